"""Prose as slides need it: its first sentence, its blocks; Markdown as HTML and as plain words."""

from __future__ import annotations

import ast
import re
from html import escape, unescape

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

# HTML in Markdown is shown as text: what is rendered here was written as words.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")  # to a file that is not beside the deck
_SENTENCE = re.compile(r"(?:(?<=[.?!])|(?<=[.?!][\"”*)])|(?<=[.?!]\*\*))\s+(?=[\"“*`(]*[A-Z0-9])")


def blocks(source: str) -> list[str]:
    """The paragraphs, headings, lists, tables and pieces of code of a Markdown cell, without links to other files."""
    source = _LINK.sub(r"\1", source)
    lines = source.splitlines()
    tokens = [token for token in _MARKDOWN.parse(source) if token.level == 0 and token.map]
    return ["\n".join(lines[token.map[0] : token.map[1]]).rstrip() for token in tokens if token.map]


def heading(block: str) -> tuple[int, str]:
    """The level and the words of a heading; 0 for any other block."""
    found = re.match(r"(#+) (.+)", block)
    return (len(found[1]), found[2]) if found else (0, "")


def is_code(block: str) -> bool:
    """Whether a block is preformatted, such as a drawing in letters."""
    return block.startswith(("    ", "```"))


def is_table(block: str) -> bool:
    return block.startswith("|")


def is_list(block: str) -> bool:
    return bool(re.match(r"[-*] |\d+\. ", block))


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph; what is quoted or emphasised is not cut in two."""
    whole: list[str] = []
    for part in _SENTENCE.split(" ".join(text.split())):
        within = whole and any(whole[-1].count(mark) % 2 for mark in '"*`')
        whole[-1:] = [f"{whole[-1]} {part}"] if within else [*whole[-1:], part]
    return whole


def html(markdown: str) -> str:
    """Markdown as HTML; HTML that stands in it is shown as text."""
    return str(_MARKDOWN.render(markdown))


def inline(markdown: str) -> str:
    """Markdown within a line as HTML."""
    return str(_MARKDOWN.renderInline(" ".join(markdown.split())))


def plain(markup: str) -> str:
    """The words of a piece of HTML, in one line."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def preformatted(text: str, kind: str = "") -> str:
    """Text as it stands, in letters of one width."""
    return f'<pre class="{f"{kind} fit".strip()}">{escape(text)}</pre>'


def code(source: str) -> str:
    """Python with its colours."""
    return f'<pre class="code fit">{highlight(source, PythonLexer(), HtmlFormatter(nowrap=True)).rstrip()}</pre>'


def code_style() -> str:
    """The colours as CSS."""
    return str(HtmlFormatter(style="default").get_style_defs("pre.code"))


def of_dicts(text: str) -> str:
    """What was printed, with dicts in words: a line each where a dict is all of a line, else between commas."""
    lines = []
    for line in text.splitlines():
        found = _literal(line.strip())
        lines += [f"{name}: {_in_words(value)}" for name, value in found.items()] if found else [_inline(line)]
    return "\n".join(lines)


def _inline(line: str) -> str:
    for start in [at.start() for at in re.finditer(r"\{", line)]:
        for end in [at.end() for at in re.finditer(r"\}", line[start:])][::-1]:
            if found := _literal(line[start : start + end]):
                return _inline(line[:start] + _in_words(found) + line[start + end :])
    return line


def _in_words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value))
    return str(value)


def _literal(text: str) -> dict[object, object]:
    """A dict whose repr this is; empty if it is none."""
    try:
        found = ast.literal_eval(text) if text.startswith("{") else {}
    except (ValueError, SyntaxError):
        return {}
    return found if isinstance(found, dict) else {}
