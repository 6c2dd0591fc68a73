"""`shard_map`: who holds what, moment by moment, with a slider and a play button and a sentence for each moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fsdp_sim.timeline import timeline_of
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.shard_maps.cast import Cast, cast_of
from fsdp_sim.viz.shard_maps.figure import KINDS_OF_MEMORY, moving_figure
from fsdp_sim.viz.shard_maps.grid import Grid
from fsdp_sim.viz.shard_maps.holdings import HoldingsMoment
from fsdp_sim.viz.shard_maps.narration import a_part, briefly, piece
from fsdp_sim.viz.shard_maps.scenes import (
    MAX_LINES,
    MAX_RANKS,
    ShardFrame,
    all_moments,
    scenes,
    sentence_of,
    stage,
    step_of,
    whole_at_once,
)
from fsdp_sim.viz.shard_maps.still import film_strip
from fsdp_sim.viz.table import Table
from fsdp_sim.words import human_bytes


def shard_map(
    source: Any,
    *,
    ranks: Iterable[int] | None = None,
    unit: str | None = None,
    step: int | None = None,
) -> Picture:
    """Who holds what at each moment of a step: a row for each shard of each unit, a column for each rank.

    Under each rank are its parameters, its gradients and its optimizer state. The rank's own shard is outlined. A
    slider and buttons go through the step; each moment says in a sentence what happens.

    Args:
        source: a `Timeline`, measured or not, or what has one: what ``simulate`` or ``ranks.run`` returned, or a
            program (``schedule.build``). What is held follows from its allocations and collectives.
        ranks: the columns, by default all, or if there are more than 8 some.
        unit: show one unit alone; by default all, or where they are many the first and last.
        step: of several steps which; by default a program's last, a timeline's of median duration.

    Raises:
        TypeError: it is no timeline and has none.
        ValueError: there is nothing to draw, or a rank, unit or step that is not there (the message names those that
            are).

    Example:
        >>> from fsdp_sim import Cluster, simulate
        >>> picture = shard_map(simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=4)))
        >>> picture.finding.partition(".")[0]
        'Each of 4 ranks holds a quarter of every unit, and the optimizer state of that quarter'
    """
    ranks = None if ranks is None else tuple(ranks)
    timeline = timeline_of(source)
    cast = cast_of(timeline)
    of_step = step_of(timeline, step)
    shown = stage(cast, ranks, unit, MAX_RANKS, MAX_LINES)
    by_rank = all_moments(timeline, cast, of_step, shown.ranks)
    reel = scenes(shown, by_rank)
    columns = (0, 1, 2) if cast.optimizer else (0, 1)
    grid = Grid(shown, columns)
    reference = by_rank[shown.ranks[0]]
    finding = _finding(cast, reference, sentence_of(shown, timeline), reel)
    still = film_strip(timeline, unit=unit, step=of_step, ranks=ranks, columns=columns, title=_title(cast, reference))
    return Picture(moving_figure(grid, reel, _title(cast, reference)), finding, (_table(reel, shown.ranks[0]),), still)


# Words and numbers


def _title(cast: Cast, reference: Sequence[HoldingsMoment]) -> str:
    n, whole = cast.shards, whole_at_once(cast, reference)[0]
    if cast.ranks == 1:
        return "One rank holds everything"
    if cast.keeps_whole:
        tail = f", and the optimizer state of {a_part(n)}" if n > 1 else ", and does the same update"
        return f"Each of {cast.ranks} ranks holds all parameters{tail}"
    if n == 1:
        return f"Each of {cast.ranks} ranks holds everything"
    most = f"; at most {len(whole)} of {len(cast.bands)} {'is' if len(whole) == 1 else 'are'} whole at once"
    own = "its shard" if any(piece(band) == "shard" for band in cast.bands) else a_part(n)
    return f"Each of {cast.ranks} ranks holds {own} of every unit{most if whole else ''}"


def _finding(cast: Cast, reference: Sequence[HoldingsMoment], left_out: str, reel: Sequence[ShardFrame]) -> str:
    sentences = [reel[0].text.removeprefix("At rest: ")]
    sentences[0] = sentences[0][0].upper() + sentences[0][1:]
    whole, moment = whole_at_once(cast, reference)
    if whole and moment and cast.ranks > 1:
        names = ", ".join(whole[:-1][:4]) + (", ..." if len(whole) > 5 else "")
        names = f"{names} and {whole[-1]}" if names else whole[0]
        units = "unit is" if len(whole) == 1 else "units are"
        sentences.append(
            f"At most {len(whole)} {units} whole at once ({names}), first {briefly(moment)}, in the order of issue."
        )
    totals = [sum(m.bytes.values()) for m in reference]
    if max(totals, default=0):
        at = int(np.argmax(totals))
        rest = f"{human_bytes(totals[0])} of a rank's memory at rest, and " if totals[0] else ""
        of = "" if rest else " of a rank's memory"
        most = f"at most {human_bytes(totals[at])}{of}, {briefly(reference[at])}"
        sentences.append(f"Parameters, gradients and optimizer state take {rest}{most}.")
    return " ".join([*sentences, left_out]).strip()


def _table(reel: Sequence[ShardFrame], rank: int) -> Table:
    rows = []
    for number, scene in enumerate(reel, 1):
        held = [sum(scene.moment.bytes.get(c, 0) for c in of) for _, of, _ in KINDS_OF_MEMORY]
        rows.append((str(number), scene.text, *map(human_bytes, held), human_bytes(sum(held))))
    header = ("moment", "what happens", *(name for name, _, _ in KINDS_OF_MEMORY), "together")
    return Table(f"What rank {rank} holds after each moment", header, tuple(rows))
