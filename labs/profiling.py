"""Where a training step's time goes: steps recorded, and read as the same kind of timeline that the simulator makes.

On a GPU communication is exposed while NCCL's kernels run and no other kernel does. On CPUs gloo has threads of its
own: communication is exposed while they work and the training thread does not compute, which is when it waits. Both
include waiting for a rank that comes late.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from fsdp_sim.timeline import COLLECTIVES, RECORDER, Header, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s, step_time_s, subtract, union
from fsdp_sim.timeline.kineto import read_kineto
from fsdp_sim.timeline.kineto.rows import read_rows


class Profile:
    """One rank's recording, complete when the block of `profiled` has ended.

    Of several steps the first is left out of all figures: ranks begin to record at different moments, and the first
    collective of the one that was ready waits for the others.

    Attributes:
        timeline: what ran when; of a single process, in which nothing communicates, without events.
        rank: whose it is.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.timeline = Timeline(Header(producer="torch.profiler", clock="measured", world_size=1), [])
        self._exposed_s: list[float] = []  # of each step

    @property
    def step_time_s(self) -> float:
        """Seconds of the median step. Recording makes steps longer, on CPUs the most."""
        return _median([step_time_s(self.timeline, step) for step in self._steps])

    @property
    def exposed_comm_s(self) -> float:
        """Seconds of the median step in which this rank communicated and did not compute."""
        return _median(self._exposed_s)

    @property
    def collectives(self) -> int:
        """How many a step has; the median."""
        mine = [event.step for event in self.timeline.ops if event.op in COLLECTIVES]
        return int(_median([mine.count(step) for step in self._steps]))

    @property
    def _steps(self) -> list[int]:
        return sorted({event.step for event in self.timeline.ops})

    def _read(self, timeline: Timeline, exposed_s: list[float] | None = None) -> None:
        self.timeline = timeline
        steps = [timeline.select(step=step) for step in self._steps]
        self._exposed_s = exposed_s or [exposed_comm_s(step, self.rank) for step in steps]


def _median(of_steps: list[float] | list[int]) -> float:
    return float(statistics.median(of_steps[1:] or of_steps or [0.0]))


@contextmanager
def profiled(*, rank: int = 0, api: str = "fsdp2", device: str = "cpu") -> Iterator[Profile]:
    """Record the training steps of the block. Whole steps only: forward, backward and the optimizer's step.

    Args:
        rank: this process's.
        api: of `labs.config.TrainConfig`. torch.profiler records the ranks; the project's own FSDP (``mini``) tells
            its `fsdp_sim.timeline.RECORDER` itself; of a ``single`` process nothing is recorded.
        device: ``cpu``, or ``cuda``, whose kernels are recorded as well.

    Raises:
        ValueError: there is no training step in the block; from `read_kineto`.
    """
    profile = Profile(rank)
    if api == "single":
        yield profile
    elif api == "mini":
        RECORDER.start(rank)
        try:
            yield profile
        finally:
            events = RECORDER.stop()
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        profile._read(Timeline(Header(producer="mini", clock="measured", world_size=world_size), events))
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints that it starts and stops
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        with torch.profiler.profile(activities=activities, record_shapes=True) as recording:
            yield profile
            if device == "cuda":
                torch.cuda.synchronize()  # the last kernels belong to the last step
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, f"rank{rank}.json")
            recording.export_chrome_trace(str(trace))
            exposed_s = _waited_for_gloo(trace) if api == "ddp" and device == "cpu" else None
            profile._read(read_kineto(trace, rank=rank), exposed_s)


def _waited_for_gloo(trace: Path) -> list[float]:
    """Seconds of each step in which gloo's threads worked and no operation ran on another thread.

    For DDP: `read_kineto` makes one operation of its whole backward, the wait for the last bucket included, so this
    looks at the trace itself. (FSDP waits inside of operations, its hooks, whose annotations `read_kineto` knows.)
    A step ends with the optimizer's.
    """
    rows = read_rows(trace)
    ends = sorted(span.end for span in rows.annotations if span.name.startswith("Optimizer.step#"))
    ops = rows.op_columns()
    own = ~np.isin(ops["tid"], [span.tid for span, _ in rows.gloo])
    busy = union(zip(ops["start"][own].tolist(), ops["end"][own].tolist(), strict=True))
    exposed = [0.0] * len(ends)
    for start, end in subtract([(span.start, span.end) for span, _ in rows.gloo], busy):
        if (step := bisect_left(ends, end)) < len(ends):  # what follows the last optimizer step is no training
            exposed[step] += (end - start) * 1e-6
    return exposed
