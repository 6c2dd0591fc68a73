"""What questions of several files of this topic share."""

from __future__ import annotations

STATES = 16
"""Bytes per parameter with Adam: a sum, not a constant: 2 + 2 + 4 + 4 + 4, or 4 + 4 + 4 + 4."""


LLAMAS = ("llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b", "llama3-405b")
