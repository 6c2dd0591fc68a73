"""What the units under one FSDP1 root share: streams, process groups, settings, and the rate limiter's queue."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane

C, U, P, B, AR = Lane.COMPUTE, Lane.UNSHARD, Lane.PRE_UNSHARD, Lane.POST_BACKWARD, Lane.ALL_REDUCE
SHARD, REPLICATE = "shard", "replicate"  # communicators: of the ranks that share one copy, of those with equal shards
MAX_UNFREED = 2  # torch: _FreeEventQueue._max_num_inflight_all_gathers


@dataclass
class FSDP1Context:
    """What the units under one root share: the settings, and the events after which memory was freed.

    Attributes:
        strategy: one of torch's ``ShardingStrategy``; one rank alone has ``NO_SHARD``.
        shard_size, replicas: ranks that share one copy of the parameters, and how many copies there are.
        use_orig_params: torch's argument of that name.
        sync_gradients: False inside ``no_sync()``.
    """

    plan: Plan
    cpu: Cpu
    strategy: str
    shard_size: int
    replicas: int
    use_orig_params: bool
    sync_gradients: bool = True
    free_events: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        ranks = self.shard_size * self.replicas
        # Before and after the sum over ranks, so that neither its terms nor it leave the range of a 16-bit float
        self.predivide = predivide_factor(ranks)
        self.postdivide = ranks / self.predivide
        self.sharded = self.strategy != "NO_SHARD"
        self.hybrid = "HYBRID" in self.strategy
        self.reshard_after_forward = self.strategy in ("FULL_SHARD", "HYBRID_SHARD")
        self.skips_views = self.use_orig_params and self.strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")


def predivide_factor(ranks: int) -> float:
    """The power of two near the square root of ``ranks`` (torch: ``DefaultState._get_gradient_predivide_factor``).

    Example:
        >>> [predivide_factor(n) for n in (1, 2, 8, 16, 24, 7)]
        [1.0, 2.0, 4.0, 4.0, 8.0, 2.0]
    """
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)
