"""The plans of a sweep: a mark for each, the front the explorer's own, its ends and knee named."""

import plotly.graph_objects as go
import pytest

from fsdp_sim.explore import Sweep, front_of
from fsdp_sim.viz.charts.pareto_front import _knee, pareto

FIXED = {"gpu": "H100", "gpus": "16", "seq_len": "4096", "param_dtype": "bf16"}
VARY = {"micro_batch": ["1", "2", "4"], "activation_checkpointing": ["none", "selective", "full"]}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return list(Sweep(FIXED | {"model": "llama3-8b"}, VARY).rows())


def row(us: float, gib: float, *, fit: str = "fits", **asked: str) -> dict[str, str]:
    return asked | {
        "step_time_s": "1", "tokens_per_s_per_gpu": str(1e6 / us), "mfu": "0.4", "exposed_comm_s": "0",
        "peak_memory_bytes": str(gib * 2**30), "memory_limit_bytes": str(80 * 2**30),
        "fit": fit, "error": "",
    }  # fmt: skip


def points(figure: go.Figure, what: str) -> list[tuple[float, float]]:
    return sorted((x, y) for t in figure.data if t.name.endswith(what) for x, y in zip(t.x, t.y, strict=True))


def test_every_possible_plan_is_one_mark(rows: list[dict[str, str]]) -> None:
    figure = pareto(rows).figure
    drawn = sorted(point for t in figure.data for point in zip(t.x, t.y, strict=True))
    assert drawn == sorted((1e6 / float(r["tokens_per_s_per_gpu"]), float(r["peak_memory_bytes"])) for r in rows)


def test_the_front_is_the_explorers_and_what_does_not_fit_is_hollow(rows: list[dict[str, str]]) -> None:
    figure = pareto(rows).figure
    front = front_of(rows)
    assert points(figure, "front") == sorted(
        (1e6 / float(rows[n]["tokens_per_s_per_gpu"]), float(rows[n]["peak_memory_bytes"])) for n in front
    )
    assert len(points(figure, "does not fit")) == sum(r["fit"] == "does not fit" for r in rows)
    (hollow,) = (t for t in figure.data if t.name == "does not fit")
    assert hollow.marker.symbol.endswith("-open")
    (limit,) = (s for s in figure.layout.shapes if s.name == "limit")
    assert limit.y0 == float(rows[0]["memory_limit_bytes"])


def test_a_sweep_that_was_not_run_is_run() -> None:
    sweep = Sweep(FIXED | {"model": "gpt2-124m", "seq_len": "512"}, {"micro_batch": ["1", "2"]})
    assert pareto(sweep).finding == pareto(list(sweep.rows())).finding


def test_ends_and_knee_are_named_in_words_and_figure() -> None:
    some = [
        row(1, 64, plan="a"),
        row(1.1, 16, plan="b"),
        row(2, 12, plan="c"),
        row(4, 11, plan="d"),
        row(3, 70, plan="e"),
    ]
    front = front_of(some)
    assert _knee(some, front) == 1
    picture = pareto(some)
    assert "the fastest plan is plan=a" in picture.finding
    assert "the smallest is plan=d" in picture.finding
    assert (
        "The knee is plan=b (909,091 tokens/s per GPU, 16.0 GiB): 10% more time than the fastest for 75% less memory."
        in picture.finding
    )
    labels = [note.text for note in picture.figure.layout.annotations]
    assert "<b>knee</b><br>plan=b" in labels
    assert "<b>fastest</b><br>plan=a" in labels
    assert [r[-1] for r in picture.tables[0].rows] == ["", "knee", "", ""]


def test_plans_on_the_edge_of_memory_are_counted_by_themselves_and_have_a_dot() -> None:
    some = [row(1, 75, plan="a", fit="on the edge"), row(2, 30, plan="b"), row(3, 76, plan="c", fit="on the edge")]
    picture = pareto(some)
    assert picture.finding.startswith("3 combinations: 1 fit, 0 do not, 2 on the edge of memory.")
    assert "the fastest plan is plan=a (1,000,000 tokens/s per GPU, 75.0 GiB, on the edge)" in picture.finding
    front, beaten = (next(t for t in picture.figure.data if t.name.endswith(end)) for end in ("front", "beats it"))
    assert [symbol.endswith("-dot") for symbol in front.marker.symbol] == [True, False]
    assert beaten.name.startswith("on the edge")
    assert [one[-1] for one in picture.tables[0].rows] == ["on the edge", ""]


def test_a_front_that_does_not_bend_has_no_knee() -> None:
    straight = [row(1, 64), row(2, 32), row(4, 16)]
    assert _knee(straight, front_of(straight)) is None
    assert "knee" not in pareto(straight).finding


def test_models_have_a_front_a_sign_and_a_name_each() -> None:
    both = [
        row(1, 64, model="a"),
        row(2, 32, model="a"),
        row(5, 70, model="<b>z"),
        row(9, 100, model="<b>z", fit="does not fit"),
    ]
    picture = pareto(both)
    fronts = [t for t in picture.figure.data if t.name.endswith("front")]
    assert len({t.marker.symbol for t in fronts}) == len({t.marker.color for t in fronts}) == 2
    texts = [note.text for note in picture.figure.layout.annotations] + [t.name for t in picture.figure.data]
    assert any("&lt;b&gt;z" in text for text in texts)
    assert not any("<b>z" in text for text in texts)
    assert "<b>z: one plan is both the fastest and the smallest" in picture.finding


def test_none_that_fits_and_one_alone_are_drawn() -> None:
    assert pareto([row(1, 100, fit="does not fit")]).figure.layout.title.text == "The only plan does not fit."
    alone = pareto([row(1, 78, fit="on the edge")]).figure.layout.title.text
    assert alone == "One plan, and it is on the edge of memory: 78.0 GiB."
    assert pareto([row(1, 10)]).figure.layout.title.text.startswith("One plan, and it fits")


def test_a_sweep_without_a_possible_plan_says_why() -> None:
    impossible = dict.fromkeys(row(1, 1), "") | {"error": "gpus is 3"}
    assert pareto([impossible]).finding == "None of the 1 combinations is possible: gpus is 3."
    assert pareto([]).finding == "No plan was simulated."
    with pytest.raises(ValueError, match="no rows of a sweep: they have no step_time_s"):
        pareto([{"x": "1"}])
