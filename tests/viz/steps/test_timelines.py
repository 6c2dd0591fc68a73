"""`timeline` makes a picture: the figure, a sentence for each timeline that states the finding, a table of numbers."""

from collections.abc import Callable

import pytest

from fsdp_sim.timeline import Timeline
from fsdp_sim.viz import Picture, describe, show, timeline, timeline_figure

Run = Callable[..., Timeline]


def test_a_picture_has_the_figure_the_finding_and_the_numbers(training_run: Run) -> None:
    run = training_run()
    picture = timeline(run, ranks=[0], step=1)
    assert isinstance(picture, Picture)
    assert picture.figure.to_json() == timeline_figure(run, ranks=[0], step=1).to_json()
    assert picture.finding == describe(run, step=1)
    assert [row[1] for row in picture.tables[0].rows] == ["0"]


def test_several_timelines_get_a_paragraph_each(training_run: Run) -> None:
    picture = timeline({"off": training_run(), "on": training_run(prefetch=True)})
    off, on = picture.finding.split("\n\n")
    assert off.startswith("off: The ")
    assert on.startswith("on: The ")
    assert len(picture.tables) == 1


def test_many_ranks_beside_few_get_a_table_each(training_run: Run) -> None:
    picture = timeline({"few": training_run(ranks=2), "many": training_run(ranks=12, clock="measured")}, step=1)
    assert [table.caption for table in picture.tables] == [
        "Where the time of one training step goes",
        "How 12 ranks differ",
    ]
    assert "many: Rank 11 keeps 11 ranks waiting" in picture.finding


def test_a_picture_takes_no_more_options(tiny: Timeline) -> None:
    with pytest.raises(ValueError, match="a Picture is shown as it is; give ranks to the function that makes it"):
        show(timeline(tiny), ranks=[0])


@pytest.mark.parametrize("bars", [300, 1_000])
def test_a_figure_stays_small_enough_for_several_in_a_notebook(training_run: Run, bars: int) -> None:
    run = training_run(ranks=1, blocks=bars // 6)
    assert len(run.select(step=1).ops) == pytest.approx(bars, rel=0.1)
    assert len(timeline_figure(run, step=1).to_json()) < 320 * bars + 20_000
