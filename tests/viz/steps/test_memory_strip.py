"""The strip shows every summit, names what it leaves out, and has room for the limit where that is near."""

from collections.abc import Callable

import numpy as np
import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.timeline import Event, Header, Lane, Memory, Op, Timeline
from fsdp_sim.viz.steps.memory_strip import MAX_MOMENTS, OTHER, Strip
from fsdp_sim.viz.steps.step_view import step_views

Run = Callable[..., Timeline]


def strip(timeline: Timeline, **which: int) -> Strip:
    (view,) = step_views(timeline, **which)
    return Strip(view, 0)


def memory(*changes: tuple[float, int, Memory], limit: int = 0) -> Timeline:
    """An operation of one second, and allocations (frees where negative) at some moments."""
    fwd = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, end_s=1.0)
    events = [
        Event(seq=n, rank=0, op=Op.ALLOC if size > 0 else Op.FREE, lane=Lane.COMPUTE, bytes=abs(size),
              category=category, issue_s=at_s, start_s=at_s, end_s=at_s)
        for n, (at_s, size, category) in enumerate(changes, start=1)
    ]  # fmt: skip
    header = Header(producer="tests", clock="measured", world_size=1, memory_limit_bytes=limit)
    return Timeline(header, [fwd, *events])


def test_no_summit_gets_lost_among_more_moments_than_can_be_drawn() -> None:
    changes = [(n / 5_000, 2**20 if n % 2 == 0 else -(2**20), Memory.ACTIVATION) for n in range(4_000)]
    changes += [(0.9, 5 * 2**20, Memory.LOGITS), (0.9000001, -5 * 2**20, Memory.LOGITS)]
    times_ms, curves = strip(memory(*changes)).curves
    assert len(times_ms) <= MAX_MOMENTS + 2
    assert np.all(np.diff(times_ms) >= 0)
    total = np.sum(list(curves.values()), axis=0)
    assert total.max() == 5 * 2**20
    busy = times_ms < 790
    assert (total[busy] == 2**20).mean() > 0.95


def test_a_summit_of_no_length_is_drawn_too() -> None:
    drawn = strip(memory((0.5, 2**20, Memory.ACTIVATION), (0.5, 2**20, Memory.LOGITS), (0.5, -(2**20), Memory.LOGITS)))
    assert max(np.sum(list(drawn.curves[1].values()), axis=0)) == 2**21


def test_what_is_too_small_to_see_is_drawn_as_one_and_named_when_pointed_at() -> None:
    small = [(0.1, 1_000, Memory.SHARDED), (0.1, 2_000, Memory.OPTIMIZER)]
    drawn = strip(memory(*small, (0.2, 2**20, Memory.ACTIVATION)))
    kinds = list(drawn.curves[1])
    assert kinds[0] is OTHER
    assert drawn.curves[1][OTHER].max() == 3_000
    assert "parameter shards, optimizer state" in drawn.traces()[-1]["hovertemplate"]
    alone = strip(memory(small[0], (0.2, 2**20, Memory.ACTIVATION)))
    assert OTHER not in alone.curves[1]


def test_areas_keep_only_what_changes_and_end_with_the_step(training_run: Run) -> None:
    drawn = strip(training_run(ranks=1), step=1)
    lengths = {trace["name"]: len(trace["x"]) for trace in drawn.traces()}
    assert lengths["parameter shards"] == 2 < lengths["unsharded parameters"] < lengths["alive together"]
    assert [trace["x"][-1] for trace in drawn.traces()] == pytest.approx([132.6] * len(lengths))


def test_the_axis_has_few_round_ticks_and_holds_peak_and_limit() -> None:
    axis = strip(memory((0.2, 7 * 2**30, Memory.ACTIVATION), limit=9 * 2**30)).axis()
    assert axis["ticktext"] == ["0", "2 GiB", "4 GiB", "6 GiB", "8 GiB"]
    assert axis["range"][1] > 9
    assert strip(memory((0.2, 7 * 2**30, Memory.ACTIVATION), limit=90 * 2**30)).axis()["range"][1] < 9
    assert strip(memory((0.2, 3, Memory.NONE))).axis()["ticktext"][-1] == "3 B"


def test_the_peak_of_a_large_model_is_the_true_one_though_the_curve_stays_below() -> None:
    plan = Plan(micro_batch=1, seq_len=8192, param_dtype="bf16", activation_checkpointing="full")
    timeline = simulate("llama3-70b", Cluster("H100-SXM-80GB", gpus=64), plan).timeline
    drawn = strip(timeline)
    assert drawn.peak_bytes == timeline.peak_bytes(0)
    assert 0.95 * drawn.peak_bytes < max(np.sum(list(drawn.curves[1].values()), axis=0)) <= drawn.highest_bytes
