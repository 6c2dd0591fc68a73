"""Training steps recorded, and read as the same kind of timeline that the simulator makes: of one rank, then of all.

    with profiled(rank=rank, api="fsdp2") as profile:
        for _ in range(4):
            train_step(...)
    recording = gathered(profile.timeline)      # on rank 0 all ranks on one clock, see `labs.measure.clocks`

On a GPU communication is what NCCL's kernels do. On CPUs gloo has threads of its own, and these are the lanes.
"""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from fsdp_sim.timeline import RECORDER, Event, Header, Timeline
from fsdp_sim.timeline.kineto import read_kineto
from labs.loop.failpoints import failpoint
from labs.measure.clocks import merged


class Profile:
    """One rank's recording, complete when the block of `profiled` has ended.

    Attributes:
        timeline: what ran when; of a single process, in which nothing communicates, without events. Of several steps
            the first is no measure: ranks begin to record at different moments, and wait for each other.
    """

    def __init__(self) -> None:
        self.timeline = Timeline(Header(producer="torch.profiler", clock="measured", world_size=1), [])


@dataclass(frozen=True)
class Recording:
    """Some steps of all ranks.

    Attributes:
        timeline: on one clock, which begins with the first operation of any rank.
        uncertain_s: the clocks of two ranks may differ by this much and what was recorded would still be possible.
    """

    timeline: Timeline
    uncertain_s: float

    def write(self, path: Path) -> None:
        """As JSON lines, compressed: `fsdp_sim.timeline.read_timeline` reads it.

        Raises:
            OSError: it cannot be written.
        """
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder, "timeline.jsonl")
            self.timeline.to_jsonl(plain)
            path.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))


@contextmanager
def profiled(*, rank: int = 0, api: str = "fsdp2", device: str = "cpu", units: Sequence[str] = ()) -> Iterator[Profile]:
    """Record the training steps of the block. Whole steps only: forward, backward and the optimizer's step.

    Args:
        rank: this process's.
        api: of `labs.config.TrainConfig`. torch.profiler records the ranks; the project's own FSDP (``mini``) tells
            its `fsdp_sim.timeline.RECORDER` itself; of a ``single`` process nothing is recorded.
        device: ``cpu``, or ``cuda``, whose kernels are recorded as well.
        units: names of the units but the root, in the order of forward. FSDP1's annotations have none.

    Raises:
        ValueError: there is no training step in the block, or the profiler failed, wherever it did: after the block,
            whose steps the other ranks share.
    """
    profile = Profile()
    if api == "single":
        yield profile
    elif api == "mini":
        RECORDER.start(rank)
        try:
            yield profile
        finally:
            events = RECORDER.stop()
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        header = Header(
            producer="mini", clock="measured", world_size=world_size, api="fsdp2",
            device="gpu" if device == "cuda" else "cpu",
        )  # fmt: skip
        profile.timeline = Timeline(header, events)
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints that it starts and stops
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        recording = torch.profiler.profile(activities=activities, record_shapes=True)
        wrong: list[str] = []
        with _noted(wrong):
            failpoint("profile-start")
            recording.start()
        try:
            yield profile
            if device == "cuda":
                torch.cuda.synchronize()  # the last kernels belong to the last step
        finally:
            with _noted(wrong):
                recording.stop()
        with _noted(wrong), tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, f"rank{rank}.json")
            failpoint("profile-read")
            recording.export_chrome_trace(str(trace))
            profile.timeline = _named(read_kineto(trace, rank=rank), units)
        if wrong:
            raise ValueError(wrong[0])


@contextmanager
def _noted(wrong: list[str]) -> Iterator[None]:
    """What fails in the block goes onto the list, in words: one rank that fails alone leaves the others waiting."""
    try:
        yield
    except ValueError as error:
        wrong.append(str(error))
    except Exception as error:
        wrong.append(f"torch.profiler: {type(error).__name__}: {error}")


def gathered(mine: Timeline | None) -> Recording | None:
    """The recordings of all ranks as one, on rank 0; elsewhere None. Every rank has to call this.

    Args:
        mine: this rank's; None, or one without events, if there is none. All ranks' being so, the result is None.

    Raises:
        ValueError: on rank 0: there is no common clock, see `labs.measure.clocks.offsets`, or the recordings cannot be
            read.
    """
    packed = msgspec.json.encode((mine.header, mine.events)) if mine else b""
    everyone: list[bytes] = [packed]
    if dist.is_initialized():
        everyone = [b""] * dist.get_world_size()
        dist.gather_object(packed, everyone if dist.get_rank() == 0 else None, dst=0)
        if dist.get_rank():
            return None
    wrong: list[str] = []
    with _noted(wrong):
        read = [msgspec.json.decode(one, type=tuple[Header, list[Event]]) for one in everyone if one]
        return Recording(*merged([Timeline(*one) for one in read])) if read else None
    raise ValueError(wrong[0])


def trouble_of_any(trouble: str) -> str:
    """On all ranks the trouble of any of them, the lowest first; empty if there is none. A collective call."""
    everyone = [trouble]
    if dist.is_initialized():
        everyone = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, trouble)
    return next(filter(None, everyone), "")


def _named(timeline: Timeline, units: Sequence[str]) -> Timeline:
    """With the names of FSDP1's units, which are counted in the order of forward, if there are so many."""
    names = {f"unit.{i}": name for i, name in enumerate(units)}
    if set(names) != {event.unit for event in timeline if event.unit.startswith("unit.")}:
        return timeline
    events = [msgspec.structs.replace(event, unit=names.get(event.unit, event.unit)) for event in timeline]
    return Timeline(timeline.header, events)
