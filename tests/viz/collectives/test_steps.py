"""Collectives executed chunk by chunk give what their definitions say, and send what the formulas say."""

from __future__ import annotations

import numpy as np
import pytest

from fsdp_sim.viz.collectives.steps import ALGORITHMS, execute

RANKS = (1, 2, 3, 4, 7, 16)


def numbers(ranks: int, size: int) -> list[np.ndarray]:
    return list(np.random.default_rng(ranks * 100 + size).integers(-50, 50, (ranks, size)))


@pytest.mark.parametrize("size", [0, 1, 37])
@pytest.mark.parametrize("ranks", RANKS)
def test_reductions_give_the_sum_and_gathers_the_whole(ranks: int, size: int) -> None:
    data = numbers(ranks, size)
    total = np.array_split(np.sum(data, axis=0), ranks)
    scattered, reduced, gathered = (execute(name, data) for name in ("reduce-scatter", "all-reduce", "all-gather"))
    for rank in range(ranks):
        mine = scattered.result(rank)
        np.testing.assert_array_equal(mine[rank], total[rank])
        assert all(chunk is None for place, chunk in enumerate(mine) if place != rank)
        np.testing.assert_array_equal(np.concatenate(reduced.result(rank)), np.sum(data, axis=0))
        np.testing.assert_array_equal(np.concatenate(gathered.result(rank)), np.concatenate(data))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_broadcast_gives_all_the_root_s_and_an_all_to_all_transposes(ranks: int) -> None:
    data = numbers(ranks, 19)
    root = ranks // 2
    sent, exchanged = execute("broadcast", data, root=root), execute("all-to-all", data)
    for rank in range(ranks):
        np.testing.assert_array_equal(np.concatenate(sent.result(rank)), data[root])
        expected = [np.array_split(one, ranks)[rank] for one in data]
        for got, wanted in zip(exchanged.result(rank), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("collective", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_ranks_send_what_the_formula_says(collective: str, ranks: int) -> None:
    even = execute(collective, numbers(ranks, ranks * 3 if collective != "all-gather" else 3))
    uneven = execute(collective, numbers(ranks, 17))
    for run in (even, uneven):
        assert np.mean(run.steps[-1].sent) == pytest.approx(run.sent_by_formula)
    if collective != "broadcast":
        assert set(even.steps[-1].sent) == {even.sent_by_formula}


@pytest.mark.parametrize(("collective", "steps"), [("all-gather", 3), ("reduce-scatter", 3), ("all-reduce", 6)])
def test_in_every_step_of_a_ring_each_rank_sends_one_chunk_to_the_next(collective: str, steps: int) -> None:
    run = execute(collective, numbers(4, 8))
    assert len(run.steps) == 1 + steps
    for step in run.steps[1:]:
        assert sorted((t.source, t.target) for t in step.transfers) == [(0, 1), (1, 2), (2, 3), (3, 0)]
        assert len({t.chunk for t in step.transfers}) == 4


def test_what_is_sent_is_what_the_sender_held() -> None:
    run = execute("all-reduce", numbers(5, 11))
    for before, step in zip(run.steps, run.steps[1:], strict=False):
        for t in step.transfers:
            assert before.held[t.source][t.chunk] is t.payload


def test_a_partial_sum_knows_whose_data_are_in_it() -> None:
    run = execute("reduce-scatter", numbers(4, 4))
    for number, step in enumerate(run.steps[1:], 2):
        assert {len(step.held[t.target][t.place].of) for t in step.transfers} == {number}


@pytest.mark.parametrize(
    ("collective", "data", "root", "says"),
    [
        ("all-gather", [], 0, "data has 0 arrays"),
        ("all-gather", [[1]] * 17, 0, "data has 17 arrays"),
        ("all-reduce", [[[1]], [[3]]], 0, r"data\[0\] has the shape \(1, 1\)"),
        ("broadcast", [[1], [2]], 2, "root is 2; there are ranks 0 to 1"),
    ],
)
def test_what_does_not_fit_is_named(collective: str, data: list[list[int]], root: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        execute(collective, data, root)
