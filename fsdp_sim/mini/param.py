"""One parameter: what a rank keeps for good, and what it holds only while the parameter's unit computes.

[Note: the shapes of one parameter]  W ranks, ``rows = ceil(d0 / W)``:

    original   (d0, ...)         the tensor on the module before `fully_shard`; dropped
    sharded    (<= rows, ...)    DTensor with placement Shard(0): this rank's rows. The optimizer, the state dict and
                                 the user see this one. The last ranks may hold fewer rows, or none
    unsharded  (d0, ...)         plain tensor; forward and backward compute with this one

A collective moves pieces of equal size, so the memory behind both is padded to whole pieces: a rank stores
``(rows, ...)`` (zeros below its own rows) and the gathered buffer has ``W * rows`` rows, of which the first d0 are the
parameter. Rows are contiguous, so the padding falls off the end and needs no copy.

[Note: one unsharded parameter for the whole run]  Autograd saves the unsharded parameter in forward and reads it
in backward, after it was freed and gathered again. So the tensor object stays the same for the whole run and only the
storage behind it is given back (``resize_(0)``) and allocated anew.
"""

from __future__ import annotations

from enum import Enum, auto
from itertools import count
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

Owner = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter. Tied parameters have several."""

_uids = count()


class ShardedState(Enum):
    """Which of its two forms a parameter (and its group) is registered in on the module."""

    SHARDED = auto()
    UNSHARDED = auto()


class FSDPParam:
    """One parameter, sharded on dim 0 over a 1-D mesh (torch: `_fsdp_param.FSDPParam`).

    Attributes:
        sharded_param: the DTensor parameter, placement ``Shard(0)``.
        sharded_size: shape of this rank's rows; dim 0 may be 0.
        padded_sharded_size: shape of what every rank contributes to the all-gather.
        uid: the same for every group that was given the same original parameter.

    Raises:
        NotImplementedError: the parameter is not contiguous, or already a DTensor (tensor parallelism).
    """

    def __init__(self, param: nn.Parameter, owners: list[Owner], mesh: DeviceMesh) -> None:
        self.owners = owners
        self.mesh = mesh
        self.world_size: int = mesh.size()
        self.fqn = f"{type(owners[0][0]).__name__}.{owners[0][1]}"  # full name from the root: at lazy init
        if isinstance(param, DTensor):
            raise NotImplementedError(
                f"{self.fqn} is already a DTensor with placements {param.placements}; this version shards plain "
                "parameters only (no tensor parallelism)"
            )
        if not param.is_contiguous():
            raise NotImplementedError(
                f"fully_shard needs contiguous parameters, but {self.fqn} has shape {tuple(param.shape)} and stride "
                f"{param.stride()}; replace it by nn.Parameter(param.contiguous())"
            )
        if not hasattr(param, "_fsdp_mini_uid"):
            param._fsdp_mini_uid = next(_uids)  # type: ignore[attr-defined]
        self.uid: int = param._fsdp_mini_uid  # type: ignore[attr-defined]
        self.sharded_state = ShardedState.SHARDED
        self._unsharded_param: nn.Parameter | None = None  # from the first all-gather on
        self.recorded_grad_bytes = 0  # of the whole gradient in the timeline
        self._init_sharded_param(param)
        module = owners[0][0]
        module.register_load_state_dict_post_hook(lambda *_: self.reset_sharded_param())

    @torch.no_grad()
    def _init_sharded_param(self, param: nn.Parameter) -> None:
        self.orig_size, self.orig_stride = param.size(), param.stride()
        d0, rows = param.size(0), -(-param.size(0) // self.world_size)
        first = min(self.mesh.get_local_rank() * rows, d0)
        own = param[first : min(first + rows, d0)]  # (0 to rows, ...), the same split as torch.chunk
        self.sharded_size = own.size()
        self.padded_sharded_size = torch.Size((rows, *self.orig_size[1:]))
        self._own_padded_memory(own)
        dtensor = self.to_sharded_dtensor(self._padded_rows())
        self.sharded_param = nn.Parameter(dtensor, requires_grad=param.requires_grad)
        self._register(self.sharded_param)

    def _own_padded_memory(self, own: torch.Tensor) -> None:
        padded = own.new_zeros(self.padded_sharded_size)
        padded[: own.size(0)].copy_(own)
        self._sharded_param_data = padded.view(-1)  # 1D, padded: what goes into the all-gather

    def _padded_rows(self) -> torch.Tensor:
        """This rank's rows, a view of the padded memory: an optimizer step changes what the next all-gather sends."""
        return self._sharded_param_data.view(self.padded_sharded_size)[: self.sharded_size[0]]

    def to_sharded_dtensor(self, local: torch.Tensor) -> DTensor:
        """This rank's rows of the parameter or of its gradient, as the DTensor that users see."""
        return DTensor.from_local(
            local, self.mesh, (Shard(0),), run_check=False, shape=self.orig_size, stride=self.orig_stride
        )

    def reset_sharded_param(self) -> None:
        """Take over the tensor now on the module: ``to_empty``, ``.double()`` and ``load_state_dict(assign=True)``
        replace the one made here, and the new one is not padded."""
        module, name = self.owners[0]
        self.sharded_param = getattr(module, name)
        local = local_tensor(self.sharded_param)
        ours = self._sharded_param_data.untyped_storage().data_ptr()
        if local.is_meta or (ours and ours == local.untyped_storage().data_ptr()):
            return
        with torch.no_grad():
            self._own_padded_memory(local)
            cast(DTensor, self.sharded_param)._local_tensor = self._padded_rows()  # the object stays

    # Moving between the two forms

    def alloc_unsharded_param(self) -> None:
        """Give the unsharded parameter memory (U in the programs); what is in it is for the copy-out to write."""
        if self._unsharded_param is None:
            shape = (self.world_size * self.padded_sharded_size[0], *self.orig_size[1:])
            with torch.no_grad():
                buffer = self._sharded_param_data.new_empty(shape)  # (W * rows, ...)
                self.all_gather_output = buffer.view(-1)  # 1D, padded
                self._unsharded_param = nn.Parameter(
                    buffer[: self.orig_size[0]], requires_grad=self.sharded_param.requires_grad
                )
        self.all_gather_output.untyped_storage().resize_(self.unsharded_bytes)

    def free_unsharded_param(self) -> None:
        if self._unsharded_param is not None:
            self.all_gather_output.untyped_storage().resize_(0)

    def to_unsharded(self) -> None:
        unsharded_param = self.unsharded_param
        if unsharded_param.requires_grad != self.sharded_param.requires_grad:  # frozen or thawed since the last time
            unsharded_param.requires_grad_(self.sharded_param.requires_grad)
        self._register(unsharded_param)
        self.sharded_state = ShardedState.UNSHARDED

    def to_sharded(self) -> None:
        self._register(self.sharded_param)
        self.free_unsharded_param()
        self.sharded_state = ShardedState.SHARDED

    def _register(self, param: nn.Parameter) -> None:
        for module, name in self.owners:
            module._parameters[name] = param  # setattr would do, with checks that cost time in every hook

    # What the collectives read and write

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The whole parameter, shape (d0, ...); without memory while the group is sharded."""
        if self._unsharded_param is None:
            raise RuntimeError(f"{self.fqn} was never gathered; run the forward of its module first")
        return self._unsharded_param

    @property
    def all_gather_input(self) -> torch.Tensor:
        """1D, padded: this rank's contribution to the all-gather."""
        return self._sharded_param_data

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of U, padding included."""
        return self.all_gather_output.numel() * self.all_gather_output.itemsize

    @property
    def unsharded_grad(self) -> torch.Tensor | None:
        """The gradient autograd computed for the whole parameter, shape (d0, ...), if any."""
        return None if self._unsharded_param is None else self._unsharded_param.grad

    def take_unsharded_grad(self) -> torch.Tensor:
        """Hand over the gradient of the whole parameter: the parameter lets go of it."""
        grad = self.unsharded_param.grad
        if grad is None:
            raise RuntimeError(f"{self.fqn} has no gradient to hand over")
        self.unsharded_param.grad = None
        return grad

    def __repr__(self) -> str:
        return f"FSDPParam(fqn={self.fqn}, orig_size={tuple(self.orig_size)})"


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without autograd (which `DTensor.to_local` takes part in)."""
    return cast(DTensor, tensor)._local_tensor
