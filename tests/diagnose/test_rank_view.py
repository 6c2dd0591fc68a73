"""`RankView`: what kind of run a timeline is of, and why its operations start when they do."""

import pytest
from msgspec import structs

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.diagnose.critical_path import RunCauses
from fsdp_sim.diagnose.rank_view import RankView
from fsdp_sim.schedule import toy
from fsdp_sim.timeline import Event, Lane, Op, Timeline
from tests.diagnose.scenarios import played
from tests.timeline.strategies import gather, op, timeline_of


def view_of(*events: Event, clock: str = "simulated", device: str = "gpu") -> RankView:
    timeline = timeline_of(*events)
    header = structs.replace(timeline.header, clock=clock, device=device)
    return RankView(Timeline(header, timeline.events), 0)


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1", "ddp", "zero1", "zero2"])
@pytest.mark.parametrize("said", [True, False])
def test_the_api_is_named_in_the_header_or_told_by_the_operations(api, said):
    timeline = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=8), Plan(api=api)).timeline
    if not said:
        timeline = Timeline(structs.replace(timeline.header, api=""), timeline.events)

    assert RankView(timeline, 0).api == api


def test_a_rank_that_only_computes_has_no_api():
    assert view_of(op(0.0, 1.0)).api == ""


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("plan", [Plan(), Plan(forward_prefetch=1), Plan(api="fsdp1"), Plan(api="ddp")], ids=str)
def test_the_device_is_told_by_what_is_queued_where_the_header_does_not_name_it(plan, device):
    timeline = played(plan, units=toy(3), device=device).timeline()
    timeline = Timeline(structs.replace(timeline.header, device=""), timeline.events)

    assert RankView(timeline, 0).on_cpu == (device == "cpu")


def test_a_device_that_waits_for_its_cpu_is_no_cpu():
    assert not RankView(played(forward=0.1, backward=0.1, gather=0.1, scatter=0.1, issue_s=1.0).timeline(), 0).on_cpu


@pytest.mark.parametrize("plan", [Plan(), Plan(api="fsdp1"), Plan(grad_accum=2)], ids=str)
def test_causes_are_those_that_the_engine_reads_off_the_program(plan):
    run = played(plan, layers=4, gather=30.0, scatter=20.0, issue_s=0.5)
    view, causes = RankView(run.timeline(), 0), RunCauses(run)

    for k, e in enumerate(view.ops):
        want, got = causes.cause((0, k)), view.cause(e)
        assert (got.why == "CPU") == (want.why == "CPU"), e
        if want.key is not None:
            on = view.op(got)
            assert on is not None
            assert on.end_s == view.ops[want.key[1]].end_s == e.start_s


def test_collectives_that_never_overlap_share_a_communicator():
    reduce = {"kind": Op.REDUCE_SCATTER, "lane": Lane.REDUCE_SCATTER}

    assert view_of(gather(0.0, 1.0), op(1.0, 2.0, **reduce), gather(2.0, 3.0)).one_communicator
    assert not view_of(gather(0.0, 2.0), op(1.0, 3.0, **reduce)).one_communicator


def test_without_recorded_waits_compute_is_known_to_wait_for_the_gather_of_its_unit():
    view = view_of(
        op(0.0, 1.0, unit="a", seq=0), gather(0.5, 2.0, unit="b", seq=1),
        op(2.0 + 3e-6, 3.0, unit="b", seq=2, issue_s=0.6), clock="measured",
    )  # fmt: skip

    assert view.cause(view.ops[2]) == ("event", (0, 1), 0)
    assert not view.says_waits


def test_what_is_issued_after_the_gather_has_ended_did_not_wait_for_it():
    view = view_of(
        op(0.0, 1.0, unit="a", seq=0, issue_s=-1.0), gather(0.5, 2.0, unit="b", seq=1),
        op(3.0, 4.0, unit="b", seq=2, issue_s=3.0 - 5e-6), clock="measured",
    )  # fmt: skip

    assert view.cause(view.ops[2]).why == "CPU"


def test_a_gather_that_starts_as_a_reduction_ends_took_its_turn_after_it():
    reduce = {"kind": Op.REDUCE_SCATTER, "lane": Lane.REDUCE_SCATTER, "group_size": 8}
    view = view_of(
        op(0.0, 2.0, seq=0, **reduce), gather(2.0 + 2e-6, 3.0, seq=1, group_size=8, issue_s=0.1), clock="measured"
    )

    assert view.cause(view.ops[1]) == ("communicator", (0, 0), 0)


@pytest.mark.parametrize(("start_s", "synchronous"), [(1.0, True), (0.2, False)])
def test_a_thread_that_never_computes_while_a_collective_is_in_flight_stays_in_it(start_s, synchronous):
    view = view_of(op(0.0, 1.0, seq=0), gather(start_s, 2.0, seq=1), clock="measured", device="cpu")

    assert view.synchronous == synchronous
