"""Streams: their priorities, and that a device, which has them, computes what a CPU does without."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_sim.mini import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp_sim.mini.comm_context import FSDPCommContext
from tests.mini.models import Transformer, batches, my_part, shard, token_loss


def test_communication_goes_before_compute_but_the_all_reduce():
    priorities = []
    ctx = FSDPCommContext(torch.device("cpu"))
    ctx.device_handle = SimpleNamespace(Stream=lambda priority=0: priorities.append(priority) or object())
    ctx.lazy_init()
    before = ctx.all_gather_stream
    ctx.lazy_init()
    assert ctx.all_gather_stream is before, "two roots may share a context"
    assert priorities == [-1, -1, -1, 0]


OPTIONS = {
    "default": {},
    "keep": {"reshard_after_forward": False},
    "a slice": {"reshard_after_forward": 2},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    "hybrid": {"mesh": (2, 2)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def parameters_after_training(options, on_cpu):
    """With the code path of a device, whose streams do nothing here, or with that of the CPU."""
    if "mesh" in options:
        options = options | {"mesh": init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))}
    names = ("Stream", "Event", "stream", "current_stream")
    device = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in names})  # torch.cpu, but not itself
    with patch("fsdp_sim.mini.streams._get_device_handle", lambda _: torch.cpu if on_cpu else device):
        torch.manual_seed(0)
        model = shard(Transformer(), **options)
    assert model._get_fsdp_state()._comm_ctx.on_cpu is on_cpu
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, batch in enumerate(batches(4)):
        model.set_requires_gradient_sync(i != 1)
        token_loss(model, my_part(batch)).backward()
        if i != 1:
            optimizer.step()
            optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_device_computes_what_the_cpu_does(ranks, name):
    """On a device the sharded gradients are handed out behind the reduce-scatter, on CPU when it is waited for."""

    def run():
        ours, cpus = (parameters_after_training(OPTIONS[name], on_cpu) for on_cpu in (False, True))
        return all(torch.equal(a, b) for a, b in zip(ours, cpus, strict=True))

    assert ranks(4, run) == [True] * 4
