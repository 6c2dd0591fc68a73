"""Reports as SARIF 2.1.0, which GitHub and editors read, and as plain JSON."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fsdp_sim.lint.report import FileReport, Finding
from fsdp_sim.lint.rules import Rule, rules

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(reports: Iterable[FileReport], version: str) -> dict[str, Any]:
    """A SARIF log with one run. Columns count from 1, in Unicode characters."""
    found = [(report, finding) for report in reports for finding in report.findings]
    used = list(dict.fromkeys(finding.rule for _, finding in found))
    driver = {"name": "fsdp-sim lint", "version": version, "rules": [_rule(rules()[id]) for id in used]}
    results = [_result(report, finding, used.index(finding.rule)) for report, finding in found]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.costs},
        "help": {"text": f"{rule.fix}\n\nSource: {rule.source}"},
        "defaultConfiguration": {"level": rule.level},
    }


def _result(report: FileReport, finding: Finding, number: int) -> dict[str, Any]:
    where: dict[str, Any] = {"artifactLocation": {"uri": _uri(Path(report.target))}}
    if finding.line:
        where["region"] = {"startLine": finding.line}
        if finding.column:
            where["region"] |= {"startColumn": finding.column, "endColumn": finding.end_column}
    location: dict[str, Any] = {"physicalLocation": where}
    if report.kind == "module":
        location = {"logicalLocations": [{"fullyQualifiedName": report.target}]}
    return {
        "ruleId": finding.rule,
        "ruleIndex": number,
        "level": finding.of.level,
        "message": {"text": text_of(finding)},
        "locations": [location],
    }


def _uri(path: Path) -> str:
    """Relative to where one stands, which is how GitHub finds a repository's file; what is elsewhere as ``file://``."""
    path, here = path.absolute(), Path.cwd()
    return quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()


def text_of(finding: Finding) -> str:
    """A finding in one text: what, what it costs, what to do."""
    cost = f"{finding.of.costs} {finding.simulated and f'Simulated: {finding.simulated}.'}".strip()
    return f"{finding.of.title}: {finding.message}. {cost} Fix: {finding.of.fix}"


def plain(reports: Iterable[FileReport]) -> dict[str, Any]:
    """Reports as JSON."""
    return {
        "files": [
            {
                "target": report.target,
                "kind": report.kind,
                "findings": [_plain(finding) for finding in report.findings],
                "ignored": report.ignored,
                "unread": list(report.unread),
                "notes": list(report.notes),
            }
            for report in reports
        ]
    }


def _plain(finding: Finding) -> dict[str, Any]:
    rule = finding.of
    place = (
        {} if not finding.line else {"line": finding.line, "column": finding.column, "end_column": finding.end_column}
    )
    return {
        "rule": finding.rule, "level": rule.level, "title": rule.title, "message": finding.message, **place,
        "costs": rule.costs, "simulated": finding.simulated or None, "fix": rule.fix, "source": rule.source,
    }  # fmt: skip
