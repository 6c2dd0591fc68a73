"""The rungs of the parity ladder: one GPT, trained in each of the ways this course speaks of.

A rung differs from the next in how it is *built* and in how it is *asked* for what every way of training has, though
each keeps it in its own shape: whole gradients, whole parameters under their original names, the norm of the gradients.
The training loop is the same for all, `labs.experiments.ladder.train`.

    replicas    one process, DDP and the mini's DDP: whole tensors lie on every rank
    zero        the optimizer's state is cut (1), then the gradients too (2): cuts go through a flat buffer
    flat        FSDP1 and the mini's: cuts go through one flat parameter per unit
    sharded     FSDP2 and the mini's, on a 1-D mesh or a 2-D one (HSDP): every parameter is cut on dim 0

The last two pairs stand for what the others leave out, and bring their own number of ranks: three ranks, which divide
no parameter evenly, offloaded, with gradients that accumulate; and HSDP of 2 x 2 in bfloat16, whose partial sums wait
for the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

import fsdp_sim.mini
from fsdp_sim.mini.readings.one_idea import FSDPUnit, whole_parameters
from fsdp_sim.mini.siblings import DistributedDataParallel, ZeroOptimizer
from fsdp_sim.mini.siblings.collectives import all_gather
from fsdp_sim.mini.siblings.flat import FlatParameterFSDP
from labs.loop.minimal import make_optimizer, shard
from labs.model.gpt import GPT, Block

Tensors = dict[str, torch.Tensor]
"""Whole tensors by the name of the parameter in the plain GPT."""


class Replicas:
    """A model that is whole on every rank, and its AdamW.

    Attributes:
        model: called with tokens and targets, returns this rank's loss.
        optimizer: ``zero_grad`` and ``step``.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer or make_optimizer(model)

    @property
    def held(self) -> tuple[nn.Module | torch.optim.Optimizer, ...]:
        """What `fsdp_sim.measure.live_bytes` counts from the start."""
        return self.model, self.optimizer

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as this rank has them."""
        for name, param in self.model.named_parameters():
            yield name.removeprefix("module."), param

    def begin_micro_batch(self, last: bool) -> None:
        """Say whether it is the last of the step."""

    def parameters(self) -> Tensors:
        """Whole parameters. A collective call, as the two below."""
        return {name: _whole(param) for name, param in self.named()}

    def gradients(self) -> Tensors:
        """Whole gradients, between backward and the optimizer's step."""
        return {name: _whole(param.grad) for name, param in self.named() if param.grad is not None}

    def grad_norm(self) -> float:
        """2-norm of all gradients."""
        return _whole(get_total_norm([p.grad for _, p in self.named() if p.grad is not None])).item()


class Sharded(Replicas):
    """Parameters and gradients are DTensors: whole ones are a ``full_tensor`` away, and norms come by themselves."""


class PartialSums(Sharded):
    """HSDP that all-reduces once per step: until then each row of the mesh keeps the sum of its own rows."""

    def begin_micro_batch(self, last: bool) -> None:
        self.model.set_requires_all_reduce(last)  # type: ignore[operator]


class Zero(Replicas):
    """Whole parameters; in stage 2 a rank has the gradients of its part of each bucket."""

    optimizer: ZeroOptimizer

    @property
    def held(self) -> tuple[nn.Module | torch.optim.Optimizer, ...]:
        return self.model, self.optimizer.optim

    def gradients(self) -> Tensors:
        if self.optimizer.stage == 1:
            return super().gradients()
        names = {param: name for name, param in self.named()}
        found: Tensors = {}
        for bucket in self.optimizer.buckets:
            whole = bucket.zeros()  # 1D: numel
            all_gather(whole, bucket.owned.grad, self.optimizer.group, bucket.unit).wait()  # type: ignore[arg-type]
            found |= {names[p]: bucket.part(whole, p) for p in bucket.params}
        return {name: found[name] for name in names.values()}

    def grad_norm(self) -> float:
        return self.optimizer.clip_grad_norm_(torch.inf).item()


