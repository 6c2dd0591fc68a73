"""Why an operation began when it did, and the chain that a step's time consists of: the rules, for every record.

An operation begins at the latest of a few moments: the end of the one before it on its lane, the end of what it waited
for, the end of the collective before it on its communicator, the moment its CPU issued it. A collective is a
rendezvous, so there the last rank of its group decides. Following that latest moment back from the last operation of a
step gives a path that has no gaps, so its pieces add up to the step: what is not on it could have been slower at no
cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple

Key = tuple[int, int]
"""An operation: its rank, and its number there (in a timeline its seq, in a run its place among the operations)."""
Why = Literal["lane", "event", "communicator", "CPU", "unknown"]


class Cause(NamedTuple):
    """Why an operation began when it did.

    Attributes:
        why: ``lane``, the operation before it on its lane ended; ``event``, what it waited for ended; ``communicator``,
            the collective before it on its communicator ended; ``CPU``, it was issued; ``unknown``, none of these.
        key: the operation that ended; None for ``CPU`` and ``unknown``.
        rank: where that was so: for a collective the rank that came last.
    """

    why: Why
    key: Key | None
    rank: int


class PathPiece(NamedTuple):
    """A piece of a critical path: an operation, or (``cpu``) a CPU that issues up to and including that operation."""

    key: Key
    cpu: bool
    start_s: float
    end_s: float

    @property
    def rank(self) -> int:
        return self.key[0]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Causes(ABC):
    """Why the operations of a record began when they did."""

    @abstractmethod
    def start_s(self, key: Key) -> float: ...

    @abstractmethod
    def end_s(self, key: Key) -> float: ...

    @abstractmethod
    def own_cause(self, key: Key) -> Cause:
        """Why an operation began when it did, by what its own rank says."""

    @abstractmethod
    def last_to_come(self, key: Key) -> Key:
        """Of a collective the one of the rank that came last, if others came earlier; else the operation itself."""

    @abstractmethod
    def stood_still_for(self, key: Key) -> Key | None:
        """The operation whose end the CPU last waited for before it issued one; None if it never did."""

    def issued_s(self, key: Key) -> float | None:
        """When the CPU was done issuing an operation that had to go on until then; None where it had not."""
        return None

    def cause(self, key: Key) -> Cause:
        """Why an operation began when it did."""
        return self.own_cause(self.last_to_come(key))

    def back(self, key: Key) -> Iterator[tuple[Key, Cause]]:
        """An operation and, again and again, the one that made it begin when it did; with the cause of each.

        Of a collective it is the one of the rank that came last.
        """
        seen: set[Key] = set()  # operations that take no time may wait for each other
        at: Key | None = key
        while at is not None:
            at = self.last_to_come(at)
            if at in seen:
                return
            seen.add(at)
            cause = self.own_cause(at) if self.issued_s(at) is None else Cause("CPU", None, at[0])
            yield at, cause
            at = self._made_by(at, cause)

    def made_by(self, key: Key) -> Key | None:
        """The operation whose end made one begin, or for which its CPU stood still before it issued it late."""
        last = self.last_to_come(key)
        return self._made_by(last, self.own_cause(last))

    def _made_by(self, key: Key, cause: Cause) -> Key | None:
        return self.stood_still_for(key) if cause.why == "CPU" else cause.key

    def path_to(self, last: Key, begin_s: float) -> list[PathPiece]:
        """The operations to which the time from ``begin_s`` to the end of one went, in order of time."""
        pieces: list[PathPiece] = []
        now = self.end_s(last)

        for key, cause in self.back(last):
            end_s = self.end_s(key)
            if end_s < now:
                now = end_s
            issued_s = self.issued_s(key) if cause.why == "CPU" else None
            since_s = self.start_s(key) if issued_s is None else issued_s
            if since_s < begin_s:
                since_s = begin_s
            if since_s < now:
                pieces.append(PathPiece(key, False, since_s, now))
                now = since_s
            if cause.why == "CPU":
                before = self.stood_still_for(key)
                since_s = begin_s if before is None else max(begin_s, self.end_s(before))
                if since_s < now:
                    pieces.append(PathPiece(key, True, since_s, now))
                    now = since_s
            if now <= begin_s:
                break
        return pieces[::-1]
