"""On a GPU: the same numbers as torch, with streams that really run beside each other."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import fsdp_sim.mini
from tests.mini.models import Transformer, batches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS = {
    "default": {},
    "keep": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


def losses_of(fully_shard, options, prefetch):
    """Five AdamW steps on the GPU of this rank; gloo carries CUDA tensors between ranks that share one GPU."""
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    model = Transformer(n_layers=4)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for ahead, layer in zip(model.layers[1:] if prefetch else (), model.layers, strict=False):
        layer.set_modules_to_forward_prefetch([ahead])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(5):
        logits = model(batch[:, :-1].cuda()).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten().cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, type(options.get("offload_policy", OffloadPolicy())).__name__


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_losses_are_torchs(ranks, world_size, name, prefetch):
    def run():
        ours = losses_of(fsdp_sim.mini.fully_shard, SETTINGS[name], prefetch)
        theirs = losses_of(torch.distributed.fsdp.fully_shard, SETTINGS[name], prefetch)
        return ours, theirs

    for ours, theirs in ranks(world_size, run):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
