"""What ``fsdp-sim lint`` prints for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from fsdp_sim.lint import LEVELS, FileReport, Finding, Rule, examples_of, proof_of
from fsdp_sim.words import harmless

STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
MOST_COLUMNS = 100  # of a line of code
LEXERS = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def print_reports(reports: Sequence[FileReport]) -> None:
    """Findings by file, then how many there are."""
    console = Console(highlight=False, soft_wrap=False)
    told: set[str] = set()
    for report in reports:
        if report.findings or report.unread or report.notes:
            console.print(Text(harmless(report.target), style="bold underline"))
        for finding in report.findings:
            _print(console, finding, finding.rule in told)
            told.add(finding.rule)
        for sentence in (*report.notes, *report.unread):
            console.print(Padding(Text(harmless(sentence), style="dim"), (0, 0, 0, 2)))
    counts = Counter(finding.of.level for report in reports for finding in report.findings)
    ignored = sum(report.ignored for report in reports)
    found = ", ".join(f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in LEVELS if counts[level])
    where = reports[0].target if len(reports) == 1 else f"{len(reports)} files"
    rest = f" ({ignored} ignored by comments)" if ignored else ""
    console.print(Text(f"{found or 'Nothing found'} in {harmless(where)}{rest}."))
    if counts:
        console.print(Text("fsdp-sim lint --explain RULE shows a rule with its proof.", style="dim"))


def _print(console: Console, finding: Finding, told: bool) -> None:
    rule = finding.of
    place = f"line {finding.line}: " if finding.line else ""
    head = Text.assemble("\n  ", (rule.level, STYLES[rule.level]), " ", (rule.id, "bold"), f"  {place}{rule.title}")
    console.print(head)
    if finding.source_line:
        _print_code(console, finding)
    lines = [("", finding.message)]
    if not told:  # once is enough for what is the same each time
        lines += [("costs", rule.costs)]
    if finding.simulated:
        lines += [("simulated", finding.simulated)]
    lines += [("fix", rule.fix)] + ([] if told else [("source", rule.source)])
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in lines:
        table.add_row(name, Text(harmless(text)))
    console.print(Padding(table, (0, 0, 0, 4)))


def _print_code(console: Console, finding: Finding) -> None:
    """The line, and a line under what is meant."""
    cut = len(finding.source_line) - len(finding.source_line.lstrip())
    line = harmless(finding.source_line.strip().replace("\t", " "))[:MOST_COLUMNS]
    start = max(finding.column - 1 - cut, 0)
    length = max(min(finding.end_column - finding.column, len(line) - start), 1)
    number = f"{finding.line:>6} | "
    console.print(Text(number, style="dim").append(line, style="default"))
    console.print(Text(" " * (len(number) + start)).append("^" * length, style=STYLES[finding.of.level]))


def print_list(looked_for: Mapping[str, Rule]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("rule", "", "in", "what is found"):
        table.add_column(column, no_wrap=column != "what is found")
    for rule in looked_for.values():
        table.add_row(rule.id, Text(rule.level, style=STYLES[rule.level]), ", ".join(rule.where), rule.title)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\n{len(looked_for)} rules. fsdp-sim lint --explain RULE shows one with its proof.")


def explained(rule: Rule) -> dict[str, Any]:
    """All that there is of a rule."""
    proof = proof_of(rule.id)
    return rule._asdict() | {
        "trap": dict(rule.trap),
        "instead": dict(rule.instead),
        "examples": {place: example._asdict() for place, example in examples_of(rule.id).items()},
        "proof": None if proof is None else proof[1],
    }


def print_explained(rule: Rule) -> None:
    console = Console(highlight=False)
    console.print(Text.assemble((rule.id, "bold"), "  ", (rule.level, STYLES[rule.level]), f"\n{rule.title}."))
    for name, text in (("What it costs", rule.costs), ("What to do", rule.fix), ("Source", rule.source)):
        console.print(Text.assemble("\n", (name, "bold"), f"\n{text}"))
    for place, example in examples_of(rule.id).items():
        for name, code in (("The trap", example.trap), ("Looks like it, and is right", example.clean)):
            console.print(Text.assemble("\n", (f"{name} ({place})", "bold")))
            console.print(
                Padding(Syntax(code.strip(), LEXERS[example.suffix], background_color="default"), (0, 0, 0, 2))
            )
    proof = proof_of(rule.id)
    if proof is not None:
        console.print(
            Text.assemble(
                "\n", ("Its proof", "bold"), f", which the tests run on two ranks (fsdp_sim/lint/proofs/{proof[0]}.py)"
            )
        )
        console.print(Padding(Syntax(proof[1], "python", background_color="default"), (0, 0, 0, 2)))
