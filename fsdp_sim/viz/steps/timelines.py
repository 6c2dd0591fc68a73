"""Timelines as pictures: `timeline` makes one, `show` displays it in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fsdp_sim.engine import Run
from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import Timeline
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.steps.bands import ManyRanks, bands_sentence, bands_subtitle, bands_table, many_ranks, views_of
from fsdp_sim.viz.steps.step_view import StepView, Timelines, step_views
from fsdp_sim.viz.steps.summary import table_of, words_of
from fsdp_sim.viz.steps.timeline_figure import draw
from fsdp_sim.viz.table import Table


def timeline(
    timelines: Timelines,
    *,
    ranks: Iterable[int] | None = None,
    step: int | None = None,
    titles: Sequence[str] | None = None,
    memory_rank: int | None = None,
) -> Picture:
    """One step of one or more timelines, one above the other, with a sentence for each and a table of the numbers.

    Args:
        timelines: a `Timeline`, a list of them, or a dict of name to `Timeline`.
        ranks, step, titles, memory_rank: see `timeline_figure`.

    Raises:
        ValueError: as `timeline_figure`.
    """
    views = views_of(timelines, ranks=ranks, step=step, titles=titles)
    sentences = [words(view) for view in views]
    if len(views) > 1:
        sentences = [f"{view.name}: {text}" for view, text in zip(views, sentences, strict=True)]
    return Picture(draw(views, memory_rank), "\n\n".join(sentences), tables_of(views))


def rank_bands(what: Timeline | Run | Simulation, *, step: int = -1, title: str = "") -> Picture:
    """Many ranks as bands: when each operation ran on most of them, and the rank the others wait for.

    Args:
        what: a `Timeline` of many ranks, or, faster by far, a `Simulation` with a skew or its `Run`.
        step: the step, counted from the end if negative.
        title: the name of the run.

    Raises:
        ValueError: it has no such step.
    """
    if isinstance(what, Timeline):
        steps = sorted({e.step for e in what.ops})
        step = steps[step] if step < 0 and -step <= len(steps) else step
        (view,) = step_views(what, step=step)
        title = title or view.name
    elif isinstance(what, Simulation):
        title = title or f"{what.workload.name}, {what.plan.api}"
    view = many_ranks(what, title or "predicted", step)
    return Picture(draw([view]), words(view), tables_of([view]))


def words(view: StepView) -> str:
    """What a view shows, in sentences."""
    if isinstance(view, ManyRanks):
        return f"{bands_sentence(view)} {bands_subtitle(view.bands)}"
    return words_of(view)


def tables_of(views: Sequence[StepView]) -> tuple[Table, ...]:
    """One table of the views drawn rank by rank, one for each drawn as bands."""
    few = [view for view in views if not isinstance(view, ManyRanks)]
    bands = [bands_table(view.bands) for view in views if isinstance(view, ManyRanks)]
    return (*([table_of(few)] if few else []), *bands)


def show(what: Timelines | Simulation | Picture, *, png: bool | None = None, **which: Any) -> None:
    """Display a picture, or the picture of timelines, in a notebook; see `Picture.show`, `timeline` and `rank_bands`.

    Raises:
        ValueError: as `timeline`; or a picture was given options, which it has no use for.
        RuntimeError: an image was asked for and kaleido or its browser is missing.
    """
    if isinstance(what, Picture) and which:
        raise ValueError(f"a Picture is shown as it is; give {', '.join(which)} to the function that makes it")
    (what if isinstance(what, Picture) else _picture_of(what, **which)).show(png=png)


def _picture_of(what: Timelines | Simulation, **which: Any) -> Picture:
    """Timelines over memory; of a simulation whose ranks differ, bands."""
    if not isinstance(what, Simulation):
        return timeline(what, **which)
    return timeline(what.timeline, **which) if what.run.ranks == 1 else rank_bands(what, **which)
