"""A scene has the numbers of the timeline that the same simulation would make, without making it."""

import numpy as np
import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.timeline.analysis import exposed_intervals
from fsdp_sim.viz.explorer.scene import MOST_BARS, scene

REQUESTS = {
    "fsdp2": ("gpt2-124m", Cluster("A100", gpus=16), Plan(micro_batch=4, param_dtype="bf16")),
    "hsdp": ("gpt2-124m", Cluster("A100", gpus=16), Plan(micro_batch=4, shard_size=8, grad_accum=2)),
    "fsdp1": ("gpt2-124m", Cluster("A100", gpus=8), Plan(api="fsdp1", forward_prefetch=True)),
    "zero2": ("gpt2-124m", Cluster("A100", gpus=8), Plan(api="zero2")),
    "one rank": ("gpt2-124m", Cluster("A100", gpus=1), Plan()),
    "cpu": ("gpt2-124m", Cluster("cpu", gpus=2), Plan(seq_len=64)),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_its_bars_are_the_operations_of_the_last_step(name: str) -> None:
    sim = simulate(*REQUESTS[name])
    seen, steps = scene(sim), sim.run.step_ends_s
    begin = steps[-2] if len(steps) > 1 else 0.0
    events = [e for e in sim.timeline.ops if e.rank == 0 and e.step == len(steps) - 1]
    bars = {
        (seen.lanes[row], n, round(float(base), 2), round(float(x), 2))
        for some in seen.bars.values()
        for row, n, base, x in zip(some.rows, some.names, some.base, some.x, strict=True)
    }
    wanted = {(e.lane, e.unit, round((e.start_s - begin) * 1e3, 2), round(e.duration_s * 1e3, 2)) for e in events}
    assert sum(len(some.ops) for some in seen.bars.values()) == len(events)
    near = [min((abs(b[2] - w[2]) + abs(b[3] - w[3]) for b in bars if b[:2] == w[:2]), default=9) for w in wanted]
    assert max(near) < 0.05
    assert seen.span_ms == pytest.approx(sim.run.step_time_s() * 1e3)


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_exposed_is_what_the_timeline_says(name: str) -> None:
    sim = simulate(*REQUESTS[name])
    seen = scene(sim)
    assert (seen.exposed[:, 1] - seen.exposed[:, 0]).sum() == pytest.approx(sim.exposed_comm_s * 1e3, abs=1e-6)
    if len(sim.run.step_ends_s) == 1:
        wanted = np.array(exposed_intervals(sim.timeline, 0)).reshape(-1, 2) * 1e3
        assert seen.exposed == pytest.approx(wanted)


@pytest.mark.parametrize("name", REQUESTS)
def test_its_memory_is_that_of_the_timeline_and_no_peak_is_lost_between_pixels(name: str) -> None:
    sim = simulate(*REQUESTS[name])
    seen = scene(sim)
    times, live = sim.timeline.live_bytes(0)
    steps = sim.run.step_ends_s
    inside = (times >= (steps[-2] if len(steps) > 1 else 0.0)) & (times <= steps[-1])
    highest = sum(live.values())[inside].max()
    assert sum(seen.live.values()).max() == highest
    for points in (700, 40, 3):
        shown, parts = seen.memory(0.0, seen.span_ms, points)
        assert sum(parts.values()).max() * 2**30 == pytest.approx(highest, rel=1e-6)
        assert (np.diff(shown) >= 0).all()


def test_of_too_many_bars_those_on_one_pixel_become_one_and_a_part_shows_each() -> None:
    plan = Plan(micro_batch=1, grad_accum=16, param_dtype="bf16")
    seen = scene(simulate("gpt2-1.5b", Cluster("A100", gpus=8), plan))
    count = sum(len(some.ops) for some in seen.bars.values())
    whole = seen.bars_between(0.0, seen.span_ms)
    assert count > MOST_BARS > 0
    assert sum(len(some.ops) for some in whole.values()) < count
    assert any("more (zoom in)" in name for some in whole.values() for name in some.names)
    for kind, some in whole.items():
        assert some.base.min() == seen.bars[kind].base.min()
        assert (some.base + some.x).max() == pytest.approx((seen.bars[kind].base + seen.bars[kind].x).max())
    part = seen.bars_between(0.0, seen.span_ms / 100)
    assert not any("more" in name for some in part.values() for name in some.names)
