"""Which moments of a step are shown, for which ranks and bands, and in which words: what a shard map draws.

A step of a large model has thousands of moments. Bands that are not drawn pass in one scene; so do micro-batches
between the first and the last; and the number of scenes is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_sim.timeline import Op, Phase, Timeline, UnitShards, median_step
from fsdp_sim.viz.shard_maps.cast import COMPUTE, Cast, events_of
from fsdp_sim.viz.shard_maps.holdings import HoldingsMoment, moments
from fsdp_sim.viz.shard_maps.narration import called, ranks_text, sentence

MAX_SCENES, MAX_RANKS, MAX_ROWS, MAX_LINES = 150, 8, 8, 60


@dataclass(frozen=True)
class ShardFrame:
    """One frame.

    Attributes:
        moment: what happens, on the rank that is told about. ``by_rank``: the same moment on each rank drawn.
        text: the sentence.
    """

    moment: HoldingsMoment
    by_rank: dict[int, HoldingsMoment]
    text: str

    @property
    def phase(self) -> str:
        return str(self.moment.phase) or "at rest"


@dataclass(frozen=True)
class Stage:
    """What is drawn of a cast.

    Attributes:
        ranks: the columns. ``bands``: the units or buckets; None stands for those left out.
        hidden: names of those left out.
    """

    cast: Cast
    ranks: tuple[int, ...]
    bands: tuple[UnitShards | None, ...]
    hidden: tuple[str, ...] = ()

    def rows(self, band: UnitShards) -> list[tuple[str, int]]:
        """Label and row of each line of a band; where there are too many, the last stands for the rest."""
        count = len(band.parts)
        if count <= MAX_ROWS:
            return [(name, row) for row, name in enumerate(band.parts)]
        if band.shards == 1:
            shown = list(range(MAX_ROWS - 1))
        else:
            shown = sorted({rank % band.shards for rank in self.ranks})
        rest = next((row for row in range(count) if row not in shown), None)
        lines = [(band.parts[row], row) for row in shown]
        return lines if rest is None else [*lines, (f"{count - len(shown)} more", rest)]


def stage(cast: Cast, ranks: Iterable[int] | None, unit: str | None, most_ranks: int, most_lines: int) -> Stage:
    """Choose what is drawn.

    Raises:
        ValueError: a rank or unit that is not there.
    """
    names = [band.name for band in cast.bands]
    if unit is not None and unit not in names:
        raise ValueError(f"there is no unit {unit!r}; there are {', '.join(names[:8])}{', ...' if names[8:] else ''}")
    wanted = tuple(dict.fromkeys(ranks)) if ranks is not None else _some_ranks(cast, most_ranks)
    unknown = [rank for rank in wanted if rank not in range(cast.ranks)]
    if unknown or not wanted:
        raise ValueError(
            f"ranks is {list(wanted)}, and there {'are ranks 0 to' if cast.ranks > 1 else 'is only rank'} "
            f"{cast.ranks - 1}; name some of those"
        )
    bands: list[UnitShards | None] = [band for band in cast.bands if unit in (None, band.name)]
    hidden: list[str] = []
    tallest = max(min(len(band.parts), MAX_ROWS) for band in cast.bands)
    most_bands = max(most_lines // tallest, 3)
    if len(bands) > most_bands:
        first = (most_bands + 1) // 2
        last = len(bands) - (most_bands - 1 - first)
        hidden = [band.name for band in bands[first:last] if band]
        bands = [*bands[:first], None, *bands[last:]]
    elif unit is not None:
        hidden = [name for name in names if name != unit]
    return Stage(cast, wanted, tuple(bands), tuple(hidden))


def _some_ranks(cast: Cast, most: int) -> tuple[int, ...]:
    """All, or the first of the first groups that share a copy: of two of them, so that replicas are seen."""
    if cast.ranks <= most:
        return tuple(range(cast.ranks))
    if cast.replicas == 1 or cast.shards == 1:
        return tuple(range(most))
    each = min(cast.shards, max(most // 2, 1))
    groups = min(max(most // each, 1), cast.replicas)
    return tuple(group * cast.shards + place for group in range(groups) for place in range(each))


def is_program(timeline: Timeline) -> bool:
    """Whether it is a program's, which all ranks issue, and no run's."""
    return timeline.header.clock == "issue order"


def step_of(timeline: Timeline, step: int | None) -> int:
    """The step to show: of a program the last, of a timeline the one of median duration.

    Raises:
        ValueError: it has not the step asked for.
    """
    steps = timeline.steps
    if step is None and steps:
        return steps[-1] if is_program(timeline) else median_step(timeline)
    if step not in steps:
        raise ValueError(f"step {step} is not there; the steps are {list(steps)}")
    return step


def all_moments(timeline: Timeline, cast: Cast, step: int, ranks: Sequence[int]) -> dict[int, list[HoldingsMoment]]:
    """The moments of each rank; ranks that were not recorded are as the first that was."""
    played = [rank for rank in ranks if rank in timeline.ranks] or timeline.ranks[:1]
    recorded = {rank: moments(cast, events_of(timeline, rank, cast), step) for rank in played}
    first = recorded[played[0]]
    return {rank: recorded.get(rank, first) for rank in ranks}


def scenes(shown: Stage, by_rank: dict[int, list[HoldingsMoment]], most: int = MAX_SCENES) -> list[ShardFrame]:
    """The moments of the first rank as scenes, the other ranks at the same point of their own program."""
    reference = by_rank[shown.ranks[0]]
    places = {rank: _same_points(reference, own) for rank, own in by_rank.items()}

    def scene(at: int, text: str) -> ShardFrame:
        there = {rank: by_rank[rank][places[rank][at]] for rank in shown.ranks}
        return ShardFrame(reference[at], there, text)

    found = []
    for at, text in _narrated(shown, reference):
        found.append(scene(at, text))
    return _thinned(found, most)


def _same_points(reference: Sequence[HoldingsMoment], own: Sequence[HoldingsMoment]) -> list[int]:
    """For each moment of one rank the place of the same on another; where it has none, the last it has before."""
    if own is reference:
        return list(range(len(own)))
    seen: Counter[tuple[object, ...]] = Counter()
    where = {}
    for place, moment in enumerate(own):
        where[moment.key, seen[moment.key]] = place
        seen[moment.key] += 1
    count: Counter[tuple[object, ...]] = Counter()
    found, last = [], 0
    for moment in reference:
        last = where.get((moment.key, count[moment.key]), last)
        count[moment.key] += 1
        found.append(last)
    return found


def _narrated(shown: Stage, reference: Sequence[HoldingsMoment]) -> Iterable[tuple[int, str]]:
    """Place and sentence of each moment told."""
    cast, hidden = shown.cast, set(shown.hidden)
    last_batch = max((m.micro_batch for m in reference), default=0)
    skipped = {m.micro_batch for m in reference if 0 < m.micro_batch < last_batch} if last_batch > 1 else set()
    run: list[int] = []  # moments of bands that are not drawn
    for at, moment in enumerate(reference):
        if moment.micro_batch in skipped and moment.op is not Op.OPTIM:
            if at + 1 == len(reference) or reference[at + 1].micro_batch == last_batch:
                yield at, f"Micro-batches 2 to {last_batch} go the same way as the first, and are not shown."
            continue
        if moment.band in hidden:
            run.append(at)
            ends = at + 1 == len(reference) or reference[at + 1].band not in hidden
            if ends or reference[at + 1].phase is not moment.phase:
                yield at, _passed(cast, [reference[k] for k in run])
                run = []
            continue
        yield at, sentence(cast, moment)


def _passed(cast: Cast, run: Sequence[HoldingsMoment]) -> str:
    names = list(dict.fromkeys(moment.band for moment in run))
    if len(run) == 1:
        return f"{sentence(cast, run[0])} (It is not drawn.)"
    if len(names) == 1:
        return f"{called(names[0])}, which is not drawn, goes the same way."
    phase = f" in {run[0].phase}" if run[0].phase is not Phase.NONE else ""
    which = f"{called(names[0])} to {names[-1]}, {len(names)} that are not drawn,"
    return f"{which} go the same way{phase}, one after the other."


def _thinned(found: list[ShardFrame], most: int) -> list[ShardFrame]:
    """At most so many: first without what is seen in the next scene too, then every n-th; never the ends."""
    for drop in ({Op.RECOMPUTE}, {Op.FREE}, COMPUTE):
        if len(found) <= most:
            return found
        inner = [s for s in found[1:-1] if s.moment.op not in drop or not s.moment.band]
        found = [found[0], *inner, found[-1]]
    if len(found) > most:
        last = len(found) - 1
        found = [found[round(k * last / (most - 1))] for k in range(most)]
    return found


def whole_at_once(cast: Cast, reference: Sequence[HoldingsMoment]) -> tuple[list[str], HoldingsMoment | None]:
    """The most bands whose parameters are gathered at one moment, and the first such moment."""
    best: tuple[list[str], HoldingsMoment | None] = ([], None)
    for moment in reference:
        whole = [band.name for band in cast.bands if not band.replicated and moment.of(band.name).whole]
        if len(whole) > len(best[0]):
            best = whole, moment
    return best


def sentence_of(shown: Stage, timeline: Timeline) -> str:
    """What is left out of the picture, in a sentence; empty where nothing is."""
    cast = shown.cast
    sentences = []
    if len(shown.ranks) < cast.ranks:
        sentences.append(f"{ranks_text(shown.ranks)} of {cast.ranks}")
    if shown.hidden:
        kind = "buckets" if cast.keeps_whole else "units"
        sentences.append(f"{sum(b is not None for b in shown.bands)} of {len(cast.bands)} {kind}")
    text = f"Drawn: {' and '.join(sentences)}; the others do the same." if sentences else ""
    if any(band and band.shards > MAX_ROWS for band in shown.bands):
        text += " The last row of a unit stands for its shards that no rank drawn keeps."
    if len(timeline.ranks) < cast.ranks and not is_program(timeline):
        one = len(timeline.ranks) == 1
        who = ranks_text(timeline.ranks)
        text += (
            f" Only {who} of {cast.ranks} {'was recorded, and stands' if one else 'were recorded, and stand'} for all."
        )
    return text.strip()
