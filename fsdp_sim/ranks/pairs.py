"""Sends and the receives that get them: between two ranks, in order."""

from __future__ import annotations

from collections import defaultdict, deque

from fsdp_sim.ranks.board import Record

MOST_OPEN = 100_000  # sends and receives without their counterpart


def peer_of(record: Record) -> int | None:
    """The rank to which a send goes, or from which a receive comes; None if it may be any."""
    peer = record.detail.removeprefix("peer=").partition(" ")[0]
    return int(peer) if peer.isdigit() else None


class Pairs:
    """Brings each receive together with its send: the same group, the same two ranks, the same tag, first to first."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, int, int], deque[tuple[int, Record]]] = defaultdict(deque)
        self._count = 0
        self._any: set[tuple[int, str, int]] = set()  # where a rank receives from any, nobody knows from whom

    def add(self, rank: int, record: Record) -> tuple[int, Record, int, Record] | None:
        """Note a send or a receive of a rank.

        Returns:
            If that makes a pair whose sizes or dtypes differ: who sends, what, who receives, into what.
        """
        peer, tag = peer_of(record), record.detail.partition(" ")[2]
        source, target = (rank, peer) if record.op == "send" else (peer, rank)
        if target is None or self._count > MOST_OPEN:
            return None
        if source is None:
            self._any.add((record.group, tag, target))
        if source is None or (record.group, tag, target) in self._any:
            return None
        waiting = self._open[record.group, tag, source, target]
        if not waiting or waiting[0][1].op == record.op:
            waiting.append((rank, record))
            self._count += 1
            return None
        _, other = waiting.popleft()
        self._count -= 1
        if (other.numel, other.dtype) == (record.numel, record.dtype):
            return None
        sent, received = (record, other) if record.op == "send" else (other, record)
        return source, sent, target, received
