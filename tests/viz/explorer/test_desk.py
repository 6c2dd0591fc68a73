"""The controls are moved as a reader would, and the figure, the words and the state are looked at."""

from typing import Any

import numpy as np
import pytest

from fsdp_sim import Cluster, Model, Plan
from fsdp_sim.forms import FormState
from fsdp_sim.timeline import Event
from fsdp_sim.viz.explorer import Explorer, explorer
from fsdp_sim.viz.explorer.scene import Scene
from fsdp_sim.viz.explorer.starts import GOALS, PRESETS
from fsdp_sim.viz.theme import KINDS
from fsdp_sim.words import human_ms

STATE = "model=gpt2-124m gpu=A100 gpus=16 micro_batch=4"


@pytest.fixture
def made() -> Explorer:
    return explorer(state=STATE)


def trace_of(made: Explorer, name: str, axis: str | None = None) -> Any:
    """A trace of the figure as it is now."""
    return next(t for t in made.canvas.figure.data if t.name == name and axis in (None, t.yaxis))


def bars(made: Explorer, name: str) -> np.ndarray:
    """Where the bars of a kind begin and how long they are."""
    trace = trace_of(made, name)
    return np.array([trace.base, trace.x])


def events(seen: Scene, name: str) -> list[Event]:
    """The operations that a scene draws as a kind."""
    return [e for row in seen.rows if KINDS[(e := seen.timeline.events[row]).op].name == name]


def test_it_begins_where_it_is_told() -> None:
    plan = Plan(forward_prefetch=3, param_dtype="bf16")
    made = explorer("gpt2-350m", Cluster("H100", gpus=16), plan)
    assert (made.shown.sim.plan, made.shown.sim.cluster) == (plan, Cluster("H100", gpus=16))
    assert made.controls.widgets["model"].value == "gpt2-350m"
    assert made.controls.widgets["forward_prefetch:fsdp2"].value == "3"
    assert explorer(state=made.state.line).shown.sim.step_time_s == made.shown.sim.step_time_s


def test_what_a_state_leaves_out_is_shown_as_its_default(made: Explorer) -> None:
    shown = {key: widget.label for key, widget in made.controls.widgets.items() if hasattr(widget, "label")}
    assert (shown["micro_batch"], shown["seq_len"]) == ("4 sequences", "1024 tokens")
    assert "None" not in shown.values()


def test_an_impossible_beginning_is_an_error() -> None:
    with pytest.raises(ValueError, match="take 8 or 16"):
        explorer(state="model=gpt2-124m gpu=H100 gpus=12")


def test_a_move_of_a_slider_moves_the_bars_the_words_and_the_state(made: Explorer) -> None:
    before, words = bars(made, "all-gather"), made.words.value
    made.controls.widgets["bandwidth_gbps"].value = "10"
    after = bars(made, "all-gather")
    assert after[1].sum() > 2 * before[1].sum()
    assert made.words.value != words
    line = (
        "model=gpt2-124m gpu=A100 gpus=16 bandwidth_gbps=10 param_dtype=bf16 reduce_dtype=fp32 micro_batch=4 "
        "seq_len=1024"
    )
    assert made.line.value == made.state.line == line
    assert len(made.shown.seen.bars) == len(made.shown.sim.run.ops)


