"""What a file of an exercise holds: one `Exercise`, called ``EXERCISE``.

The file's name is the exercise's. In it stand, as plain Python: the solution under the exercise's name, the stub, wrong
answers that people give, shortcuts that people try, and a judge (see `fsdp_sim.learn.judges`). ``exercises/unit/
all_gathers_per_step.py`` is a short one; ``exercises/collectives/reduce_scatter_from_sends.py`` runs on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_sim.learn.verdict import Finding

if TYPE_CHECKING:
    from fsdp_sim.learn.apart import Ran, Trial

IS_A_STUB = "is still the stub"


class Kind(StrEnum):
    """What the learner does."""

    CODE = "write code on real ranks"
    NUMBER = "predict a number"
    ORDER = "order a schedule"
    TRACE = "read a trace"
    PLAN = "choose a plan under a budget"
    FAULT = "find the seeded fault"
    CLAIM = "true or false, with an experiment"


@dataclass(frozen=True)
class Wrong:
    """A wrong answer and (a part of) the message it must get; for answers that are compared, also its cause.

    Judges that compare answers (numbers, orders) say ``message`` to whoever answers as ``function`` does. Judges that
    watch code find the cause themselves; there ``message`` is what the tests look for.
    """

    function: Callable[..., Any]
    message: str


class Judge(Protocol):
    """Says what is to be run, and then what is to be said about what came back. Pure: it keeps nothing."""

    def trial(self, seed: int) -> Trial:
        """The calls to be made, drawn anew for each ``seed``, so that no table of results can be right."""
        ...

    def grade(self, trial: Trial, ran: Ran, wrong: Sequence[Wrong]) -> Finding:
        """The grade and one paragraph."""
        ...


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        title: begins with a verb: "Count the all-gathers".
        difficulty, importance: 1 to 5.
        minutes: for someone who has read the chapter up to here.
        contract: what the function is given, what it returns, what must hold; a paragraph that can stand alone.
        reference: the solution; has the exercise's name. Its source is what `solution` shows.
        stub: what the learner begins with: returns ``...``, or for a fault the faulty code.
        why: why the solution is as it is.
        hints: the concept, the principle, almost the code.
        judge: see `fsdp_sim.learn.judges`.
        wrong: known wrong answers, each with its message. At least one.
        shortcuts: attempts to pass without solving it (hard-coded results, tampering), each with its message.
        targets: numbers to reach, as a sentence; empty if there are none.
        covers: what it teaches, as rows of the coverage map, pitfalls and misconceptions: ``coverage 000.10``,
            ``pitfall 4``, ``misconception 13`` (part 1), ``misconception 3.6`` (part 2).
        stub_says: part of what `check` says to the stub.
    """

    title: str
    kind: Kind
    difficulty: int
    importance: int
    minutes: int
    contract: str
    reference: Callable[..., Any]
    stub: Callable[..., Any]
    why: str
    hints: tuple[str, str, str]
    judge: Judge
    wrong: tuple[Wrong, ...]
    shortcuts: tuple[Wrong, ...]
    covers: tuple[str, ...]
    targets: str = ""
    stub_says: str = IS_A_STUB
    name: str = field(default="", init=False)  # these two follow from the file's place
    chapter: str = field(default="", init=False)
