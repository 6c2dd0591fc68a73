"""The slow network: real data moves through gloo, but a collective completes only when a modelled wire says so.

Every rank has one wire and collectives queue on it in issue order: they never overlap each other. A collective
starts when its last member has issued it and every member's wire is free, and takes

    latency + bytes / bandwidth

where ``bytes`` is what one rank sends in a ring: (W-1)/W of the message for an all-gather or reduce-scatter,
twice that for an all-reduce. All of it follows from the issue times on the board, so every rank computes the
same start and end without talking to the others.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from fsdp_sim.ranks.board import RING, RankBoard, Record
from fsdp_sim.timeline import ring_share

Key = tuple[int, int]  # group, and the collective's number in it


@dataclass(frozen=True)
class Network:
    """A link of ``bandwidth_gbps`` (10^9 bits per second) and ``latency_us`` per collective.

    Raises:
        ValueError: a bandwidth that is not positive or a negative latency.

    Example:
        >>> Network(bandwidth_gbps=8, latency_us=100).seconds("all_gather", n_bytes=4_000_000, world_size=4)
        0.0031
    """

    bandwidth_gbps: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_gbps > 0:
            raise ValueError(f"Network(bandwidth_gbps={self.bandwidth_gbps}): must be above 0, for example 10")
        if not self.latency_us >= 0:
            raise ValueError(f"Network(latency_us={self.latency_us}): must be 0 or more, for example 50")

    def wire_bytes(self, op: str, n_bytes: int, world_size: int) -> float:
        """Bytes one rank sends for a collective whose whole message is ``n_bytes`` (ring algorithms)."""
        return ring_share(op, world_size) * n_bytes

    def seconds(self, op: str, n_bytes: int, world_size: int) -> float:
        """Seconds a collective occupies the wire."""
        if world_size == 1:
            return 0.0
        return self.latency_us * 1e-6 + self.wire_bytes(op, n_bytes, world_size) / (self.bandwidth_gbps * 1e9 / 8)


class Wire:
    """Start and end of every collective, from the issue times on the board.

    Without a network a collective starts when its last member has issued it, and only gloo knows when it ends. A
    send or a receive takes its time from its own issue and does not queue. Any thread of the rank may ask.
    """

    def __init__(self, board: RankBoard, rank: int, network: Network | None) -> None:
        self.board, self.rank, self.network = board, rank, network
        self._lock = threading.Lock()
        self._read = [0] * board.world_size  # records taken from the board, per rank
        self._missed: set[int] = set()  # ranks of which some records were overwritten before they were taken
        self._queues: list[dict[Key, Record]] = [{} for _ in range(board.world_size)]  # issued, not yet on the wire
        self._free_s = [0.0] * board.world_size  # when each rank's wire is free
        self._spans: dict[Key, tuple[float, float]] = {}

    def span(self, record: Record) -> tuple[float, float]:
        """When an operation that this rank has issued starts and ends, in seconds of the monotonic clock.

        Waits until all members have issued it, and with a network everything before it on their wires.
        """
        pause_s = 5e-5
        while (found := self.span_if_known(record)) is None:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-4)
        with self._lock:
            self._spans.pop((record.group, record.group_seq), None)
        return found

    def span_if_known(self, record: Record) -> tuple[float, float] | None:
        """The same without waiting: None if it cannot be known yet."""
        if not record.is_collective:
            return record.issue_s, record.issue_s + record.cost_s
        key = (record.group, record.group_seq)
        with self._lock:
            if key not in self._spans:
                if self.network is None:
                    self._rendezvous(record)
                else:
                    self._put_on_wire(record, busy=set())
            return self._spans.get(key)

    def keep_up(self) -> None:
        """Take what the others have issued before they overwrite it."""
        for rank in range(self.board.world_size):
            if self.board.issued(rank) - self._read[rank] > RING // 2:
                with self._lock:
                    self._take(rank)

    def _rendezvous(self, record: Record) -> None:
        """Note when the last member issued it, if all have."""
        key = (record.group, record.group_seq)
        issues_s = []
        for rank in record.members:
            its = self._find(rank, key) or (record if rank in self._missed else None)
            if its is None:
                return
            issues_s.append(its.issue_s)
        self._forget(record.members, key)
        self._spans[key] = (max(issues_s), max(issues_s))

    def _put_on_wire(self, record: Record, busy: set[Key]) -> bool:
        """Give it its time on the wires of its members; False if it, or one before it, has not been issued by all."""
        key = (record.group, record.group_seq)
        busy.add(key)
        start_s = cost_s = 0.0
        for rank in record.members:
            its = self._find(rank, key)
            if its is None:
                return False
            while (head := next(iter(self._queues[rank]))) != key and head not in busy:
                if not self._put_on_wire(self._queues[rank][head], busy):
                    return False
            start_s, cost_s = max(start_s, its.issue_s, self._free_s[rank]), max(cost_s, its.cost_s)
        for rank in record.members:
            self._free_s[rank] = max(self._free_s[rank], start_s + cost_s)
        self._forget(record.members, key)
        if self.rank in record.members:
            self._spans[key] = (start_s, start_s + cost_s)
        return True

    def _find(self, rank: int, key: Key) -> Record | None:
        """A rank's record of a collective, if it is on the board."""
        if key not in self._queues[rank]:
            self._take(rank)
        return self._queues[rank].get(key)

    def _take(self, rank: int) -> None:
        """Take a rank's new records from the board.

        Raises:
            RuntimeError: some were overwritten, and the order of the wire with them.
        """
        first, last = self._read[rank], self.board.issued(rank)
        if last - first > RING:
            if self.network is not None:
                raise RuntimeError(
                    f"rank {rank} issued {last - first:,} operations while rank {self.rank} issued none and waited for "
                    f"none; a slow network can follow {RING:,}. Let rank {self.rank} take part more often"
                )
            self._missed.add(rank)
            first = last - RING
        for record in self.board.read(rank, first, last):
            if record.is_collective and (self.network is not None or self.rank in record.members):
                self._queues[rank][record.group, record.group_seq] = record
        self._read[rank] = last

    def _forget(self, members: tuple[int, ...], key: Key) -> None:
        for rank in members:
            self._queues[rank].pop(key, None)
