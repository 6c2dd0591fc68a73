"""Prose as slides need it: its first sentence, its blocks; Markdown as HTML and as plain words."""

from __future__ import annotations

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
    """The sentences of a paragraph."""
    return _SENTENCE.split(" ".join(text.split()))


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
