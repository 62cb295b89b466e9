"""`p2pavg launch`: starts one peer per machine, or several on this one.

Start reading at `cli`. `local` starts peers as processes of this machine, behind a bootstrap node of their
own. `deployment` starts them on the machines of a `swarm_file` through `remote` and `ssh`; there a `keeper`
keeps each alive. `emit` writes what Docker (`compose`) and SkyPilot (`sky`) start them from. May import every
floor below.
"""
