"""What is said and shown of several ranks beside each other."""

from __future__ import annotations

from collections import Counter

from fsdp_sim.diagnose.findings import Diagnosis, RankTimes
from fsdp_sim.words import human_ms, percent

RANK_COLUMNS = ("rank", "computing", "waiting for a later rank", "moving bytes", "came last", "others waited for it")
SHOWN = 8  # ranks


def ranks_to_show(found: Diagnosis) -> list[RankTimes]:
    """All ranks, or of many the rank that is looked at and those that others wait for most; in order."""
    most = sorted(found.rank_times, key=lambda row: (row.rank != found.rank, -row.made_wait_s))[:SHOWN]
    return sorted(most, key=lambda row: row.rank)


def rank_cells(row: RankTimes) -> tuple[str, ...]:
    """A rank as texts, one for each of `RANK_COLUMNS`."""
    return (
        str(row.rank), human_ms(row.compute_s), human_ms(row.waited_s), human_ms(row.moved_s), str(row.last_times),
        human_ms(row.made_wait_s),
    )  # fmt: skip


def ranks_sentence(found: Diagnosis) -> str:
    """Waiting apart from transfer on the rank that is looked at, and the straggler."""
    mine = next(row for row in found.rank_times if row.rank == found.rank)
    both_s = mine.waited_s + mine.moved_s
    apart = (
        f"Of the {human_ms(both_s)} that rank {found.rank} is in collectives, it waits {human_ms(mine.waited_s)} "
        f"({percent(mine.waited_s, both_s)}) for a rank that comes later, and bytes move for {human_ms(mine.moved_s)}."
    )
    if found.straggler:
        return f"{found.straggler.sentence} {apart}"
    return f"No rank costs the step 2% or more by being slower than the others. {apart}"


def path_sentence(found: Diagnosis) -> str:
    """Where the critical path runs."""
    by_rank: Counter[int] = Counter()
    by_what: Counter[str] = Counter()
    for share in found.critical_path:
        by_rank[share.rank] += share.seconds  # type: ignore[assignment]
        by_what[share.what] += share.seconds  # type: ignore[assignment]
    total_s = sum(by_rank.values())
    ranks = ", ".join(f"{percent(s, total_s)} on rank {rank}" for rank, s in by_rank.most_common(3))
    kinds = ", ".join(f"{what} {human_ms(s)}" for what, s in by_what.most_common(5))
    return f"The critical path runs {ranks}; it is made of {kinds}."
