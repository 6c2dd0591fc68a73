"""What the ranks sent, issued and held: checks of a rank's account, and whether the account itself can be true.

A rank's account is what passed through its process group: written down before it goes to gloo, and read by the
notebook's process. Code that bypasses or rewrites it is found out by what it cannot change: the other ranks' accounts,
their results, and the bytes that the kernel saw leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fsdp_sim.learn.apart import Trial, TrialRun, tensor_bytes
from fsdp_sim.learn.verdict import Finding, Grade
from fsdp_sim.spec import DTYPE_BYTES
from fsdp_sim.timeline import RING_PASSES

if TYPE_CHECKING:
    from fsdp_sim.ranks.board import Record

ELEMENT_BYTES = DTYPE_BYTES | {"int64": 8, "int32": 4, "int16": 2}  # others 1
SLACK_BYTES = 2**16  # of what sockets and files carry besides: joining, headers
RINGS = {op: RING_PASSES[op] for op in ("all_gather", "reduce_scatter", "all_reduce")}
GLOO = RINGS | {"reduce_scatter": RINGS["all_reduce"]}  # gloo reduces everything to everyone, and drops the rest
SIZELESS = ("all_to_all", "gather", "scatter", "broadcast", "reduce")  # which rank sends how much is not on record
KERNEL = (0.8, 1.25)  # how far the kernel's bytes may be from the account's
UNMETERED_BYTES = 3 * 2**19


class Check(Protocol):
    """One thing to be checked about code that ran on ranks, beyond its results."""

    def look(self, trial: Trial, ran: TrialRun) -> Finding: ...


def message_bytes(record: Record) -> int:
    """The whole message of a collective: all-gather output, reduce-scatter input."""
    return record.numel * ELEMENT_BYTES.get(record.dtype, 1)


def sent_bytes(records: Sequence[Record], rings: dict[str, int] = RINGS) -> int:
    """What a rank sends for the collectives of its account: ring algorithms, or those of ``rings``."""
    total = 0.0
    for record in records:
        ranks = len(record.members)
        if record.op == "send":
            total += message_bytes(record)
        elif record.op in rings:
            total += rings[record.op] * (ranks - 1) / ranks * message_bytes(record)
    return round(total)


def dishonest(ran: TrialRun) -> str:
    """Why an account cannot be true, or nothing."""
    if ran.replaced:
        return f"your code replaced {ran.replaced[0]}; call it instead, for what is checked is what it does"
    sends, receives = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for rank, records in enumerate(ran.records):
        for record in records:
            peer = record.detail.removeprefix("peer=")
            if record.op == "send":
                sends[rank, int(peer)] += message_bytes(record)
            elif record.op == "recv" and peer.isdigit():
                receives[int(peer), rank] += message_bytes(record)
    anyone = any(record.op == "recv" and record.detail == "peer=any" for of in ran.records for record in of)
    for source, target in sorted(set(sends) | set(receives)):
        sent, received = sends[source, target], receives[source, target]
        if sent != received and not anyone:
            return f"rank {source} sent {sent:,} bytes to rank {target}, which received {received:,}"
    for rank, (records, written) in enumerate(zip(ran.records, ran.written_bytes, strict=True)):
        if written is None or any(record.op in SIZELESS for record in records):
            continue
        claimed = sent_bytes(records, GLOO)
        least, most = KERNEL[0] * claimed - SLACK_BYTES, KERNEL[1] * claimed + SLACK_BYTES
        if not least <= written <= most:
            return f"rank {rank}'s account shows {claimed:,} bytes sent; the kernel saw {written:,} leave its process"
    return ""


@dataclass(frozen=True)
class OnlyCollectives:
    """Only these collectives (words of the account: ``send``, ``recv``, ``all_gather``, ...) are issued."""

    only: frozenset[str]
    instead: str

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        allowed = " and ".join(sorted(self.only))
        for rank, records in enumerate(ran.records):
            for record in records:
                if record.op not in self.only:
                    return Finding(
                        Grade.NOT_YET,
                        f"rank {rank}: expected only {allowed}, found {record.op}",
                        f"; {self.instead}.",
                    )
        return Finding(Grade.OPTIMAL, "")


@dataclass(frozen=True)
class CollectiveOrder:
    """Each rank issues these operations in this order: those of a built program, as words of the account."""

    order: Callable[[Trial], Sequence[str]]
    source: str

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        expected = list(self.order(trial))
        for rank, records in enumerate(ran.records):
            found = [f"{record.op}({record.unit})" if record.unit else record.op for record in records]
            if found != expected:
                pairs = enumerate(zip([*expected, "nothing more"], [*found, "nothing more"], strict=False))
                i, (a, b) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
                return Finding(
                    Grade.NOT_YET, f"rank {rank}, collective {i + 1}: expected {a}, found {b} ({self.source})."
                )
        return Finding(Grade.OPTIMAL, "")


@dataclass(frozen=True)
class _Bounded:
    """Bytes of each rank against a proven lower bound: at the bound optimal, then good, then a pass, then too much.

    Attributes:
        at_least: bytes below which no right solution can be, for a trial.
        proof: why.
        good, passes: times the bound.
        cure: what to do about too much.
    """

    at_least: Callable[[Trial], float]
    proof: str
    good: float
    passes: float
    cure: str

    def _grade(self, what: str, by_rank: Sequence[int], trial: Trial) -> Finding:
        bound = self.at_least(trial)
        rank, most = max(enumerate(by_rank), key=lambda item: item[1])
        least_rank, least = min(enumerate(by_rank), key=lambda item: item[1])
        if least < 0.99 * bound:
            return Finding(
                Grade.NOT_YET,
                f"rank {least_rank}: expected at least {bound:,.0f} bytes {what}, found {least:,} on its account, and "
                f"no right result can come from less ({self.proof}); does something bypass torch.distributed?",
            )
        if most > self.passes * bound:
            return Finding(
                Grade.NOT_YET,
                f"rank {rank}: expected at most {self.passes * bound:,.0f} bytes {what}, found {most:,}",
                f"; {self.cure}.",
            )
        grade = Grade.OPTIMAL if most <= 1.01 * bound else Grade.GOOD if most <= self.good * bound else Grade.PASS
        return Finding(grade, f"{most:,} bytes {what}, {most / bound:.2f} times the least possible ({self.proof})")


@dataclass(frozen=True)
class BytesSent(_Bounded):
    """The bytes that each rank sends."""

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        return self._grade("sent", [sent_bytes(records) for records in ran.records], trial)


@dataclass(frozen=True)
class BusiestRankBytes:
    """The bytes that the busiest rank sends, against its share of what all ranks together must send.

    A single rank may send less than its share and still have the right result; all together cannot.

    Attributes:
        together: the least bytes that all ranks together send, for a trial.
        proof: why.
        good, passes: times the share.
        cure: what to do about more.
    """

    together: Callable[[Trial], float]
    proof: str
    good: float
    passes: float
    cure: str

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        sent, least = [sent_bytes(records) for records in ran.records], self.together(trial)
        if sum(sent) < 0.99 * least:
            return Finding(
                Grade.NOT_YET,
                f"expected at least {least:,.0f} bytes sent by all ranks together, found {sum(sent):,} on their "
                f"accounts, and no right result can come from less ({self.proof}); does something bypass "
                "torch.distributed?",
            )
        share, most = least / trial.ranks, max(sent)
        if most > self.passes * share:
            return Finding(
                Grade.NOT_YET,
                f"rank {sent.index(most)}: expected at most {self.passes * share:,.0f} bytes sent, found {most:,}",
                f"; {self.cure}.",
            )
        grade = Grade.OPTIMAL if most <= 1.01 * share else Grade.GOOD if most <= self.good * share else Grade.PASS
        return Finding(
            grade,
            f"the busiest rank sends {most:,} bytes, {most / share:.2f} times its share of the least possible "
            f"({self.proof})",
        )


@dataclass(frozen=True)
class PeakBytes(_Bounded):
    """The most bytes that the tensors of each rank hold at once.

    Attributes:
        unmetered: bytes by which a process may grow besides, see `belied`.
    """

    unmetered: int = UNMETERED_BYTES

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        for rank, (found, cases) in enumerate(zip(ran.peak_bytes, trial.each, strict=True)):
            if why := belied(ran, rank, found - tensor_bytes(cases), self.unmetered):  # what is given was there
                return Finding(Grade.NOT_YET, why)
        return self._grade("held at once", ran.peak_bytes, trial)


def belied(ran: TrialRun, rank: int, taken: int, unmetered: int = UNMETERED_BYTES) -> str:
    """Why a rank's meter cannot be right, or nothing. The meter counts in the learner's process, which could change it,
    so it is held against how much that process grew.

    Args:
        taken: bytes that the meter saw taken, beyond what was given.
        unmetered: bytes besides: buffers of gloo's, the growth of Python's own memory.
    """
    grown = ran.grown_bytes[rank]
    if grown is None or grown <= max(taken, 0) + unmetered:
        return ""
    return (
        f"rank {rank}: its meter shows {max(taken, 0):,} bytes taken while your code ran, and the kernel saw its "
        f"process grow by {grown:,}; do you keep what the meter does not see, or import or start something inside the "
        "function?"
    )
