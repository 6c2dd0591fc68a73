"""Proofs of the traps in how a model is made and sharded."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp_sim.lint.proofs._toy import (
    CPU,
    Collectives,
    Shown,
    Toy,
    agree,
    fsdp1,
    fsdp2,
    fully_shard,
    mesh,
    own_tokens,
    raised,
    train,
)


def optimizer_before_sharding() -> Shown:
    model = Toy()
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    fsdp2(model)
    stuck = train(model, early)
    moving = train(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return Shown(stuck[0] == stuck[1] and moving[0] != moving[1], f"loss {stuck}", f"loss {moving}")


def fabric_joint_setup() -> Shown:
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

    strategy = ModelParallelStrategy(lambda model, _: fsdp2(model))
    strategy.parallel_devices, strategy._device_mesh = [CPU], mesh()  # what Fabric.launch() says

    together = Toy()
    model, [early], _ = strategy.setup_module_and_optimizers(together, [torch.optim.SGD(together.parameters(), lr=1.0)])
    stuck = train(model, early)
    model = strategy.setup_module(Toy())
    moving = train(model, strategy.setup_optimizer(torch.optim.SGD(model.parameters(), lr=1.0)))
    return Shown(stuck[0] == stuck[1] and moving[0] != moving[1], f"loss {stuck}", f"loss {moving}")


def forward_before_optimizer() -> Shown:
    def plain(reshards: bool) -> int:
        model = fsdp2(Toy())
        model(own_tokens())
        if reshards:
            model.reshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return sum(not isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])

    trap, fix = plain(False), plain(True)
    return Shown(trap == 2 and fix == 0, f"{trap} parameters are plain tensors", f"{fix} are")


def root_not_sharded() -> Shown:
    def grad(root: bool) -> Any:
        torch.manual_seed(0)
        model = Toy()
        for block in model.layers:
            fully_shard(block, mesh=mesh())
        if root:
            fully_shard(model, mesh=mesh())
        model(own_tokens()).square().mean().backward()
        grad = model.head.weight.grad
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    trap, fix = agree(grad(False)), agree(grad(True))
    return Shown(not trap and fix, f"the head's gradients agree: {trap}", f"{fix}")


def _largest(shard: object) -> int:
    """Elements of the largest all-gather of a forward."""
    model = Toy()
    shard(model)  # type: ignore[operator]
    with Collectives() as collectives:
        model(own_tokens())
    return max(numel for name, numel, _ in collectives.seen if "allgather" in name)


def root_before_blocks() -> Shown:
    def wrong(model: Toy) -> None:
        fully_shard(model, mesh=mesh())
        for block in model.layers:
            fully_shard(block, mesh=mesh())

    said = raised(lambda: _largest(wrong))
    trap = 0 if said else _largest(wrong)
    fix = _largest(fsdp2)
    return Shown(bool(said) or trap > fix, said or f"{trap} elements at once", f"{fix} at once")


def one_unit() -> Shown:
    trap, fix = _largest(lambda model: fully_shard(model, mesh=mesh())), _largest(fsdp2)
    whole = sum(p.numel() for p in Toy().parameters())
    return Shown(trap >= whole > fix, f"{trap} of {whole} elements in one all-gather", f"{fix} in the largest")


def unit_per_linear() -> Shown:
    def count(per_linear: bool) -> int:
        model: Any = Toy()
        for block in model.layers:
            for unit in (block.up, block.down) if per_linear else (block,):
                fully_shard(unit, mesh=mesh())
        fully_shard(model, mesh=mesh())
        with Collectives() as collectives:
            model(own_tokens()).sum().backward()
        return len(collectives.seen)

    trap, fix = count(True), count(False)
    return Shown(trap >= 1.5 * fix, f"{trap} collectives a step", f"{fix}")


def tied_across_units() -> Shown:
    def forward(together: bool) -> None:
        model = Toy(tied=True)
        units = [[model.embed, model.head]] if together else [model.embed, model.head]
        for unit in units:
            fully_shard(unit, mesh=mesh())
        fully_shard(model, mesh=mesh())
        model(own_tokens()).sum().backward()

    trap, fix = raised(lambda: forward(False)), raised(lambda: forward(True))
    return Shown("already managed" in trap and not fix, trap, fix or "trains")


def to_empty_unties() -> Shown:
    with torch.device("meta"):
        model = Toy(tied=True)
    model.to_empty(device="cpu")
    trap = model.head.weight is model.embed.weight
    model.head.weight = model.embed.weight
    fix = model.head.weight is model.embed.weight
    return Shown(not trap and fix, f"head and embedding are one tensor: {trap}", f"{fix}")


def meta_never_filled() -> Shown:
    torch.use_deterministic_algorithms(True)  # has torch fill what nobody has set with NaN
    try:
        with torch.device("meta"):
            model = Toy()
        fully_shard(model, mesh=mesh())
        model.to_empty(device="cpu")
        trap = bool(model.head.weight.to_local().isnan().all())  # type: ignore[attr-defined]
        model.head.reset_parameters()
        fix = bool(model.head.weight.to_local().isnan().any())  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)
    return Shown(trap and not fix, f"unset: {trap}", f"unset: {fix}")


def seed_per_rank() -> Shown:
    def is_one_model(seed: int) -> bool:
        torch.manual_seed(seed)
        model = Toy()
        own = model.head.weight.detach().clone()
        fsdp2(model)
        return bool(torch.equal(model.head.weight.full_tensor(), own))  # type: ignore[attr-defined]

    trap, fix = is_one_model(1234 + dist.get_rank()), is_one_model(1234)
    return Shown(not trap and fix, f"the model is the one that this rank made: {trap}", f"{fix}")


def weights_on_one_rank() -> Shown:
    torch.manual_seed(7)
    wanted = Toy().state_dict()

    def loaded(broadcasts: bool) -> bool:
        torch.manual_seed(dist.get_rank())
        model = Toy()
        if dist.get_rank() == 0 and not broadcasts:
            model.load_state_dict(wanted)
        fsdp2(model)
        if broadcasts:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, dict(wanted) if dist.get_rank() == 0 else {}, options=options)
        return bool(torch.equal(model.head.weight.full_tensor(), wanted["head.weight"]))  # type: ignore[attr-defined]

    trap, fix = loaded(False), loaded(True)
    return Shown(not trap and fix, f"the weights are those of the file: {trap}", f"{fix}")


def sync_states_on_cpu() -> Shown:
    trap = raised(lambda: fsdp1(Toy(), sync_module_states=True))
    fix = raised(lambda: fsdp1(Toy()))
    return Shown(bool(trap) and not fix, trap, fix or "is made")


def ignored_parameters() -> Shown:
    def agreed(frozen: bool) -> bool:
        torch.manual_seed(0)
        model = Toy()
        model.head.requires_grad_(not frozen)
        fully_shard(model, mesh=mesh(), ignored_params=set(model.head.parameters()))
        train(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0), steps=1)
        return agree(model.head.weight)

    trap, fix = agreed(False), agreed(True)
    return Shown(not trap and fix, f"the ranks' heads agree after a step: {trap}", f"{fix}")


def deepcopy_of_shards() -> Shown:
    trap = raised(lambda: copy.deepcopy(fsdp2(Toy())))
    fix = raised(lambda: fsdp2(copy.deepcopy(Toy())))
    return Shown("deepcopy" in trap and not fix, trap, fix or "is copied")
