"""The numbers, the sentence and the table agree with the timeline."""

from collections.abc import Callable
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.timeline import Event, Header, Lane, Memory, Op, Timeline
from fsdp_sim.viz import describe, summary_table
from fsdp_sim.viz.steps.step_view import step_views
from fsdp_sim.viz.steps.summary import headline, memory_sentence
from tests.timeline.strategies import gather, op, timeline_of

Run = Callable[..., Timeline]


def test_the_sentence_tells_time_exposure_and_memory(tiny: Timeline) -> None:
    assert describe(tiny) == (
        "The all-gather of layers.0 is exposed for 2.00 ms, and nothing else. Step 0 on 1 rank "
        "takes 5.00 ms; 2.00 ms of it (40.0%) is exposed communication, during which nothing computes; 0% of the "
        "communication is hidden behind computing; live memory of rank 0: peak 1.00 MiB."
    )


def test_the_finding_names_the_longest_wait_and_the_rank_it_was_on(training_run: Run) -> None:
    run = training_run(clock="measured")
    slow = Timeline(run.header, [
        msgspec.structs.replace(e, start_s=e.start_s - 0.002)
        if e.rank == 3 and e.step == 1 and e.label == "ALL_GATHER(embed)" and e.phase == "forward" else e
        for e in run.events
    ])  # fmt: skip
    assert headline(step_views(slow, step=1)) == (
        "The all-gather of embed is exposed for 5.00 ms on rank 3, the longest of 18 (56.0 ms together)."
    )


def test_exposed_communication_that_hardly_matters_is_not_made_the_story(training_run: Run) -> None:
    run = training_run(ranks=1)
    long = Event(seq=9_000, rank=0, step=1, op=Op.OPTIM, lane=Lane.COMPUTE, issue_s=1.2, start_s=1.2, end_s=9.0)
    (view,) = step_views(Timeline(run.header, [*run.events, long]), step=1)
    assert headline([view]) == "The step communicates next to nothing: 54.0 ms (0.7%), of which 54.0 ms exposed."
    hidden = Event(seq=9_000, rank=0, step=1, op=Op.OPTIM, lane=Lane.COMPUTE, issue_s=0.9, start_s=0.9, end_s=9.0)
    (view,) = step_views(Timeline(run.header, [*run.events, hidden]), step=1)
    assert headline([view]) == "All communication is hidden behind computing."


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["compute", "wire"]), st.integers(0, 400), st.integers(1, 100)), min_size=1))
def test_what_the_headline_claims_is_what_the_numbers_say(some: list[tuple[str, int, int]]) -> None:
    kinds = {"compute": op, "wire": gather}
    (view,) = step_views(timeline_of(*(kinds[kind](at / 10, (at + length) / 10) for kind, at, length in some)))
    comm_s, exposed_s, said = view.mean_comm_s, view.mean_exposed_s, headline([view])
    if "communicates nothing" in said:
        assert comm_s == 0
    elif "next to nothing" in said:
        assert 0 < comm_s <= 0.02 * view.step_s
    elif said.startswith("All communication is hidden"):
        assert comm_s > 0
        assert exposed_s == pytest.approx(0)
    elif "hidden" in said:
        assert 0 < exposed_s <= 0.1 * comm_s + 1e-9
    else:
        assert exposed_s > 0


def test_several_timelines_are_compared_in_the_headline(training_run: Run) -> None:
    views = step_views({"off": training_run(), "on": training_run(prefetch=True)})
    assert headline(views) == (
        "Off: 133 ms a step, 54.0 ms exposed communication; on: 87.6 ms a step, 9.00 ms exposed communication."
    )


def test_the_peak_is_counted_in_issue_order_and_set_against_the_limit(training_run: Run) -> None:
    simulated = simulate("gpt2-124m", Cluster("H100-SXM-80GB", gpus=8), Plan(micro_batch=8, param_dtype="bf16"))
    (view,) = step_views(simulated.timeline)
    assert view.peak_bytes(0) == simulated.timeline.peak_bytes(0) == simulated.peak_memory_bytes
    assert memory_sentence(view, 0).endswith("of the 78.5 GiB there are")
    small = Header(producer="t", clock="simulated", world_size=1, memory_limit_bytes=2**20)
    (view,) = step_views(Timeline(small, training_run(ranks=1).events))
    assert "more than the 1.00 MiB there are" in memory_sentence(view, 0)


def test_what_is_alive_when_a_step_begins_counts_for_its_peak(tiny: Timeline) -> None:
    first, gather, forward, last = tiny.events
    later = [msgspec.structs.replace(e, seq=e.seq + 10, step=1, start_s=e.start_s + 1, end_s=e.end_s + 1)
             for e in (gather, forward)]  # fmt: skip
    freed = msgspec.structs.replace(last, seq=9, step=1, start_s=11.0, end_s=11.0)
    (view,) = step_views(Timeline(tiny.header, [first, gather, forward, freed, *later]), step=1)
    assert view.peak_bytes(0) == 2**20


