"""A class's results, from files that learners hand in: their progress, or their notebooks as saved.

A folder holds a file or a folder for each learner. Of ``progress.json`` the tries, hints and grades are taken; of a
notebook what the checks in it said, and from that which known mistake it was. Files are read as data: nothing in them
is run, and what is no such file is passed over and named.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from fsdp_sim.learn.exercise import AS_GIVEN, Exercise
from fsdp_sim.learn.find import former, load, names
from fsdp_sim.learn.progress import ExerciseEntry, ExerciseState
from fsdp_sim.learn.verdict import WORDS, Grade
from fsdp_sim.words import harmless

MAX_BYTES = 30_000_000
"""Of a file: a notebook of the course with its outputs has a tenth."""
STATES = (ExerciseState.OPEN, ExerciseState.TRIED, ExerciseState.SEEN, ExerciseState.PASSED, ExerciseState.OPTIMAL)
"""From the least to the most that one can say of a learner."""
SOLVED = (ExerciseState.PASSED, ExerciseState.OPTIMAL)


@dataclass(frozen=True)
class LearnerResult:
    """One exercise of one learner.

    Attributes:
        learner: the folder, or else the file, it was found in.
        tries, hints: None where only a notebook is known.
        message: what the last check said, if it was not passed.
        mistake: the known wrong answer that this is, by the message it gets; empty if none is known.
    """

    learner: str
    exercise: str
    state: ExerciseState
    tries: int | None = None
    hints: int | None = None
    message: str = ""
    mistake: str = ""


@dataclass(frozen=True)
class ExerciseSummary:
    """An exercise over all learners: how many are in which state, and the mistakes most met."""

    exercise: Exercise
    states: Counter[ExerciseState]
    tries: float | None
    mistakes: tuple[tuple[str, int], ...]

    @property
    def solved(self) -> int:
        return sum(self.states[state] for state in SOLVED)


class _Progress(msgspec.Struct):
    exercises: dict[str, ExerciseEntry]


def gather(folder: Path) -> tuple[list[LearnerResult], list[str]]:
    """The results of all learners in a folder, and a sentence for each file that could not be read.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; it holds a file or a folder for each learner")
    found: dict[tuple[str, str], LearnerResult] = {}
    refused = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".ipynb") and path.is_file()):
        inside = path.relative_to(folder)
        learner = harmless(inside.parts[0] if len(inside.parts) > 1 else inside.stem)
        try:
            results = list(_read(path, learner))
        except Exception as error:  # whatever a file may hold, that of one learner ends nothing
            refused.append(harmless(f"{inside}: {error}"))
            continue
        for result in results:
            key = learner, result.exercise
            found[key] = _together(found[key], result) if key in found else result
    return list(found.values()), refused


def summaries(results: Iterable[LearnerResult]) -> list[ExerciseSummary]:
    """Of each exercise that somebody has, in the order of the course; who has not begun counts as open."""
    every = list(results)
    learners = {result.learner for result in every}
    found = []
    for name in names():
        of = [result for result in every if result.exercise == name]
        if any(result.state is not ExerciseState.OPEN for result in of):
            states = Counter(result.state for result in of)
            states[ExerciseState.OPEN] += len(learners) - len(of)
            tries = [result.tries for result in of if result.tries]
            mistakes = Counter(result.mistake for result in of if result.mistake)
            found.append(
                ExerciseSummary(
                    load(name), states, statistics.median(tries) if tries else None, tuple(mistakes.most_common(3))
                )
            )
    return found


def as_csv(results: Sequence[LearnerResult]) -> str:
    """A line for each learner and exercise."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("learner", "chapter", "exercise", "state", "tries", "hints", "mistake", "message"))
    for r in sorted(results, key=lambda r: (r.learner, list(names()).index(r.exercise))):
        cells = (r.learner, names()[r.exercise], r.exercise, r.state, r.tries, r.hints, r.mistake, r.message)
        writer.writerow("" if cell is None else _plain(cell) for cell in cells)
    return out.getvalue()


def _plain(cell: object) -> str:
    """Text that a spreadsheet does not take for a formula."""
    text = str(cell)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def _together(a: LearnerResult, b: LearnerResult) -> LearnerResult:
    """What a learner's progress and a notebook say of one exercise: the better state, and whatever either knows."""
    better = max(a, b, key=lambda result: STATES.index(result.state))
    known = {field: getattr(a, field) or getattr(b, field) for field in ("tries", "hints", "message", "mistake")}
    return LearnerResult(a.learner, a.exercise, better.state, **known)


def _read(path: Path, learner: str) -> Iterator[LearnerResult]:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES / 1e6:.0f} MB")
    data = path.read_bytes()
    if path.suffix == ".json":
        for name, entry in msgspec.json.decode(data, type=_Progress).exercises.items():
            name = former().get(name, name)
            if name in names():
                yield LearnerResult(learner, name, entry.state, entry.tries, entry.hints)
    else:
        yield from _of_notebook(msgspec.json.decode(data), learner)


def _of_notebook(notebook: Any, learner: str) -> Iterator[LearnerResult]:
    """What the check after each exercise said when the notebook was saved."""
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ValueError("no notebook")
    cells = [cell for cell in notebook["cells"] if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    for exercise, check in pairwise(cells):
        named = str((exercise.get("metadata") or {}).get("exercise"))
        name = former().get(named, named)
        if name not in names():
            continue
        grade, message = _verdict(check)
        if grade is None or AS_GIVEN in message or load(name).stub_says in message:
            yield LearnerResult(learner, name, ExerciseState.OPEN)
        elif grade:
            yield LearnerResult(
                learner, name, ExerciseState.OPTIMAL if grade is Grade.OPTIMAL else ExerciseState.PASSED
            )
        else:
            yield LearnerResult(learner, name, ExerciseState.TRIED, message=message, mistake=_mistake(name, message))


def _verdict(check: dict[str, Any]) -> tuple[Grade | None, str]:
    """The grade and the message in a cell's outputs; no grade where it was not run."""
    for output in check.get("outputs") or []:
        text = (output.get("data") or {}).get("text/plain", "") if isinstance(output, dict) else ""
        text = harmless("".join(text) if isinstance(text, list) else str(text))
        for grade, words in sorted(WORDS.items(), key=lambda item: -len(item[1])):
            if text.startswith(f"{words}: "):
                return grade, text[len(words) + 2 :].strip()
    return None, ""


@cache
def _messages(name: str) -> tuple[str, ...]:
    exercise = load(name)
    return tuple(sorted({w.message for w in (*exercise.wrong, *exercise.shortcuts)}, key=len, reverse=True))


def _mistake(name: str, message: str) -> str:
    return next((known for known in _messages(name) if known in message), "")
