"""Text of a learner on an instructor's screen."""

from __future__ import annotations

import unicodedata

TURNS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # what makes text run the other way


def harmless(text: str) -> str:
    """The text without what would drive a terminal: such a character is shown as Python writes it, ``\\x1b``."""
    return "".join(c if c in "\n\t" or not _drives(c) else repr(c)[1:-1] for c in text)


def _drives(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or unicodedata.bidirectional(character) in TURNS
