"""Steps of training with each culprit in them."""

from collections import Counter

from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.look import look
from fsdp_sim.engine import run
from fsdp_sim.engine.run import Run
from fsdp_sim.schedule import build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Timeline
from tests.engine.programs import durations, layers_only


def played(plan=None, layers=3, device="gpu", issue_s=0.0, units=None, steps=1, world_size=8, **seconds) -> Run:
    """A small model's step; durations are those of `tests.engine.programs.durations`."""
    program = build(units or layers_only(layers), plan or Plan(), world_size, steps=steps)
    return run(program, durations(**seconds), device=device, issue_s=issue_s)


def idle_by_culprit(timeline: Timeline, **which) -> dict[Culprit, float]:
    """Seconds in which compute stands idle, by culprit; those of next to no length left out."""
    totals: Counter[Culprit] = Counter()
    for wait in look(timeline, **which).idle:
        totals[wait.culprit] += wait.seconds
    return {culprit: seconds for culprit, seconds in totals.items() if seconds > 1e-12}
