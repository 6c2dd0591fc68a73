"""What a checkpoint holds: one tensor per name, with the names and shapes of the plain model, however it is wrapped.

    model.layers.0.attn.qkv.weight              the parameter (and persistent buffers, if any)
    optim.layers.0.attn.qkv.weight.exp_avg      AdamW's mean of its gradients, of its shape
    optim.layers.0.attn.qkv.weight.exp_avg_sq   and of their squares
    optim.layers.0.attn.qkv.weight.step         how often it was stepped, a scalar

A value is a plain tensor where every rank has it whole (one process, DDP), and a DTensor, cut on dim 0, where it is
sharded; so `torch.distributed.checkpoint` can save it once and load it onto any other number of ranks. A tied weight is
there once, under its first name. Saving is `read_state`, then write the tensors; loading is `read_state`, fill the
tensors in place, then `write_state`.

[Note: why not torch.distributed.checkpoint.state_dict]  `get_state_dict` has the same aim, but a run could not resume
exactly with it in every way of wrapping:

- An optimizer that has not stepped yet it steps itself, with lr 0: AdamW's ``step`` then says 1 where it was 0. While
  gradients are there it leaves the optimizer empty.
- From FSDP1 it gets ShardedTensors, or DTensors, as FSDP1 was constructed, and an error with NO_SHARD, which is what
  FSDP1 makes of one rank. It copies everything in both directions.
- It keeps the optimizer's groups with their hyperparameters, which differ from one way of wrapping to the next; the
  trainer's config has them, and the schedule sets them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor, Shard

import fsdp_sim.mini
from labs.wrapping.base import original_name

State = dict[str, torch.Tensor]
"""Plain tensors and DTensors by name."""

MOMENTS = ("exp_avg", "exp_avg_sq")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; for a DTensor a collective call.

    Shards that a model on GPUs keeps in host memory are gathered through the GPU.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()


@torch.no_grad()
def not_finite(state: State) -> list[str]:
    """The names of those tensors of which this rank's part holds NaN or infinity."""
    parts = {name: local(tensor) for name, tensor in state.items()}
    parts = {name: part for name, part in parts.items() if part.is_floating_point() and part.numel()}
    # The largest magnitude, which is NaN where one is: without a copy, and the host waits once for all of them.
    largest = [torch.linalg.vector_norm(part, ord=torch.inf, dtype=torch.float32).cpu() for part in parts.values()]
    return [name for name, most in zip(parts, largest, strict=True) if not torch.isfinite(most)]


@torch.no_grad()
def read_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> State:
    """Everything that training changes in a model and its AdamW, by name. Collective where FSDP1 shards.

    The tensors are the live ones: who fills them fills the model. FSDP1 cuts a unit's parameters together, as one flat
    tensor, so there they are copies of this rank's rows (made with one unit whole at a time), which `write_state` puts
    back. An optimizer that has not stepped yet gets the zeros with which its first step would begin. Call it between
    steps.

    Args:
        optimizer: an AdamW, made after wrapping. Without one the state is that of the model.

    Raises:
        ValueError: an optimizer with other state than AdamW's, or with parameters that the model does not have.
    """
    _reshard_all(model)
    adamw = _AdamWState(optimizer)
    state: State = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                state["model." + original_name(f"{path}.{name}".removeprefix("."))] = buffer.detach()
    units = _flat_units(model)
    for unit in units:
        state |= unit.read(adamw)
    if not units:
        for name, param in model.named_parameters():
            state["model." + original_name(name)] = param.detach()
            state |= {f"optim.{original_name(name)}.{key}": value for key, value in adamw.of(param).items()}
    adamw.check_all_seen()
    return state


