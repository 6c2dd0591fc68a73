"""What a file of an exercise holds: one `Exercise`, called ``EXERCISE``.

The file's name is the exercise's. In it stand, as plain Python: the solution under the exercise's name, the stub, wrong
answers that people give, shortcuts that people try (each a function, or an `Edit` of the solution), and a judge (see
`fsdp_sim.learn.judges`). ``exercises/unit/all_gathers_per_step.py`` is a short one; ``exercises/collectives/
reduce_scatter_from_sends.py`` runs on real ranks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_sim.learn.edit import Edit, source_of
from fsdp_sim.learn.verdict import Finding

if TYPE_CHECKING:
    from fsdp_sim.learn.apart import Trial, TrialRun

IS_A_STUB = "is still the stub"
AS_GIVEN = "the code as it was given"  # of a seeded fault
MAX_LINES = 30  # of a solution
COVERS = re.compile(r"coverage 00[0-4]\.\d+|pitfall \d+|misconception (\d+|[0-4]\.\d+)")


class ExerciseKind(StrEnum):
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

    One that is the reference but for a few words is a `mutant`; one that is another idea, a function.
    Judges that compare answers (numbers, orders) say ``message`` to whoever answers as ``function`` does. Judges that
    watch code find the cause themselves; there ``message`` is what the tests look for.
    """

    function: Callable[..., Any]
    message: str


def mutant(texts: Mapping[str, str], message: str, name: str = "") -> Wrong:
    """The wrong answer that is the reference with these texts replaced (see `Edit`); ``name`` says what it is."""
    return Wrong(Edit(texts, name=name), message)


class Judge(Protocol):
    """Says what is to be run, and then what is to be said about what came back. Pure: it keeps nothing."""

    def trial(self, seed: int) -> Trial:
        """The calls to be made, drawn anew for each ``seed``, so that no table of results can be right."""
        ...

    def grade(self, trial: Trial, ran: TrialRun, wrong: Sequence[Wrong]) -> Finding:
        """The grade and one paragraph."""
        ...


def unwritten(*given: Any) -> Any:
    """Stands for the stub that nobody has to write."""
    return ...


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        title: begins with a verb: "Count the all-gathers".
        difficulty, importance: 1 to 5.
        minutes: for someone who has read the chapter up to here, with reading what is asked: an estimate, nobody was
            timed. 5 to name what one has seen; 10 for a formula, a fault in a few lines, or a count like an earlier
            one; 15 and more where one has to find out how.
        contract: what the function is given, what it returns, what must hold; a paragraph that can stand alone.
        reference: the solution; has the exercise's name. Its source is what `solution` shows.
        why: why the solution is as it is.
        cause: of a seeded fault: what is wrong, in a clause that could stand among others to choose from.
        hints: the concept, the principle, almost the code.
        judge: see `fsdp_sim.learn.judges`.
        wrong: known wrong answers, each with its message. At least one.
        shortcuts: attempts to pass without solving it (hard-coded results, tampering), each with its message.
        targets: numbers to reach, as a sentence; empty if there are none.
        covers: what it teaches, as rows of the coverage map, pitfalls and misconceptions: ``coverage 000.10``,
            ``pitfall 4``, ``misconception 13`` (part 1), ``misconception 3.6`` (part 2).
        stub: what the learner begins with: the reference's first line and ``return ...``; for a fault the faulty code.
        stub_says: part of what `check` says to the stub; to faulty code, after one has named a cause.

    Raises:
        ValueError: something about it is not as a learner may expect; the message names the exercise and the fault.
    """

    title: str
    kind: ExerciseKind
    difficulty: int
    importance: int
    minutes: int
    contract: str
    reference: Callable[..., Any]
    why: str
    hints: tuple[str, str, str]
    judge: Judge
    wrong: tuple[Wrong, ...]
    shortcuts: tuple[Wrong, ...]
    covers: tuple[str, ...]
    cause: str = ""
    targets: str = ""
    stub: Callable[..., Any] = unwritten
    stub_says: str = IS_A_STUB
    name: str = field(default="", init=False)  # these two follow from the file's place
    chapter: str = field(default="", init=False)

    def __post_init__(self) -> None:
        try:
            if self.stub is unwritten:
                body = source_of(self.reference).partition(":\n")[2]
                object.__setattr__(self, "stub", Edit({re.sub("\n *", "\n", body.strip()): "return ..."}))
            for edit in _edits(self):
                edit.of = edit.of or self.reference
                _ = edit.source
            fault = next(_faults(self), "")
        except ValueError as error:
            fault = str(error)
        if fault:
            raise ValueError(f"exercise {self.reference.__name__}: {fault}") from None


def _edits(of: Exercise) -> list[Edit]:
    functions = (of.stub, *(answer.function for answer in (*of.wrong, *of.shortcuts)))
    return [function for function in functions if isinstance(function, Edit)]


def _faults(of: Exercise) -> Iterator[str]:
    """What is not as a learner may expect, as sentences."""
    answers = (*of.wrong, *of.shortcuts)
    solution, stub = _parsed(of.reference), _parsed(of.stub)
    lines = source_of(of.reference).count("\n") + 1
    if lines > MAX_LINES:
        yield f"its solution has {lines} lines; at most {MAX_LINES} can be read at once"
    if _parameters(stub) != _parameters(solution):
        yield f"its stub takes {_parameters(stub)} and its solution {_parameters(solution)}; they are called alike"
    if not of.title[:1].isupper() or of.title[-1] in ".!":
        yield f"its title {of.title!r} should begin with a capital letter and end without a full stop"
    for name in ("difficulty", "importance"):
        if getattr(of, name) not in range(1, 6):
            yield f"its {name} is {getattr(of, name)}; it goes from 1 to 5"
    if not 3 <= of.minutes <= 90:
        yield f"it takes {of.minutes} minutes; one can plan with 3 to 90"
    for name in ("contract", "why"):
        if len(getattr(of, name)) <= 80 or "\n" in getattr(of, name):
            yield f"its {name} should be one paragraph of more than 80 characters: {getattr(of, name)!r}"
    if not of.covers or not all(COVERS.fullmatch(row) for row in of.covers):
        yield f"it covers {of.covers!r}; rows are written as 'coverage 000.10', 'pitfall 4' or 'misconception 3.6'"
    if not of.wrong or not of.shortcuts:
        yield "it needs at least one wrong answer and one shortcut"
    for answer in answers:
        if len(answer.message) < 8:
            yield f"the message {answer.message!r} to a wrong answer says too little to be told apart"
    if (of.kind is ExerciseKind.FAULT) is not bool(of.cause):
        yield f"what learners look for is said by its cause, which only a fault has, and it has {of.cause!r}"
    if len(set(of.hints)) != 3:
        yield f"it needs three different hints, and has {len(set(of.hints))}"
    code = [" ".join(ast.unparse(line).split()) for line in solution.body]
    for hint in of.hints:
        if not 20 < len(hint) < 300 or "\n" in hint:
            yield f"a hint should be one paragraph of 20 to 300 characters: {hint!r}"
        if all(line in " ".join(hint.split()) for line in code):
            yield f"a hint gives the whole solution away: {hint!r}"


def _parsed(function: Callable[..., Any]) -> ast.FunctionDef:
    found = ast.parse(source_of(function)).body[0]
    if not isinstance(found, ast.FunctionDef):
        raise ValueError("its solution and its stub are functions that begin with def")
    return found


def _parameters(function: ast.FunctionDef) -> str:
    return f"({', '.join(arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg))})"
