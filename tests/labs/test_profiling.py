"""Recorded steps of real ranks: what communication costs, whoever shards."""

import time

import pytest
import torch
import torch.distributed as dist

from fsdp_sim.ranks import run
from fsdp_sim.timeline import Op
from labs.config import TrainConfig
from labs.place import Place
from labs.profiling import profiled

LATE_S = 0.4
HOW = {"record": False, "progress": False, "show_output": False, "timeout_s": 120.0}


def record(api, steps, late_step=None):
    """Profile some steps on this rank; before the backward of one of them rank 1 is late."""
    from labs.loader import Batch
    from labs.optimizer import make_optimizer
    from labs.step import train_step
    from labs.wrapping import wrap

    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = TrainConfig(api=api, n_layer=2, seq_len=32, global_batch=4)
    place = Place(rank, world_size, rank, world_size, torchrun=True)
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
    with profiled(rank=rank, api=api) as profile:
        for step in range(steps):
            step_now = step
            train_step(wrapped, optimizer, batch, step, config)
    counts = {op: sum(e.op is op for e in profile.timeline.ops) for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER)}
    return profile.timeline.header.world_size, counts, profile.exposed_comm_s, profile.step_time_s, profile.collectives


@pytest.mark.parametrize("api", ["fsdp2", "mini", "fsdp1"])
class TestSharded:
    def test_has_torchs_collectives_and_their_exposed_time(self, api):
        for world, counts, exposed_s, step_s, collectives in run(record, 2, api, 1, **HOW):
            # 2 blocks and the root: each gathered for forward, the blocks again for backward, each reduced once
            assert counts == {Op.ALL_GATHER: 5, Op.REDUCE_SCATTER: 3}
            assert world == 2
            assert collectives >= 8
            assert 0 < exposed_s < step_s


@pytest.mark.parametrize("api", ["ddp", "fsdp2"])
def test_a_rank_that_waits_for_a_late_one_has_exposed_communication(api):
    (_, _, waited_s, step_s, _), (_, _, own_s, _, _) = run(record, 2, api, 2, 1, **HOW)
    assert waited_s > 0.7 * LATE_S  # of the second step: the first of several is left out
    assert step_s > waited_s
    assert own_s < waited_s


def test_a_single_process_communicates_nothing():
    ((_, counts, exposed_s, step_s, collectives),) = run(record, 1, "single", 1, **HOW)
    assert (exposed_s, step_s, collectives) == (0.0, 0.0, 0)
    assert set(counts.values()) == {0}


def test_without_a_step_there_is_nothing_to_read():
    with pytest.raises(ValueError, match=r"rank3\.json"), profiled(rank=3):
        torch.ones(8).sum()
