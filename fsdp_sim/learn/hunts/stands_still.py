"""A training on three ranks that hangs where one of them goes its own way.

Its faults meet in collectives of different kinds, for which gloo waits as NCCL does; of one kind and different sizes
they would end the process.
"""

# mypy: disable-error-code="operator, attr-defined"

from __future__ import annotations

from fsdp_sim.learn.hunts.training import Fault, Leaves, Training


def stays_in_step(seed):
    """Three layers; the middle one is an expert, for rows whose sum is positive. There are as many steps as the rank
    with the fewest batches has. Every step logs the mean loss of all ranks, and is clipped to a norm of 1. After the
    third step rank 0 saves the weights."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = nn.ModuleDict({name: nn.Linear(48, 48) for name in ("first", "expert", "last")})
    for layer in model.values():
        fully_shard(layer, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.Generator().manual_seed(seed + 1 + rank)
    batches = [torch.randn(6, 48, generator=rows) for _ in range(4 + rank % 2)]
    batches[1] *= 1 + 9 * (rank == 1)
    batches[2] = batches[2].abs() * (-1 if rank == 1 else 1)
    count = torch.tensor(len(batches))
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    losses, saved = [], torch.zeros(0)
    for step in range(int(count)):
        x = torch.relu(model["first"](batches[step]))
        chosen = batches[step].sum(1, keepdim=True) > 0
        x = x + chosen * model["expert"](x)
        loss = model["last"](x).square().mean()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            whole = [parameter.full_tensor().detach().flatten() for parameter in model.parameters()]
            if rank == 0:
                saved = torch.cat(whole)
            dist.barrier()
    dist.barrier()
    return {"losses": losses, "saved": saved}


HANG = Training(
    "It stops, and each rank left the dump of its flight recorder",
    stays_in_step,
    (
        Fault(
            "a rank leaves out the expert when none of its rows are for it",
            {'x = x + chosen * model["expert"](x)': 'if chosen.any():\n    x = x + chosen * model["expert"](x)'},
        ),
        Fault(
            "a rank clips only where its own loss is large",
            {
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)": "if loss > 2.0:\n"
                "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
            },
        ),
        Fault(
            "only the rank that prints the loss reduces it",
            {"dist.all_reduce(mean)": "if rank == 0:\n    dist.all_reduce(mean)"},
        ),
        Fault(
            "only the rank that saves gathers the weights",
            {
                "whole = [parameter.full_tensor().detach().flatten() for parameter in model.parameters()]\n"
                "if rank == 0:": "if rank == 0:\n"
                "    whole = [parameter.full_tensor().detach().flatten() for parameter in model.parameters()]"
            },
        ),
        Fault(
            "each rank does a step for every batch that it has",
            {"range(int(count))": "range(len(batches))"},
        ),
    ),
    ranks=3,
    leaves=Leaves.DUMPS,
)
