"""Half a minute of real faults: processes killed, stopped, fed garbage; joiners, and leaders lost."""

from __future__ import annotations

from p2pavg.bench.chaos.check import summarise
from p2pavg.bench.chaos.swarm import Swarm
from p2pavg.bench.chaos.verb import STEPS

EPOCH_SECONDS = 0.5
EPOCHS = 60


def test_half_a_minute_of_faults() -> None:
    """No peer hangs, no two differ, no sample of a survivor is lost or counted twice, every epoch is
    finished.
    """
    faults = ("kill", "stop", "leader", "join", "corrupt")
    with Swarm(
        peers=4,
        epochs=EPOCHS,
        steps=STEPS,
        epoch_seconds=EPOCH_SECONDS,
        topology=None,
        seed=7,
        encrypted=False,
    ) as swarm:
        swarm.run(faults, 2.0, lambda _: None)
    result = summarise(swarm.events, epochs=EPOCHS, capacity=STEPS / EPOCH_SECONDS)
    assert result["faults_injected"] >= 5
    assert result["hangs"] == 0
    assert result["crashes"] == 0, result["crash_details"]
    assert result["divergences"] == 0, result["divergence_details"]
    assert result["samples_lost"] == 0
    assert result["samples_doubled"] == 0
    assert result["finished_by_all"]
