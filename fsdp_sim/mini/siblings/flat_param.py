"""The flat parameter of FSDP1: all parameters of a unit in one 1-D tensor (torch: `_flat_param`).

[Note: the flat parameter]  A unit's parameters are laid end to end, and the result is cut into W equal chunks wherever
the cuts fall. Parameters a (2, 3) and b (5,) on 4 ranks are 11 elements, padded to 12:

    | a a a | a a a | b b b | b b . |      rank 1 holds the second row of a, rank 3 the end of b and one zero

What it buys: the chunk *is* the all-gather's input, the gathered buffer *is* the flat parameter. The module computes
with views of it, so autograd writes one flat gradient, which *is* the reduce-scatter's input (if it needs no padding).
Nothing is copied in or out, where FSDP2 copies before and after every collective.

What it costs, and why FSDP2 replaced it:

- A chunk is nothing that has a name. It may begin inside one parameter and end inside another, so `parameters()` yields
  one flat parameter per unit (build the optimizer from the wrapped model), settings per parameter are lost, and a
  checkpoint must be gathered to be read. FSDP2 cuts each parameter on dim 0: a shard is a DTensor with name and shape.
- A unit has one dtype and one ``requires_grad``: frozen weights beside trained ones need a unit of their own.
- The original names on the modules (``layer.weight``) are views; while the unit is sharded they have no memory.

This is ``use_orig_params=False``. With True, torch also keeps the original parameters as views of chunk or whole.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup, Work

from fsdp_sim.mini import recording
from fsdp_sim.mini.collectives import all_gather_single
from fsdp_sim.timeline import Lane, Memory


class HandleTrainingState(Enum):
    """Where a unit is in the step."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class FlatParameter(nn.Parameter):
    """The parameters of a unit in one 1-D tensor: this rank's chunk, or the whole while the unit computes."""


class ParamInfo(NamedTuple):
    """A place where a parameter, later a view of the flat parameter, is registered. Tied ones have several."""

    module: nn.Module
    name: str
    fqn: str

    @property
    def param(self) -> nn.Parameter:
        return self.module._parameters[self.name]  # type: ignore[return-value]


