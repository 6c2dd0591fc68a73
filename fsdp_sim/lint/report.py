"""What lint has to say of a file, as data: findings, and what could not be read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_sim.lint.rules import Rule, rules

IGNORED = re.compile(r"#\s*fsdp-sim:\s*ignore(?:\[([\w,\s-]*)\])?")


class Finding(NamedTuple):
    """A trap at a place.

    Attributes:
        rule: its id. message: what is found there. line, column, end_column: from 1; 0 where there is no place.
        source_line: the text of the line. simulated: what it costs in a sentence, where it was simulated.
    """

    rule: str
    message: str
    line: int = 0
    column: int = 0
    end_column: int = 0
    source_line: str = ""
    simulated: str = ""

    @property
    def of(self) -> Rule:
        return rules()[self.rule]


@dataclass(frozen=True)
class FileReport:
    """What lint has to say of one file or model.

    Attributes:
        target: as it was given. kind: script, config or module.
        findings: in the order of their lines. unread: sentences about what could not be read.
        ignored: how many findings a comment in the file leaves out.
    """

    target: str
    kind: str
    findings: tuple[Finding, ...] = ()
    unread: tuple[str, ...] = ()
    ignored: int = 0
    notes: tuple[str, ...] = field(default=())


def report_of(
    target: str, kind: str, findings: Iterable[Finding], lines: list[str], unread: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> FileReport:  # fmt: skip
    """The report on a file, without what its comments ignore."""
    found = sorted(findings, key=lambda one: (one.line, one.column, one.rule))
    kept = [one for one in found if not is_ignored(one, lines)]
    return FileReport(target, kind, tuple(kept), tuple(unread), len(found) - len(kept), tuple(notes))


def is_ignored(finding: Finding, lines: list[str]) -> bool:
    """Whether a comment in its line says so: ``# fsdp-sim: ignore[rule-id]``, or ``# fsdp-sim: ignore`` for all."""
    if not 0 < finding.line <= len(lines):
        return False
    match = IGNORED.search(lines[finding.line - 1])
    return match is not None and (match[1] is None or finding.rule in [name.strip() for name in match[1].split(",")])


def finding_at(rule: str, message: str, node: ast.AST, lines: list[str], simulated: str = "") -> Finding:
    """A finding at a node of a Python file."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    text = lines[line - 1] if line <= len(lines) else ""
    one_line = getattr(node, "end_lineno", line) == line
    end = getattr(node, "end_col_offset", None) if one_line else None
    # ast counts bytes of UTF-8
    column = len(text.encode()[:column].decode(errors="ignore"))
    end = len(text.rstrip()) if end is None else len(text.encode()[:end].decode(errors="ignore"))
    return Finding(rule, message, line, column + 1, max(end, column + 1) + 1, text, simulated)
