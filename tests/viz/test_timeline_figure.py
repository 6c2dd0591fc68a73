"""What is drawn is what is in the timeline: every bar an event, every area its live bytes, one time axis."""

from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import pytest

from fsdp_sim.engine import replay
from fsdp_sim.schedule import build, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Event, Lane, Memory, Op, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s
from fsdp_sim.viz import theme, timeline_figure

Run = Callable[..., Timeline]


def bars(figure: go.Figure) -> list[go.Bar]:
    return [t for t in figure.data if isinstance(t, go.Bar) and t.name != theme.EXPOSED.name]


def exposed_bars(figure: go.Figure) -> list[go.Bar]:
    return [t for t in figure.data if t.name == theme.EXPOSED.name]


def simulated(**plan: int) -> Timeline:
    program = build(toy(layers=3), Plan(**plan), world_size=4, steps=2)
    return replay(program, defaultdict(lambda: 0.004), device="cpu", ranks=4, copies_s=0.001)


@pytest.fixture(params=["written by hand", "replayed"])
def pair(request: pytest.FixtureRequest, training_run: Run) -> dict[str, Timeline]:
    if request.param == "replayed":
        return {"prefetch off": simulated(), "prefetch on": simulated(forward_prefetch=1)}
    return {"predicted": training_run(prefetch=True), "measured": training_run(prefetch=True, clock="measured")}


def test_each_operation_of_the_step_is_one_bar_of_its_kind(pair: dict[str, Timeline]) -> None:
    figure = timeline_figure(pair, step=1)
    drawn = Counter()
    for trace in bars(figure):
        drawn[trace.name] += len(trace.x)
    assert drawn == Counter(theme.KINDS[e.op].name for t in pair.values() for e in t.ops if e.step == 1)


def test_bars_lie_where_the_events_ran(tiny: Timeline) -> None:
    forward, all_gather = bars(timeline_figure(tiny))
    assert (forward.name, all_gather.name) == ("forward", "all-gather")
    assert (*forward.base, *forward.x) == pytest.approx((2.0, 3.0))
    assert (*all_gather.base, *all_gather.x) == pytest.approx((0.0, 2.0))
    assert forward.text == ("0",)


def test_each_bar_lies_in_the_row_of_its_rank_and_lane(training_run: Run) -> None:
    figure = timeline_figure(training_run(), ranks=[1, 3])
    labels = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    assert list(labels.values()) == [
        *("<b>rank 1</b> · compute", "all-gather", "reduce-scatter"),
        *("<b>rank 3</b> · compute", "all-gather", "reduce-scatter"),
    ]
    for trace in bars(figure):
        lane = trace.name if trace.name in ("all-gather", "reduce-scatter") else "compute"
        assert {labels[y].rsplit(" · ")[-1] for y in trace.y} == {lane}


def test_a_copy_in_on_its_own_stream_gets_a_thin_row_between_compute_and_all_gather() -> None:
    figure = timeline_figure(simulated(), ranks=[0])
    compute, all_gather, _ = figure.layout.yaxis.tickvals
    (copies,) = (t for t in bars(figure) if t.name == theme.COPY.name)
    thin = {y for y, width in zip(copies.y, copies.width, strict=True) if width < 0.5}
    assert len(thin) == 1
    assert compute < thin.pop() < all_gather


def test_the_exposed_bars_add_up_to_the_exposed_communication(pair: dict[str, Timeline]) -> None:
    figure = timeline_figure(pair, step=1, ranks=[0])
    for trace, timeline in zip(exposed_bars(figure), pair.values(), strict=True):
        assert sum(trace.x) == pytest.approx(exposed_comm_s(timeline.select(step=1), rank=0) * 1e3)
        assert "rank 0 computes nothing<br>while " in trace.hovertext[0]


def test_nothing_is_marked_exposed_where_everything_is_hidden(tiny: Timeline) -> None:
    assert exposed_bars(timeline_figure(tiny.select(op=Op.FWD))) == []


def test_hover_tells_operation_unit_duration_bytes_rank_issue_and_what_it_waited_for(tiny: Timeline) -> None:
    forward, all_gather = bars(timeline_figure(tiny))
    assert forward.hovertext[0].split("<br>") == [
        "<b>forward layers.0</b>, 3.00 ms",
        "rank 0, compute lane, from 2.00 to 5.00 ms",
        "issued at 1.00 ms, began 1.00 ms later",
        "waited for ALL_GATHER(layers.0), 2.00 ms",
    ]
    assert all_gather.hovertext[0].split("<br>") == [
        "<b>all-gather layers.0</b>, 2.00 ms",
        "rank 0, all-gather lane, from 0.00 to 2.00 ms",
        "issued at 0.00 ms",
        "1.00 MiB among 2 ranks, bf16",
        "train.py:7",
    ]


