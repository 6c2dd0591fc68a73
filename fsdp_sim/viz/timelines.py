"""Timelines as pictures: `timeline` makes one, `show` displays it in a notebook."""

from __future__ import annotations

from typing import Any

from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.summary import Timelines, describe, step_views, summary_table
from fsdp_sim.viz.timeline_figure import timeline_figure


def timeline(timelines: Timelines, **which: Any) -> Picture:
    """One step of one or more timelines, one above the other, with a sentence for each and a table of the numbers.

    Args:
        timelines: a `Timeline`, a list of them, or a dict of name to `Timeline`.
        which: the keyword arguments of `timeline_figure`.

    Raises:
        ValueError: as `timeline_figure`.
    """
    numbers = {name: which[name] for name in ("ranks", "step", "titles") if name in which}
    views = step_views(timelines, **numbers)
    told = [describe(view.timeline, step=view.step) for view in views]
    if len(views) > 1:
        told = [f"{view.name}: {text}" for view, text in zip(views, told, strict=True)]
    return Picture(timeline_figure(timelines, **which), "\n\n".join(told), (summary_table(timelines, **numbers),))


def show(what: Timelines | Picture, *, png: bool | None = None, **which: Any) -> None:
    """Display a picture, or the picture of timelines, in a notebook; see `Picture.show` and `timeline`.

    Raises:
        ValueError: as `timeline`; or a picture was given options, which it has no use for.
        RuntimeError: an image was asked for and kaleido or its browser is missing.
    """
    if isinstance(what, Picture) and which:
        raise ValueError(f"a Picture is shown as it is; give {', '.join(which)} to the function that makes it")
    picture = what if isinstance(what, Picture) else timeline(what, **which)
    picture.show(png=png)
