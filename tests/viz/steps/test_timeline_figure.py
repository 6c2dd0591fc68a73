"""What is drawn is what is in the timeline: every bar an event, every area its live bytes, one time axis."""

from collections import Counter, defaultdict
from collections.abc import Callable

import msgspec
import numpy as np
import plotly.graph_objects as go
import pytest

from fsdp_sim.engine import replay
from fsdp_sim.schedule import build, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Event, Lane, Op, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s
from fsdp_sim.viz import theme, timeline_figure
from fsdp_sim.words import human_bytes

Run = Callable[..., Timeline]


def bars(figure: go.Figure) -> list[go.Bar]:
    return [t for t in figure.data if isinstance(t, go.Bar) and t.name != theme.EXPOSED.name]


def areas(figure: go.Figure) -> list[go.Scatter]:
    return [t for t in figure.data if isinstance(t, go.Scatter) and t.stackgroup]


def hover(trace: go.Bar, number: int) -> list[str]:
    """The lines of a hover text as plotly puts them together."""
    text = trace.hovertemplate.removesuffix("<extra></extra>")
    for column, value in enumerate(trace.customdata[number]):
        text = text.replace(f"%{{customdata[{column}]}}", value)
    start, length = float(trace.base[number]), float(trace.x[number])
    text = text.replace("%{base:,.2f}", f"{start:,.2f}").replace("%{x:,.2f}", f"{start + length:,.2f}")
    return text.split("<br>")


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
        assert {labels[min(labels, key=lambda at: abs(at - y))].rsplit(" · ")[-1] for y in trace.y} == {lane}


def test_a_copy_in_on_its_own_stream_gets_a_thin_row_between_compute_and_all_gather() -> None:
    figure = timeline_figure(simulated(), ranks=[0])
    compute, all_gather, _ = figure.layout.yaxis.tickvals
    thin = {float(y) for t in bars(figure) if np.max(t.width) < 0.5 for y in t.y}
    assert len(thin) == 1
    assert compute < thin.pop() < all_gather


def test_the_exposed_bars_add_up_to_the_exposed_communication(pair: dict[str, Timeline]) -> None:
    figure = timeline_figure(pair, step=1, ranks=[0])
    for trace, timeline in zip(exposed_bars(figure), pair.values(), strict=True):
        assert sum(trace.x) == pytest.approx(exposed_comm_s(timeline.select(step=1), rank=0) * 1e3, rel=1e-6)
        assert "rank 0 computes nothing<br>while " in trace.hovertext[0]


def test_nothing_is_marked_exposed_where_everything_is_hidden(tiny: Timeline) -> None:
    assert exposed_bars(timeline_figure(tiny.select(op=Op.FWD))) == []


def test_hover_tells_what_an_operation_is_how_fast_its_bytes_went_and_who_waited_for_whom(tiny: Timeline) -> None:
    forward, all_gather = bars(timeline_figure(tiny))
    assert hover(forward, 0) == [
        "<b>forward layers.0</b>, 3.00 ms",
        "<i>computes the output of the unit from its whole parameters</i>",
        "2.00 to 5.00 ms, issued 1.00 ms before",
        "waited for its all-gather",
    ]
    assert hover(all_gather, 0) == [
        "<b>all-gather layers.0</b>, 2.00 ms",
        "<i>brings together the shards of all ranks: now each has the whole parameters</i>",
        "0.00 to 2.00 ms",
        "1.00 MiB bf16 among 2 ranks, 0.524 GB/s",
        "awaited by its forward",
        "train.py:7",
    ]


def stacked(figure: go.Figure, axis: str, at_ms: np.ndarray) -> dict[str, np.ndarray]:
    """The drawn areas at some moments: each keeps its value until its next point."""
    found = {}
    for trace in areas(figure):
        if trace.yaxis == axis:
            found[trace.name] = trace.y[np.searchsorted(trace.x, at_ms.astype(np.float32), side="right") - 1]
    return found


def test_memory_areas_are_the_live_bytes_on_the_same_axis(pair: dict[str, Timeline]) -> None:
    figure = timeline_figure(pair, step=0, memory_rank=2)
    for timeline, axis in zip(pair.values(), ("y2", "y4"), strict=True):
        times_s, live = timeline.live_bytes(2)
        in_step = times_s < timeline.select(step=0).end_s
        moments = np.unique(times_s[in_step])
        last = np.searchsorted(times_s, moments, side="right") - 1
        drawn = stacked(figure, axis, (moments - times_s[0]) * 1e3)
        unit = {"MiB": 2**20, "B": 1}[figure.layout["yaxis" + axis[1:]].ticktext[-1].split()[1]]
        total = np.sum(list(live.values()), axis=0)[last] / unit
        np.testing.assert_allclose(np.sum(list(drawn.values()), axis=0), total, atol=0.002 * total.max())
        for category, n_bytes in live.items():
            if (name := theme.MEMORY[category].name) in drawn:
                np.testing.assert_allclose(drawn[name], n_bytes[last] / unit, rtol=1e-6)
    for trace in areas(figure):
        assert trace.line.shape == "hv"
        assert trace.xaxis in (None, "x")


