"""`run` and `replay`: when each operation of a program runs.

`run` keeps the times as columns and is what the simulator calls; `replay` is `run` with a `Timeline` made of it.
Two passes do the work, `one_rank` and `many_ranks`; where operations slow each other down, two loops over time do,
`contended_rank` and `contended`. They give the same numbers where they overlap.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

from fsdp_sim.engine.contended_rank import contended_rank
from fsdp_sim.engine.contention import Contention
from fsdp_sim.engine.kinds import Alike
from fsdp_sim.engine.one_rank import one_rank
from fsdp_sim.engine.run import Run
from fsdp_sim.engine.seconds import Given, OpCosts, costs_of
from fsdp_sim.schedule import Program
from fsdp_sim.timeline import Timeline

Device = Literal["gpu", "cpu"]


def run(
    program: Program,
    durations: Given,
    *,
    device: Device = "gpu",
    ranks: int | None = None,
    issue_s: float | Given = 0.0,
    launch_s: float = math.inf,
    copies_s: float | None = None,
    contention: Contention | None = None,
    alike: Alike | None = None,
) -> Run:
    """Say when each operation of a program runs on each rank.

    Rules: a stream runs its operations in issue order; waits are free; the collectives of one communicator run in
    issue order whatever stream they are on; a collective starts when the last rank of its group is ready and ends for
    all of them after the longest duration any of them names; an asynchronous collective does so on a stream of its
    process group, and the stream it is issued on goes on.

    An operation whose issue takes c seconds and that runs d seconds cannot start before the CPU, which comes to it at
    time t, has issued its first kernel, nor end before the CPU has issued its last one. It is n = max(1, c /
    ``launch_s``) equal kernels: start >= t + c/n, end >= start + d, end >= t + c + d/n. A collective is one kernel.

    Args:
        program: what the CPU issues.
        durations: seconds of each operation: a mapping from (operation, unit) to a number or an array of shape
            (ranks,), or a function of the instruction. The unit of FWD, BWD and RECOMPUTE is the segment; that of
            OPTIM is ``""``. `fsdp_sim.engine.skew` makes stragglers and jitter of them.
        device: ``gpu`` issues and runs ahead. On ``cpu`` the thread that issues also computes and copies:
            everything but a collective occupies it, and so does a wait of the compute stream. Then an all-gather
            overlaps only compute issued after it.
        ranks: how many ranks to play, at most the world size. By default the length of the longest array in
            ``durations`` and ``issue_s``, or one rank that stands for all.
        issue_s: seconds the CPU takes to issue an operation: one number for all, or given like ``durations``.
        launch_s: seconds the CPU takes to issue one kernel. By default every operation is one kernel.
        copies_s: seconds of every copy and cast that ``durations`` does not name.
        contention: how operations that run at the same time slow each other down; None for not at all.
        alike: by name of a unit or segment what it computes; of names with the same value the durations are the same.
            They are asked for once, and layers that are alike need not be played one by one.

    Raises:
        KeyError: durations lack an operation; names operation and unit.
        ValueError: a duration is negative, not finite, or not one number per rank; ranks or device is wrong; the
            program waits for an event that nothing has recorded.
    """
    if device not in ("gpu", "cpu"):
        raise ValueError(f"device is {device!r}; it must be 'gpu' or 'cpu'")
    costs = costs_of(program, durations, ranks, issue_s, launch_s, copies_s, alike or {})
    return _play(program, device, contention, costs)


def _play(program: Program, device: Device, contention: Contention | None, costs: OpCosts) -> Run:
    on_cpu = device == "cpu"
    if costs.per_rank:
        from fsdp_sim.engine.machine import contended  # these two need numpy, one rank does not
        from fsdp_sim.engine.many_ranks import many_ranks

        if contention is not None:
            columns = contended(program, costs, on_cpu, contention)
        else:
            columns = many_ranks(program, costs, on_cpu)
    elif contention is not None:
        columns = contended_rank(program, costs, on_cpu, contention)
    else:
        columns = one_rank(program, costs, on_cpu)
    return Run(program, costs, columns, device, partial(_play, program, device, contention))


def replay(
    program: Program,
    durations: Given,
    *,
    device: Device = "gpu",
    ranks: int | None = None,
    issue_s: float | Given = 0.0,
    launch_s: float = math.inf,
    copies_s: float | None = None,
    contention: Contention | None = None,
) -> Timeline:
    """The timeline of a program; arguments and errors are those of `run`.

    Example:
        >>> from collections import defaultdict
        >>> from fsdp_sim.schedule import build, toy
        >>> from fsdp_sim.spec import Plan
        >>> program = build(toy(layers=2), Plan(), world_size=4)
        >>> replay(program, defaultdict(lambda: 1.0), copies_s=0.0).span_s
        11.0
    """
    how = {"device": device, "ranks": ranks, "issue_s": issue_s, "launch_s": launch_s, "copies_s": copies_s}
    return run(program, durations, contention=contention, **how).timeline()  # type: ignore[arg-type]
