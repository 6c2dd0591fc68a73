"""Two runs beside each other, printed."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_sim.diagnose import Against
from fsdp_sim.words import harmless, human_ms, signed_ms

LITTLE = 0.001  # of the step: a part that differs by less is not shown


def print_against(found: Against, top: int) -> None:
    """What grew and shrank, and the sentences that say why."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(Text("Held against the other run", "bold"))
    for sentence in found.sentences:
        console.print(Text(f"  {harmless(sentence)}"), soft_wrap=True)
    console.print()
    shown = [part for part in found.parts if abs(part.more_s) >= LITTLE * found.step_there_s]
    rest_s = found.more_s - sum(part.more_s for part in shown)
    rows = [
        (("computing " if part.kind == "compute" else "waiting: ") + part.name, part.here_s, part.there_s, part.more_s)
        for part in shown
    ]
    console.print(_table("part", rows, rest_s, found))
    if found.kernels:
        kernels = [(part.name, part.here_s, part.there_s, part.more_s) for part in found.kernels]
        console.print("", _table("of forward and backward", kernels, None, found))
    if changed := [op for op in found.operations if abs(op.more_s) >= LITTLE * found.step_there_s][:top]:
        operations = [
            (harmless(f"{op.op}({op.unit})" if op.unit else str(op.op)), op.here_s, op.there_s, op.more_s)
            for op in changed
        ]
        console.print("", _table("operation in both", operations, None, found))
    for what, alone in (("this run", found.only_here), ("the other", found.only_there)):
        if alone:
            names = ", ".join(f"{times} {harmless(label)}" for label, times in list(alone.items())[:5])
            more = f" and {len(alone) - 5} more kinds" if len(alone) > 5 else ""
            console.print(Text(f"Only in {what}: {names}{more}."), soft_wrap=True)
    console.print()


def _table(title: str, rows: list[tuple[str, float, float, float]], rest_s: float | None, found: Against) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (title, "here", "there", "difference"):
        table.add_column(name, justify="left" if name == title else "right")
    for name, here_s, there_s, more_s in rows:
        table.add_row(Text(name), human_ms(here_s), human_ms(there_s), signed_ms(more_s))
    if rest_s is not None:
        if abs(rest_s) > 1e-9:
            table.add_row("all else", "", "", signed_ms(rest_s))
        table.add_row(
            Text("step", "bold"), human_ms(found.step_here_s), human_ms(found.step_there_s), signed_ms(found.more_s)
        )
    return table
