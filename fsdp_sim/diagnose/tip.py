"""`Tip`: one thing to try, and the `Facts` of a run that decide whether it applies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fsdp_sim.diagnose.look import StepObservation
from fsdp_sim.diagnose.rank_view import REDUCTIONS
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import Event, Op, Phase, total_s

SATURATED = 0.9  # of a step in which a collective is in flight


class Facts(NamedTuple):
    """What is known of the run that decides which advice applies.

    Attributes:
        api: fsdp2, fsdp1, ddp, zero1, zero2, or empty where the operations do not tell.
        gather_dtype, reduce_dtype: of the largest all-gather and reduction; empty where not known.
        gathers: whether there are all-gathers.
        communicates: whether there are collectives.
        group_size: ranks of the largest group that gathers.
        replicates: whether gradients are summed over groups too, as HSDP does.
        forward_prefetch: whether all-gathers of the forward are issued before other units compute, and not on demand.
        backward_gathers: whether units are gathered again in backward.
        shards_copied: whether shards come from the CPU's memory.
        on_cpu: whether the thread that computes also issues.
        saturated: whether a collective is in flight nearly all the time; then no other order makes the step shorter.
    """

    api: str
    gather_dtype: str
    reduce_dtype: str
    gathers: bool
    communicates: bool
    group_size: int
    replicates: bool
    forward_prefetch: bool
    backward_gathers: bool
    shards_copied: bool
    on_cpu: bool
    saturated: bool

    @classmethod
    def of(cls, found: StepObservation) -> Facts:
        view, ops = found.view, found.events
        comm_s = total_s(found.in_flight)
        gathers = [e for e in found.comm if e.op is Op.ALL_GATHER]
        reductions = [e for e in found.comm if e.op in REDUCTIONS]
        return cls(
            api=view.api,
            gather_dtype=_dtype_of_largest(gathers),
            reduce_dtype=_dtype_of_largest(reductions),
            gathers=bool(gathers),
            communicates=bool(found.comm),
            group_size=max((e.group_size for e in gathers), default=1),
            replicates=bool(gathers) and any(e.op is Op.ALL_REDUCE and e.phase is Phase.BACKWARD for e in found.comm),
            forward_prefetch=_prefetches(ops),
            backward_gathers=any(e.phase is Phase.BACKWARD for e in gathers),
            shards_copied=Op.H2D in {e.op for e in ops},
            on_cpu=view.on_cpu,
            saturated=comm_s >= SATURATED * (found.window[1] - found.window[0]),
        )


def _dtype_of_largest(events: list[Event]) -> str:
    return max(events, key=lambda e: e.bytes).dtype if events else ""


def _prefetches(ops: Sequence[Event]) -> bool:
    """Whether what is computed after an all-gather of the forward is issued is mostly another unit."""
    others: list[bool] = []
    gathered: list[str] = []  # units gathered since something was computed
    gather, compute, forward = Op.ALL_GATHER, Op.FWD, Phase.FORWARD
    for e in ops:
        if e.op is gather and e.phase is forward:
            gathered.append(e.unit)
        elif e.op is compute and gathered:
            others += [unit != e.unit for unit in gathered]
            gathered = []
    return sum(others) > len(others) / 2


Settings = dict[str, Any]


class Tip(NamedTuple):
    """One thing to try: what it is called for users of each API (where it exists), and when it applies.

    Attributes:
        change: the fields of a plan that it would change, with their new values, so that it can be simulated; None for
            what a plan does not say.
    """

    by_api: dict[str, str]
    when: Callable[[Facts], bool] = lambda facts: True
    change: Callable[[Plan, Cluster], Settings] | None = None


def everywhere(
    text: str,
    when: Callable[[Facts], bool] = lambda facts: True,
    change: Callable[[Plan, Cluster], Settings] | None = None,
) -> Tip:
    return Tip(dict.fromkeys(("fsdp2", "fsdp1", "ddp", "zero1", "zero2", ""), text), when, change)


def fsdp2(
    text: str,
    when: Callable[[Facts], bool] = lambda facts: True,
    change: Callable[[Plan, Cluster], Settings] | None = None,
) -> Tip:
    return Tip({"fsdp2": text}, when, change)


def always(**settings: Any) -> Callable[[Plan, Cluster], Settings]:
    return lambda plan, cluster: settings
