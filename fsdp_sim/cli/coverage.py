"""``fsdp-sim coverage``: where the course teaches what it sets out to teach."""

from __future__ import annotations

import sys
from collections import defaultdict

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdp_sim.cli.options import Command, print_json, schema_option
from fsdp_sim.learn.coverage import KINDS, Lesson, Topic, lessons, masters, rows
from fsdp_sim.learn.statements import WITH_STATEMENTS, misconceptions


@click.command(cls=Command, epilog="Exit status: 0; with --missing 1 if rows are; 2 where there are no notebooks.")
@click.option("--missing", is_flag=True, help="Only rows that no notebook teaches.")
@click.option("--kind", type=click.Choice(KINDS), help="Only these rows.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@schema_option("coverage")
def coverage(missing: bool, kind: str | None, as_json: bool) -> None:
    """List what the course is to teach, row by row, and the notebook, section and exercise that teaches it.

    \b
    Examples:
      fsdp-sim coverage
      fsdp-sim coverage --kind pitfall
      fsdp-sim coverage --missing --json
    """
    taught: defaultdict[str, list[Lesson]] = defaultdict(list)
    for place in lessons(masters()):
        taught[place.row].append(place)
    asked = [row for row in rows() if kind in (None, row.kind)]
    without = [row for row in asked if not taught[row.name]]
    shown = without if missing else asked
    if as_json:
        listed = [row._asdict() | {"places": [place._asdict() for place in taught[row.name]]} for row in shown]
        print_json("coverage", {"rows": len(asked), "missing": len(without), "list": listed})
    else:
        _print(shown, taught)
        print(f"{len(asked) - len(without)} of {len(asked)} rows have a place.")
    if missing and without:
        sys.exit(1)


def _print(shown: list[Topic], taught: dict[str, list[Lesson]]) -> None:
    statements = {
        name: (chapter, e.statement)
        for chapter in WITH_STATEMENTS
        for e in misconceptions(chapter).entries
        for name in e.covers
    }
    table = Table("row", "what", "status", "taught in")
    for row in shown:
        chapter, statement = statements.get(row.name, (row.teach_in, row.covers))
        what = ": ".join(filter(None, (row.heading, statement)))
        where = "\n".join(dict.fromkeys(map(str, taught[row.name]))) or f"nowhere; belongs to {chapter}"
        table.add_row(*map(escape, (row.name, what, row.status, where)))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