def test_pointing_at_the_memory_tells_what_is_alive_by_category(training_run: Run) -> None:
    figure = timeline_figure(training_run(), step=1)
    (line,) = (t for t in figure.data if isinstance(t, go.Scatter) and not t.stackgroup)
    np.testing.assert_allclose(line.customdata.sum(axis=1), line.y, rtol=1e-5)
    for column, area in enumerate(areas(figure)):
        assert f"%{{customdata[{column}]:.2f}} {area.name}" in line.hovertemplate


@pytest.mark.parametrize(("times_the_peak", "drawn"), [(0.8, True), (1.2, True), (4.0, False)])
def test_the_limit_of_the_device_is_a_line_where_it_is_near_and_said_in_words(
    training_run: Run, times_the_peak: float, drawn: bool
) -> None:
    run = training_run(ranks=1)
    limit = int(times_the_peak * run.peak_bytes(0))
    header = msgspec.structs.replace(run.header, memory_limit_bytes=limit)
    figure = timeline_figure(Timeline(header, run.events), step=1)
    heading = next(a.text for a in figure.layout.annotations if "live memory" in a.text)
    assert ("more than the" in heading) == (times_the_peak < 1)
    assert human_bytes(limit) in heading
    lines = [shape for shape in figure.layout.shapes if shape.line.color == theme.LIMIT]
    assert len(lines) == drawn
    if drawn:
        unit = 2**20
        assert lines[0].y0 * unit == pytest.approx(limit)
        assert figure.layout.yaxis2.range[1] * unit > limit


def test_all_panels_share_one_time_axis_from_zero_to_the_longest_step(training_run: Run) -> None:
    off, on = training_run(), training_run(prefetch=True)
    figure = timeline_figure({"off": off, "on": on}, step=1)
    assert {trace.xaxis or "x" for trace in figure.data} == {"x"}
    assert tuple(figure.layout.xaxis.range) == pytest.approx((0.0, 132.6 * 1.01))
    assert (figure.layout.xaxis.minallowed, figure.layout.xaxis.maxallowed) == tuple(figure.layout.xaxis.range)
    assert min(base for trace in bars(figure) for base in trace.base) == pytest.approx(0.0)


def test_each_kind_is_once_in_the_legend_with_its_own_colour(pair: dict[str, Timeline]) -> None:
    figure = timeline_figure(pair)
    entries = [t.name for t in figure.data if t.showlegend]
    assert len(entries) == len(set(entries))
    assert set(entries) == {t.name for t in [*bars(figure), *exposed_bars(figure), *areas(figure)]}
    colors = {t.name: t.marker.color for t in figure.data if isinstance(t, go.Bar)}
    assert len(set(colors.values())) == len(colors)
    assert {t.name: t.legendgroup for t in figure.data if t.showlegend} == {name: name for name in entries}


def test_the_first_four_ranks_of_the_median_step_are_drawn(training_run: Run) -> None:
    run = training_run(ranks=6, steps=4)
    late = {"op": Op.OPTIM, "lane": Lane.COMPUTE, "issue_s": 1.5, "start_s": 1.5, "end_s": 1.9}
    slow = [Event(seq=9_000 + rank, rank=rank, step=1, **late) for rank in run.ranks]
    figure = timeline_figure(Timeline(run.header, [*run.events, *slow]))
    assert "<b>predicted</b> · step 3, 133 ms" in [a.text for a in figure.layout.annotations]
    assert any("4 of 6 ranks are drawn" in a.text for a in figure.layout.annotations)
    assert [t for t in figure.layout.yaxis.ticktext if "rank" in t][-1] == "<b>rank 3</b> · compute"


