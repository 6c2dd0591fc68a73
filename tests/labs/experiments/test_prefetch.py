"""The first experiment: what is predicted has the order of what is measured, and prefetch hides what it promises."""

from itertools import pairwise

import numpy as np
import pytest

from fsdp_sim.ranks import Network
from fsdp_sim.timeline import Lane, Memory, Op
from fsdp_sim.timeline.analysis import exposed_comm_s, median_step, step_time_s
from labs.experiments.prefetch import Experiment, Pieces, hideable_s, same_order, training_only
from tests.some import some

SMALL = Experiment(batch=8, seq_len=32, network=Network(bandwidth_gbps=0.5, latency_us=100))


@pytest.fixture(scope="module")
def pieces() -> Pieces:
    return SMALL.measure_pieces(4, progress=False)


def test_the_units_are_the_root_and_the_blocks() -> None:
    assert [unit.name for unit in SMALL.units] == ["root", *(f"layers.{i}" for i in range(5))]
    assert SMALL.units[0].segments == ("embed", ..., "head")


@pytest.mark.parametrize("depth", some([1, None, 2], first=1))
def test_every_rank_issues_what_the_program_says_in_its_order(pieces: Pieces, depth: int | None) -> None:
    predicted = SMALL.predict(pieces, forward_prefetch=depth)
    results = SMALL.run(4, forward_prefetch=depth, progress=False)
    measured = training_only(results.timeline)
    assert same_order(predicted, measured)
    assert all(np.isfinite(results[0]))


@pytest.mark.tail
def test_prefetch_changes_the_order_but_not_the_losses() -> None:
    off, on = (SMALL.run(4, forward_prefetch=depth, progress=False) for depth in (None, 1))
    assert off[0] == pytest.approx(on[0], rel=1e-6)
    assert not same_order(training_only(off.timeline), training_only(on.timeline))


def test_in_the_pieces_nothing_overlaps() -> None:
    timeline = training_only(SMALL.run(3, serial=True, progress=False).timeline)
    for rank in timeline.ranks:
        ops = sorted(timeline.select(rank=rank, step=2).ops, key=lambda e: e.start_s)
        for before, after in pairwise(ops):
            assert after.start_s >= before.end_s - 1e-9


def test_a_slower_wire_makes_the_predicted_step_longer_and_prefetch_shorter(pieces: Pieces) -> None:
    def seconds(gbps: float, depth: int | None) -> float:
        wired = Experiment(batch=8, seq_len=32, network=Network(gbps, latency_us=100))
        return step_time_s(wired.predict(wired.rewired(pieces), forward_prefetch=depth), 1)

    assert seconds(0.1, None) > seconds(0.5, None) > seconds(5, None)
    assert seconds(0.5, 1) < seconds(0.5, None)


def test_by_default_forward_gathers_are_exposed_and_prefetched_ones_are_not(pieces: Pieces) -> None:
    """Gathers that take no longer than a forward: hidden behind it if, and only if, they are issued before it."""
    wired = Experiment(batch=8, seq_len=32, network=Network(bandwidth_gbps=50, latency_us=0))
    durations = wired.rewired([{key: np.full_like(t, 0.01) for key, t in p.items()} for p in pieces])

    def exposed_gathers(depth: int | None) -> float:
        timeline = wired.predict(durations, forward_prefetch=depth)
        forward = timeline.select(step=median_step(timeline), rank=0, phase="forward")
        return exposed_comm_s(forward.select(lambda e: e.unit != "root"), 0)

    gather_s = Network(bandwidth_gbps=50).seconds("all_gather", 198_272 * 4, 4)
    assert exposed_gathers(None) == pytest.approx(5 * gather_s, rel=0.02)
    assert exposed_gathers(1) <= 2 * gather_s


def test_the_promise_is_the_smaller_of_gather_and_forward_for_each_layer_but_the_first(pieces: Pieces) -> None:
    ones = [{key: np.full_like(t, 3.0 if key[0] is Op.ALL_GATHER else 2.0) for key, t in p.items()} for p in pieces]
    assert hideable_s(ones) == pytest.approx(4 * 2.0)


def test_the_states_that_live_through_all_steps_are_in_the_memory(pieces: Pieces) -> None:
    _, live = SMALL.predict(pieces).live_bytes(rank=0)
    shards = sum(p.padded_bytes(4) for unit in SMALL.units for p in unit.params) // 4
    assert live[Memory.SHARDED][-1] == shards
    assert live[Memory.OPTIMIZER][-1] == 2 * shards


def test_predicted_and_measured_memory_peak_agree(pieces: Pieces) -> None:
    predicted = SMALL.predict(pieces)
    measured = SMALL.run(4, progress=False).timeline
    assert measured.peak_bytes(0) == pytest.approx(predicted.peak_bytes(0), rel=0.02)


def test_the_wire_is_never_shared() -> None:
    timeline = training_only(SMALL.run(3, forward_prefetch=1, progress=False).timeline)
    for rank in timeline.ranks:
        wire = [e for e in timeline.ops if e.rank == rank and e.lane in (Lane.ALL_GATHER, Lane.REDUCE_SCATTER)]
        starts = [e.start_s for e in wire]
        assert starts == sorted(starts)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"world_size": 3, "batch": 32}, "32"),
        ({"world_size": 0}, "world"),
        ({"seq_len": 4096}, "seq_len=4096"),
        ({"model": "gpt3"}, "no preset 'gpt3'"),
    ],
)
def test_impossible_experiments_are_refused_before_anything_starts(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Experiment(**wrong)  # type: ignore[arg-type]


def test_without_a_network_nothing_can_be_rewired(pieces: Pieces) -> None:
    with pytest.raises(ValueError, match="measure_pieces"):
        Experiment(network=None).rewired(pieces)
