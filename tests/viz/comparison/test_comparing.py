"""Two timelines on one axis: every operation a bar of its side, the place where they part marked in both, words that
state what changed."""

from collections.abc import Callable

import msgspec
import numpy as np
import plotly.graph_objects as go
import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.timeline import Event, Header, Lane, Memory, Op, Timeline
from fsdp_sim.timeline.comparison import compare as compare_timelines
from fsdp_sim.viz import theme
from fsdp_sim.viz.comparison.comparing import compare
from fsdp_sim.viz.comparison.words import signed_ms
from fsdp_sim.words import human_ms

Run = Callable[..., Timeline]


def simulated(**plan: object) -> Timeline:
    return simulate("gpt2-124m", Cluster("A100", gpus=16, bandwidth_gbps=50), Plan(seq_len=512, **plan)).timeline


def lanes(figure: go.Figure) -> list[go.Bar]:
    return [t for t in figure.data if t.orientation == "h"]


def strip(figure: go.Figure) -> dict[str, go.Bar]:
    return {t.name: t for t in figure.data if t.orientation != "h"}


def divergences(figure: go.Figure) -> list[str]:
    return [a.text for a in figure.layout.annotations if "first divergence" in a.text or "times part" in a.text]


def test_each_operation_of_both_is_one_bar_where_it_ran(training_run: Run) -> None:
    a, b = training_run(), training_run(prefetch=True)
    found = compare_timelines(a, b, rank=1, step=1)
    drawn = [
        t
        for t in lanes(compare(a, b, rank=1, step=1, titles=["off", "on"]).figure)
        if t.name != "exposed communication"
    ]
    bars = sorted((round(start, 6), round(width, 6)) for t in drawn for start, width in zip(t.base, t.x, strict=True))
    expected = sorted(
        (round((e.start_s - side.origin_s) * 1e3, 6), round(e.duration_s * 1e3, 6))
        for side in (found.a, found.b)
        for e in side.ops
    )
    assert np.array(bars) == pytest.approx(np.array(expected))


def test_the_two_steps_and_their_difference_are_told_first(training_run: Run) -> None:
    a, b = training_run(), training_run(prefetch=True)
    found = compare_timelines(a, b)
    picture = compare(a, b, titles=["prefetch off", "prefetch on"])
    assert found.step_difference_s < 0
    off, on = human_ms(found.a.step_s), human_ms(found.b.step_s)
    assert picture.finding.startswith(f"A step takes {off} in “prefetch off” and {on} in “prefetch on”")
    assert signed_ms(found.step_difference_s) in picture.finding
    assert picture.figure.layout.title.text.startswith("A step of “prefetch on” is ")
    assert "shorter than one of “prefetch off”" in picture.figure.layout.title.text.replace("<br>", " ")


def test_the_first_divergence_is_marked_in_both_and_told(training_run: Run) -> None:
    a, b = training_run(), training_run(prefetch=True)
    at = compare_timelines(a, b).divergence
    picture = compare(a, b, titles=["off", "on"])
    assert at is not None
    assert at.a is not None
    assert at.b is not None
    told = [f"{theme.OP_NAMES[e.op]} {e.unit}" for e in (at.a, at.b)]
    assert [text for text in divergences(picture.figure)] == [f"first divergence: <b>{text}</b>" for text in told]
    differ = f"first differ after {at.place} operations: “off” issues {told[0]} and “on” issues {told[1]}"
    assert differ in picture.finding


def test_where_the_orders_agree_the_place_where_times_part_is_marked(training_run: Run) -> None:
    a, b = training_run(), training_run(clock="measured")
    picture = compare(a, b, rank=3)
    assert len(divergences(picture.figure)) == 2
    assert all("times part" in text for text in divergences(picture.figure))
    assert "Both issue the same operations in the same order." in picture.finding
    assert "Times first part by more than" in picture.finding


@pytest.mark.parametrize(
    "other", [{"api": "fsdp1"}, {"activation_checkpointing": "full"}, {"reshard_after_forward": False}]
)
def test_what_the_units_gain_and_lose_sums_to_the_difference(other: dict[str, object]) -> None:
    a, b = simulated(), simulated(**other)
    found = compare_timelines(a, b)
    bars = strip(compare(a, b, titles=["a", "b"]).figure)
    total = sum(sum(t.y) for t in bars.values())
    assert total == pytest.approx(found.step_difference_s * 1e3, rel=1e-3)
    assert sum(bars["computing"].y) == pytest.approx(found.causes.compute_s * 1e3, rel=1e-3)


