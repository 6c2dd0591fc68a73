"""Sound trainings, and the catalogue of what can be wrong in each: texts that stand in place of others (see `Edit`)."""

# mypy: disable-error-code="operator, attr-defined"

from __future__ import annotations

from fsdp_sim.learn.hunts.against_one import NUMBERS
from fsdp_sim.learn.hunts.grows import MEMORY
from fsdp_sim.learn.hunts.resumes import RESUME
from fsdp_sim.learn.hunts.slow import SLOW
from fsdp_sim.learn.hunts.stands_still import HANG
from fsdp_sim.learn.hunts.training import Fault, Training


def trains(seed):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    rank, ranks, micro_batches = dist.get_rank(), dist.get_world_size(), 2
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
    for unit in (*model, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rows = torch.Generator().manual_seed(seed + 1 + rank)
    losses, norms = [], []
    for _ in range(4):
        total = 0.0
        for number in range(micro_batches):
            model.set_requires_gradient_sync(number == micro_batches - 1)
            x = torch.randn(8, 48, generator=rows)
            loss = (model(torch.tanh(x)) - x.roll(1, 1)).square().mean() / micro_batches
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        of_all = torch.tensor(total)
        dist.all_reduce(of_all)
        losses.append(of_all.item() / ranks)
        norms.append(norm.item())
    weights = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])
    return {"losses": losses, "norms": norms, "weights": weights.detach()}


def runs_to_its_end(seed):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    for unit in (*model, model):
        fully_shard(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.Generator().manual_seed(seed + 1 + rank)
    batches = [torch.randn(4, 40, generator=rows) for _ in range(5 + rank)]
    batches[3] *= 1 + 60 * rank
    count = torch.tensor(len(batches))
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    losses, checks = [], []
    for step in range(int(count)):
        loss = model(batches[step]).square().mean()
        bad = torch.tensor(float(loss > 2.0))
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 2:
            with torch.no_grad():
                checked = model(batches[0]).square().mean()
            dist.all_reduce(checked)
            checks.append(checked.item() / ranks)
    whole = [parameter.full_tensor().detach() for parameter in model.parameters()]
    return {"losses": losses, "checks": checks, "weights": torch.cat([part.flatten() for part in whole])}


def fits(seed):
    """Six blocks, each a unit, which keeps its input for backward and computes itself again there. A step has two
    micro-batches. Between steps a rank holds its shards and nothing else; at the peak it holds one block whole, and
    the gradients of one."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)) for _ in range(6)
            )

        def forward(self, x):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x

    micro_batches = 2
    torch.manual_seed(seed)
    model = Stack()
    for unit in (*model.blocks, model):
        fully_shard(unit, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.Generator().manual_seed(seed + 1 + dist.get_rank())
    losses, norms = [], []
    for _ in range(3):
        total = torch.zeros(())
        for _ in range(micro_batches):
            x = torch.randn(256, 96, generator=rows)
            found = model(x)
            loss = (found - x.roll(1, 1)).square().mean() / micro_batches
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        norms.append(norm.item())
    return {"losses": losses, "norms": norms}


TRAININGS = (
    Training(
        "The loss falls, and not as it should",
        trains,
        (
            Fault(
                "the optimizer holds the parameters that sharding has replaced",
                {
                    "for unit in (*model, model):": "optimizer = torch.optim.SGD(model.parameters(), lr=0.2, "
                    "momentum=0.9)\nfor unit in (*model, model):",
                    "optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)": "",
                },
            ),
            Fault(
                "the loss is divided by the ranks, and FSDP averages over them as well",
                {".mean() / micro_batches": ".mean() / micro_batches / ranks"},
            ),
            Fault("all ranks draw the same rows", {"manual_seed(seed + 1 + rank)": "manual_seed(seed + 1)"}),
            Fault(
                "each rank clips by the norm of its own shards",
                {
                    "norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()": (
                        "shards = [parameter.grad.to_local() for parameter in model.parameters()]\n"
                        "norm = nn.utils.get_total_norm(shards)\n"
                        "for shard in shards:\n"
                        "    shard.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))"
                    )
                },
            ),
            Fault(
                "the learning rate's schedule steps with every micro-batch",
                {
                    "schedule.step()": "",
                    "total += loss.item()": "total += loss.item()\nschedule.step()",
                },
            ),
            Fault("gradients of the step before are added up", {"optimizer.zero_grad()": ""}),
            Fault("micro-batches are added up where their mean is meant", {".mean() / micro_batches": ".mean()"}),
            Fault(
                "no micro-batch reduces what the last one should",
                {"set_requires_gradient_sync(number == micro_batches - 1)": "set_requires_gradient_sync(number == 0)"},
            ),
            Fault(
                "every rank makes a model from another seed",
                {"torch.manual_seed(seed)": "torch.manual_seed(seed + rank)"},
            ),
        ),
    ),
    Training(
        "It stops, and nobody says why",
        runs_to_its_end,
        (
            Fault(
                "each rank does as many steps as it has batches",
                {"dist.all_reduce(count, op=dist.ReduceOp.MIN)": ""},
            ),
            Fault(
                "a rank skips a step because of its own loss",
                {"dist.all_reduce(bad, op=dist.ReduceOp.MAX)": ""},
            ),
            Fault(
                "only one rank runs the forward of the evaluation",
                {"if step % 2:": "if step % 2 and rank == 0:", "dist.all_reduce(checked)": ""},
            ),
            Fault(
                "only one rank reduces what all have evaluated",
                {"dist.all_reduce(checked)": "if rank == 0:\n    dist.all_reduce(checked)"},
            ),
        ),
    ),
    Training(
        "The memory is not what was planned",
        fits,
        (
            Fault(
                "the outputs of every micro-batch are kept",
                {
                    "losses, norms = [], []": "losses, norms, kept = [], [], []",
                    "loss.backward()": "loss.backward()\nkept.append(found)",
                },
            ),
            Fault(
                "activations are kept where they should be recomputed",
                {"checkpoint(block, x, use_reentrant=False)": "block(x)"},
            ),
            Fault(
                "whole gradients are kept until the last micro-batch",
                {
                    "for _ in range(micro_batches):": "for number in range(micro_batches):\n"
                    "    model.set_requires_gradient_sync(number == micro_batches - 1)"
                },
            ),
            Fault(
                "units stay whole after their forward", {"reshard_after_forward=True": "reshard_after_forward=False"}
            ),
            Fault("the blocks are no units, and are gathered all at once", {"(*model.blocks, model)": "(model,)"}),
            Fault(
                "the clipping makes every gradient whole",
                {
                    "norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()": (
                        "whole = [parameter.grad.full_tensor() for parameter in model.parameters()]\n"
                        "norm = nn.utils.get_total_norm(whole)\n"
                        "nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)"
                    )
                },
            ),
        ),
    ),
    HANG,
    MEMORY,
    SLOW,
    RESUME,
    NUMBERS,
)
