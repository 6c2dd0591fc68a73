"""A collective drawn: the numbers in the cells are those computed, and the finding compares them with the formulas."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from fsdp_sim.viz.collectives.rings import collective
from fsdp_sim.viz.collectives.scenes import scenes_of, seconds
from fsdp_sim.viz.collectives.steps import ALGORITHMS, execute
from fsdp_sim.viz.picture import Picture
from tests.some import some


def numbers_shown(frame: go.Frame) -> list[list[int]]:
    """The numbers in the cells of a frame."""
    trace = next(t for t in frame.data if t.type == "scatter" and t.textfont.color)
    return [[int(n) for n in re.findall(r"-?\d+", text.split("</b>")[0])] for text in trace.text]


def sentences(picture: Picture) -> list[str]:
    return [row[2] for row in picture.tables[0].rows]


def test_the_numbers_in_the_last_frame_are_the_sum() -> None:
    data = [[1, 2, 3, 4], [10, 20, 30, 40], [5, 6, 7, 8], [0, 0, 1, 1]]
    picture = collective("all-reduce", data=data)
    total = np.sum(data, axis=0).tolist()
    assert numbers_shown(picture.figure.frames[-1]) == [[n] for n in total] * 4
    scattered = collective("reduce-scatter", data=data)
    assert numbers_shown(scattered.figure.frames[-1]) == [[n] for n in total]


def test_each_step_is_first_on_the_way_and_then_there() -> None:
    picture = collective("all-gather", 4)
    assert len(picture.figure.frames) == 1 + 2 * 3
    assert [len(numbers_shown(frame)) for frame in picture.figure.frames] == [4, 4, 8, 8, 12, 12, 16]
    assert len(collective("all-gather", 12).figure.frames) == 1 + 11  # of many ranks a step is one frame


def test_sentences_tell_the_steps() -> None:
    told = sentences(collective("all-reduce", 4))
    assert told[1] == "Every rank sends its numbers of one chunk to the next rank."
    assert told[2].endswith("each chunk that moved is now a sum over 2 of 4 ranks.")
    assert "its shard. The reduce-scatter is done; now the all-gather." in told[6]
    assert "An all-reduce is a reduce-scatter and an all-gather" in told[-1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("all-gather", "3 steps. The message S is 8 numbers, and each rank sends 6 exactly, as (n-1)/n x S says."),
        ("all-reduce", "6 steps. The message S is 8 numbers, and each rank sends 12 exactly, as 2(n-1)/n x S says."),
        ("broadcast", "sends 6 on average (0 to 8), as (n-1)/n x S says."),
    ],
)
def test_the_finding_compares_what_was_sent_with_the_formula(name: str, says: str) -> None:
    assert says in collective(name, 4).finding


def test_the_time_is_alpha_and_beta() -> None:
    run = execute("all-reduce", [np.arange(8)] * 4)
    assert seconds(run, 8e9, 1e-3, 1e9) == pytest.approx(6 * (1e-3 + 2.0))
    assert seconds(execute("all-gather", [[1]]), 8e9, 1e-3, 1e9) == 0


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", some([3, 1, 16], first=1))
def test_every_collective_is_drawn_for_any_number_of_ranks(name: str, ranks: int) -> None:
    picture = collective(name, ranks)
    assert picture.still is not None
    assert picture.finding
    assert len(picture.figure.frames) == (0 if ranks == 1 else len(picture.tables[0].rows))
    assert len(picture.figure.to_json()) < 1_000_000


def test_uneven_and_empty_chunks_are_drawn() -> None:
    picture = collective("all-gather", data=[[1, 2, 3], [], [4]])
    assert "on average (" in picture.finding
    assert numbers_shown(picture.figure.frames[-1]) == [[1, 2, 3], [], [4]] * 3
    assert collective("all-reduce", data=[[7], [8], [9]]).figure.frames


def test_names_may_be_written_as_in_torch() -> None:
    assert collective("ALL_GATHER", 2).finding == collective("all-gather", 2).finding


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": "gather"}, "there is no collective 'gather' here; there are all-gather"),
        ({"ranks": 0}, "ranks is 0; draw 1 to 16 ranks"),
        ({"ranks": 17}, "ranks is 17"),
        ({"ranks": "4"}, "ranks is '4'"),
        ({"algorithm": "tree"}, "algorithm is 'tree'; all-gather is drawn as 'ring'"),
        ({"name": "all-reduce", "data": [[1], [1, 2]]}, r"arrays of \[1, 2\] numbers; .*equal sizes"),
    ],
)
def test_what_cannot_be_drawn_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        collective(**given)


def test_scenes_of_a_rank_that_only_receives_are_told_of_a_broadcast() -> None:
    texts = [scene.text for scene in scenes_of(execute("broadcast", [[1, 2]] * 3), each_twice=True)]
    assert texts[0] == "Rank 0 holds all 3 chunks. In the end all ranks do."
    assert texts[-1] == "3 of 3 ranks hold everything."
