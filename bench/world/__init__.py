"""One run through what the internet does to a swarm of strangers: `python -m bench.world --seed S`.

Start reading at `run`. `who` has the machines and their network, `faults` what befalls them, `lies` and
`stranger` the two who mean harm; `trainer` and `lightning` are the scripts that train, `model` what they
train, `log` what they write down. `bench.world_check` judges from those logs alone, `page` shows its verdict.
"""