class Flat(Replicas):
    """The mini's flat parameter, which has methods of its own for what is whole."""

    model: FlatParameterFSDP

    def parameters(self) -> Tensors:
        return _untied(self.model.full_state_dict())

    def gradients(self) -> Tensors:
        return _untied(self.model.full_gradients())

    def grad_norm(self) -> float:
        return self.model.clip_grad_norm_(torch.inf).item()


class TorchFlat(Replicas):
    """torch's FSDP1: ``summon_full_params`` puts whole parameters and gradients in place of the flat ones."""

    model: FullyShardedDataParallel

    def parameters(self) -> Tensors:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def gradients(self) -> Tensors:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=True):
            return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def grad_norm(self) -> float:
        return self.model.clip_grad_norm_(torch.inf).item()


class Function(Replicas):
    """One autograd function: a unit's parameters are one 1-D shard."""

    def parameters(self) -> Tensors:
        return {name: p.clone() for name, p in whole_parameters(self.model).items()}

    def gradients(self) -> Tensors:
        return whole_parameters(self.model, grads=True)

    def grad_norm(self) -> float:
        return get_total_norm(self.gradients().values()).item()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that later steps do not change."""
    whole = tensor.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()


def _untied(tensors: Tensors) -> Tensors:
    """Without the head's weight where it is the embedding's, as `named_parameters` has it."""
    if "head.weight" in tensors and tensors["head.weight"].data_ptr() == tensors["tok_emb.weight"].data_ptr():
        return {name: t for name, t in tensors.items() if name != "head.weight"}
    return tensors


# How each is built from the plain GPT, on all ranks


def one_process(gpt: GPT) -> Replicas:
    return Replicas(gpt)


def torch_ddp(gpt: GPT) -> Replicas:
    return Replicas(nn.parallel.DistributedDataParallel(gpt))


def mini_ddp(gpt: GPT) -> Replicas:
    return Replicas(DistributedDataParallel(gpt))


def zero(gpt: GPT, stage: int) -> Zero:
    lr = make_optimizer(gpt).defaults["lr"]
    return Zero(gpt, ZeroOptimizer(gpt.named_parameters(), torch.optim.AdamW, stage=stage, lr=lr))


def mini_flat(gpt: GPT) -> Flat:
    return Flat(FlatParameterFSDP(gpt, auto_wrap=[Block]))


def torch_fsdp1(gpt: GPT) -> TorchFlat:
    wrap = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    for i, layer in enumerate(gpt.layers):
        gpt.layers[i] = wrap(layer)
    return TorchFlat(wrap(gpt))


def function(gpt: GPT) -> Function:
    for i, layer in enumerate(gpt.layers):
        gpt.layers[i] = FSDPUnit(layer)
    return Function(FSDPUnit(gpt))


def mini_fsdp(gpt: GPT) -> Sharded:
    return Sharded(shard(gpt, fsdp_sim.mini.fully_shard, mesh=_mesh()))


def torch_fsdp2(gpt: GPT) -> Sharded:
    return Sharded(shard(gpt, fully_shard, mesh=_mesh()))


def loaded(text: str) -> dict[str, Any]:
    """What the text of a ``my_fsdp.py`` defines."""
    space: dict[str, Any] = {"__name__": "my_fsdp"}
    exec(compile(text, "my_fsdp.py", "exec"), space)
    return space


def from_text(gpt: GPT, text: str) -> Sharded:
    """With the `fully_shard` that a module's text defines."""
    return Sharded(shard(gpt, loaded(text)["fully_shard"], mesh=_mesh()))


def mini_hsdp(gpt: GPT) -> Sharded:
    return Sharded(shard(gpt, fsdp_sim.mini.fully_shard, mesh=_mesh_of_2_rows()))


