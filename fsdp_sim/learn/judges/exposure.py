"""Whether communication is hidden behind compute, on a network and with a compute time that the exercise states.

The order in which a rank issued, waited and computed is played again with these durations, one collective at a time on
the wire. So the same code always gets the same grade, however busy the machine is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.inside import WAIT
from fsdp_sim.learn.verdict import Finding, Grade
from fsdp_sim.timeline import COLLECTIVES, Event, Op

if TYPE_CHECKING:
    from fsdp_sim.ranks import Network


@dataclass(frozen=True)
class ExposedTime:
    """How much communication is exposed, in times of one collective; the exercise records its compute as FWD and BWD.

    Attributes:
        compute_s: what each of these takes.
        least: what no order can hide: collectives before there is anything to compute.
        good, passes: how much is still good, or a pass.
        cure: what to do about more.
    """

    network: Network
    compute_s: float
    least: float
    good: float
    passes: float
    cure: str

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        exposed = {rank: self.exposed([e for e in ran.timeline.ops if e.rank == rank]) for rank in range(trial.ranks)}
        at, (worst, culprit) = max(exposed.items(), key=lambda item: item[1][0])
        if worst > self.passes:
            what = f"rank {at}: expected at most {self.passes:g} collectives' time exposed, found {worst:.1f}"
            return Finding(Grade.NOT_YET, what, f"; {culprit}{self.cure}.")
        grade = Grade.OPTIMAL if worst <= self.least + 0.01 else Grade.GOOD if worst <= self.good else Grade.PASS
        return Finding(grade, f"{worst:.1f} collectives' time exposed, where {self.least:g} cannot be hidden")

    def exposed(self, events: list[Event]) -> tuple[float, str]:
        """How much of one rank's communication is exposed, and the first collective that was waited for in vain."""
        now_s = wire_s = exposed_s = 0.0
        ends_s: dict[int, float] = {}
        cost_s, computed, culprit = 0.0, "", ""
        for event in events:
            if event.op in COLLECTIVES:
                cost_s = self.network.seconds(event.op.lower(), event.bytes, event.group_size)
                wire_s = ends_s[event.seq] = max(now_s, wire_s) + cost_s
            elif event.unit == WAIT:
                for seq in event.waits_on:
                    if computed and not culprit and ends_s.get(seq, 0.0) - now_s > 0.99 * cost_s:
                        culprit = f"after {computed} a collective was issued and waited for at once; "
                    exposed_s += max(0.0, ends_s.get(seq, 0.0) - now_s)
                    now_s = max(now_s, ends_s.get(seq, 0.0))
            elif event.op in (Op.FWD, Op.BWD):
                now_s, computed = now_s + self.compute_s, event.label
        return (exposed_s / cost_s if cost_s else float("inf")), culprit
