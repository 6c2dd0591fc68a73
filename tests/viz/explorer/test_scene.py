"""A scene has the numbers of the timeline that the same simulation makes, in the order and at the times it has them."""

import numpy as np
import pytest

from fsdp_sim import Cluster, Plan, Simulation, simulate
from fsdp_sim.timeline.analysis import exposed_intervals
from fsdp_sim.viz.explorer.scene import scene
from fsdp_sim.viz.steps.step_view import MAX_BARS

REQUESTS = {
    "fsdp2": ("gpt2-124m", Cluster("A100", gpus=16), Plan(micro_batch=4, param_dtype="bf16")),
    "hsdp": ("gpt2-124m", Cluster("A100", gpus=16), Plan(micro_batch=4, shard_size=8, grad_accum=2)),
    "fsdp1": ("gpt2-124m", Cluster("A100", gpus=8), Plan(api="fsdp1", forward_prefetch=True)),
    "one rank": ("gpt2-124m", Cluster("A100", gpus=1), Plan()),
    "cpu": ("gpt2-124m", Cluster("cpu", gpus=2), Plan(seq_len=64)),
}


def begin_s(sim: Simulation) -> float:
    return (0.0, *sim.run.step_ends_s)[-2]


@pytest.mark.parametrize("name", REQUESTS)
def test_its_bars_are_the_operations_of_the_last_step(name: str) -> None:
    sim = simulate(*REQUESTS[name])
    seen, begin = scene(sim), begin_s(sim)
    events = [e for e in sim.timeline.ops if e.rank == 0 and e.step == len(sim.run.step_ends_s) - 1]
    drawn = {row: k for k, (row,) in enumerate(seen.bars.members)}
    assert [seen.timeline.events[row] for row in sorted(drawn)] == events
    for row, e in zip(sorted(drawn), events, strict=True):
        bar = drawn[row]
        assert (seen.bars.ops[bar], seen.bars.places[bar]) == (e.op, (0, e.lane))
        assert seen.bars.start_ms[bar] == pytest.approx((e.start_s - begin) * 1e3)
        assert seen.bars.length_ms[bar] == pytest.approx(e.duration_s * 1e3, abs=1e-9)
    assert seen.span_ms == pytest.approx(sim.run.step_time_s() * 1e3)


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_exposed_is_what_the_timeline_says(name: str) -> None:
    sim = simulate(*REQUESTS[name])
    seen = scene(sim)
    assert sum(end - begin for begin, end in seen.exposed_ms) == pytest.approx(sim.exposed_comm_s * 1e3, abs=1e-6)
    if len(sim.run.step_ends_s) == 1:
        wanted = np.array(exposed_intervals(sim.timeline, 0)).reshape(-1, 2) * 1e3
        assert np.array(seen.exposed_ms).reshape(-1, 2) == pytest.approx(wanted)


@pytest.mark.parametrize("name", REQUESTS)
def test_its_memory_is_that_of_the_timeline_and_no_peak_is_lost_between_pixels(name: str) -> None:
    sim = simulate(*REQUESTS[name])
    seen = scene(sim)
    times, live = sim.timeline.live_bytes(0)
    inside = (times >= begin_s(sim)) & (times <= sim.run.step_ends_s[-1])
    highest = sum(live.values())[inside].max()
    for points in (700, 40, 3):
        shown, parts = seen.memory(0.0, seen.span_ms, points)
        assert len(shown) <= points + 3
        assert max(map(sum, zip(*parts.values(), strict=True))) * 2**30 == pytest.approx(highest, rel=1e-6)
        assert (np.diff(shown) >= 0).all()


def test_of_too_many_bars_neighbours_are_drawn_as_one_and_a_part_shows_each() -> None:
    plan = Plan(micro_batch=1, grad_accum=16, param_dtype="bf16")
    seen = scene(simulate("gpt2-1.5b", Cluster("A100", gpus=8), plan))
    whole = seen.bars_between(0.0, seen.span_ms)
    assert len(whole) < len(seen.rows) > MAX_BARS
    assert sorted(row for some in whole.members for row in some) == seen.rows
    part = seen.bars_between(0.0, seen.span_ms / 200)
    assert {len(some) for some in part.members} == {1}
