"""CUDA's snapshots are read: on dictionaries as torch documents them; and on a GPU. With real calls: test_counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsdp_sim.timeline import Header, Memory, Op
from labs.config import TrainConfig
from labs.measure.allocations import read_snapshot, recorded, timeline_of

FORWARD = [{"filename": "/lib/torch/nn/modules/module.py", "line": 1776, "name": "_call_impl"}]
HEADER = Header(producer="torch.cuda.memory", clock="measured", world_size=1)


def entry(action, addr, size, time_us, frames=FORWARD):
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, "frames": frames}


def snapshot(*trace, blocks=()):
    segment = {"address": 0, "total_size": 2 << 20, "stream": 0, "segment_type": "small", "device": 0, "blocks": blocks}
    return {"segments": [segment], "device_traces": [list(trace)]}


class TestStructure:
    def test_a_block_lives_from_alloc_to_the_request_to_free_it(self):
        """Other actions say nothing of what tensors hold; an OOM has no address."""
        blocks = read_snapshot(
            snapshot(
                {"action": "segment_alloc", "addr": 0, "size": 2 << 20, "stream": 0, "time_us": 1, "frames": []},
                entry("alloc", 512, 1000, 10),
                {"action": "oom", "size": 1 << 40, "device_free": 5, "stream": 0, "time_us": 15, "frames": FORWARD},
                entry("free_requested", 512, 1000, 20),
                entry("free_completed", 512, 1000, 30),
                {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 40, "frames": []},
            )
        )
        (block,) = blocks
        assert (block.bytes, block.known) == (1000, None)
        assert (block.born.at_s, block.died.at_s) == pytest.approx((1e-5, 2e-5))
        assert timeline_of(blocks, HEADER).peak_bytes(0) == 1000

    def test_an_address_may_be_given_out_again(self):
        trace = [entry(a, 512, n, t) for t, (a, n) in enumerate([("alloc", 100), ("free_requested", 100)] * 2)]
        assert [(b.born.number, b.died.number) for b in read_snapshot(snapshot(*trace))] == [(1, 2), (3, 4)]

    def test_what_was_there_before_is_found_by_its_address(self):
        """Freed in the recording, or alive still: then a segment has it. What the allocator only keeps is no memory."""
        blocks = [
            {"address": 1024, "size": 512, "requested_size": 400, "state": "active_allocated", "frames": []},
            {"address": 1536, "size": 512, "requested_size": 300, "state": "active_allocated", "frames": []},
            {"address": 2048, "size": 512, "requested_size": 200, "state": "active_awaiting_free", "frames": []},
            {"address": 2560, "size": 512, "requested_size": 0, "state": "inactive", "frames": []},
            {"address": 3072, "size": 512, "requested_size": 64, "state": "active_allocated", "frames": FORWARD},
        ]
        taken = snapshot(entry("free_requested", 512, 100, 10), entry("alloc", 3072, 64, 20), blocks=blocks)
        found = read_snapshot(taken, known={512: Memory.RS_OUTPUT, 1024: Memory.SHARDED})
        _, live = timeline_of(found, HEADER).live_bytes(0)
        assert {c: (int(n.max()), int(n[-1])) for c, n in live.items()} == {
            Memory.SHARDED: (400, 400), Memory.RS_OUTPUT: (100, 0), Memory.NONE: (300, 300),
            Memory.ACTIVATION: (64, 64),
        }  # fmt: skip

    def test_each_device_has_its_own(self):
        taken = snapshot(entry("alloc", 512, 100, 10), entry("free_requested", 512, 100, 20))
        other = [entry("alloc", 512, 7, 10), entry("free_requested", 512, 7, 20)]
        taken["device_traces"].append(other)
        assert [b.bytes for b in read_snapshot(taken, device=1)] == [7]

    @pytest.mark.parametrize(
        ("taken", "said"),
        [
            ({"segments": [], "device_traces": []}, "no allocs of device 0"),
            (snapshot(), "no allocs of device 0"),
            (snapshot(entry("alloc", 1, 1, 1), entry("free_requested", 1, 1, 2, [])), "no 'free_requested' .* calls"),
            (snapshot(entry("alloc", 1, 1, 1, []), entry("free_requested", 1, 1, 2)), "no 'alloc' .* calls"),
        ],
    )
    def test_a_recording_that_cannot_tell_is_refused(self, taken, said):
        with pytest.raises(ValueError, match=f"{said}.*context="):
            read_snapshot(taken)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose allocator records")
def test_the_recording_of_a_gpu_is_what_its_allocator_counts():
    """A step of one process: bytes as requested, at their peak and at the end; states under their names."""
    from labs.cluster.process_group import RankPlace
    from labs.data.loader import Batch
    from labs.data.random_batch import random_batch
    from labs.loop.optimizer import make_optimizer
    from labs.loop.step import train_step
    from labs.wrapping import wrap

    config, place, gpu = TrainConfig(api="single", device="cuda"), RankPlace(), torch.device("cuda", 0)
    wrapped = wrap(config, config.model_config, place, gpu)
    optimizer = make_optimizer(wrapped, config)
    rows, _ = random_batch(config, config.model_config, place)
    batch = Batch(rows.x.to(gpu), rows.y.to(gpu), rows.n_tokens, 0)
    train_step(wrapped, optimizer, batch, 0, config)
    torch.cuda.reset_peak_memory_stats()
    with recorded(wrapped.model, optimizer, api="single") as memory:
        train_step(wrapped, optimizer, batch, 1, config)
        stats = torch.cuda.memory_stats()
    times_s, live = memory.timeline.live_bytes(0)
    alive = np.sum(list(live.values()), axis=0)
    assert alive.max() == pytest.approx(stats["requested_bytes.all.peak"], rel=0.01)
    assert alive[-1] == pytest.approx(stats["requested_bytes.all.current"], rel=0.01)
    whole = 4 * wrapped.model.num_params()
    assert live[Memory.SHARDED].max() == pytest.approx(whole, rel=0.01)
    assert live[Memory.OPTIMIZER].max() == pytest.approx(2 * whole, rel=0.01)
    assert live[Memory.UNSHARDED_GRAD].max() == pytest.approx(whole, rel=0.01)
    assert times_s[-1] > 0
    assert {op.op for op in memory.timeline.ops} >= {Op.FWD, Op.BWD}
