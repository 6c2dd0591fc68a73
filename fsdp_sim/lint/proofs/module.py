"""Proofs of the traps in a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_sim.lint.proofs._toy import CPU, Collectives, Shown, Toy, agree, fsdp2, fully_shard, mesh, own_tokens, raised


class Weights(nn.Module):
    """A module that has these parameters, and adds them up."""

    def __init__(self, *weights: torch.Tensor, trainable: tuple[bool, ...] = ()) -> None:
        super().__init__()
        for number, weight in enumerate(weights):
            is_trained = trainable[number] if trainable else weight.is_floating_point()
            self.register_parameter(f"w{number}", nn.Parameter(weight, requires_grad=is_trained))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(weight.sum() for weight in self.parameters())


def padded_rows() -> Shown:
    def gathered(*shape: int) -> int:
        model = fully_shard(Weights(torch.ones(shape)), mesh=mesh())
        with Collectives() as collectives:
            model(torch.ones(1))
        return max(numel for _, numel, _ in collectives.seen)

    trap, fix = gathered(1, 64), gathered(64, 1)
    return Shown(trap == 2 * fix, f"{trap} elements are gathered for 64", f"{fix}")


def scalar_parameter() -> Shown:
    trap = raised(lambda: fully_shard(Weights(torch.ones(())), mesh=mesh()))
    fix = raised(lambda: fully_shard(Weights(torch.ones(1)), mesh=mesh()))
    return Shown("scalar" in trap and not fix, trap, fix or "is sharded")


def mixed_dtypes() -> Shown:
    def forward(dtype: torch.dtype) -> str:
        model = fully_shard(Weights(torch.ones(4), torch.ones(4, dtype=dtype)), mesh=mesh())
        return raised(lambda: model(torch.ones(1)))

    trap, fix = forward(torch.bfloat16), forward(torch.float32)
    return Shown("uniform" in trap and not fix, trap, fix or "runs")


def frozen_in_flat_unit() -> Shown:
    def wrap(*trainable: bool) -> str:
        return raised(
            lambda: FullyShardedDataParallel(Weights(torch.ones(4), torch.ones(4), trainable=trainable), device_id=CPU)
        )

    trap, fix = wrap(True, False), wrap(True, True)
    return Shown("requires_grad" in trap and not fix, trap, fix or "is wrapped")


def integer_parameters() -> Shown:
    bits = torch.arange(100, 108, dtype=torch.uint8)
    trap = raised(lambda: FullyShardedDataParallel(Weights(bits), device_id=CPU))
    model: Any = fully_shard(Weights(bits), mesh=mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.unshard()
    fix = torch.equal(model.w0.detach(), bits)
    return Shown("integer" in trap and fix, trap, f"FSDP2 gives the module the same bits: {fix}")


class Table(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=persistent)


def buffers_not_saved() -> Shown:
    def is_unset(persistent: bool) -> bool:
        state = Table(persistent).state_dict()
        with torch.device("meta"):
            model = Table(persistent)
        torch.use_deterministic_algorithms(True)  # has torch fill what nobody has set with NaN
        try:
            model.to_empty(device="cpu")
        finally:
            torch.use_deterministic_algorithms(False)
        model.load_state_dict(state)
        return bool(model.table.isnan().all())  # type: ignore[operator]

    trap, fix = is_unset(False), is_unset(True)
    return Shown(trap and not fix, f"unset after the checkpoint was loaded: {trap}", f"{fix}")


class ResetWeights(Weights):
    def reset_parameters(self) -> None:
        for weight in self.parameters():
            nn.init.ones_(weight)


def parameters_without_reset() -> Shown:
    def wrap(kind: type[Weights]) -> str:
        return raised(lambda: FullyShardedDataParallel(kind(torch.ones(4, device="meta")), device_id=CPU))

    trap, fix = wrap(Weights), wrap(ResetWeights)
    return Shown("reset_parameters" in trap and not fix, trap, fix or "is made")


def batch_norm_statistics() -> Shown:
    def agrees(norm: nn.Module) -> bool:
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), norm), mesh=mesh())
        model(own_tokens(16).float().view(4, 4))
        return agree(torch.cat([torch.zeros(1), *(b.flatten().float() for b in norm.buffers())]))

    trap, fix = agrees(nn.BatchNorm1d(4)), agrees(nn.LayerNorm(4))
    return Shown(not trap and fix, f"the ranks' statistics agree: {trap}", f"{fix}")


def most_in_root() -> Shown:
    model = fsdp2(Toy())
    model(own_tokens())
    held = {name: not isinstance(p, DTensor) for name, p in model.named_parameters()}
    trap = [name for name, is_whole in held.items() if is_whole]
    return Shown(trap == ["embed.weight", "head.weight"], f"whole after forward: {trap}", "blocks are sharded again")


def tiny_units() -> Shown:
    def count(together: bool) -> int:
        model = Toy(blocks=4)
        blocks = list(model.layers)
        units: list[Any] = [blocks[:2], blocks[2:]] if together else blocks
        for unit in units:
            fully_shard(unit, mesh=mesh())
        fully_shard(model, mesh=mesh())
        with Collectives() as collectives:
            model(own_tokens()).sum().backward()
        return len(collectives.seen)

    trap, fix = count(False), count(True)
    return Shown(trap > fix, f"{trap} collectives a step", f"{fix}")
