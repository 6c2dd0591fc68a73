"""``fsdp-sim lint``: the traps of FSDP in a script, a configuration or a model, before a GPU is paid for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import click

from fsdp_sim.cli.options import (
    CLUSTER,
    MODEL,
    NO,
    WRONG,
    Command,
    Text,
    json_option,
    option,
    print_json,
    request_options,
    schema_option,
)
from fsdp_sim.lint import Costs, FileReport, chosen, lint, plain, rules, sarif
from fsdp_sim.words import harmless

EPILOG = (
    "Exit status: 0 nothing found; 1 something found; 2 a target that cannot be read, or what was asked wrongly. "
    "Scripts are read and never run. A model, package.module:name, is imported: that runs its code."
)
FORMATS = ("text", "json", "sarif")
WHAT = "What to look for"


def _rules_option(name: str, text: str) -> Callable[[Any], Any]:
    kind = Text(rules)
    return option(name, multiple=True, metavar="RULE", type=kind, section=WHAT, help=text)


@click.command(cls=Command, epilog=EPILOG)
@click.argument("targets", nargs=-1, metavar="[SCRIPT|CONFIG|MODULE:NAME|FOLDER]...")
@_rules_option("--rule", "Only this rule; may be repeated.")
@_rules_option("--ignore", "Not this rule; may be repeated. In a file: # fsdp-sim: ignore[RULE]")
@option("--list", "as_list", is_flag=True, section=WHAT, help="List the rules.")
@option("--explain", metavar="RULE", type=Text(rules), section=WHAT, help="Show a rule with examples and its proof.")
@option(
    "--format", "format_", type=click.Choice(FORMATS), default="text", show_default=True,
    help="SARIF 2.1.0 is what GitHub's code scanning reads.",
)  # fmt: skip
@request_options(MODEL, CLUSTER)
@json_option
@schema_option("lint")
def command(
    texts: dict[str, str], targets: tuple[str, ...], rule: tuple[str, ...], ignore: tuple[str, ...], as_list: bool,
    explain: str | None, format_: str, as_json: bool,
) -> None:  # fmt: skip
    """Find traps of FSDP in scripts, configurations and models, each with its cost, its fix and its source.

    With a model, a GPU and how many there are, what a trap costs is simulated where a plan can say it.

    \b
    Examples:
      fsdp-sim lint --list
      fsdp-sim lint --explain clip-per-rank
      fsdp-sim lint --explain one-unit --json
    \b
    On your own files (these exit with 1 if they find something):
      fsdp-sim lint train.py
      fsdp-sim lint accelerate.yaml --model llama3-8b --gpu H100 --gpus 8
      fsdp-sim lint my_package.model:build --format sarif > lint.sarif
    """
    if as_list and not targets:
        _print_list(as_json or format_ == "json", chosen(rule, ignore))
        return
    if explain is not None:
        _print_rule(explain, as_json or format_ == "json")
        return
    if not targets:
        raise click.UsageError("name a script, a configuration or a model; --list lists the rules")
    looked_for, costs = chosen(rule, ignore), Costs(texts)
    reports: list[FileReport] = []
    failed: list[str] = []
    for target in targets:
        try:
            reports += lint(target, looked_for, costs)
        except (ValueError, OSError) as error:
            said = f"{target}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
            failed.append(said)
    _print(reports, failed, "json" if as_json else format_)
    if failed:
        sys.exit(WRONG)
    if any(report.findings for report in reports):
        sys.exit(NO)


def _print(reports: list[FileReport], failed: list[str], format_: str) -> None:
    if format_ == "json":
        print_json("lint", plain(reports) | {"failed": failed})
    elif format_ == "sarif":
        from importlib.metadata import version

        click.echo(json.dumps(sarif(reports, version("fsdp-sim")), indent=2, ensure_ascii=False))
    else:
        from fsdp_sim.cli.lint_words import print_reports

        if reports:
            print_reports(reports)
    for sentence in failed:
        click.echo(f"Error: {harmless(sentence)}", err=True)


def _print_list(as_json: bool, looked_for: dict[str, Any]) -> None:
    if as_json:
        click.echo(json.dumps([rule._asdict() | {"trap": dict(rule.trap), "instead": dict(rule.instead)}
                               for rule in looked_for.values()], indent=2, ensure_ascii=False))  # fmt: skip
        return
    from fsdp_sim.cli.lint_words import print_list

    print_list(looked_for)


def _print_rule(id: str, as_json: bool) -> None:
    from fsdp_sim.cli.lint_words import explained, print_explained

    rule = chosen((id,))[id]
    if as_json:
        click.echo(json.dumps(explained(rule), indent=2, ensure_ascii=False))
    else:
        print_explained(rule)
