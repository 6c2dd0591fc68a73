"""A pretend cluster: torch's own FSDP2 as rank 0 of many, on one device.

The process group is torch's fake one, so there is one process. FSDP2 is unmodified: it gets collectives of its own
through the hooks it offers (``set_custom_all_gather``, ``set_custom_reduce_scatter``, ``set_all_reduce_hook``), which
move the bytes that a rank would receive and hold the stream for as long as a collective of the chosen cluster takes.
Scheduling, overlap, compute and memory are real; only the wire is modelled. What other ranks would have sent is not
there, so the loss means nothing.

    from fsdp_sim.spec import Cluster
    from labs.config import TrainConfig
    from labs.cluster.pretend import pretend

    pretend(TrainConfig(global_batch=64), Cluster("cpu", gpus=64, bandwidth_gbps=1, latency_us=200))

Read in this order:

    recorder    what ran when, and what each piece of a step took
    streams     on CPUs torch's streams do nothing; these are clocks, and waiting for one is waiting
    network     what a collective takes on the cluster, and how a stream is held that long: a clock, or a GPU that spins
    hooks       the collectives that FSDP2 is given
    session     rank 0 of the pretended cluster trains
    comparison  predicted beside pretended: `pretend`

As a command: ``python -m labs.cluster.pretend --help``. The GPU's path was never run on one.
"""

from labs.cluster.pretend.comparison import CAVEAT, StepPieces, compare, predict, predicted_timeline, pretend, timed
from labs.cluster.pretend.session import PretendedRun, Session, Setup, session

__all__ = [
    "CAVEAT", "PretendedRun", "Session", "Setup", "StepPieces", "compare", "predict", "predicted_timeline", "pretend",
    "session", "timed",
]  # fmt: skip
