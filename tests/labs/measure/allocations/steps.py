"""Steps of every wrapping on real ranks, counted: run once for all tests of this folder."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist

from fsdp_sim.measure import live_bytes
from fsdp_sim.ranks import run
from fsdp_sim.timeline import Event, Header, Memory, Timeline
from fsdp_sim.timeline.snapshot import AllocationMoment, Block, Frame
from labs.config import TrainConfig
from labs.measure.allocations import StepMemory, counted, read_snapshot, timeline_of

CPU = torch.device("cpu")
RANKS = 2
CASES = {
    "fsdp2": {},
    "fsdp2, kept after forward": {"reshard_after_forward": False},
    "fsdp2, bf16": {"param_dtype": "bf16"},
    "fsdp2, checkpointed": {"activation_checkpointing": "full"},
    "fsdp2, accumulating": {"micro_batch": 2, "requires_gradient_sync": "last"},
    "fsdp1": {},
    "fsdp1, bf16": {"param_dtype": "bf16"},
    "ddp": {},
    "mini": {},
}


def config_of(case: str) -> TrainConfig:
    return TrainConfig(api=case.split(",")[0], n_layer=2, seq_len=64, global_batch=8, device="cpu", **CASES[case])


class Found(msgspec.Struct):
    """What a rank found of a case.

    Attributes:
        timeline, as_gpu: of the step, counted; and of a snapshot as a GPU's allocator would have taken it.
        meter: the bytes alive after each change in the step that follows, which is the same, by `live_bytes` alone.
    """

    timeline: tuple[Header, list[Event]]
    as_gpu: tuple[Header, list[Event]]
    meter: list[int]

    def of(self, name: str) -> Timeline:
        return Timeline(*getattr(self, name))


def on_ranks(cases: list[str]) -> dict[str, Found]:
    """By case, what rank 0 of real ranks found."""
    ranks = run(count, RANKS, cases, record=False, progress=False, show_output=False, timeout_s=600.0)
    return msgspec.json.decode(ranks[0], type=dict[str, Found])


def count(cases: list[str]) -> str:
    """On a rank: every case."""
    return msgspec.json.encode({case: _count(config_of(case)) for case in cases}).decode()


def _count(config: TrainConfig) -> Found:
    from labs.cluster.process_group import RankPlace
    from labs.data.random_batch import random_batch
    from labs.loop.optimizer import make_optimizer
    from labs.loop.step import train_step
    from labs.wrapping import wrap

    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = RankPlace(rank, ranks, rank, ranks, torchrun=True)
    wrapped = wrap(config, config.model_config, place, CPU)
    optimizer = make_optimizer(wrapped, config)
    batch, n_micro_batches = random_batch(config, config.model_config, place)

    def step(number: int) -> None:
        train_step(wrapped, optimizer, batch, number, config, n_micro_batches=n_micro_batches)

    step(0)
    step(1)  # DDP makes its buckets anew
    with counted(wrapped.model, optimizer, api=config.api) as memory:
        step(2)
    with live_bytes(wrapped.model, optimizer) as meter:
        step(3)
    return Found(packed(memory.timeline), packed(on_a_gpu(memory, rank)), meter.history().tolist())


def packed(timeline: Timeline) -> tuple[Header, list[Event]]:
    return timeline.header, list(timeline)


def on_a_gpu(memory: StepMemory, rank: int) -> Timeline:
    snapshot, known = snapshot_of(memory.blocks)
    return timeline_of(read_snapshot(snapshot, known=known), memory.timeline.header, rank)


def snapshot_of(blocks: list[Block]) -> tuple[dict[str, Any], dict[int, Memory]]:
    """Blocks as ``torch.cuda.memory._snapshot()`` has them, recorded with Python's calls, and what is known of them.

    What a GPU has otherwise than a CPU: autograd works in a thread of its own, whose calls begin there; operators are
    no calls; freed addresses are given out again; and there are actions besides alloc and free.
    """
    known: dict[int, Memory] = {}
    trace: list[dict[str, Any]] = []
    address: dict[int, int] = {}  # of each block
    pool: dict[int, list[int]] = {}  # of each size
    ends = [(block.born.number, 1, i, block.born) for i, block in enumerate(blocks)]
    ends += [(block.died.number, 0, i, block.died) for i, block in enumerate(blocks) if block.died is not None]
    for number, alloc, i, moment in sorted(ends, key=lambda end: end[:3]):
        block = blocks[i]
        if not block.bytes:
            continue  # the allocator is not asked
        if alloc:
            free = pool.get(block.bytes)
            address[i] = free.pop() if free else 512 * (len(address) + 1)
            if number == 0:
                known[address[i]] = block.known or Memory.NONE
                continue
        else:
            pool.setdefault(block.bytes, []).append(address[i])
        entry = {
            "addr": address[i], "size": block.bytes, "stream": 0, "time_us": round(moment.at_s * 1e6),
            "frames": python_frames(moment), "pool_id": (0, 0),
        }  # fmt: skip
        trace += [
            entry | {"action": action} for action in (("alloc",) if alloc else ("free_requested", "free_completed"))
        ]
    alive = [
        {"address": address[i], "size": -(-block.bytes // 512) * 512, "requested_size": block.bytes,
         "state": "active_allocated", "frames": []}
        for i, block in enumerate(blocks) if block.died is None and block.bytes
    ]  # fmt: skip
    segment = {
        "address": 512,
        "total_size": 512 * (len(address) + 1),
        "device": 0,
        "stream": 0,
        "segment_type": "large",
        "blocks": alive,
    }
    return {"segments": [segment], "device_traces": [trace]}, known


def python_frames(moment: AllocationMoment) -> list[dict[str, Any]]:
    frames: list[Frame] = []
    for frame in moment.frames:
        if frame.name == "_engine_run_backward":
            break
        if frame.filename:
            frames.append(frame)
    return [frame._asdict() for frame in frames]
