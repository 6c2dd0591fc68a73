"""The panes say what the moment holds, mark where one is, and escape what they are given."""

import re

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.timeline import Memory, Op, Phase, Timeline
from fsdp_sim.viz.debugger import moment
from fsdp_sim.viz.debugger.moments import events_of
from fsdp_sim.viz.debugger.panes import events, memory, others, panes, source, waits
from fsdp_sim.viz.debugger.strip import MOST_BARS, lanes_of, strip
from tests.timeline.strategies import gather, op, timeline_of, timelines


def text(html: str) -> str:
    """What a reader sees."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def marked(html: str) -> str:
    (found,) = re.findall(r'<tr class="fsd-here" aria-current="true">.*?</tr>', html)
    return text(found)


def of_run(run: Timeline, op: Op, unit: str, phase: Phase) -> int:
    return run.select(rank=0, op=op, unit=unit, phase=phase).events[0].seq


@given(timelines())
def test_any_timeline_can_be_shown(timeline: Timeline) -> None:
    for rank in timeline.ranks:
        for event in events_of(timeline, rank):
            html = panes(moment(timeline, rank, event.seq), timeline)
            assert html.count('aria-current="true"') >= 1
            assert html.count("<section") == html.count("</section>") == 5


@given(st.sampled_from(["unit", "source", "stack", "dtype"]), st.sampled_from(["<img src=x onerror=alert(1)>", '"&']))
def test_nothing_in_a_record_is_taken_for_html(field: str, evil: str) -> None:
    value = (f"{evil}:3",) if field == "stack" else f"{evil}:3" if field == "source" else evil
    here = msgspec.structs.replace(gather(0, 1, group_size=2, unit="a"), **{field: value})
    there = msgspec.structs.replace(here, rank=1, issue_s=0.5)
    timeline = timeline_of(here, op(0, 0, Op.ALLOC, unit=evil, bytes=3, category=Memory.LOGITS, seq=1), there)
    for seq in (0, 1):
        html = panes(moment(timeline, 0, seq), timeline)
        assert "<img" not in html
        assert 'a"&' not in html


def test_the_current_event_is_the_marked_one_and_stays_in_the_list(run: Timeline) -> None:
    mine = events_of(run, 0)
    for event in (mine[0], mine[1], mine[40], mine[-2], mine[-1]):
        html = events(moment(run, 0, event.seq))
        assert marked(html).split()[0] == str(event.seq)
        assert html.count("<tr") == 21, "the list is as long at the ends"


def test_the_source_shows_the_learners_line_and_the_minis(run: Timeline) -> None:
    at = moment(run, 0, of_run(run, Op.ALL_GATHER, "layers.1", Phase.FORWARD))
    shown = source(at, run)
    assert re.findall(r'aria-current="true"><i>▶ +(\d+)</i>', shown)[0] == "16"
    assert "Your line training.py:16, in Net.forward" in text(shown)
    assert "The line of the mini-FSDP that issues it fsdp_sim/mini/collectives.py" in text(shown)
    through = "train → forward → _pre_forward → _unshard_in_forward → pre_forward → without_functorch → unshard"
    assert f"Through {through} → foreach_all_gather" in text(shown)


def test_backward_says_it_came_through_prefetch(run: Timeline) -> None:
    at = moment(run, 0, of_run(run, Op.ALL_GATHER, "layers.1", Phase.BACKWARD))
    assert "→ backward_prefetch → prefetch_unshard →" in text(source(at, run))
    assert "loss.backward()" in text(source(at, run))


def test_a_prediction_has_no_line_and_says_so(predicted: Timeline) -> None:
    assert "A predicted operation has no line" in text(source(moment(predicted, 0, 50), predicted))


def test_a_hook_on_autograds_own_thread_says_that_the_learners_line_is_not_known() -> None:
    timeline = timeline_of(gather(0, 1, source="fsdp_sim/mini/collectives.py:99"))
    assert "Not known: autograd ran this hook on a thread of its own" in text(source(moment(timeline, 0, 0), timeline))


def test_a_file_that_is_gone_is_named(run: Timeline) -> None:
    timeline = timeline_of(op(0, 1, source="/gone/train.py:7"))
    shown = text(source(moment(timeline, 0, 0), timeline))
    assert "Your line train.py:7" in shown
    assert "recorded on another machine" in shown
    assert "/gone" not in shown, "a machine's folders are nobody's business"


def test_memory_names_units_and_the_change(run: Timeline) -> None:
    seq = run.select(rank=0, op=Op.ALLOC, category=Memory.RS_INPUT, unit="layers.1", step=0).events[0].seq
    shown = text(memory(moment(run, 0, seq), run))
    assert re.search(r"reduce-scatter buffer layers\.1 288 B 288 B \+288 B", shown)
    assert "at the peak" in shown


def test_a_record_without_memory_says_so_and_a_device_has_its_limit(predicted: Timeline) -> None:
    assert "no memory events" in memory(moment(timeline_of(op(0, 1)), 0, 0), timeline_of(op(0, 1)))
    assert "The device can hold" in memory(moment(predicted, 0, 0), predicted)


def test_waits_names_both_sides_and_who_came_last(run: Timeline) -> None:
    shown = text(waits(moment(run, 0, of_run(run, Op.ALL_GATHER, "layers.1", Phase.FORWARD))))
    before, after = shown.split("What waits for it")
    assert "all-gather copy-in of layers.1" in before
    assert re.search(r"Rank [01] came to it last, [\d.,]+ ms after rank [01]\.", before)
    assert "all-gather copy-out of layers.1" in after


def test_other_ranks_say_what_they_do_and_when_they_come_here() -> None:
    timeline = timeline_of(
        gather(1.0, 2.0), op(0.5, 4.0, unit="b", rank=1), gather(4.0, 5.0, rank=1, seq=1), op(9.0, 9.5, rank=2)
    )
    assert text(others(moment(timeline, 0, 0))).endswith(" 1 forward of b 3,000 ms later 2 has not begun never ")
    assert "one rank" in others(moment(timeline_of(op(0, 1)), 0, 0))


def test_the_strip_outlines_the_event_and_what_it_waits_for_and_veils_what_is_to_come() -> None:
    timeline = timeline_of(gather(0, 1), op(1, 2, waits_on=(0,)), op(2, 4))
    for seq, x in ((0, "0.00%"), (1, "25.00%"), (2, "50.00%")):
        html = strip(moment(timeline, 0, seq), timeline)
        assert re.findall(r'<rect class="fsd-now" x="([^"]*)"', html) == [x]
    waited = strip(moment(timeline, 0, 1), timeline)
    assert re.findall(r'<rect class="fsd-waited" x="([^"]*)"', waited) == ["0.00%"]
    assert re.findall(r'<rect class="fsd-veil" x="([^"]*)"', waited) == ["50.00%"], "of compute: all-gather is over"
    assert "fsd-veil" not in strip(moment(timeline, 0, 2), timeline)


def test_bars_that_a_page_has_already_are_not_drawn_again(run: Timeline) -> None:
    at = moment(run, 0, 50)
    shared = strip(at, run, drawn_as="bars-0")
    assert '<use href="#bars-0"/>' in shared
    assert len(shared) < len(strip(at, run)) / 4
    lanes = lanes_of(at, run)
    assert lanes is not None
    assert lanes.bars in strip(at, run)


def test_other_ranks_have_a_row_of_their_own(run: Timeline) -> None:
    html = strip(moment(run, 0, 50), run)
    assert html.index("<span>compute</span>") < html.index("<span>rank 1</span>")
    assert html.count("<title>all-gather of layers.1</title>") == 4, "in forward and in backward, on both ranks"


def test_the_strip_of_a_long_step_keeps_the_longest_bars() -> None:
    many = [op(i, i + (0.9 if i == 700 else 0.1), unit=f"u{i}", seq=i) for i in range(1500)]
    html = strip(moment(timeline_of(*many), 0, 0), timeline_of(*many))
    assert html.count("<title>") == MOST_BARS
    assert "forward of u700<" in html


def test_a_step_without_operations_has_no_strip() -> None:
    timeline = timeline_of(op(0, 0, Op.ALLOC, bytes=3))
    assert strip(moment(timeline, 0, 0), timeline) == ""
