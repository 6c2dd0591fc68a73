"""Recorded steps of real ranks: what communication costs, whoever shards."""

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from fsdp_sim.ranks import run
from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline, read_timeline
from fsdp_sim.timeline.analysis import exposed_comm_s
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.measure.clocks import meetings, on_the_wire
from labs.measure.profiling import gathered, profiled
from labs.measure.step_summary import summarize
from labs.model import empty

LATE_S = 0.4
UNITS = ("root", "layers.0", "layers.1")
BYTES = {
    unit: 4 * sum(p.numel() for name, p in empty(TrainConfig(n_layer=2).model_config).named_parameters()
                  if name.startswith(unit) or (unit == "root" and not name.startswith("layers.")))
    for unit in UNITS
}  # fmt: skip
HOW = {"record": False, "progress": False, "show_output": False, "timeout_s": 120.0}


def record_on_rank_0_alone():
    mine = Timeline(Header(producer="test", clock="measured", world_size=2), [event(dist.get_rank())])
    return gathered(mine if dist.get_rank() == 0 else None)


def event(rank):
    return Event(seq=0, rank=rank, op=Op.FWD, lane=Lane.COMPUTE, end_s=1.0)


def record(api, steps, late_step=None, shard_size=None):
    """Profile some steps on this rank; in the backward of one of them rank 1 is late. Rank 0 gets all."""
    from labs.data.loader import Batch
    from labs.loop.optimizer import make_optimizer
    from labs.loop.step import train_step
    from labs.wrapping import wrap

    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = TrainConfig(api=api, n_layer=2, seq_len=32, global_batch=4, shard_size=shard_size)
    place = RankPlace(rank, world_size, rank, world_size, torchrun=True)
    wrapped = wrap(config, config.model_config, place, torch.device("cpu"))
    optimizer = make_optimizer(wrapped, config)
    tokens = torch.randint(0, 256, (config.global_batch // world_size, 33))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], 128, 0)
    train_step(wrapped, optimizer, batch, 0, config)
    step_now = 0

    def be_late(grad):
        if rank == 1 and step_now == late_step:
            time.sleep(LATE_S)
        return grad

    last = list(dict(wrapped.model.named_modules()).values())[-1]  # the head: backward begins there
    last.register_full_backward_hook(lambda module, inputs, grads: be_late(None))
    units = [f"layers.{i}" for i in range(2)]
    with profiled(rank=rank, api=api, units=units) as profile:
        for step in range(steps):
            step_now = step
            train_step(wrapped, optimizer, batch, step, config)
    return gathered(profile.timeline)


@pytest.fixture(scope="module", params=["fsdp2", "mini", "fsdp1"])
def of_ranks(request):
    return run(record, 2, request.param, 1, **HOW)


class TestSharded:
    def test_has_torchs_collectives_of_all_ranks_on_one_clock(self, of_ranks):
        recording, none = of_ranks
        timeline = recording.timeline
        assert none is None  # rank 0 has all
        assert (timeline.header.world_size, timeline.ranks, timeline.header.clock) == (2, (0, 1), "measured")
        assert min(e.issue_s for e in timeline) == 0.0
        assert 0 < recording.uncertain_s < timeline.span_s
        for rank in (0, 1):
            # 2 blocks and the root: each gathered for forward, the blocks again for backward, each reduced once
            ops = [(e.op, e.unit) for e in timeline.ops if e.rank == rank]
            assert Counter(unit for op, unit in ops if op is Op.ALL_GATHER) == {"root": 1, "layers.0": 2, "layers.1": 2}
            assert Counter(unit for op, unit in ops if op is Op.REDUCE_SCATTER) == dict.fromkeys(UNITS, 1)
        assert all(max(e.start_s for e in met) < min(e.end_s for e in met) + 1e-9 for met in meetings(timeline))

    def test_bytes_and_lanes_are_those_of_whole_units(self, of_ranks):
        timeline = of_ranks[0].timeline
        gathers = {(e.unit, e.bytes) for e in timeline.ops if e.op is Op.ALL_GATHER}
        assert gathers == {("root", BYTES["root"]), ("layers.0", BYTES["layers.0"]), ("layers.1", BYTES["layers.1"])}
        reduces = {(e.unit, e.bytes) for e in timeline.ops if e.op is Op.REDUCE_SCATTER}
        assert reduces == gathers
        assert {e.lane for e in timeline.ops if e.op is Op.FWD} == {Lane.COMPUTE}


def test_hybrid_shards_meet_in_their_groups_and_replicas_in_theirs():
    """Four ranks in shards of two: gathers are of two ranks, and so is what the replicas reduce."""
    timeline = run(record, 4, "hsdp", 1, None, 2, **HOW)[0].timeline
    ours = [e for e in timeline.ops if e.unit and e.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)]
    assert {e.op: e.group_size for e in ours} == {Op.ALL_GATHER: 2, Op.REDUCE_SCATTER: 2, Op.ALL_REDUCE: 2}
    groups = {(met[0].op, tuple(e.rank for e in met)) for met in meetings(timeline)}
    assert {ranks for op, ranks in groups if op is Op.ALL_GATHER} == {(0, 1), (2, 3)}
    assert {ranks for op, ranks in groups if op is Op.ALL_REDUCE} == {(0, 2), (1, 3)}


def test_ddp_has_its_buckets_and_what_the_loop_itself_reduces_is_none():
    timeline = run(record, 2, "ddp", 1, **HOW)[0].timeline
    reduces = [e.unit for e in timeline.ops if e.op is Op.ALL_REDUCE and e.rank == 0]
    assert "" in reduces  # loss and norm, on which the ranks agree
    buckets = [unit for unit in reduces if unit]
    assert buckets == [f"bucket.{i}" for i in range(len(buckets))]
    assert buckets


@pytest.mark.parametrize("api", ["ddp", "fsdp2", "fsdp1"])
def test_a_rank_that_waits_for_a_late_one_waits_and_does_not_communicate(api):
    recording, _ = run(record, 2, api, 2, 1, None, **HOW)
    found = summarize(recording.timeline)  # of the second step: the first of several is left out
    assert found.waited_s > 0.7 * LATE_S / 2  # the mean of two ranks, of which one waits
    assert found.step_s > LATE_S
    # Without telling them apart, the rank that waits would seem to communicate all the while
    second = recording.timeline.select(step=recording.timeline.steps[-1])
    assert exposed_comm_s(second, 0) > 0.7 * LATE_S
    assert exposed_comm_s(on_the_wire(second), 0) < exposed_comm_s(second, 0) - 0.6 * LATE_S


def test_a_written_recording_is_read_again(tmp_path):
    recording, _ = run(record, 2, "fsdp2", 1, **HOW)
    recording.write(tmp_path / "timeline.jsonl.gz")
    assert list(read_timeline(tmp_path / "timeline.jsonl.gz")) == list(recording.timeline)


def test_a_rank_without_a_recording_is_left_out():
    recording, _ = run(record_on_rank_0_alone, 2, **HOW)
    assert recording.timeline.ranks == (0,)


def test_a_single_process_communicates_nothing():
    (recording,) = run(record, 1, "single", 1, **HOW)
    assert recording is None


def test_without_a_step_there_is_nothing_to_read():
    with pytest.raises(ValueError, match=r"rank3\.json"), profiled(rank=3):
        torch.ones(8).sum()
