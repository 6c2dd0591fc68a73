"""torch's own account of memory, FSDPMemTracker, and the rules by which a program and a workload give the same.

The tracker runs torch's unmodified `fully_shard` on a fake process group with fake tensors, so one process without
memory stands for a rank of any model. It counts in the order in which the CPU issues, as an allocator does.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_sim.cost import Workload
from fsdp_sim.measure.trace_gpu import rms_norm_kernel
from fsdp_sim.schedule import Kind, Program
from fsdp_sim.spec import Model, Plan
from fsdp_sim.timeline import Memory, Op
from labs.model.gpt import GPT, GPTConfig
from labs.wrapping.checkpoint_and_compile import checkpoint_blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}
WORLD_SIZE = 8


class FusedNorm(nn.Module):
    """`nn.RMSNorm` as a GPU runs it, in one kernel; the CPU's keeps fp32 copies."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm_kernel(x, [x.shape[-1]], self.weight, 1e-5)[0]


class GPTWithLoss(GPT):
    """The labs' GPT with its loss in fp32, as most trainers compute it."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(idx)
        return logits if targets is None else F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def gpt_of(model: Model) -> GPT:
    """The labs' GPT of a model's dimensions."""
    context = model.max_seq_len or 1024
    return GPTWithLoss(
        GPTConfig(model.n_layer, model.n_head, model.d_model, model.vocab, context, model.tied_embeddings)
    )


def tokens_of(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one micro-batch, without values."""
    batch = torch.empty(plan.micro_batch, plan.seq_len, dtype=torch.long, device="meta")
    return batch, batch.clone()


@contextmanager
def fake_ranks(world_size: int) -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def tracked(build: Callable[[], nn.Module], plan: Plan, world_size: int = WORLD_SIZE) -> dict[str, int]:
    """The peak of two training steps by the tracker's kinds of reference, and ``Total``.

    The optimizer's states are made at the end of the first step, so the peak is the second's. AdamW is not ``foreach``:
    of that the tracker takes temporaries for states.

    Args:
        build: a model with its blocks in ``layers`` that returns the loss.
    """
    with fake_ranks(world_size) as mesh, FakeTensorMode():
        model: Any = build()
        checkpoint_blocks(model, plan.activation_checkpointing)
        policy = MixedPrecisionPolicy(DTYPES[plan.param_dtype], DTYPES[plan.reduce_dtype])
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=plan.reshard_after_forward)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for p in model.parameters():  # DTensor tries what it has not met on whole tensors, which would be counted
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state.clear()
        inputs = tuple(torch.empty(t.shape, dtype=t.dtype) for t in tokens_of(plan))
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(inputs)
        with tracker:
            for _ in range(2):
                loss = model(*inputs)
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        return {str(getattr(kind, "value", kind)): n_bytes for kind, n_bytes in snapshot.items()}


def peak_by_the_rules(program: Program, workload: Workload) -> dict[Memory, int]:
    """What is alive at the peak, by the rules that make a `Work` and a program agree with torch.

    Forward: saved_bytes stay (of a checkpointed block its output); forward_temporary_bytes for a moment. Backward: what
    was checkpointed comes back; for a moment backward_temporary_bytes and the whole gradients that this segment makes,
    together; at its end the gradients are there and saved_bytes gone. The gradient of a segment's input takes the place
    of that input, which the segment before counts, so it is no extra.
    """
    alive: Counter[Memory] = Counter()
    for (category, _), n_bytes in program.state_bytes.items():
        alive[category] += n_bytes
    recomputed = {i.unit for i in program.instructions if i.kind is Kind.OP and i.op is Op.RECOMPUTE}
    peak: dict[Memory, int] = {}
    gradients = 0

    def look(moment: int = 0) -> None:
        nonlocal peak
        now = alive + Counter({Memory.TEMPORARY: moment})
        if sum(alive.values()) + moment > sum(peak.values()):
            peak = dict(now)

    for i in program.instructions:
        if i.kind is Kind.ALLOC and i.category is Memory.UNSHARDED_GRAD:
            gradients += i.bytes
        elif i.kind in (Kind.ALLOC, Kind.FREE):
            alive[i.category] += i.bytes if i.kind is Kind.ALLOC else -i.bytes
            look()
        elif i.kind is Kind.OP and i.op in (Op.FWD, Op.RECOMPUTE, Op.BWD):
            work = workload.work[i.unit]
            output = work.output_bytes if i.unit in recomputed else 0
            if i.op is Op.FWD:
                alive[Memory.ACTIVATION] += output or work.saved_bytes
                look(0 if output else work.forward_temporary_bytes)
            elif i.op is Op.RECOMPUTE:
                alive[Memory.ACTIVATION] += work.saved_bytes - output
                look()
            else:
                look(work.backward_temporary_bytes + gradients)
                alive[Memory.UNSHARDED_GRAD] += gradients
                alive[Memory.ACTIVATION] -= work.saved_bytes
                gradients = 0
    return peak


def with_layers(name: str, n_layer: int, **changes: Any) -> Model:
    """A published model with fewer layers."""
    return dataclasses.replace(Model.preset(name), n_layer=n_layer, **changes)