def test_more_operations_than_a_screen_can_show_are_merged_with_their_neighbours_and_the_figure_says_so(
    training_run: Run,
) -> None:
    run = training_run(ranks=1, blocks=600)
    figure = timeline_figure(run, step=1)
    operations = len(run.select(step=1).ops)
    drawn = sum(len(t.x) for t in bars(figure))
    assert drawn <= 2_000 < operations
    (note,) = (a.text for a in figure.layout.annotations if "merged" in a.text)
    assert f"{operations:,} operations are {drawn:,} bars" in note
    merged = [(t, n) for t in bars(figure) for n, row in enumerate(t.customdata) if row[0].endswith(" operations")]
    counts = [int(trace.customdata[n][0].split()[0]) for trace, n in merged]
    assert sum(counts) + drawn - len(merged) == operations
    busy_ms = {(e.lane): 0.0 for e in run.select(step=1).ops}
    for e in run.select(step=1).ops:
        busy_ms[e.lane] += e.duration_s * 1e3
    assert sum(float(np.sum(t.x)) for t in bars(figure)) >= sum(busy_ms.values()) * (1 - 1e-5)
    assert "operations</b>" in "".join(hover(*merged[0]))
    assert "×" in "".join(hover(*merged[0]))


def test_bars_know_what_made_them_begin_and_what_they_waited_for_by_number(tiny: Timeline, training_run: Run) -> None:
    assert timeline_figure(tiny).layout.meta["timeline"] == {"cause": [1, -1], "waits": [[], []], "paths": [[1, 0]]}
    both = timeline_figure({"off": training_run(), "on": training_run(prefetch=True)}).layout.meta["timeline"]
    count = sum(len(t.x) for t in bars(timeline_figure({"off": training_run(), "on": training_run(prefetch=True)})))
    assert len(both["cause"]) == len(both["waits"]) == count
    assert [len(path) > 10 for path in both["paths"]] == [True, True]
    assert max(both["paths"][0]) < min(both["paths"][1])  # of its own panel each


def test_phases_are_bracketed_from_the_start_of_the_step_to_its_end(training_run: Run) -> None:
    figure = timeline_figure(training_run(), step=1)
    assert [a.text for a in figure.layout.annotations if a.xref == "x"] == ["forward", "backward"]
    brackets = [shape for shape in figure.layout.shapes if shape.type == "path"]
    assert [shape.line.color for shape in brackets] == [
        theme.FORWARD.color, theme.BACKWARD.color, theme.OPTIMIZER.color
    ]  # fmt: skip
    ends = [float(shape.path.rsplit("L", 1)[1].split(",")[0]) for shape in brackets]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(132.6, rel=0.01)


def test_micro_batches_are_numbered(training_run: Run) -> None:
    run = training_run(ranks=1)
    second = [
        msgspec.structs.replace(e, seq=e.seq + 5_000, micro_batch=1, issue_s=e.issue_s + 0.5,
                                start_s=e.start_s + 0.5, end_s=e.end_s + 0.5)
        for e in run.select(step=1).ops if e.phase != "optimizer"
    ]  # fmt: skip
    first = [e for e in run.events if e.phase != "optimizer"]
    figure = timeline_figure(Timeline(run.header, [*first, *second]), step=1)
    labels = [a.text for a in figure.layout.annotations if a.xref == "x"]
    assert labels == ["F1", "backward of micro-batch 1", "F2", "backward 2"]


def test_more_than_a_few_ranks_become_bands_unless_ranks_are_asked_for(training_run: Run) -> None:
    run = training_run(ranks=12, clock="measured")
    figure = timeline_figure(run, step=1)
    assert any("A bar is the median of 12 ranks" in a.text for a in figure.layout.annotations)
    assert figure.layout.yaxis.ticktext[0] == "<b>12 ranks</b> · compute"
    asked = timeline_figure(run, step=1, ranks=[0, 11])
    assert asked.layout.yaxis.ticktext[0] == "<b>rank 0</b> · compute"


def test_names_are_shown_and_never_read_as_markup(tiny: Timeline) -> None:
    hostile = Timeline(
        tiny.header, [tiny.ops[1].__class__(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="<b>u", end_s=1.0)]
    )
    figure = timeline_figure({"<i>name": hostile})
    assert "&lt;b&gt;u" in hover(bars(figure)[0], 0)[0]
    assert bars(figure)[0].text == ("&lt;b&gt;u",)
    assert any(a.text.startswith("<b>&lt;i&gt;name</b>") for a in figure.layout.annotations)


def test_a_rank_without_memory_gets_no_strip(tiny: Timeline) -> None:
    figure = timeline_figure(tiny.select(op=(Op.FWD, Op.ALL_GATHER)))
    assert not [t for t in figure.data if isinstance(t, go.Scatter)]
    assert figure.layout.xaxis.anchor == "y"


def test_an_unknown_memory_rank_is_named_with_those_there_are(tiny: Timeline) -> None:
    with pytest.raises(ValueError, match=r"memory_rank 4 is not in timeline 'measured'; it has \[0\]"):
        timeline_figure(tiny, memory_rank=4)
