"""What is said of a whole timeline: who made it, of which way of training, on what, and which units there are."""

from __future__ import annotations

from functools import cached_property

import msgspec

VERSION = 1


class UnitShards(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """How the parameters of a unit, or of a bucket of DDP and ZeRO, lie on the ranks.

    It is cut into parts: shards of equally many rows, of which the last may have fewer or none. What is not cut and
    communicated with other units' parameters, a bucket of DDP, has the segments that share it as parts.

    Attributes:
        segments: the compute that uses its parameters.
        shards: ranks that share one copy; 1 where each has it all.
        rows: what is cut: (rows, bytes of a row), those with equally many rows together; empty where it is not known.
        segment_bytes: of a bucket that is not cut, the bytes of each segment's parameters.
        replicated: parameters are whole on every rank all the time (DDP, ZeRO).
        trained: it has gradients.
        optimizer_states: how many numbers the optimizer keeps of each parameter.
        offloaded: shards, their gradients and optimizer states rest in the CPU's memory.
        apart: from one rank of its all-gathers to the next: experts that neighbouring ranks share out are gathered
            among the ranks that have the same ones.

    Example:
        >>> UnitShards(name="root", shards=4, rows=((5, 8),)).part_bytes
        (16, 16, 8, 0)
    """

    name: str
    segments: tuple[str, ...] = ()
    shards: int = 1
    rows: tuple[tuple[int, int], ...] = ()
    segment_bytes: tuple[int, ...] = ()
    replicated: bool = False
    trained: bool = True
    optimizer_states: int = 0
    offloaded: bool = False
    apart: int = 1

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """What it is cut into: numbers of shards, or names of segments."""
        return self.segments if self.segment_bytes else tuple(map(str, range(self.shards)))

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """Of the parameters in each part, where known."""
        if not self.rows:
            return self.segment_bytes
        found = [0] * self.shards
        for rows, row_bytes in self.rows:
            chunk = -(-rows // self.shards)
            for shard in range(self.shards):
                found[shard] += min(max(rows - shard * chunk, 0), chunk) * row_bytes
        return tuple(found)

    def owns(self, rank: int, part: int) -> bool:
        """Whether a rank keeps and updates a part; where nothing is cut each does."""
        return self.shards == 1 or part == rank % self.shards


class HostWork(msgspec.Struct, frozen=True):
    """What the CPU of a rank did besides issuing: ``data loader``, ``garbage collection``; on the timeline's clock."""

    rank: int
    what: str
    start_s: float
    end_s: float


class ClockShift(msgspec.Struct, frozen=True):
    """How the clock of a rank was set by collectives, whose ends all their ranks see at one moment.

    Attributes:
        added_s: what was added to its times at the start of the recording; ``per_s``: and more in each second after.
        within_s: half of the collectives agree with that to so many seconds.
        collectives: how many there were.
    """

    rank: int
    added_s: float
    per_s: float = 0.0
    within_s: float = 0.0
    collectives: int = 0


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who made a timeline, on what, with which clock.

    Attributes:
        clock: ``simulated`` or ``measured``; ``issue order`` of a program, which knows no seconds.
        api: which way of training it is a step of, as `Plan.api` has it (``fsdp2``, ``fsdp1``, ``ddp``, ``zero1``,
            ``zero2``); empty where nobody said.
        device: ``cpu`` where the thread that issues also computes, so that nothing is ever queued behind compute;
            ``gpu`` where a device works off what is issued; empty where nobody said.
        memory_limit_bytes: what a rank can allocate on its device; 0 when not known.
        units: how the parameters of each unit or bucket are cut; empty where nobody said.
        hosts: of a measured run the machine of each rank that named it.
        host_work: what CPUs did besides issuing, as far as it was recorded.
        clocks: how clocks of ranks were set by each other.
        left_out: of a measured run the devices whose kernels stand in the same file and were not read.
        of_graphs: of a measured run how many kernels graphs launched (CUDA's), many with one call.
        untimed: of a measured run how many events have a time or a duration that is none.
        began_unix_s: of a measured run when second 0 was by the machine's clock, in seconds since 1970; 0 where nobody
            said.
    """

    producer: str
    clock: str
    world_size: int
    title: str = ""
    hardware: str = ""
    api: str = ""
    device: str = ""
    versions: dict[str, str] = {}
    memory_limit_bytes: int = 0
    units: tuple[UnitShards, ...] = ()
    hosts: dict[int, str] = {}
    host_work: tuple[HostWork, ...] = ()
    clocks: tuple[ClockShift, ...] = ()
    left_out: tuple[int, ...] = ()
    of_graphs: int = 0
    untimed: int = 0
    began_unix_s: float = 0.0
    version: int = VERSION
