"""What runs in the learner's process: the calls, the meter, and a look at what the code has replaced."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

WAIT = "wait"  # the unit of the events that say where a rank waited for a collective


def call(
    function: Callable[..., Any], metered: bool, issues: tuple[int, ...], cases: tuple[tuple[Any, ...], ...]
) -> dict[str, Any]:
    """Call the function for each case, on this rank; see `fsdp_sim.learn.apart.Trial`."""
    before: dict[str, tuple[Any, str, Any]]
    meter: Any
    looked_at: Any
    warnings.simplefilter("ignore")  # they are for whoever runs code, not for whoever has it checked
    _note_waits()
    before, meter, looked_at, answers = _originals(), nullcontext(), nullcontext(), []
    if metered:
        import torch

        from fsdp_sim.measure import storages
        from fsdp_sim.measure.live_bytes import CPUMeter, live_bytes
        from fsdp_sim.ranks import looks

        torch.set_num_threads(1)  # others take memory when they start
        before = _originals(CPUMeter, storages, looks)
        cases = looks.again(cases)
        meter, looked_at = live_bytes(), looks.looked_at()
        if hasattr(function, "bring"):
            function.bring()
    with meter, looked_at:
        for case, times in zip(cases, issues or (1,) * len(cases), strict=True):
            with fsdp_issues(times):
                answers.append(function(*case))
    return {
        "answers": answers,
        "peak_bytes": meter.peak_bytes if metered else 0,
        "replaced": [name for name, (owner, key, value) in before.items() if vars(owner).get(key) is not value],
    }


@contextmanager
def fsdp_issues(times: int) -> Iterator[None]:
    """Meanwhile torch's FSDP issues each all-gather and each reduce-scatter so many times, with the same result. Who
    counts them counts so many times as many."""
    if times == 1:
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    before = collectives.dist
    collectives.dist = _Repeated(before, times)  # type: ignore[assignment]
    try:
        yield
    finally:
        collectives.dist = before


class _Repeated:
    """torch.distributed as torch's FSDP sees it meanwhile."""

    def __init__(self, of: Any, times: int) -> None:
        self._of, self._times = of, times

    def __getattr__(self, name: str) -> Any:
        once = getattr(self._of, name)
        if not name.startswith(("all_gather", "reduce_scatter")):
            return once

        def repeated(*args: Any, **kwargs: Any) -> Any:
            for _ in range(self._times - 1):
                if (work := once(*args, **kwargs)) is not None:
                    work.wait()
            return once(*args, **kwargs)

        return repeated


def _note_waits() -> None:
    """From now on, where this rank waits for a collective an event says so: the order of waits decides what "
    "overlaps."""
    from fsdp_sim.ranks.work import WatchedWork
    from fsdp_sim.timeline import RECORDER, Op

    wait = WatchedWork.wait

    def noted(work: WatchedWork, timeout: Any = None) -> bool:
        RECORDER.end(RECORDER.begin(Op.OTHER, WAIT, waits_on=(work.ticket.seq,)))
        return wait(work, timeout)

    WatchedWork.wait = noted  # type: ignore[method-assign, assignment]


def _originals(*counting: Any) -> dict[str, tuple[Any, str, Any]]:
    """The functions through which ranks communicate and are counted, by name: where each is, and what is there now."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    from fsdp_sim.ranks.board import RankBoard
    from fsdp_sim.ranks.group import WatchedGroup
    from fsdp_sim.ranks.work import WatchedWork
    from fsdp_sim.timeline import Recorder

    owners: list[Any] = [dist, c10d, WatchedGroup, WatchedWork, RankBoard, Recorder, *counting]
    return {
        f"{owner.__name__}.{key}": (owner, key, value)
        for owner in owners
        for key, value in vars(owner).items()
        if (callable(value) or isinstance(value, property)) and not key.startswith("__")
    }
