"""``fsdp-sim exercises``: the exercises of the course, and how many there are of each chapter and kind.

A mutant is a known wrong answer or a shortcut: the tests show that each fails with its own message.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fsdp_sim.cli.options import print_json, schema_option
from fsdp_sim.learn.exercise import Exercise
from fsdp_sim.learn.find import CHAPTERS, load_all


@click.command(epilog="Exit status: 0; 2 for what was asked wrongly.")
@click.option("--chapter", type=click.Choice(CHAPTERS), help="Only this chapter.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@schema_option("exercises")
def exercises(chapter: str | None, as_json: bool) -> None:
    """List the exercises of the course, and count them with their mutants by chapter and kind.

    \b
    Examples:
      fsdp-sim exercises
      fsdp-sim exercises --chapter bug_hunt
      fsdp-sim exercises --json
    """
    found = [exercise for exercise in load_all() if chapter in (None, exercise.chapter)]
    counts = count(found)
    if as_json:
        print_json("exercises", counts | {"list": [_row(exercise) for exercise in found]})
        return
    console = Console()
    listed = Table(Column("exercise", no_wrap=True), "title", "kind", "difficulty", "minutes", "mutants")
    for exercise in found:
        cells = (
            exercise.name,
            exercise.title,
            exercise.kind.name.lower(),
            f"{exercise.difficulty}/5",
            exercise.minutes,
            mutants(exercise),
        )
        listed.add_row(*(escape(str(cell)) for cell in cells))
    console.print(listed)
    for by in ("chapter", "kind"):
        table = Table(by, "exercises", "mutants")
        for name, numbers in counts[f"by_{by}"].items():
            table.add_row(escape(name), str(numbers["exercises"]), str(numbers["mutants"]))
        table.add_section()
        table.add_row("all", str(counts["exercises"]), str(counts["mutants"]))
        console.print(table)


def mutants(exercise: Exercise) -> int:
    """Known wrong answers and shortcuts of an exercise."""
    return len(exercise.wrong) + len(exercise.shortcuts)


def count(found: list[Exercise]) -> dict[str, Any]:
    """How many exercises and mutants there are: in all, by chapter and by kind."""

    def numbers(some: list[Exercise]) -> dict[str, int]:
        return {"exercises": len(some), "mutants": sum(map(mutants, some))}

    chapters, kinds = (Counter(getattr(e, by) for e in found) for by in ("chapter", "kind"))
    return numbers(found) | {
        "by_chapter": {chapter: numbers([e for e in found if e.chapter == chapter]) for chapter in chapters},
        "by_kind": {str(kind): numbers([e for e in found if e.kind == kind]) for kind in kinds},
    }


def _row(exercise: Exercise) -> dict[str, object]:
    return {
        "name": exercise.name, "chapter": exercise.chapter, "title": exercise.title, "kind": str(exercise.kind),
        "difficulty": exercise.difficulty, "importance": exercise.importance, "minutes": exercise.minutes,
        "covers": list(exercise.covers), "mutants": mutants(exercise),
    }  # fmt: skip