def torch_hsdp(gpt: GPT) -> Sharded:
    return Sharded(shard(gpt, fully_shard, mesh=_mesh_of_2_rows()))


def offloaded(gpt: GPT, fully_shard: Callable[..., Any]) -> Sharded:
    return Sharded(shard(gpt, fully_shard, mesh=_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


def mixed(gpt: GPT, fully_shard: Callable[..., Any]) -> PartialSums:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return PartialSums(shard(gpt, fully_shard, mesh=_mesh_of_2_rows(), mp_policy=policy))


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _mesh_of_2_rows() -> Any:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class Rung:
    """One way to train.

    Attributes:
        name: on the command line.
        title: in the table.
        build: what a rank calls with the plain GPT.
        twin: the rung that issues the same collectives: torch's, for a rung of the mini.
        n_shards: into how many pieces dim 0 of a parameter is cut on so many ranks; None if not on dim 0.
        even_ranks: HSDP's mesh has two rows, so it takes an even number of ranks.
        ranks: its own number of ranks; None: as many as the ladder is climbed on.
        micro_batches: of a step, on every rank.
        only_twin: its numbers are rounded otherwise than all others, so they are compared with the twin's alone.
    """

    name: str
    title: str
    build: Callable[[GPT], Replicas]
    twin: str = ""
    n_shards: Callable[[int], int] | None = None
    even_ranks: bool = False
    ranks: int | None = None
    micro_batches: int = 1
    only_twin: bool = False


_THREE: dict[str, Any] = {"n_shards": lambda ranks: ranks, "ranks": 3, "micro_batches": 2}
_MIXED: dict[str, Any] = {"n_shards": lambda ranks: ranks // 2, "ranks": 4, "micro_batches": 3, "only_twin": True}
RUNGS = {
    rung.name: rung
    for rung in (
        Rung("one-process", "one process", one_process),
        Rung("torch-ddp", "torch DDP", torch_ddp),
        Rung("mini-ddp", "mini DDP", mini_ddp),
        Rung("zero-1", "ZeRO-1", partial(zero, stage=1)),
        Rung("zero-2", "ZeRO-2", partial(zero, stage=2)),
        Rung("torch-fsdp1", "torch FSDP1", torch_fsdp1),
        Rung("mini-flat", "mini flat parameter", mini_flat, twin="torch-fsdp1"),
        Rung("function", "one-function FSDP", function),
        Rung("torch-fsdp2", "torch FSDP2", torch_fsdp2, n_shards=lambda ranks: ranks),
        Rung("mini-fsdp", "mini FSDP", mini_fsdp, twin="torch-fsdp2", n_shards=lambda ranks: ranks),
        Rung("torch-hsdp", "torch HSDP", torch_hsdp, "", lambda ranks: ranks // 2, even_ranks=True),
        Rung("mini-hsdp", "mini HSDP", mini_hsdp, "torch-hsdp", lambda ranks: ranks // 2, even_ranks=True),
        Rung("torch-3", "torch, 3 ranks, offload", partial(offloaded, fully_shard=fully_shard), **_THREE),
        Rung("mini-3", "mini, 3 ranks, offload", partial(offloaded, fully_shard=fsdp_sim.mini.fully_shard),
             "torch-3", **_THREE),
        Rung("torch-bf16", "torch, 2 x 2, bf16", partial(mixed, fully_shard=fully_shard), **_MIXED),
        Rung("mini-bf16", "mini, 2 x 2, bf16", partial(mixed, fully_shard=fsdp_sim.mini.fully_shard),
             "torch-bf16", **_MIXED),
    )
}  # fmt: skip


def yours(name: str, text: str) -> Rung:
    """The rung of the learner's own FSDP: a module's file name and text."""
    build = partial(from_text, text=text)
    return Rung("yours", f"yours, {name}", build, twin="torch-fsdp2", n_shards=lambda ranks: ranks)
