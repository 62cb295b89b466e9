"""The faults of `bench chaos`: their names, and how much each breaks."""

from __future__ import annotations

PHASES = ("proposed", "begun", "done", "committed")  # of a round, in the order of its leader
FAULTS = (
    *("kill", "stop", "leader", *(f"leader-{phase}" for phase in PHASES), "all-but-one", "join"),
    *("corrupt", "duplicate", "cut", "cut-one-way", "slow", "leave", "stages"),
)
# Moments of a transfer at which "stages" strikes a member that reduces or passes on: it has the first
# contribution of its own region, the first mean of another region, the first result.
STAGES = ("contributions", "means", "results")
LAB_FAULTS = ("cut", "cut-one-way", "slow")
GRADIENT_FAULTS = ("stages",)  # of --numel values: a run that shares data out averages a vector of its own
DATA_FAULTS = ("leave",)  # who leaves hands samples over: they are counted by what they are, not by how many
BREAKS: dict[str, dict[str, float]] = {  # fault -> settings of a host's paths
    "cut": {"down": 1},
    "cut-one-way": {"down": 1},
    "slow": {"rate_mbps": 0.008, "queue_kb": 2},
    "corrupt": {"corrupt": 0.01},
}
DRAINS_S = {"slow": 2.0}  # after the fault, packets in the queue still leave at the old rate for this long
STOP_S = (0.5, 8.0)  # least and most seconds
CUT_S = (1.0, 8.0)
GARBAGE_BYTES = 65536