@torch.no_grad()
def write_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, state: State) -> None:
    """Put back what `read_state` returned and a loader has filled. Collective where FSDP1 shards.

    Args:
        state: of the same model and optimizer, filled in place (or replaced by tensors of the same form).

    Raises:
        ValueError: FSDP1 with ``use_orig_params=False`` has one ``step`` per unit, and the state has several.
    """
    units = _flat_units(model)
    if not units:
        for name, tensor in read_state(model, optimizer).items():
            if local(tensor).data_ptr() != local(state[name]).data_ptr():
                tensor.copy_(state[name])
    _reshard_all(model)  # else the next forward computes with what was gathered before
    for unit in units:
        unit.write(_AdamWState(optimizer), state)


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What this rank keeps between steps of parameters and of the optimizer's state. Not collective."""
    _reshard_all(model)
    states = [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    return sum(local(tensor).nbytes for tensor in [*model.parameters(), *states])


def _reshard_all(model: nn.Module) -> None:
    """Free what is gathered: after a forward without backward a root still holds whole parameters."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            handle = module._handle
            if handle is not None and hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard():
                _reshard(module, handle, free_unsharded_flat_param=True)
        elif isinstance(module, (FSDPModule, fsdp_sim.mini.FSDPModule)):
            module.reshard()


class _AdamWState:
    """An optimizer's own tensors by parameter, made where they are missing; of no optimizer there are none."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        groups = optimizer.param_groups if optimizer else []
        if optimizer and not (isinstance(optimizer, torch.optim.Adam) and not any(g["amsgrad"] for g in groups)):
            raise ValueError(f"{type(optimizer).__name__} keeps other state than AdamW; use AdamW without amsgrad")
        self.optimizer = optimizer
        self.groups = {param: group for group in groups for param in group["params"]}
        self.seen: set[torch.Tensor] = set()

    def of(self, param: torch.Tensor) -> State:
        """``exp_avg``, ``exp_avg_sq`` and ``step``; nothing for a parameter the optimizer does not step.

        Source of the zeros: `torch.optim.Adam._init_group`.
        """
        self.seen.add(param)
        if (
            self.optimizer is None or param not in self.groups or not param.numel()
        ):  # FSDP1 leaves nothing on some ranks
            return {}
        state = self.optimizer.state[param]
        if not state:
            on_device = self.groups[param]["capturable"] or self.groups[param]["fused"]
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")
            for key in MOMENTS:
                state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return {key: state[key] for key in (*MOMENTS, "step")}

    def check_all_seen(self) -> None:
        for param in self.groups:
            if param not in self.seen:
                raise ValueError(
                    f"the optimizer steps a parameter of shape {tuple(param.shape)} that the model does not have; make "
                    "the optimizer after wrapping the model"
                )


# ---- FSDP1: the parameters of a unit are one flat tensor, of which each rank has an interval -------------------------


@dataclass(frozen=True, eq=False)
class _Original:
    """One of the parameters that were flattened.

    Attributes:
        start: where it begins in the flat tensor of all ranks.
        param: what the optimizer steps: this, or (``use_orig_params=False``) the flat tensor it is in.
    """

    name: str
    shape: torch.Size
    start: int
    param: torch.Tensor


@dataclass(frozen=True)
class _FlatUnit:
    """A unit of FSDP1.

    torch has no public way to the intervals, so this reads FlatParameter's attributes: `_local_shard` (this rank's,
    padded to equal lengths), `_fqns`, `_shapes`, `_numels_with_padding`. FSDP1 is no longer developed.
    """

    handle: FlatParamHandle
    originals: tuple[_Original, ...]

    @property
    def shard(self) -> torch.Tensor:
        """This rank's interval, 1D; with NO_SHARD all of it."""
        flat = self.handle.flat_param
        return getattr(flat, "_local_shard", flat).data  # the attribute comes with the first forward

    def tensors(self, original: _Original, adamw: _AdamWState) -> State:
        """This rank's pieces of a parameter and of its moments, 1D and live, and ``step``."""
        mine, _ = self.interval(original)
        kept = adamw.of(original.param)
        if original.param is self.handle.flat_param:
            kept |= {key: kept[key][mine] for key in kept if key in MOMENTS}
        return {"param": self.shard[mine]} | {key: kept[key].view(-1) if key in MOMENTS else kept[key] for key in kept}

    def interval(self, original: _Original) -> tuple[slice, slice]:
        """What this rank has of a parameter: as a part of the shard, and as a part of the parameter (flattened)."""
        first = self.handle.rank * self.shard.numel() if self.handle.uses_sharded_strategy else 0
        begin = max(original.start, first)
        end = max(begin, min(original.start + original.shape.numel(), first + self.shard.numel()))
        return slice(begin - first, end - first), slice(begin - original.start, end - original.start)

    def read(self, adamw: _AdamWState) -> State:
        state: State = {}
        tensors = {it: self.tensors(it, adamw) for it in self.originals}
        stepped = [it for it in self.originals if it.param in adamw.groups]
        for key, originals in {"param": self.originals, "exp_avg": stepped, "exp_avg_sq": stepped}.items():
            state |= self.gather(key, {it: tensors[it].get(key) for it in originals})
        # A rank has no state for a parameter of which it has nothing; the others know its step.
        steps = torch.tensor([float(tensors[it].get("step", 0)) for it in stepped], device=self.shard.device)
        if stepped and self.handle.uses_sharded_strategy:
            dist.all_reduce(steps, dist.ReduceOp.MAX, self.handle.process_group)
        return state | {f"optim.{it.name}.step": step.clone() for it, step in zip(stepped, steps.cpu(), strict=True)}

    def gather(self, key: str, pieces: dict[_Original, torch.Tensor | None]) -> State:
        """Parameters or moments of this unit, each cut on dim 0 over the ranks that share the flat tensor."""
        names = {it: f"model.{it.name}" if key == "param" else f"optim.{it.name}.{key}" for it in pieces}
        if not self.handle.uses_sharded_strategy:
            return {names[it]: piece.view(it.shape) for it, piece in pieces.items() if piece is not None}
        mine = torch.zeros_like(self.shard)
        for it, piece in pieces.items():
            if piece is not None:
                mine[self.interval(it)[0]] = piece
        ranks, group = self.handle.world_size, self.handle.process_group
        flat = mine.new_empty(ranks * mine.numel())
        dist.all_gather_into_tensor(flat, mine, group)
        mesh = DeviceMesh.from_group(group, mine.device.type)
        state: State = {}
        for it, name in names.items():
            param = flat[it.start : it.start + it.shape.numel()].view(it.shape)
            rows = -(-it.shape[0] // ranks)  # as torch.chunk and Shard(0) cut
            own = param[self.handle.rank * rows : (self.handle.rank + 1) * rows].clone()
            state[name] = DTensor.from_local(
                own, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride()
            )
        return state

    def write(self, adamw: _AdamWState, state: State) -> None:
        steps: dict[torch.Tensor, tuple[str, float]] = {}
        for it in self.originals:
            tensors = self.tensors(it, adamw)
            names = {"param": f"model.{it.name}"}
            if it.param in adamw.groups:
                names |= {key: f"optim.{it.name}.{key}" for key in MOMENTS}
                step = state[f"optim.{it.name}.step"].item()
                first, known = steps.setdefault(it.param, (it.name, step))
                if step != known:
                    raise ValueError(
                        f"{first} was stepped {known:g} times and {it.name} {step:g} times, but they are one flat "
                        "tensor; use use_orig_params=true"
                    )
                if "step" in tensors:
                    tensors["step"].fill_(step)
            for key, name in names.items():
                flattened = whole(state[name]).reshape(-1)  # collective: also for what is not on this rank
                if key in tensors:
                    tensors[key].copy_(flattened[self.interval(it)[1]])


def _flat_units(model: nn.Module) -> list[_FlatUnit]:
    units = []
    for path, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
            continue
        flat = module._handle.flat_param
        offsets = accumulate(flat._numels_with_padding, initial=0)
        starts = [start for start, padding in zip(offsets, flat._is_padding_mask, strict=False) if not padding]
        params = flat._params or [flat] * len(starts)
        names = [original_name(f"{path}.{name}".removeprefix(".")) for name in flat._fqns]
        originals = map(_Original, names, flat._shapes, starts, params)
        units.append(_FlatUnit(module._handle, tuple(originals)))
    return units
