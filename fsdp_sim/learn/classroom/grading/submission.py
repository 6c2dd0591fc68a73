"""The exercises' code in a notebook that was handed in. Read as data: nothing in it is run."""

from __future__ import annotations

from typing import Any

import msgspec

from fsdp_sim.learn.find import names

MAX_CHARACTERS = 100_000  # of one exercise's code
MISSING = "# The notebook that was handed in has no cell for this exercise.\n"


def answers(notebook: bytes) -> dict[str, str]:
    """The code of each exercise, by name, in the order of the notebook.

    The cell of an exercise is known by its metadata; of two for the same exercise the first counts.

    Raises:
        ValueError: it is no notebook; or one without an exercise; or an exercise's code is absurdly long.
    """
    try:
        cells = msgspec.json.decode(notebook)["cells"]
        code = [cell for cell in cells if cell.get("cell_type") == "code"]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("this is no notebook: it is not JSON with a list of cells") from None
    found: dict[str, str] = {}
    for cell in code:
        name = _exercise(cell)
        if name in names() and name not in found:
            found[name] = _text(cell.get("source"))
            if len(found[name]) > MAX_CHARACTERS:
                raise ValueError(f"the code of {name} has {len(found[name]):,} characters; at most {MAX_CHARACTERS:,}")
    if not found:
        raise ValueError("no cell of this notebook is an exercise's; is it one that the course's assignments gave out?")
    return found


def of_assignment(handed_in: dict[str, str], given_out: dict[str, str]) -> dict[str, str]:
    """The code of each exercise that was given out, in its order. What is missing is there without code, so that it
    gets no points and counts; what nobody asked for is left out."""
    return {name: handed_in.get(name, MISSING) for name in given_out}


def _exercise(cell: dict[str, Any]) -> str:
    """The name that the builder of the notebooks gave to the cell; empty if it is none of an exercise."""
    metadata = cell.get("metadata")
    name = metadata.get("exercise") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def _text(source: Any) -> str:
    lines = source if isinstance(source, list) else [source]
    return "".join(line for line in lines if isinstance(line, str))
