"""The title is true, nothing overlaps, and every row is high enough for its label."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from fsdp_sim.timeline import Timeline
from fsdp_sim.viz import timeline_figure
from fsdp_sim.viz.steps import layout
from fsdp_sim.viz.steps.step_view import step_views
from fsdp_sim.viz.steps.summary import headline

Run = Callable[..., Timeline]


def test_the_title_is_the_finding(training_run: Run, tiny: Timeline) -> None:
    assert timeline_figure(tiny).layout.title.text.replace("<br>", " ").replace("\u00a0", " ") == headline(
        step_views(tiny)
    )
    views = step_views({"off": training_run(), "on": training_run(prefetch=True)})
    figure = timeline_figure({"off": training_run(), "on": training_run(prefetch=True)})
    assert figure.layout.title.text.replace("<br>", " ").replace("\u00a0", " ") == headline(views)


@pytest.mark.parametrize("panels", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 4])
def test_panels_follow_each_other_from_top_to_bottom_with_room_for_their_headings(
    training_run: Run, panels: int, ranks: int
) -> None:
    figure = timeline_figure({f"run {n}": training_run(ranks=ranks) for n in range(panels)})
    plot_px = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    axes = [figure.layout[f"yaxis{n + 1 if n else ''}"] for n in range(2 * panels)]
    assert all(0 <= axis.domain[0] < axis.domain[1] <= 1 for axis in axes)
    assert (1 - axes[0].domain[1]) * plot_px == pytest.approx(layout.HEADING + layout.PHASES, abs=1)
    for above, below in pairwise(axes):
        assert (above.domain[0] - below.domain[1]) * plot_px >= layout.MEMORY_HEADING - 1
    assert axes[-1].domain[0] == pytest.approx(0)


def test_rows_stay_legible_with_two_timelines_of_four_ranks(training_run: Run) -> None:
    figure = timeline_figure({"predicted": training_run(), "measured": training_run(clock="measured")})
    plot_px = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    for axis in (figure.layout.yaxis, figure.layout.yaxis3):
        assert len(axis.tickvals) == 4 * 3
        row_px = (axis.domain[1] - axis.domain[0]) * plot_px / axis.range[0]
        assert row_px >= layout.LANE_MIN - 0.1


def test_the_figure_has_no_width_and_lets_only_time_be_zoomed(training_run: Run) -> None:
    figure = timeline_figure(training_run())
    assert figure.layout.width is None
    assert figure.layout.yaxis.fixedrange
    assert figure.layout.yaxis2.fixedrange
    assert not figure.layout.xaxis.fixedrange


def test_long_lane_labels_get_the_room_they_need(training_run: Run) -> None:
    short, long = timeline_figure(training_run(ranks=2)), timeline_figure(training_run(ranks=12, clock="measured"))
    assert short.layout.margin.l == layout.LEFT < long.layout.margin.l


def test_lines_of_a_title_are_about_as_long_as_each_other_and_keep_numbers_and_units_together() -> None:
    text = "Rank 717 keeps 1,023 ranks waiting: it computes 1,724 ms, their median 1,488 ms."
    first, second = layout._wrapped(text, 78)
    assert abs(len(first) - len(second)) < 20
    assert "1,724\u00a0ms" in first + second
    assert layout._wrapped("Short.", 78) == ["Short."]
