"""Why is my step slow: what `fsdp-sim diagnose` says of the traces of some ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from fsdp_sim.diagnose import COLUMNS, cells, diagnose, main_blames, shown, totals
from fsdp_sim.timeline import read_timeline
from fsdp_sim.viz.explorer import composed, drawing, layout_of
from fsdp_sim.viz.explorer.scene import Scene, scene_of
from fsdp_sim.words import human_ms, percent
from web.live.calls.explorer import plain

MOST_ROWS = 40  # of the table
MOST_BYTES = 2**30  # of a file, unpacked: what is kept of it has to go into the memory of a page
LANES_PX = 260
SETTINGS = ("step", "rank", "bandwidth_gbps")


def trace(argument: dict[str, Any], progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """What a step waited for, what to try, and the step as a figure.

    Args:
        argument: ``files``: where they lie; and, where they are given, ``step``, ``rank`` and ``bandwidth_gbps``.
        progress: told how many bytes are read, of how many.

    Raises:
        ValueError: a file is no trace, damaged or too large, or has no such step or rank.
    """
    files = argument["files"]
    try:
        timeline = read_timeline(files, progress=progress, max_bytes=MOST_BYTES)
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
        "figure": figure(scene_of(timeline, found.step, found.rank)),
    }


def figure(seen: Scene) -> dict[str, Any]:
    """The lanes of a rank, and its memory where it is known, drawn as the explorer's."""
    window = (0.0, seen.span_ms or 1.0)
    remembers = bool(seen.strip)
    top_gib = layout_of.needed_gib(seen) if remembers else 1.0
    layout = composed.layout(None, seen, window, top_gib)
    del layout["template"]  # the page's, light or dark
    lanes = len(drawing.lane_traces())
    changes = composed.changes(seen, window)
    if not seen.strip.limit_bytes:
        changes[lanes + len(drawing.memory_traces()) - 1] = {"visible": False}
    if not remembers:
        changes[lanes:] = [{"visible": False}] * (len(changes) - lanes)
        layout["yaxis"] |= {"domain": [0.0, 1.0]}
        layout["yaxis2"] |= {"visible": False}
        layout["height"] = LANES_PX
    traces = composed.traces(pinned=False)
    shown = [trace | plain(change) for trace, change in zip(traces, changes, strict=True) if change["visible"]]
    return {"data": shown, "layout": layout, "legend": drawing.legend_html(seen, memory=remembers)}


def _name(file: str) -> str:
    return PurePosixPath(file).name
