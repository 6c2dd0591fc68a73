"""`lint(target)`: which kind of thing a target is, and what is found in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fsdp_sim.lint.cost import Costs
from fsdp_sim.lint.report import FileReport, Finding, finding_at, report_of
from fsdp_sim.lint.rules import Rule, rules
from fsdp_sim.lint.script import read_script, traps_of

CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
SKIPPED = ("venv", "site-packages", "node_modules", "__pycache__")


def lint(target: str, only: Mapping[str, Rule] | None = None, costs: Costs | None = None) -> list[FileReport]:
    """Look for traps in a script, a configuration, a model (``package.module:name``), or each script of a folder.

    Args:
        only: the rules that are looked for; all by default.
        costs: the model, the cluster and the plan for which costs are simulated.

    Raises:
        ValueError: it is none of these, or cannot be read. OSError: there is no such file.
    """
    looked_for = rules() if only is None else only
    costs = costs or Costs({})
    path = Path(target)
    if path.is_dir():
        return [report for file in scripts_of(path) for report in lint(str(file), looked_for, costs)]
    if path.suffix == ".py":
        return [lint_script(target, looked_for, costs)]
    if path.suffix in CONFIGURATIONS:
        from fsdp_sim.lint.config import lint_config

        return [lint_config(target, looked_for, costs)]
    if ":" in target:
        from fsdp_sim.lint.module import lint_module

        return [lint_module(target, looked_for, costs)]
    if not path.exists():
        raise FileNotFoundError(2, "no such file", target)
    raise ValueError(
        f"{target} is no script (.py), no configuration ({', '.join(CONFIGURATIONS)}), no model (module:name)"
    )


def scripts_of(folder: Path) -> Iterator[Path]:
    """The Python files below a folder, but for those of environments and hidden ones.

    Raises:
        ValueError: there is none.
    """
    found = [
        path
        for path in sorted(folder.rglob("*.py"))
        if not any(part in SKIPPED or part[:1] == "." for part in path.relative_to(folder).parts)
    ]
    if not found:
        raise ValueError(f"{folder} has no Python file")
    return iter(found)


def lint_script(path: str, looked_for: Mapping[str, Rule], costs: Costs) -> FileReport:
    """The traps of a Python file, which is read and never run."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None
    script = read_script(text, path)
    lines = text.splitlines()
    ids = [id for id, rule in looked_for.items() if "script" in rule.where]
    findings = [
        finding_at(id, found.message, found.node, lines, costs.sentence(looked_for[id]))
        for id, found in traps_of(script, ids)
    ]
    said, notes = _of_arguments(path, text, looked_for, costs)
    return report_of(path, "script", [*findings, *said], lines, script.unread, notes)


TRAINERS = re.compile(r"^\s*(from|import)\s+(transformers|trl|lightning\w*|pytorch_lightning)\b", re.MULTILINE)
"""Imports of packages whose calls say a configuration."""


def _of_arguments(
    path: str, text: str, looked_for: Mapping[str, Rule], costs: Costs
) -> tuple[Sequence[Finding], Sequence[str]]:
    """The traps of what a script gives a trainer, such as TrainingArguments, where that can be read; and notes."""
    if not TRAINERS.search(text):
        return (), ()
    from fsdp_sim.configurations import NothingCalledError
    from fsdp_sim.lint.config import lint_config

    try:
        report = lint_config(path, looked_for, costs)
    except NothingCalledError:
        return (), ()
    except (ValueError, OSError) as error:
        return (), [f"what it gives a trainer was not looked at for the traps of configurations: {error}"]
    return report.findings, report.notes