def test_one_rank_recorded_of_many_is_said() -> None:
    simulated = simulate("gpt2-124m", Cluster("H100-SXM-80GB", gpus=8), Plan(micro_batch=8, param_dtype="bf16"))
    assert "Step 0 on 8 ranks (one of them recorded) takes" in describe(simulated.timeline)


def test_the_sentence_of_a_timeline_without_communication_says_so(tiny: Timeline) -> None:
    assert describe(tiny.select(op=Op.FWD)) == ("The step communicates nothing. Step 0 on 1 rank takes 3.00 ms.")


def test_means_are_over_all_ranks_whichever_are_drawn(training_run: Run) -> None:
    run = training_run(clock="measured")
    (some,), (every,) = step_views(run, ranks=[3]), step_views(run)
    assert some.ranks == (3,)
    assert (some.mean_exposed_s, some.mean_overlap, some.step_s) == (
        every.mean_exposed_s,
        every.mean_overlap,
        every.step_s,
    )


def test_live_memory_of_a_step_is_that_of_the_timeline_with_what_was_alive_before(training_run: Run) -> None:
    run = training_run()
    (view,) = step_views(run, step=1)
    since_s, live = view.live(2)
    times_s, whole = run.live_bytes(2)
    assert since_s[0] == 0.0
    assert since_s[-1] == pytest.approx(view.step_s)
    inside = (times_s >= view.origin_s) & (times_s <= view.origin_s + view.step_s)
    assert inside.sum() > 50
    for category, n_bytes in live.items():
        np.testing.assert_array_equal(n_bytes[1:-1], whole[category][inside])
        assert n_bytes[0] == whole[category][times_s < view.origin_s][-1]
    assert live[Memory.OPTIMIZER][0] == 6 * 2 * (6 * 2**20 // 4)  # allocated before the first step, alive in all


def test_the_table_has_a_row_for_each_timeline_and_rank(training_run: Run) -> None:
    table = summary_table({"off": training_run(), "on": training_run(prefetch=True)}, ranks=[0, 2])
    assert [row[:2] for row in table.rows] == [("off", "0"), ("off", "2"), ("on", "0"), ("on", "2")]
    off = dict(zip(table.header, table.rows[0], strict=True))
    # 6 forwards of 4 ms, 6 backwards of 8 ms, 6 copies of 0.6 ms, 1 optimizer; 12 all-gathers and 6 reductions of 3 ms
    assert off["computing"] == "78.6 ms"
    assert off["communicating"] == off["exposed communication"] == "54.0 ms"
    assert off["communication hidden"] == "0%"


def test_the_html_table_is_well_formed_and_takes_no_text_for_html(training_run: Run) -> None:
    name = '<script>alert("1")</script> & co'
    page = summary_table({name: training_run(ranks=2)}).to_html()
    root = ElementTree.fromstring(page)
    assert root.find("caption") is not None
    assert {cell.get("scope") for cell in root.iter("th")} == {"col", "row"}
    assert [row[0].text for row in root.findall("tbody/tr")] == [name, name]


def test_an_unnamed_timeline_is_named_after_its_title_or_its_clock(training_run: Run) -> None:
    titled = Timeline(Header(producer="tests", clock="simulated", world_size=4, title="a plan"), training_run().events)
    views = step_views([training_run(), training_run(clock="measured"), titled, training_run()])
    assert [view.name for view in views] == ["predicted", "measured", "a plan", "predicted (4)"]


def test_the_step_of_a_sentence_and_a_figure_is_never_one_of_allocations_alone(tiny: Timeline) -> None:
    later = Event(seq=4, rank=0, step=7, op=Op.ALLOC, lane=Lane.COMPUTE, bytes=1, issue_s=11.0)
    assert describe(Timeline(tiny.header, [*tiny.events, later])).count("Step 0") == 1


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({"ranks": [0, 9]}, r"rank 9 is not in timeline 'predicted'; it has ranks \[0, 1, 2, 3\]"),
        ({"ranks": []}, r"an empty choice of ranks is not in timeline 'predicted'; it has ranks \[0, 1, 2, 3\]"),
        ({"step": 5}, r"step 5 is not in timeline 'predicted'; it has steps \[0, 1, 2\]"),
        ({"titles": ["a", "b"]}, r"titles is \['a', 'b'\]; 1 timeline\(s\) need as many different titles"),
    ],
)
def test_what_a_timeline_lacks_is_named_with_what_it_has(training_run: Run, which: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_views(training_run(), **which)


def test_an_empty_timeline_cannot_be_drawn(tiny: Timeline) -> None:
    with pytest.raises(ValueError, match="timeline 'a' has no events; it needs at least one operation"):
        step_views({"a": tiny.select(rank=3)})
    with pytest.raises(ValueError, match="timeline 'measured' has only alloc and free events"):
        step_views(tiny.select(op=(Op.ALLOC, Op.FREE)))
    with pytest.raises(ValueError, match="no timeline was given"):
        step_views([])
    with pytest.raises(ValueError, match=r"'run\.jsonl' is a str; what is drawn is a fsdp_sim\.timeline\.Timeline"):
        step_views({"a": "run.jsonl"})
