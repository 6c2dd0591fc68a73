"""What a page may ask: ``call(name, argument)``, both as JSON. The same functions answer in the worker and natively.

A name is a function of a file here, ``file.function``; it takes what the JSON says and returns what becomes JSON. What
a reader can do something about is a ValueError, whose sentence the page shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

CALLS = {
    "begin": "explorer.begin",
    "see": "explorer.see",
    "say": "explorer.say",
    "fit": "fit.fit",
    "changes": "fit.changes",
    "trace": "trace.trace",
    "open_puzzle": "puzzle.open_puzzle",
    "take": "puzzle.take",
}
"""By the name that a page uses: the file and its function."""
PAGES = {"index": "explorer", "fit": "fit", "trace": "trace", "puzzle": "puzzle"}
"""The file whose calls a page makes."""


def prepare(page: str) -> None:
    """Import what a page will ask for, before it asks."""
    if page in PAGES:
        import_module(f"{__name__}.{PAGES[page]}")


def call(name: str, argument_json: str, progress: Callable[[int, int], None] | None = None) -> str:
    """Answer one question; ``{"answer": ...}``, or ``{"refused": sentence}``.

    Args:
        progress: told what is done and what there is in all, now and then, by calls that may take long.

    Raises:
        KeyError: there is no such call.
    """
    file, function = CALLS[name].split(".")
    answer = getattr(import_module(f"{__name__}.{file}"), function)
    try:
        more = {"progress": progress} if progress else {}
        found: dict[str, Any] = {"answer": answer(json.loads(argument_json), **more)}
    except (ValueError, TypeError) as error:
        found = {"refused": str(error)}
    return json.dumps(found, separators=(",", ":"))
