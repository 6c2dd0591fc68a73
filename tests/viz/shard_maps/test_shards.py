"""The shard map: its cells are what is held, its size is bounded, its words state what it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fsdp_sim import Cluster, simulate
from fsdp_sim.schedule import Param, Program, Unit, build, toy, toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Event, Memory, Op, Timeline
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.shard_maps.cast import cast_of, events_of
from fsdp_sim.viz.shard_maps.cells import CellState
from fsdp_sim.viz.shard_maps.holdings import moments
from fsdp_sim.viz.shard_maps.narration import sentence
from fsdp_sim.viz.shard_maps.shards import shard_map
from tests.some import some

Run = Callable[..., Timeline]


def sentences(picture: Picture) -> list[str]:
    """The sentence of each frame, on one line."""
    column = next(k for k, trace in enumerate(picture.figure.data) if trace.type == "scatter" and trace.xaxis == "x2")
    place = picture.figure.frames[0].traces.index(column)
    return [frame.data[place].text[0].split("<br>", 1)[1].replace("<br>", " ") for frame in picture.figure.frames]


def map_of(picture: Picture, number: int) -> np.ndarray:
    """The cells of a frame, gaps left out."""
    z = np.asarray(picture.figure.frames[number].data[0].z)
    return z[(z != CellState.GAP).any(axis=1)][:, (z != CellState.GAP).any(axis=0)]


def labels(picture: Picture) -> list[str]:
    return [text.removeprefix("<b>").removesuffix("</b>") for text in picture.figure.layout.yaxis.ticktext]


def test_at_rest_each_unit_is_a_diagonal_and_a_gathered_one_a_full_column() -> None:
    picture = shard_map(toy_program(2, 4))
    rest, gathered = map_of(picture, 0), map_of(picture, 1)
    assert rest.shape == (12, 12)  # 3 units of 4 shards; 4 ranks of 3 columns
    parameters = rest[:4, ::3]
    np.testing.assert_array_equal(parameters == CellState.OWN, np.eye(4, dtype=bool))
    np.testing.assert_array_equal(parameters == CellState.NOTHING, ~np.eye(4, dtype=bool))
    whole = gathered[:4, ::3]
    np.testing.assert_array_equal(whole == CellState.GATHERED, ~np.eye(4, dtype=bool))
    np.testing.assert_array_equal(gathered[4:, ::3] == CellState.GATHERED, False)


def test_every_moment_has_its_sentence_and_its_row_in_the_table() -> None:
    program = toy_program(2, 4)
    cast = cast_of(program.timeline)
    story = [sentence(cast, m) for m in moments(cast, events_of(program.timeline, 0, cast), 0)]
    picture = shard_map(program)
    assert sentences(picture) == story
    assert [row[1] for row in picture.tables[0].rows] == story
    assert picture.tables[0].rows[0][2:4] == ("64 B", "128 B")


def test_the_finding_says_what_is_held_and_how_much_is_whole_at_once() -> None:
    said = shard_map(toy_program(3, 4)).finding
    assert "Each of 4 ranks holds a quarter of every unit" in said
    assert "At most 3 units are whole at once (root, layers.1 and layers.2)" in said
    assert "240 B of a rank's memory at rest" in said


@pytest.mark.parametrize(
    "plan",
    some([
        {}, {"shard_size": 2}, {"reshard_after_forward": 2}, {"api": "ddp"}, {"api": "zero1"}, {"api": "zero2"},
        {"api": "fsdp1"}, {"api": "fsdp1", "sharding_strategy": "NO_SHARD"}, {"cpu_offload": True},
        {"api": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "shard_size": 2}, {"grad_accum": 5},
        {"optimizer": "sgd"}, {"shard_size": 1}, {"wrap": "root"}, {"reshard_after_forward": False},
        {"activation_checkpointing": "full"},
    ], first=7),
)  # fmt: skip
def test_every_way_to_shard_is_drawn(plan: dict[str, Any]) -> None:
    picture = shard_map(toy_program(2, 6, plan=Plan(**plan)))
    assert len(picture.figure.frames) > 5
    assert picture.finding
    assert picture.still is not None


@pytest.mark.parametrize(
    "plan", some([{}, {"api": "ddp"}, {"api": "zero2"}, {"api": "fsdp1"}, {"cpu_offload": True}], first=2)
)
@pytest.mark.parametrize("layers", [0, 2])
def test_one_rank_alone_is_drawn(plan: dict[str, Any], layers: int) -> None:
    assert shard_map(toy_program(layers, 1, plan=Plan(**plan))).finding.startswith("One rank holds all")


def test_many_ranks_and_units_are_abbreviated_and_bounded() -> None:
    plan = Plan(param_dtype="bf16", shard_size=64, grad_accum=4)
    picture = shard_map(simulate("llama3-70b", Cluster("H100-SXM-80GB", gpus=512), plan).program)
    assert len(picture.figure.frames) <= 150
    assert len(picture.figure.to_json()) < 1_000_000
    assert "of 512 and" in picture.finding
    assert "of 81 units" in picture.finding
    assert any("⋮" in label for label in labels(picture))
    assert any("not drawn" in text for text in sentences(picture))
    assert any("Micro-batches 2 to 3 go the same way" in text for text in sentences(picture))


def test_a_hundred_units_drawn_in_full_stay_within_the_bound() -> None:
    units = toy(100)
    picture = shard_map(build(units, Plan(api="fsdp1", sharding_strategy="NO_SHARD"), 4))
    assert len(picture.figure.frames) <= 150
    assert len(picture.figure.to_json()) < 1_000_000


def test_ranks_and_a_unit_can_be_chosen() -> None:
    picture = shard_map(toy_program(3, 16), ranks=[0, 9], unit="layers.1")
    assert labels(picture) == ["layers.1"]
    headers = [a.text for a in picture.figure.layout.annotations if "rank" in a.text and a.text.startswith("<b>")]
    assert headers == ["<b>rank 0</b>", "<b>rank 9</b>"]


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ({"ranks": [4]}, "there are ranks 0 to 3"),
        ({"ranks": []}, "ranks is"),
        ({"unit": "layer.1"}, "there is no unit 'layer.1'; there are root, layers.0"),
        ({"step": 3}, "step 3 is not there; the steps are"),
    ],
)
def test_what_is_not_there_is_named(which: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shard_map(toy_program(2, 4), **which)


def test_what_has_no_timeline_is_named() -> None:
    with pytest.raises(TypeError, match=r"takes a Timeline, or what has one .*, not a Plan"):
        shard_map(Plan())


def test_a_measured_run_is_drawn_and_ranks_that_differ_are_seen(training_run: Run) -> None:
    run = training_run(ranks=2, blocks=1, steps=1)
    first = next(e for e in run if e.rank == 1 and e.op is Op.FREE and e.category is Memory.UNSHARDED)
    picture = shard_map(run.select(lambda e: e is not first))  # rank 1 does not reshard its first unit
    story = sentences(picture)
    after = map_of(picture, next(k for k, text in enumerate(story) if text.startswith("embed reshards")))
    assert (after[:2, 0] == CellState.GATHERED).sum() == 0
    assert (after[:2, 3] == CellState.GATHERED).sum() == 1
    backward = map_of(picture, next(k for k, text in enumerate(story) if text.startswith("Backward of layers.0")))
    assert (backward[2:4, [1, 4]] == CellState.PARTIAL).all()  # the ranks are at the same point of their programs


def test_ranks_that_were_not_recorded_are_as_the_one_that_was() -> None:
    sim = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=4))
    picture = shard_map(sim.timeline)
    assert "Only rank 0 of 4 was recorded, and stands for all." in picture.finding
    of_program = shard_map(sim.program)
    for number in (0, 20, 60):
        np.testing.assert_array_equal(map_of(picture, number), map_of(of_program, number))


def test_names_are_shown_as_text() -> None:
    name = "<b>x</b>"
    root = Unit("root", (Param("w", (4, 4)),), segments=(..., "head"))
    picture = shard_map(build([root, Unit(name, (Param("w", (4, 4)),))], Plan(), 2))
    drawn = picture.figure.to_json() + (picture.still.to_json() if picture.still else "")
    assert "&lt;b&gt;x" in drawn.replace("\\u003c", "<").replace("\\u0026", "&")
    assert name not in [text for text in picture.figure.layout.yaxis.ticktext]
    assert all(name not in text for text in sentences(picture))


def test_surfaces_come_from_the_template() -> None:
    for figure in (shard_map(toy_program(2, 4)).figure, shard_map(toy_program(2, 4)).still):
        layout = figure.layout.to_plotly_json()
        assert not {"paper_bgcolor", "plot_bgcolor", "font"} & set(layout)


def test_a_still_has_up_to_eight_moments_with_their_sentences() -> None:
    program: Program = toy_program(3, 4)
    picture = shard_map(program)
    assert picture.still is not None
    assert sum(trace.type == "heatmap" for trace in picture.still.data) == 8
    captions = " ".join(a.text for a in picture.still.layout.annotations)
    for words in ("At rest", "all-gather", "Forward", "reshards", "Backward", "reduce-scatter", "Optimizer"):
        assert words in captions


def test_a_step_without_backward_or_optimizer_is_drawn(training_run: Run) -> None:
    forward = training_run(ranks=2, steps=1).select(lambda e: e.phase == "forward" or not e.phase)
    assert "At most" in shard_map(forward).finding


def test_events_of_other_producers_may_lack_units(training_run: Run) -> None:
    run = training_run(ranks=2, steps=1)
    extra = Event(seq=10_000, rank=0, op=Op.ALL_REDUCE, lane=run.events[0].lane, group_size=2, bytes=4)
    assert shard_map(Timeline(run.header, [*run.events, extra])).figure.frames
