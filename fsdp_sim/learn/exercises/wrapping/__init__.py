"""What becomes a unit."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.verdict import Finding, Grade


@dataclass(frozen=True)
class AllGatherCount:
    """How often each rank gathers: what FSDP's units are, seen in what it does.

    Attributes:
        least, most: all-gathers.
        fewer, more: the cause if there are fewer, or more.
    """

    least: int
    most: int
    fewer: str
    more: str

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        for rank, records in enumerate(ran.records):
            found = sum(record.op == "all_gather" for record in records)
            if not self.least <= found <= self.most:
                few = found < self.least
                bound = f"at {'least' if few else 'most'} {self.least if few else self.most}"
                expected = f"{self.least}" if self.least == self.most else bound
                cause = self.fewer if few else self.more
                return Finding(
                    Grade.NOT_YET, f"rank {rank}: expected {expected} all-gathers, found {found}", f"; {cause}."
                )
        return Finding(Grade.OPTIMAL, "")