def test_memory_areas_are_the_live_bytes_on_the_same_axis(pair: dict[str, Timeline]) -> None:
    figure = timeline_figure(pair, step=0, memory_rank=2)
    areas = [t for t in figure.data if isinstance(t, go.Scatter)]
    categories = {theme.MEMORY[c].name: c for c in Memory}
    for timeline, axis in zip(pair.values(), ("y2", "y4"), strict=True):
        times_s, live = timeline.live_bytes(2)
        in_step = [t for t in areas if t.yaxis == axis]
        assert {categories[t.name] for t in in_step} == set(live)
        for trace in in_step:
            n = np.searchsorted(times_s, times_s[0] + trace.x[-1] / 1e3, side="right")  # the later steps are not drawn
            np.testing.assert_array_equal(trace.y[-1 - n : -1], live[categories[trace.name]][:n])
            np.testing.assert_allclose(trace.x[-1 - n : -1], times_s[:n] * 1e3, atol=1e-6)
            assert trace.line.shape == "hv"
            assert trace.xaxis in (None, "x")


def test_all_panels_share_one_time_axis_from_zero_to_the_longest_step(training_run: Run) -> None:
    off, on = training_run(), training_run(prefetch=True)
    figure = timeline_figure({"off": off, "on": on}, step=1)
    assert {trace.xaxis or "x" for trace in figure.data} == {"x"}
    assert figure.layout.xaxis.range == pytest.approx((0.0, 132.6 * 1.01))
    assert min(base for trace in bars(figure) for base in trace.base) == pytest.approx(0.0)


def test_each_kind_is_once_in_the_legend_with_its_own_colour(pair: dict[str, Timeline]) -> None:
    figure = timeline_figure(pair)
    entries = [t.name for t in figure.data if t.showlegend]
    assert len(entries) == len(set(entries)) == len({t.name for t in figure.data})
    colors = {t.name: t.marker.color for t in figure.data if isinstance(t, go.Bar)}
    assert len(set(colors.values())) == len(colors)


def test_the_first_four_ranks_of_the_median_step_are_drawn(training_run: Run) -> None:
    run = training_run(ranks=6, steps=4)
    late = {"op": Op.OPTIM, "lane": Lane.COMPUTE, "issue_s": 1.5, "start_s": 1.5, "end_s": 1.9}
    slow = [Event(seq=9_000 + rank, rank=rank, step=1, **late) for rank in run.ranks]
    figure = timeline_figure(Timeline(run.header, [*run.events, *slow]))
    assert figure.layout.annotations[0].text == "<b>predicted</b> · step 3, 133 ms"
    assert [t for t in figure.layout.yaxis.ticktext if "rank" in t][-1] == "<b>rank 3</b> · compute"


def test_text_inside_bars_is_left_out_where_there_are_too_many_to_draw_it(training_run: Run) -> None:
    assert {t.textposition for t in bars(timeline_figure(training_run()))} == {"inside"}
    assert {t.textposition for t in bars(timeline_figure(training_run(blocks=120)))} == {"none"}


def test_names_are_shown_and_never_read_as_markup(tiny: Timeline) -> None:
    hostile = Timeline(
        tiny.header, [tiny.ops[1].__class__(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="<b>u", end_s=1.0)]
    )
    figure = timeline_figure({"<i>name": hostile})
    assert "&lt;b&gt;u" in bars(figure)[0].hovertext[0]
    assert bars(figure)[0].text == ("&lt;b&gt;u",)
    assert figure.layout.annotations[0].text.startswith("<b>&lt;i&gt;name</b>")


def test_a_rank_without_memory_gets_no_strip(tiny: Timeline) -> None:
    figure = timeline_figure(tiny.select(op=(Op.FWD, Op.ALL_GATHER)))
    assert not [t for t in figure.data if isinstance(t, go.Scatter)]
    assert figure.layout.xaxis.anchor == "y"


def test_an_unknown_memory_rank_is_named_with_those_there_are(tiny: Timeline) -> None:
    with pytest.raises(ValueError, match=r"memory_rank 4 is not in timeline 'measured'; it has \[0\]"):
        timeline_figure(tiny, memory_rank=4)