def test_every_control_can_be_moved_to_every_option(made: Explorer) -> None:
    for api in ("", "fsdp1", "ddp"):
        made.controls.widgets["api"].value = api
        for key, widget in made.controls.widgets.items():
            if widget.layout.display == "none" or key in ("api", "model", "gpu"):
                continue
            was = widget.value
            options = [value for _, value in widget.options] if hasattr(widget, "options") else [True, False]
            for option in options[:: max(len(options) // 3, 1)]:
                if key == "gpus" and int(option) > 64:
                    continue
                widget.value = option
                assert made.message or made.shown.state.line == made.state.line, (api, key, option)
            widget.value = was
            assert not made.message, (api, key, made.message)


def test_what_is_impossible_is_said_and_the_last_good_figure_stays_faded(made: Explorer) -> None:
    good, line = bars(made, "forward"), made.shown.state.line
    made.controls.widgets["shard_size"].value = "64"
    assert "Plan.shard_size is 64, which does not divide the 16 GPUs" in made.message
    assert "take a divisor, for example 16" in made.numbers.value
    assert line in made.numbers.value
    assert "fsdp-stale" in made.figure_box._dom_classes
    assert (bars(made, "forward") == good).all()
    made.controls.widgets["shard_size"].value = "8"
    assert made.message == ""
    assert "fsdp-stale" not in made.figure_box._dom_classes
    assert "all_reduce" in [str(lane) for lane in made.shown.seen.lanes]


def test_another_api_leaves_out_what_it_does_not_have_and_shows_its_own_controls(made: Explorer) -> None:
    made.controls.widgets["forward_prefetch:fsdp2"].value = "2"
    made.controls.widgets["api"].value = "fsdp1"
    assert made.message == ""
    assert made.controls.widgets["limit_all_gathers"].layout.display is None
    assert made.controls.widgets["forward_prefetch:fsdp2"].layout.display == "none"
    made.controls.widgets["forward_prefetch:fsdp1"].value = True
    assert made.shown.sim.plan.forward_prefetch is True
    made.controls.widgets["api"].value = ""
    assert made.shown.sim.plan.forward_prefetch == 2  # as it was left


def test_a_state_is_pasted_with_values_that_no_slider_offers(made: Explorer) -> None:
    made.line.value = "model=gpt2-124m gpu=A100 gpus=24 micro_batch=5 bandwidth_gbps=33.5 wrap=root"
    assert made.message == ""
    assert made.controls.widgets["gpus"].value == "24"
    made.controls.widgets["micro_batch"].value = "2"
    assert (made.shown.sim.plan.wrap, made.shown.sim.cluster.bandwidth_gbps) == ("root", 33.5)


def test_a_state_that_cannot_be_read_is_said_and_changes_nothing(made: Explorer) -> None:
    before = made.shown
    made.line.value = "modle=gpt2-124m"
    assert "did you mean model?" in made.numbers.value
    assert made.shown is before
    made.line.value = STATE
    assert made.message == ""


def test_text_of_a_reader_is_shown_as_text(made: Explorer) -> None:
    made.line.value = "model=<img/src=x> gpu=H100 gpus=8"
    assert "<img" not in made.numbers.value
    evil = Model("<img src=x>", n_layer=2, d_model=64, n_head=4, d_ffn=128, vocab=100)
    other = explorer(evil)
    other.pin()
    shown = other.words.value + other.about.value + other.numbers.value + str(other.canvas.figure.layout.annotations)
    assert "<img" not in shown


def test_an_operation_lights_up_with_what_it_waits_for_and_what_waits_for_it(made: Explorer) -> None:
    made.select(next(e.seq for e in events(made.shown.seen, "forward") if e.unit == "layers.3"))
    forward = trace_of(made, "forward")
    assert [forward.hovertext[at] for at in forward.selectedpoints] == ["forward layers.3"]
    assert "all-gather copy-out layers.3" in made.about.value
    assert trace_of(made, "dependencies").visible
    made.controls.widgets["bandwidth_gbps"].value = "10"  # the choice stays on the same operation
    assert "Forward layers.3" in made.about.value
    made.operation.value = 0
    assert trace_of(made, "forward").selectedpoints is None


def test_a_click_on_a_bar_selects_its_operation(made: Explorer) -> None:
    third = events(made.shown.seen, "reduce-scatter")[2]
    place = [trace.name for trace in made.canvas.figure.data].index("reduce-scatter")
    made.canvas.view._handle_custom_msg({"clicked": [place, third.start_s * 1e3]}, [])  # as the browser sends it
    assert made.about.value.count(f"Reduce-scatter {third.unit} runs") == 1


def test_copies_shorter_than_a_pixel_are_left_out_until_one_zooms_in(made: Explorer) -> None:
    count = len(events(made.shown.seen, "copy in or out"))
    assert len(trace_of(made, "copy in or out").x) < count
    made.canvas.zoom(0.0, made.shown.seen.span_ms / 1000)
    assert len(trace_of(made, "copy in or out").x) == count


def test_a_move_sends_the_numbers_of_every_trace_and_a_new_kind_of_trace_a_new_figure(made: Explorer) -> None:
    drawn = made.canvas.view.figure
    made.controls.widgets["micro_batch"].value = "8"
    moved = made.canvas.view.moved
    assert made.canvas.view.figure is drawn
    for sent, trace in zip(moved["traces"], made.canvas.figure.data, strict=True):
        if "x" in sent:
            np.testing.assert_allclose(np.frombuffer(sent["x"]["bytes"], "f4"), np.array(trace.x, dtype="f4"))
    assert moved["layout"]["xaxis.range"] == list(made.canvas.figure.layout.xaxis.range)
    made.controls.widgets["activation_checkpointing"].value = "full"  # now something is computed again
    assert made.canvas.view.figure is not drawn
    assert "recompute" in [trace["name"] for trace in made.canvas.view.figure["data"]]


def test_buttons_step_through_the_operations_in_the_order_of_issue(made: Explorer) -> None:
    made.next.click()
    assert made.operation.value == 1
    made.next.click()
    assert made.operation.value == 2
    made.previous.click()
    made.previous.click()
    assert made.operation.value == made.operation.max == len(made.shown.sim.run.ops)


def test_a_pinned_plan_stays_beside_what_comes_next(made: Explorer) -> None:
    made.pin_button.click()
    step = made.shown.sim.step_time_s
    made.controls.widgets["micro_batch"].value = "8"
    above = trace_of(made, "forward", "y3")
    lengths_ms = [e.duration_s * 1e3 for e in events(made.pinned.seen, "forward")]
    assert np.array(above.x) == pytest.approx(np.array(lengths_ms), rel=1e-6)
    assert f"A: {human_ms(step)}, +" in made.numbers.value
    assert made.pinned.sim.step_time_s == step
    made.back.click()
    assert made.shown.sim.step_time_s == step
    made.unpin_button.click()
    assert made.pinned is None
    assert "A: " not in made.numbers.value
    assert not [t for t in made.canvas.figure.data if t.yaxis == "y3"]


def test_a_plan_that_does_not_fit_is_said_to(made: Explorer) -> None:
    made.line.value = "model=llama3-70b gpu=A100-SXM-40GB gpus=8 seq_len=4096"
    assert "does not fit" in made.words.value
    assert made.message == ""


def test_it_is_dark_where_it_is_told_to_be() -> None:
    made = explorer(state=STATE, dark=True)
    assert made.canvas.figure.layout.template.layout.paper_bgcolor == "#111418"
    made.dark.value = False
    assert made.canvas.figure.layout.template.layout.paper_bgcolor == "#FFFFFF"


def test_the_axis_of_time_stays_while_the_step_fills_half_of_it(made: Explorer) -> None:
    end = made.canvas.figure.layout.xaxis.range
    made.controls.widgets["forward_prefetch:fsdp2"].value = "1"
    assert made.canvas.figure.layout.xaxis.range == end
    made.controls.widgets["micro_batch"].value = "16"
    assert made.canvas.figure.layout.xaxis.range[1] > made.shown.seen.span_ms > end[1]


def test_a_zoom_draws_the_memory_of_the_part_in_view(made: Explorer) -> None:
    span = made.shown.seen.span_ms
    made.canvas.view._handle_custom_msg({"window": [0.4 * span, 0.5 * span]}, [])
    area = trace_of(made, "activations")
    assert min(area.x) == pytest.approx(0.4 * span, abs=1e-3)
    assert max(area.x) <= 0.5 * span + 1e-3


@pytest.mark.parametrize("name", PRESETS)
def test_each_plan_to_start_from_fits(name: str, made: Explorer) -> None:
    made.start.value = PRESETS[name]
    assert made.message == ""
    assert made.shown.state.model == FormState.read(PRESETS[name]).model
    assert made.shown.sim.fits


WAYS = {  # what reaches each goal from its start
    "Llama-3-8B on 8 H100: 45% MFU in 40 GiB": "activation_checkpointing=selective compile=true",
    "Llama-3-8B on two A100 of 40 GB: 30% MFU": "activation_checkpointing=full cpu_offload=true micro_batch=2",
    "GPT-2 124M on two nodes, 10 Gbit/s per GPU: hide the wire": "shard_size=8 micro_batch=32",
    "Llama-3-70B over Ethernet: 11% MFU, and it fits": "reshard_after_forward=8",
    "Llama-3-70B on 512 H100: 40% MFU in 36 GiB": "shard_size=128 compile=true",
}


@pytest.mark.parametrize("name", GOALS)
def test_each_goal_is_missed_at_its_start_and_can_be_reached(name: str, made: Explorer) -> None:
    made.goal.value = name
    assert "✗" in made.numbers.value
    way = FormState.read(WAYS[name]).texts
    made.go(made.shown.state.with_texts(way).line)
    assert "✗" not in made.numbers.value
    made.goal.value = ""
    assert "goal" not in made.numbers.value


def test_a_goal_is_not_reached_on_another_machine(made: Explorer) -> None:
    made.goal.value = "Llama-3-70B on 512 H100: 40% MFU in 36 GiB"
    made.go(made.shown.state.with_texts(FormState.read("shard_size=128 compile=true gpus=1024").texts).line)
    (missed,) = [text for text, holds in GOALS[made.goal.value].conditions(made.state, made.shown.sim) if not holds]
    assert missed == "the model, machine and sequence are those given"
