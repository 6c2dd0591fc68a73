"""The words of the pages' own controls, from ``words.toml``."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

_TABLES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
WORDS = _TABLES["python"]


def script() -> str:
    """Those that the course's scripts say, as a script: a page that is a file may read no other kind."""
    return f"const WORDS = {json.dumps(_TABLES['script'], ensure_ascii=False, indent=1)};\n"


def module() -> str:
    """Those that the live pages' scripts say, as a module."""
    return f"export const WORDS = {json.dumps(_TABLES['live'], ensure_ascii=False, indent=1)};\n"
