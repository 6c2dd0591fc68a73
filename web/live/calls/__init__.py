"""What a page may ask: ``call(name, argument)``, both as JSON. The same functions answer in the worker and natively.

A name is a function of a file here, ``file.function``; it takes what the JSON says and returns what becomes JSON. What
a reader can do something about is a ValueError, whose sentence the page shows.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

CALLS = {
    "begin": "explorer.begin",
    "see": "explorer.see",
    "fit": "fit.fit",
    "changes": "fit.changes",
    "trace": "trace.trace",
}
"""By the name that a page uses: the file and its function."""


def call(name: str, argument_json: str) -> str:
    """Answer one question; ``{"answer": ...}``, or ``{"refused": sentence}``.

    Raises:
        KeyError: there is no such call.
    """
    file, function = CALLS[name].split(".")
    answer = getattr(import_module(f"{__name__}.{file}"), function)
    try:
        found: dict[str, Any] = {"answer": answer(json.loads(argument_json))}
    except (ValueError, TypeError) as error:
        found = {"refused": str(error)}
    return json.dumps(found, separators=(",", ":"))
