"""What a recording of memory consists of: blocks, each alive from one moment to another, and who asked for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fsdp_sim.timeline.kinds import Memory


class Frame(NamedTuple):
    """One call of a stack, as CUDA's snapshots have it. Of an operator: no file, and its name."""

    filename: str
    line: int
    name: str


class AllocationMoment(NamedTuple):
    """When memory was allocated or freed, and from where.

    Attributes:
        number: counts moments in the order in which they came; 0 is before all of them.
        at_s: of any clock, the same for all moments of a recording.
        frames: the calls that led there, innermost first. Empty on a thread without Python, as autograd's for a GPU.
    """

    number: int
    at_s: float
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Block:
    """Memory from its allocation to its release.

    Attributes:
        died: None where it is alive at the end.
        known: what it is for, if it was there before the recording; None if it was allocated in it.
    """

    bytes: int
    born: AllocationMoment
    died: AllocationMoment | None = None
    known: Memory | None = None
