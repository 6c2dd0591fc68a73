"""Bars are the operations as columns; where they are too many, neighbours share one, and no time is lost or made up."""

from collections.abc import Callable

import numpy as np
import pytest

from fsdp_sim.timeline import Event, Header, Lane, Op, Phase, Timeline
from fsdp_sim.viz import theme
from fsdp_sim.viz.steps.bars import SMALL_OPS, bar_trace, bars_of, kinds_in_order
from fsdp_sim.viz.steps.step_view import step_views

Run = Callable[..., Timeline]


def test_every_operation_has_a_bar_and_a_phrase_that_says_what_it_does(training_run: Run) -> None:
    (view,) = step_views(training_run(), step=1)
    bars = bars_of(view)
    ops = [e for e in view.timeline.ops if e.step == 1]
    assert [view.timeline.events[row] for row in sorted(row for (row,) in bars.members)] == ops
    assert set(bars.busy) == {1.0}
    assert bars.merged_ms == 0
    assert set(theme.OP_DOES) == set(theme.KINDS)


def test_merged_bars_hold_each_operation_once_and_its_time(training_run: Run) -> None:
    (view,) = step_views(training_run(ranks=1, blocks=200), step=1)
    bars = bars_of(view, 50)
    members = [[view.timeline.events[row] for row in rows] for rows in bars.members]
    ops = [e for e in view.timeline.ops if e.step == 1]
    assert len(bars) <= 50 < len(ops)
    assert sorted((e for some in members for e in some), key=lambda e: e.seq) == ops
    running_ms = sum(e.duration_s for e in ops) * 1e3
    assert float(np.dot(bars.length_ms, bars.busy)) == pytest.approx(running_ms)
    for some in members:
        assert len({(e.lane, e.phase, e.micro_batch) for e in some}) == 1
        assert len(some) == 1 or some[-1].end_s - some[0].start_s <= bars.merged_ms / 1e3 + 1e-12


def test_a_merged_bar_is_drawn_as_what_takes_longest_in_it() -> None:
    ops = [(Op.FWD, 3e-6), (Op.AG_COPY_OUT, 1e-6)] * 50 + [(Op.BWD, 1.0)]
    starts = np.cumsum([0.0, *(seconds for _, seconds in ops)])
    events = [
        Event(seq=n, rank=0, op=op, lane=Lane.COMPUTE, phase=Phase.FORWARD, start_s=start, end_s=start + seconds)
        for n, ((op, seconds), start) in enumerate(zip(ops, starts, strict=False))
    ]
    (view,) = step_views(Timeline(Header(producer="t", clock="measured", world_size=1), events))
    bars = bars_of(view, 10)
    assert bars.ops == [Op.FWD, Op.BWD]
    assert len(bars.members[0]) == 100


def test_small_operations_are_drawn_below_the_others_but_come_later_in_the_legend() -> None:
    order = kinds_in_order([Op.FWD, Op.AG_COPY_IN, Op.ALL_GATHER])
    assert order == [Op.AG_COPY_IN, Op.FWD, Op.ALL_GATHER]
    one = np.ones(1)
    ranks = {kind: bar_trace(kind, one, one, one, one, 1.0)["legendrank"] for kind in theme.KINDS.values()}
    assert min(ranks[kind] for kind in SMALL_OPS) > ranks[theme.FORWARD]
    assert bar_trace(theme.EXPOSED, one, one, one, one, 1.0)["legendrank"] > max(ranks.values())


def test_thin_bars_have_edges_of_their_own_colour() -> None:
    def edge(length_ms: float) -> str:
        return str(bar_trace(theme.ALL_GATHER, *[np.full(3, length_ms)] * 4, 1_000.0)["marker"]["line"]["color"])

    assert edge(0.1) == theme.ALL_GATHER.color != edge(100.0)