@pytest.mark.parametrize("idle_s", [0.0, 1.0])
def test_idle_time_is_a_place_of_its_own_where_the_steps_differ_in_it(idle_s: float) -> None:
    def step(computes_s: float, idle_s: float) -> Timeline:
        first = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.0", end_s=computes_s)
        starts_s = computes_s + idle_s
        last = Event(seq=1, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.1", start_s=starts_s, end_s=starts_s + 1)
        return Timeline(Header(producer="tests", clock="measured", world_size=1), [first, last])

    figure = compare(step(1.0, 0.0), step(2.0, idle_s), titles=["a", "b"]).figure
    assert [*figure.layout.xaxis.ticktext] == (["0", "idle"] if idle_s else ["0"])


def test_identical_timelines_are_said_to_be_so_and_nothing_is_marked() -> None:
    picture = compare(simulated(), simulated())
    assert "are identical" in picture.finding
    assert divergences(picture.figure) == []
    assert strip(picture.figure) == {}


def test_of_a_timeline_that_ends_early_the_end_is_marked() -> None:
    def run(count: int) -> Timeline:
        ops = [
            Event(seq=n, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit=f"x.{n}", start_s=n, end_s=n + 1.0)
            for n in range(count)
        ]
        return Timeline(Header(producer="tests", clock="measured", world_size=1), ops)

    picture = compare(run(3), run(2), titles=["whole", "short"])
    assert divergences(picture.figure) == ["first divergence: <b>forward x.2</b>", "first divergence: <b>has ended</b>"]
    assert "“short” has ended" in picture.finding


def test_names_from_users_are_text() -> None:
    bad = "<img src=x>"
    ops = [Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit=bad, end_s=s) for s in (1.0, 2.0)]
    a, b = (Timeline(Header(producer="tests", clock="measured", world_size=1), [e]) for e in ops)
    figure = compare(a, b, titles=[bad, "other"]).figure
    texts = [figure.layout.title.text, *(note.text for note in figure.layout.annotations)]
    texts += [text for trace in figure.data for text in (*(trace.hovertext or ()), *(trace.text or ()))]
    texts += list(figure.layout.xaxis.ticktext)
    assert any("&lt;img" in text for text in texts)
    assert not any("<img" in text for text in texts)


def test_memory_and_other_ranks_do_not_matter(training_run: Run) -> None:
    four, one = training_run(ranks=4), training_run(ranks=1)
    assert compare(four, one, titles=["four", "one"], rank=0).finding
    freed = Event(seq=9, rank=0, op=Op.FREE, lane=Lane.COMPUTE, category=Memory.SHARDED, start_s=9.0, end_s=9.0)
    only = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="x", end_s=1.0)
    header = Header(producer="tests", clock="measured", world_size=1)
    assert "identical" in compare(Timeline(header, [only, freed]), Timeline(header, [only])).finding


def test_a_step_without_duration_is_drawn() -> None:
    event = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="x")
    header = Header(producer="tests", clock="measured", world_size=1)
    longer = Timeline(header, [msgspec.structs.replace(event, end_s=1.0)])
    assert compare(Timeline(header, [event]), longer, titles=["nothing", "something"]).finding
    assert compare(Timeline(header, [event]), Timeline(header, [event])).finding


def test_titles_must_be_two_and_different(tiny: Timeline) -> None:
    with pytest.raises(ValueError, match="two timelines need two different names"):
        compare(tiny, tiny, titles=["same", "same"])


def test_the_tables_say_the_same_as_the_figure(training_run: Run) -> None:
    a, b = training_run(), training_run(prefetch=True)
    found = compare_timelines(a, b)
    causes, units = compare(a, b, titles=["off", "on"]).tables
    assert causes.rows[0][1:] == (
        human_ms(found.a.step_s), human_ms(found.b.step_s), signed_ms(found.step_difference_s),
    )  # fmt: skip
    assert [row[0] for row in units.rows] == [u.unit or "step" for u in found.units]
