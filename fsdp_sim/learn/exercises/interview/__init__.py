"""Whiteboard questions of interviews on FSDP, done on real ranks.

What two of them have in common stands here: how many bytes the busiest rank sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_sim.learn.apart import Ran, Trial
from fsdp_sim.learn.judges.account import sent_bytes
from fsdp_sim.learn.verdict import Finding, Grade


@dataclass(frozen=True)
class Busiest:
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

    def look(self, trial: Trial, ran: Ran) -> Finding:
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
                f"rank {sent.index(most)}: expected at most {self.passes * share:,.0f} bytes sent, found {most:,}; "
                f"{self.cure}.",
            )
        grade = Grade.OPTIMAL if most <= 1.01 * share else Grade.GOOD if most <= self.good * share else Grade.PASS
        return Finding(
            grade,
            f"the busiest rank sends {most:,} bytes, {most / share:.2f} times its share of the least possible "
            f"({self.proof})",
        )