class FlatParamHandle:
    """Flattens, shards, gathers and frees the parameters of one unit.

    Attributes:
        flat_param: what the optimizer sees. Its ``data`` is ``_local_shard`` while sharded.
        _local_shard: 1-D, this rank's chunk, zeros on its right; the whole if not ``uses_sharded_strategy``.
        _full_param_padded: 1-D, W chunks; without memory while sharded.
    """

    def __init__(
        self, module: nn.Module, fqn: str, param_infos: list[ParamInfo], sharded: bool, process_group: ProcessGroup
    ) -> None:
        self.unit, self.is_root = fqn or "root", not fqn
        self.process_group, self.world_size = process_group, process_group.size()
        self.uses_sharded_strategy = sharded
        self._init_flat_param_and_metadata(param_infos)
        self.shard()
        module._parameters["_flat_param"] = self.flat_param

        # where the unit is in the step: `flat` moves these
        self._training_state = HandleTrainingState.IDLE
        self._post_forward_index: int | None = None
        self._needs_pre_forward_unshard = self._needs_pre_backward_unshard = False  # else a prefetch is in vain
        self._prefetched = self._ran_pre_backward_hook = False
        self._post_backward_hook: Any = None
        self._saved_grad_shard: torch.Tensor | None = None  # the sharded gradient while `.grad` is that of the whole
        self._holds_unsharded_grad = False  # `.grad` was left by a backward under no_sync
        self._grad_is_new = True  # autograd will allocate `.grad`, not add to it
        self._gathered = -1  # seq of the last all-gather in the timeline
        self._segments = (self.unit, self.unit)  # names of the first and the last segment of compute in the timeline

    def _init_flat_param_and_metadata(self, param_infos: list[ParamInfo]) -> None:
        numbers: dict[nn.Parameter, int] = {}  # of each parameter, in the order in which they are flattened
        self._param_infos = [(numbers.setdefault(info.param, len(numbers)), info) for info in param_infos]
        self._shapes, self._numels = [p.shape for p in numbers], [p.numel() for p in numbers]
        flat = torch.cat([p.detach().flatten() for p in numbers])  # 1-D, sum(numels)
        self.flat_param = FlatParameter(flat, requires_grad=param_infos[0].param.requires_grad)
        self._use_unsharded_views()

    @torch.no_grad()
    def shard(self) -> None:
        """Keep this rank's chunk."""
        whole = self._local_shard = self._full_param_padded = self.flat_param.data
        if self.uses_sharded_strategy:
            # ceil(numel / W) elements each; of a small parameter the last chunks are shorter or missing
            rank, chunks = self.process_group.rank(), whole.chunk(self.world_size)
            own = chunks[rank] if rank < len(chunks) else whole[:0]
            self._local_shard = F.pad(own, [0, chunks[0].numel() - own.numel()]).clone()
            self._full_param_padded = whole.new_empty(self.world_size * chunks[0].numel())
            self._full_param_padded.untyped_storage().resize_(0)
            whole.untyped_storage().resize_(0)
            self.flat_param.data = self._local_shard

    def needs_unshard(self) -> bool:
        return self._full_param_padded.untyped_storage().size() == 0

    def unshard(self) -> Callable[..., Work] | None:
        """Make the flat parameter the whole one.

        Returns:
            the all-gather that fills it, still to be issued; None if nothing was freed.
        """
        whole, all_gather = self._full_param_padded, None
        if self.needs_unshard():
            whole.untyped_storage().resize_(whole.nbytes)
            recording.allocated(Memory.UNSHARDED, self.unit, whole.nbytes, Lane.COMPUTE)
            all_gather = partial(all_gather_single, whole, self._local_shard)
        self.flat_param.data = whole[: sum(self._numels)]
        if self._training_state is HandleTrainingState.FORWARD:  # backward reads the views that autograd has saved
            self._use_unsharded_views()
        return all_gather

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Make the flat parameter the chunk, and give the memory of the whole back if told to."""
        self.flat_param.data = self._local_shard
        if free_unsharded_flat_param and not self.needs_unshard():
            self._full_param_padded.untyped_storage().resize_(0)
            recording.freed(Memory.UNSHARDED, self.unit, self._full_param_padded.nbytes, Lane.COMPUTE)

    def prepare_gradient_for_backward(self) -> None:
        """Put the sharded gradient of an earlier backward aside: autograd is about to write that of the whole."""
        if self.uses_sharded_strategy and not self._holds_unsharded_grad:
            self._saved_grad_shard, self.flat_param.grad = self.flat_param.grad, None
        self._grad_is_new = self.flat_param.grad is None

    def accumulate_sharded_grad(self, grad: torch.Tensor) -> None:
        self._saved_grad_shard = grad if self._saved_grad_shard is None else self._saved_grad_shard.add_(grad)

    def prepare_gradient_for_optim(self) -> None:
        if self._saved_grad_shard is not None:
            self.flat_param.grad, self._saved_grad_shard = self._saved_grad_shard, None

    @torch.enable_grad()  # a unit may be prefetched inside another one's no_grad
    def _use_unsharded_views(self) -> None:
        """Set the original names to views of the flat parameter, which autograd tracks."""
        views = self.get_unflat_views(self.flat_param)
        for _, info in self._param_infos:
            info.module._parameters.pop(info.name, None)  # the optimizer sees the flat parameter alone
            info.module.__dict__[info.name] = views[info.fqn]

    def get_unflat_views(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The original tensors by name, as views of a flat one, padded or not; tied ones under each name."""
        pieces = whole[: sum(self._numels)].split(self._numels)
        views = [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
        return {info.fqn: views[number] for number, info in self._param_infos}

    def gather_unflattened(self, chunk: torch.Tensor) -> dict[str, torch.Tensor]:
        """The original tensors by name, from every rank's chunk of the parameter or of its gradient."""
        if not self.uses_sharded_strategy:
            return self.get_unflat_views(chunk.clone())
        whole = chunk.new_empty(self.world_size * chunk.numel())  # 1-D, W chunks
        all_gather_single(whole, chunk, group=self.process_group)
        return self.get_unflat_views(whole)


def params_of_units(root: nn.Module, units: dict[str, nn.Module]) -> dict[str, list[ParamInfo]]:
    """Which parameters each unit flattens: those of the modules that no unit inside it contains.

    Args:
        units: by name, outer ones before those inside them.

    Raises:
        ValueError: a unit's parameters differ in dtype, device or ``requires_grad``, or are scalars; a parameter is in
            two units.
    """
    unit_of = {m: fqn for fqn, unit in units.items() for m in unit.modules()}  # the innermost, which comes last
    found: dict[str, list[ParamInfo]] = {fqn: [] for fqn in units}
    owners: dict[nn.Parameter, str] = {}
    for module_fqn, module in root.named_modules(remove_duplicate=False):
        unit = unit_of[module]
        for name, param in module._parameters.items():
            if param is not None:
                fqn = f"{module_fqn}.{name}".lstrip(".")
                found[unit].append(ParamInfo(module, name, fqn))
                if owners.setdefault(param, unit) != unit:
                    raise ValueError(
                        f"{fqn} is in unit {unit or 'root'!r} and in unit {owners[param] or 'root'!r}; make one unit "
                        "of a module that contains all that share it"
                    )
    for infos in found.values():
        _validate_tensors_to_flatten(infos)
    return {fqn: infos for fqn, infos in found.items() if infos}


def _validate_tensors_to_flatten(infos: list[ParamInfo]) -> None:
    for info in infos:
        if info.param.ndim == 0:
            raise ValueError(f"{info.fqn} is a scalar, which FSDP1 does not take; make it a tensor of shape (1,)")
        for what in ("dtype", "requires_grad", "device"):
            mine, first = getattr(info.param, what), getattr(infos[0].param, what)
            if mine != first:
                raise ValueError(
                    f"a flat parameter has one {what}, but {infos[0].fqn} has {first} and {info.fqn} has {mine}; make "
                    "the modules that differ units of their own"
                )
