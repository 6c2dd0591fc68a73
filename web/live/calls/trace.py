"""Why is my step slow: what `fsdp-sim diagnose` says of the traces of some ranks."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from fsdp_sim.diagnose import COLUMNS, cells, diagnose, main_blames, shown, totals
from fsdp_sim.timeline import read_timeline
from fsdp_sim.words import human_ms, percent

MOST_ROWS = 40  # of the table
SETTINGS = ("step", "rank", "bandwidth_gbps")


def trace(argument: dict[str, Any]) -> dict[str, Any]:
    """What a step waited for, and what to try.

    Args:
        argument: ``files``: where they lie; and, where they are given, ``step``, ``rank`` and ``bandwidth_gbps``.

    Raises:
        ValueError: a file is no trace, damaged or too large, or has no such step or rank.
    """
    files = argument["files"]
    try:
        timeline = read_timeline(files)
    except MemoryError:
        raise ValueError(
            f"{', '.join(map(_name, files))} needs more memory than a browser gives to a page; record fewer steps, or "
            "read it outside of the page: fsdp-sim diagnose"
        ) from None
    except ValueError as error:
        said = str(error)
        for file in files:
            said = said.replace(file, _name(file))
        raise ValueError(said) from None
    found = shown(diagnose(timeline, **{name: argument[name] for name in SETTINGS if argument.get(name) is not None}))
    exposed = [row for row in found.collectives if row.exposed_s > 0]
    return {
        "headline": found.headline,
        "step": found.step,
        "rank": found.rank,
        "events": len(timeline),
        "totals": [[name, human_ms(seconds), percent(seconds, found.step_s)] for name, seconds in totals(found)],
        "culprits": [
            {
                "name": str(blame.culprit),
                "time": human_ms(blame.idle_s),
                "sentence": blame.sentence,
                "advice": blame.advice,
            }
            for blame in main_blames(found)
        ],
        "columns": COLUMNS,
        "rows": [cells(row) for row in exposed[:MOST_ROWS]],
        "collectives": len(found.collectives),
        "notes": found.notes,
    }


def _name(file: str) -> str:
    return PurePosixPath(file).name
