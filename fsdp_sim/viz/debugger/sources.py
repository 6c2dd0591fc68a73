"""Where an event came from: ``file:line`` as a place with its function and a listing, whatever became of the file."""

from __future__ import annotations

import ast
import linecache
import re
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from fsdp_sim.timeline import Event
from fsdp_sim.timeline.call_sites import MINI, PACKAGE, RECORDED

CELL = re.compile(r"ipykernel_\d+[/\\]|<ipython-input-(\d+)")
FILE_AND_LINE = re.compile(r"(?P<file>.+?)(?::(?P<line>\d{1,9})|\((?P<at>\d{1,9})\)(?:: .*)?)", re.DOTALL)
"""``file:line``, and ``file(line): function`` as torch's profiler writes it."""
PLAIN = re.compile(r'<span class="(?:n|nn|p|o|w|fm|vm)">([^<]*)</span>')
"""Names and punctuation, which have no colour of their own: most of the spans."""
LINES_BEFORE, LINES_AFTER = 5, 4


@dataclass(frozen=True)
class CodeLine:
    """A line of code.

    Attributes:
        title: what a reader calls the file: ``fsdp_sim/mini/group.py``, ``Cell In[3]``, ``train.py``.
        lines: of the whole file; empty when it is not there any more.
    """

    title: str
    line: int
    function: str
    in_mini: bool
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The line itself, with the next where it ends in an open bracket; empty when it is not known."""
        here = [line.strip() for line in self.lines[self.line - 1 : self.line + 1]]
        return "".join(here if here and here[0].endswith(("(", "[", "{")) else here[:1])

    @property
    def label(self) -> str:
        """``fsdp_sim/mini/group.py:169, in unshard``."""
        return f"{self.title}:{self.line}" + (f", in {self.function}" if self.function else "")


def place(source: str) -> CodeLine | None:
    """The place that a ``file:line`` names; None where the text names none."""
    found = FILE_AND_LINE.fullmatch(source)
    if found is None or not (line := int(found["line"] or found["at"])):
        return None
    name = found["file"]
    path = str(PACKAGE.parent / name) if name.startswith(MINI) else name
    # A timeline may come from elsewhere, and a page may be passed on: of a file that no run here was seen to run, nor
    # came from the mini or a cell, the name is all that is told.
    is_cell = CELL.search(name) and name in linecache.cache
    known = (name.startswith(MINI) and ".." not in name) or name in RECORDED or is_cell
    lines = tuple(linecache.getlines(path)) if known and (path.endswith(".py") or is_cell) else ()
    return CodeLine(_title(name), line, _function(lines, line), name.startswith(MINI), lines)


def places(event: Event) -> tuple[CodeLine, ...]:
    """The lines that led to an event, outermost first; the last is the one that issued it."""
    found = (place(source) for source in (*event.stack, event.source))
    return tuple(p for p in found if p is not None)


def learners_line(found: tuple[CodeLine, ...]) -> CodeLine | None:
    """Of the lines that led to an event the learner's own that is nearest to it."""
    return next((p for p in reversed(found) if not p.in_mini), None)


def minis_line(found: tuple[CodeLine, ...]) -> CodeLine | None:
    """The line of the mini-FSDP that issued an event."""
    return found[-1] if found and found[-1].in_mini else None


def listing(at: CodeLine) -> str:
    """The lines around a place as HTML, the line itself marked; nothing when the file is not there."""
    coloured = coloured_lines(at.lines)
    if at.line > len(coloured):
        return ""
    first, last = max(1, at.line - LINES_BEFORE), min(len(coloured), at.line + LINES_AFTER)
    rows = []
    for number in range(first, last + 1):
        marked = ' class="fsd-here" aria-current="true"' if number == at.line else ""
        sign = "▶" if number == at.line else " "
        rows.append(f"<span{marked}><i>{sign}{number:>4}</i> {coloured[number - 1]}</span>")
    return f'<pre class="fsd-code" tabindex="-1"><code>{"".join(rows)}</code></pre>'


@lru_cache(maxsize=64)
def coloured_lines(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Lines of Python as HTML, whose colours `code_css` knows."""
    if not lines:
        return ()
    lexer = PythonLexer(stripnl=False, ensurenl=True)
    html = highlight("".join(lines), lexer, HtmlFormatter(nowrap=True))
    return tuple(PLAIN.sub(r"\1", html).splitlines())


@lru_cache(maxsize=4096)
def _function(lines: tuple[str, ...], line: int) -> str:
    """The function a line is in, with its class: ``FSDPParamGroup.unshard``."""
    names = []
    node: Any = _tree(lines)
    while node is not None:
        inside = (n for n in ast.walk(node) if n is not node and isinstance(n, _SCOPES))
        node = next((n for n in inside if n.lineno <= line <= (n.end_lineno or n.lineno)), None)
        if node is not None:
            names.append(node.name)
    return ".".join(names)


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@lru_cache(maxsize=64)
def _tree(lines: tuple[str, ...]) -> ast.AST | None:
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError):  # a cell with %magic, or no Python at all
        return None


def _title(name: str) -> str:
    """What a reader calls a file. A cell's file has a name that says nothing, but IPython knows its number."""
    if name.startswith(MINI):
        return name
    if not CELL.search(name):
        return Path(name).name
    number = _cell_number(name)
    return f"Cell In[{number}]" if number else "a notebook cell"


def _cell_number(name: str) -> str:
    if found := re.search(r"<ipython-input-(\d+)", name):
        return found[1]
    try:
        from IPython import get_ipython
    except ImportError:
        return ""
    shell = get_ipython()
    known = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return str(known.get(name, ""))


def code_css(scope: str) -> str:
    """Colours of the code, from JupyterLab's theme where there is one."""
    colours = {
        "k, kn, kd, kc, ow": ("keyword", "#0550ae"), "s, s1, s2, sd, si, sa": ("string", "#0a6b2b"),
        "c1, cm, ch": ("comment", "#57606a"), "mi, mf": ("number", "#0550ae"), "nf, nc": ("def", "#6639ba"),
        "nb, bp": ("builtin", "#6639ba"), "nd": ("meta", "#8a4600"),
    }  # fmt: skip
    rules = []
    for classes, (variable, colour) in colours.items():
        chosen = ", ".join(f"{scope} .{escape(name.strip())}" for name in classes.split(","))
        rules.append(f"{chosen} {{ color: var(--jp-mirror-editor-{variable}-color, {colour}); }}")
    return "\n".join(rules)
