"""Several ranks at once: clocks set by collectives, waiting apart from transfer, the straggler and what it costs."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.diagnose import diagnose
from fsdp_sim.engine import straggler
from fsdp_sim.engine.skew import PerRank
from fsdp_sim.timeline import Lane, Op, Timeline, read_timeline
from tests.timeline.kineto.gpu_trace import ZERO_US
from tests.timeline.kineto.many_ranks import as_kernels, write_ranks

NODE = Cluster("H100", gpus=4)
PLAN = Plan(param_dtype="bf16", reduce_dtype="fp32", seq_len=512)
CLOCKS_S = (0.0, 3e-3, -50e-3, 7e-6)


def simulated(factor: float, rank: int = 2) -> Timeline:
    """Collectives begin when the last rank has come."""
    return simulate("gpt2-350m", NODE, PLAN, skew=lambda s, n: straggler(s, n, rank=rank, factor=factor)).timeline


def stepped(factor: float, rank: int = 2) -> Timeline:
    return as_kernels(simulated(factor, rank))


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Timeline:
    folder = write_ranks(stepped(1.3), tmp_path_factory.mktemp("slow"), CLOCKS_S.__getitem__)
    return read_timeline(folder)


def test_clocks_are_set_by_the_ends_of_collectives(slow: Timeline) -> None:
    added = {clock.rank: clock.added_s for clock in slow.header.clocks}
    assert added == {rank: pytest.approx(-CLOCKS_S[rank], abs=1e-6) for rank in (1, 2, 3)}
    assert max(clock.within_s for clock in slow.header.clocks) < 1e-6


def test_a_clock_that_drifts_is_set_along_the_recording(tmp_path: Path) -> None:
    true = stepped(1.0)

    def drifted(e):
        return msgspec.structs.replace(
            e, **{name: getattr(e, name) * (1 + 1e-2) for name in ("issue_s", "start_s", "end_s")}
        )

    events = [drifted(e) if e.rank == 1 else e for e in true.events]
    read = read_timeline(write_ranks(Timeline(true.header, events), tmp_path))
    last = [max(e.end_s for e in read.ops if e.rank == rank) for rank in read.ranks]
    assert max(last) - min(last) < 0.1 * 1e-2 * true.span_s


def test_where_collectives_begin_when_the_last_has_come_the_straggler_is_found_too() -> None:
    found = diagnose(simulated(1.3)).straggler
    assert found is not None
    assert (found.rank, found.cost_s) == (2, pytest.approx(simulated(1.3).span_s - simulated(1.0).span_s, rel=0.05))
    assert diagnose(simulated(1.0)).straggler is None


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1", "ddp"])
def test_a_thread_that_computes_is_late_with_all_that_it_issues_next(api: str) -> None:
    def of(factor: float) -> Timeline:
        skew = lambda s, n: straggler(s, n, rank=2, factor=factor)  # noqa: E731
        return simulate("gpt2-124m", Cluster("cpu", gpus=4), Plan(api=api, seq_len=128), skew=skew).timeline

    found = diagnose(of(1.2)).straggler
    assert found is not None
    assert (found.rank, found.cost_s) == (2, pytest.approx(of(1.2).span_s - of(1.0).span_s, rel=0.1))
    assert "compute" in [reason.what for reason in found.reasons]
    assert diagnose(of(1.0)).straggler is None


def test_the_straggler_is_named_with_what_the_step_loses_by_it(slow: Timeline) -> None:
    found = diagnose(slow)
    assert found.straggler is not None
    assert found.straggler.rank == 2
    lost_s = stepped(1.3).span_s - stepped(1.0).span_s
    assert found.straggler.cost_s == pytest.approx(lost_s, rel=0.05)
    (reason,) = found.straggler.reasons
    assert (reason.what, set(reason.operations)) == ("compute", {"BWD", "FWD"})
    assert "matmul" in reason.kernels_s


def test_waiting_is_told_from_transfer(slow: Timeline) -> None:
    late, *_ = (row for row in diagnose(slow).rank_times if row.rank == 2)
    early, *_ = (row for row in diagnose(slow).rank_times if row.rank == 0)
    assert late.waited_s < 0.01 * early.waited_s
    assert late.moved_s == pytest.approx(early.moved_s, rel=0.01)
    assert late.last_times > 0 == early.last_times


def test_no_rank_is_a_straggler_where_all_are_alike(tmp_path: Path) -> None:
    found = diagnose(read_timeline(write_ranks(stepped(1.0), tmp_path, CLOCKS_S.__getitem__)))
    assert found.straggler is None
    assert "slower rank" not in [str(blame.culprit) for blame in found.culprits]


LONG = Plan(param_dtype="bf16", reduce_dtype="fp32", seq_len=1024, micro_batch=16)


def held_up(late_s: float, rank: int = 1) -> Timeline:
    """One rank's CPU begins its step so much later than the others'; all are far ahead of their devices."""

    def skew(given, ranks):
        def factor(i):
            factors = np.ones(ranks)
            if i.op is Op.AG_CAST and i.unit == "root" and late_s:
                factors[rank] += late_s / given(i)
            return factors

        return PerRank(given, "compute", factor, per_occurrence=False)

    stood = as_kernels(simulate("gpt2-350m", NODE, LONG, skew=skew).timeline)

    def moved(e):  # what the simulation has as a longer first cast is a CPU that comes later
        mine_s = late_s if e.rank == rank else 0.0
        first = (e.op, e.unit) == (Op.AG_CAST, "root")
        return msgspec.structs.replace(e, issue_s=0.1 * e.issue_s + mine_s, start_s=e.start_s + mine_s * first)

    return Timeline(stood.header, [moved(e) for e in stood.ops])


def test_a_data_loader_that_is_late_on_one_rank_is_the_reason(tmp_path: Path) -> None:
    held = held_up(30e-3)
    folder = write_ranks(held, tmp_path)
    path = folder / "rank1.json"
    trace = json.loads(path.read_text())
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    begin_us = ZERO_US + 0.5e-3 * 1e6
    loader = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 4242, "ts": begin_us, "dur": 29e3}
    trace["traceEvents"].append(loader)
    path.write_text(json.dumps(trace))

    found = diagnose(read_timeline(folder)).straggler
    assert found is not None
    assert found.rank == 1
    assert found.reasons[0].what == "data loader"
    assert found.reasons[0].seconds == pytest.approx(29e-3, rel=0.1)
    assert found.cost_s == pytest.approx(held.span_s - held_up(0.0).span_s, rel=0.1)


def test_the_critical_path_adds_up_to_the_step_and_runs_on_the_slow_rank(slow: Timeline) -> None:
    found = diagnose(slow)
    assert sum(share.seconds for share in found.critical_path) == pytest.approx(found.step_s)
    on_slow_s = sum(share.seconds for share in found.critical_path if share.rank == 2)
    assert on_slow_s > 0.9 * found.step_s


def test_ranks_that_are_not_at_hand_are_named(tmp_path: Path) -> None:
    folder = write_ranks(stepped(1.0), tmp_path)
    (folder / "rank3.json").unlink()
    assert any("Of 4 ranks 3 are at hand; not: 3." in note for note in diagnose(read_timeline(folder)).notes)


def test_one_rank_has_no_table_of_ranks() -> None:
    alone = stepped(1.0).select(rank=0)
    found = diagnose(alone)
    assert (found.rank_times, found.straggler, found.critical_path) == ([], None, [])
    assert Lane.COMPUTE in {e.lane for e in alone.ops}
