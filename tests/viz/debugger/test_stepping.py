"""Stepping: forwards and backwards, along a unit and a lane, to another rank; buttons, slider and calls agree."""

from typing import Any

import pytest

from fsdp_sim.timeline import Lane, Op, Phase, Timeline
from fsdp_sim.viz.debugger import Debugger, debugger
from tests.timeline.strategies import gather, op, timeline_of


def buttons(at: Debugger) -> dict[str, Any]:
    return {b.description: b for b in at.widget().children[1].children if hasattr(b, "click")}


def slider(at: Debugger) -> Any:
    return at.widget().children[2]


def shown(at: Debugger) -> str:
    return at.widget().children[3].value


def test_forwards_and_backwards(run: Timeline) -> None:
    at = debugger(run, rank=1)
    seqs = [at.first().event.seq, *(at.forward().event.seq for _ in range(4))]
    assert seqs == [0, 1, 2, 3, 4]
    assert [at.back().event.seq for _ in range(6)] == [3, 2, 1, 0, 0, 0], "it stays at the first"
    assert at.last() == at.forward() == at.forward(100), "and at the last"
    assert at.rank == 1


def test_one_step_of_a_run(run: Timeline) -> None:
    at = debugger(run, step=1)
    assert {e.step for e in at.events} == {1}
    assert at.first().live_bytes > 0, "with what earlier steps left in memory"
    assert at.last().event == at.events[-1]


def test_along_a_unit_a_lane_and_to_another_rank(run: Timeline) -> None:
    at = debugger(run)
    here = at.find("all-gather layers.0").event
    assert (here.op, here.unit, here.phase) == (Op.ALL_GATHER, "layers.0", Phase.FORWARD)
    assert at.same_on(1).event.rank == 1
    assert at.rank == 1
    assert at.same_on(0).event == here
    assert at.next_on_lane().event.label == "ALL_GATHER(layers.1)"
    assert at.next_of_unit().event.unit == "layers.1"


def test_find_goes_round_and_takes_a_number(run: Timeline) -> None:
    at = debugger(run)
    first = at.find("reduce-scatter layers.1").event
    again = at.find("Reduce-Scatter LAYERS.1").event
    assert (first.op, first.step, again.step) == (Op.REDUCE_SCATTER, 0, 1)
    assert at.find("reduce-scatter layers.1").event == first
    assert at.find("17").event.seq == 17
    assert at.find("free layers.1").event.op is Op.FREE
    here = at.moment
    assert at.find("nothing like it") == at.find("99999") == at.find("  ") == here


def test_where_there_is_nowhere_to_go_it_stays() -> None:
    at = debugger(timeline_of(gather(0, 1, unit="a"), op(0, 1, rank=1)))
    here = at.moment
    assert at.next_of_unit() == at.next_on_lane() == at.same_on(1) == here


def test_a_simulation_or_results_will_do(predicted: Timeline) -> None:
    class Results(list):
        timeline = predicted

    assert debugger(Results()).timeline is predicted


def test_wrong_arguments_are_named(run: Timeline) -> None:
    with pytest.raises(TypeError, match="not a str; read_timeline reads one from a file"):
        debugger("run.jsonl")
    with pytest.raises(ValueError, match="no rank 7; its ranks are 0, 1"):
        debugger(run, rank=7)
    with pytest.raises(ValueError, match="no events in step 9; the timeline's steps are 0, 1"):
        debugger(run, step=9)
    with pytest.raises(ValueError, match="no events to step through"):
        debugger(timeline_of())
    at = debugger(run)
    with pytest.raises(ValueError, match="no rank 2"):
        at.same_on(2)
    with pytest.raises(ValueError, match="no event 12345 on this rank; its events are numbered 0 to"):
        at.go(12345)


# ---------------------------------------------------------------------- the widget


def test_the_slider_and_the_buttons_step(run: Timeline) -> None:
    at = debugger(run)
    assert slider(at).value == at.position
    before = shown(at)
    slider(at).value += 1
    assert at.moment.event.label == "ALL_GATHER(root)"
    assert shown(at) != before
    buttons(at)["Back"].click()
    assert (shown(at), slider(at).value) == (before, at.position)
    buttons(at)["Last"].click()
    assert slider(at).value == slider(at).max == len(at.events) - 1
    buttons(at)["First"].click()
    assert slider(at).value == 0


def test_calls_move_the_widget(run: Timeline) -> None:
    at = debugger(run)
    at.widget()
    at.find("reduce-scatter layers.2")
    assert slider(at).value == at.position
    assert "<h3>" in shown(at)
    assert "Reduce-scatter of layers.2" in shown(at)


def test_buttons_say_where_they_go_and_are_off_where_there_is_nothing(run: Timeline) -> None:
    at = debugger(run)
    at.find("all-gather layers.1")
    assert {"Next of layers.1", "Next on all-gather", "Same on rank 1"} <= set(buttons(at))
    buttons(at)["Next on all-gather"].click()
    assert at.moment.event.lane is Lane.ALL_GATHER
    buttons(at)["Same on rank 1"].click()
    assert at.rank == 1
    assert "Same on rank 0" in buttons(at)
    at.last()
    assert all(b.disabled for name, b in buttons(at).items() if name.startswith(("Next on", "Next of")))


def test_choosing_a_rank_goes_to_the_same_event_there(run: Timeline) -> None:
    at = debugger(run)
    here = at.find("forward layers.2").event
    chooser = at.widget().children[1].children[7]
    chooser.value = 1
    there = at.moment.event
    assert (there.rank, there.label, there.step) == (1, here.label, here.step)
    assert slider(at).value == at.position


def test_choosing_a_rank_without_the_event_goes_to_the_same_time() -> None:
    at = debugger(timeline_of(gather(5, 6), op(0, 1, rank=1, seq=1), op(4, 9, rank=1, seq=2), op(9, 10, rank=1, seq=3)))
    at.widget().children[1].children[7].value = 1
    assert at.moment.event.seq == 2


def test_ranks_with_fewer_events_keep_the_slider_in_range() -> None:
    at = debugger(timeline_of(*(op(i, i + 1, seq=i, unit=f"u{i}") for i in range(9)), op(0, 1, rank=1, seq=1)))
    at.last()
    at.go(1, rank=1)
    at.widget()
    assert (slider(at).value, slider(at).disabled) == (0, True)
    at.go(8, rank=0)
    assert (slider(at).value, slider(at).max, slider(at).disabled) == (8, 8, False)


# ---------------------------------------------------------------------- in a notebook


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda what, **_: found.append(what))
    monkeypatch.delenv("FSDP_SIM_PNG", raising=False)
    return found


def test_a_notebook_gets_the_widget_and_below_it_what_can_be_read_without_a_kernel(
    run: Timeline, displayed: list[Any]
) -> None:
    at = debugger(run)
    at._ipython_display_()
    widget, bundle = displayed
    assert widget["application/vnd.jupyter.widget-view+json"]["model_id"] == at.widget().model_id
    assert widget["text/plain"].startswith("Run this cell to step"), "what is shown where the kernel is gone"
    assert "<details>" in bundle["text/html"]
    assert bundle["text/plain"].startswith("Rank 0, event 5 of")


def test_a_notebook_that_is_being_saved_gets_no_widget(
    run: Timeline, displayed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_SIM_PNG", "1")
    debugger(run).show()
    (bundle,) = displayed
    assert "<details>" not in bundle["text/html"]
    assert "The most memory alive" in bundle["text/html"]
