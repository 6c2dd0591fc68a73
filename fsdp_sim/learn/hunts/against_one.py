"""A training in mixed precision whose numbers are laid beside those of one process."""

# mypy: disable-error-code="operator, attr-defined, union-attr"

from __future__ import annotations

from fsdp_sim.learn.hunts.training import Fault, Leaves, Training


def computes_as_one(seed):
    """Rows of 3 to 12 tokens, 8 a step, in two micro-batches. The embedding is the head's weight too. Computes in
    bfloat16, and keeps weights and reduces gradients in float32. The loss is the mean over all tokens of the step,
    whichever rank has them, and is scaled for backward; the step is clipped to a norm of 0.2."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 32)
            nn.init.normal_(self.embed.weight, std=0.2)
            self.mix = nn.Linear(32, 32)
            self.head = nn.Linear(32, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            x = self.embed(tokens)
            return self.head(x + torch.tanh(self.mix(x))).float()

    rank, ranks, scale = dist.get_rank(), dist.get_world_size(), 1024.0
    torch.manual_seed(seed)
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (model.mix, model):
        fully_shard(unit, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = torch.Generator().manual_seed(seed + 1)
    losses, norms = [], []
    for _ in range(4):
        tokens = torch.randint(16, (8, 13), generator=rows)
        lengths = torch.randint(3, 13, (8, 1), generator=rows)
        counted = torch.arange(12) < lengths
        total = torch.zeros(())
        for number in range(2):
            mine = slice(4 * number + rank, 4 * number + 4, ranks)
            every = nn.functional.cross_entropy(
                model(tokens[mine, :-1]).transpose(1, 2), tokens[mine, 1:], reduction="none"
            )
            loss = (every * counted[mine]).sum() * ranks / counted.sum()
            (scale * loss).backward()
            total += loss.detach() / ranks
        for parameter in model.parameters():
            parameter.grad.div_(scale)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item())
        norms.append(norm.full_tensor().item())
    weights = torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])
    return {"losses": losses, "norms": norms, "weights": weights}


NUMBERS = Training(
    "It learns, and not what one process learns",
    computes_as_one,
    (
        Fault(
            "each rank takes the mean over its own tokens",
            {"* ranks / counted.sum()": "/ counted[mine].sum() / 2"},
        ),
        Fault(
            "gradients are clipped while they are still scaled",
            {
                "for parameter in model.parameters():\n    parameter.grad.div_(scale)\n"
                "norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)": (
                    "norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)\n"
                    "for parameter in model.parameters():\n    parameter.grad.div_(scale)"
                )
            },
        ),
        Fault(
            "the head has a copy of the embedding, and no longer its weight",
            {"self.head.weight = self.embed.weight": "self.head.weight.data.copy_(self.embed.weight)"},
        ),
        Fault("the weights themselves are kept in bfloat16", {"model = Model()": "model = Model().bfloat16()"}),
        Fault(
            "each rank clips by the norm of its own shards",
            {
                "norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)": (
                    "shards = [parameter.grad.to_local() for parameter in model.parameters()]\n"
                    "norm = nn.utils.get_total_norm(shards)\n"
                    "for shard in shards:\n"
                    "    shard.mul_((0.2 / (norm + 1e-6)).clamp(max=1.0))"
                ),
                "norm.full_tensor().item()": "norm.item()",
            },
        ),
        Fault(
            "the gradients of the first micro-batch are dropped",
            {"for number in range(2):": "for number in range(2):\n    optimizer.zero_grad()"},
        ),
    ),
    leaves=Leaves.BESIDE_ONE,
    rel=1e-3,
    abs_=2e-4,
)
