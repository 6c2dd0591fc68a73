"""What a diagnosis says: the structs, which are also the JSON of ``fsdp-sim diagnose``."""

from __future__ import annotations

import msgspec

from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.timeline import Op, Phase


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """One culprit: what it costs and what to try.

    Attributes:
        idle_s: seconds in which compute stands idle for it.
        exposed_s: of those, the seconds in which communication is in flight; the others lose time too.
        times: how often.
        units: that wait, those that wait longest first.
        sentence: what happens.
        advice: what to try, in the names of the trace's own API; the most promising first.
    """

    culprit: Culprit
    idle_s: float
    exposed_s: float
    times: int
    units: list[str]
    sentence: str
    advice: list[str]


class CollectiveCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the collectives of one kind for one unit in one phase cost.

    Attributes:
        times: how many there are in the step.
        bytes: the largest message.
        total_s: they are in flight; ``exposed_s``: of that no compute hides.
        bus_gbps: bus bandwidth in Gbit/s, over all of them, while bytes move: what a rank waits for later ones, where
            those are at hand, does not count; 0 where no size is known.
        culprit: of the largest part of ``exposed_s``; null where nothing is exposed.
        sentence: the same in words.
    """

    phase: Phase
    op: Op
    unit: str
    times: int
    bytes: int
    group_size: int
    total_s: float
    exposed_s: float
    bus_gbps: float
    culprit: Culprit | None
    sentence: str


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did in the step, beside the others.

    Attributes:
        compute_s: its compute lane is busy.
        waited_s: in collectives it waited for a rank that came later; ``moved_s``: in collectives bytes moved. Both
            are added up over collectives, whether compute runs beside them or not.
        last_times: it was the last to come.
        made_wait_s: others waited for it, added up over them.
    """

    rank: int
    compute_s: float
    waited_s: float
    moved_s: float
    last_times: int
    made_wait_s: float


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank was late: what took it longer than the median of the others.

    Attributes:
        operations: in which most. kernels_s: of compute, the kinds of kernels that took longer, where they are known.
    """

    what: str
    seconds: float
    operations: list[str]
    kernels_s: dict[str, float] = {}


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that the step would gain most by, if it were as fast as the others.

    Attributes:
        cost_s: so much shorter the step is, played again with that rank's operations and pauses no longer than the
            median of the others'.
    """

    rank: int
    cost_s: float
    reasons: list[Lateness]
    sentence: str


class PathShare(msgspec.Struct, frozen=True, kw_only=True):
    """What the critical path spends on one rank in operations of one kind; ``CPU`` where a CPU issued."""

    rank: int
    what: str
    seconds: float


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Why one step took as long as it did on one rank.

    Attributes:
        step, rank: what was looked at.
        ranks: whose events were at hand.
        api: fsdp2, fsdp1, ddp, zero1 or zero2, as far as the operations tell; else empty.
        device: ``cpu`` where the thread that computes also issues, else ``gpu``.
        step_s: from the first start to the last end of all ranks.
        between_steps_s: from the last end of the step before to the first start of this one; 0 where it is not there.
        compute_s: the compute lane is busy, which it is not where the CPU has not launched an operation's next kernel;
            ``copies_s``: of that, with copies and casts of FSDP.
        comm_s: a collective is in flight; ``exposed_s``: of that, compute is idle meanwhile.
        idle_s: neither computes nor communicates.
        overlap: part of the communication that compute hides, 0 to 1, as Holistic Trace Analysis defines it.
        headline: the finding in a sentence.
        culprits: largest first. Their ``exposed_s`` add up to that of the step.
        collectives: by unit; the most exposed first.
        notes: what the timeline does not say, and how to find out.
        rank_times: of each rank, where several are at hand and share collectives.
        straggler: the rank that makes the step longer than it would be with all ranks as fast as the median; null where
            none does by 2% of the step.
        critical_path: the step's time by rank and kind of operation, along the chain of operations each of which began
            when the one before it ended, from rank to rank; what costs most first.
    """

    step: int
    rank: int
    ranks: list[int]
    api: str
    device: str
    step_s: float
    between_steps_s: float
    compute_s: float
    copies_s: float
    comm_s: float
    exposed_s: float
    idle_s: float
    overlap: float
    headline: str
    culprits: list[Blame]
    collectives: list[CollectiveCost]
    notes: list[str]
    rank_times: list[RankTimes] = []
    straggler: Straggler | None = None
    critical_path: list[PathShare] = []

    def __str__(self) -> str:
        lines = [self.headline]
        for blame in self.culprits:
            lines += [f"- {blame.sentence}", *(f"    try: {tip}" for tip in blame.advice)]
        return "\n".join([*lines, *self.notes])
