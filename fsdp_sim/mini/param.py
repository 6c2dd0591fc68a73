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

[Note: a slice in between]  With ``reshard_after_forward=n`` a rank keeps 1/n of the gathered buffer between forward
and backward (SHARDED_POST_FORWARD), and backward gathers from n neighbours only. The slice is a clone: the buffer
itself is freed.
"""

from __future__ import annotations

from itertools import count
from typing import cast

import torch
from torch import nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_sim.mini import versions
from fsdp_sim.mini.extensions import extension_of
from fsdp_sim.mini.hsdp import FSDPMeshInfo
from fsdp_sim.mini.offload import pin, to_device
from fsdp_sim.mini.precision import mixed_dtypes, to_dtype
from fsdp_sim.states import ShardedState

Owner = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter. Tied parameters have several."""

Piece = tuple[int, torch.dtype]
"""What each rank contributes to an all-gather for a parameter: elements, padding included, and their dtype."""

_uids = count()


class FSDPParam:
    """One parameter, sharded on dim 0 (torch: `_fsdp_param.FSDPParam`).

    Attributes:
        sharded_param: the DTensor parameter, placement ``Shard(0)``, or ``(Replicate(), Shard(0))`` on a 2-D mesh.
        sharded_size: shape of this rank's rows; dim 0 may be 0.
        padded_sharded_param_size: shape of what every rank contributes to the all-gather.
        unsharded_accumulated_grad: gradient of the whole parameter in ``reduce_dtype``, see `accumulation`.
        orig_dtype, param_dtype, reduce_dtype: see `precision`.
        all_gather_outputs: the memory behind the unsharded parameter: one tensor, 1D, padded.
        extension: of a tensor subclass that is gathered in its own way, see `extensions`; else None.

    Raises:
        TypeError, NotImplementedError: a DTensor already, of a mesh without names (torch's type) or with them (tensor
            parallelism).
        NotImplementedError: not contiguous.
    """

    _unsharded_param: nn.Parameter

    def __init__(
        self,
        param: nn.Parameter,
        owners: list[Owner],
        mesh_info: FSDPMeshInfo,
        device: torch.device,
        offload_policy: OffloadPolicy | None = None,
    ) -> None:
        self.owners = owners
        self.mesh_info = mesh_info
        self.device = device
        self.offload_to_cpu = isinstance(offload_policy, CPUOffloadPolicy)
        self.pin_memory = isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory
        self._param_fqn = f"{type(owners[0][0]).__name__}.{owners[0][1]}"  # full name from the root: at lazy init
        if isinstance(param, DTensor):
            named = param.device_mesh.mesh_dim_names and mesh_info.mesh.mesh_dim_names
            raise (NotImplementedError if named else TypeError)(
                f"{self._param_fqn} is a DTensor already, with placements {param.placements}: either torch's own "
                "fully_shard cut it (use one of the two for all of a model), or tensor parallelism, left out here"
            )
        if not param.is_contiguous():
            raise NotImplementedError(
                f"fully_shard needs contiguous parameters, but {self._param_fqn} has shape {tuple(param.shape)} and "
                f"stride {param.stride()}; replace it by nn.Parameter(param.contiguous())"
            )
        if not hasattr(param, "_fsdp_mini_uid"):
            param._fsdp_mini_uid = next(_uids)  # type: ignore[attr-defined]
        self._orig_param_uid: int = param._fsdp_mini_uid  # type: ignore[attr-defined]
        self.orig_dtype = param.dtype
        self.param_dtype: torch.dtype | None = None
        self.reduce_dtype: torch.dtype | None = None
        self.sharded_state = ShardedState.SHARDED
        self.unsharded_accumulated_grad: torch.Tensor | None = None
        self.grad_offload_event: torch.Event | None = None
        self.all_gather_outputs: list[torch.Tensor] = []
        self.shard(param)
        module = owners[0][0]
        module.register_load_state_dict_post_hook(lambda *_: self.reset_sharded_param())

    @torch.no_grad()
    def shard(self, param: nn.Parameter) -> None:
        """Keep this rank's rows of a whole parameter, and register them in its place."""
        self._orig_size, self._orig_stride = param.size(), param.stride()
        d0, rows = param.size(0), -(-param.size(0) // self.mesh_info.shard_mesh_size)
        first = min(self.mesh_info.shard_mesh_rank * rows, d0)
        own = param[first : min(first + rows, d0)]  # (0 to rows, ...), the same split as torch.chunk
        self.sharded_size = own.size()
        self.padded_sharded_param_size = torch.Size((rows, *self._orig_size[1:]))
        self._own_padded_memory(own)
        meta = TensorMeta(self._orig_size, self._orig_stride, param.dtype)
        self._sharding_spec = DTensorSpec(self.mesh_info.mesh, self.mesh_info.placements, tensor_meta=meta)
        self.sharded_param = nn.Parameter(self.to_sharded_dtensor(self._padded_rows()), param.requires_grad)
        self.extension = extension_of(self, local_tensor(self.sharded_param))
        self._register(self.sharded_param)

    def _own_padded_memory(self, own: torch.Tensor) -> None:
        padded = own.new_zeros(self.padded_sharded_param_size)  # of a tensor subclass, if ``own`` is
        padded.narrow(0, 0, own.size(0)).copy_(own)
        if self.offload_to_cpu:
            padded = pin(padded, self.pin_memory)
        elif not padded.is_meta:
            padded = padded.to(self.device)
        self._sharded_param_data = padded.view(-1)  # 1D, padded: what goes into the all-gather

    def _padded_rows(self) -> torch.Tensor:
        """This rank's rows, a view of the padded memory: an optimizer step changes what the next all-gather sends."""
        return self._sharded_param_data.view(self.padded_sharded_param_size).narrow(0, 0, self.sharded_size[0])

    def to_sharded_dtensor(self, local: torch.Tensor) -> DTensor:
        """This rank's rows of the gradient as users see it (`DTensor.from_local`, without its checks)."""
        return DTensor(local, self._sharding_spec, requires_grad=False)

    def reset_sharded_param(self) -> None:
        """Take over the tensor now on the module: ``to_empty``, ``.double()`` and ``load_state_dict(assign=True)``
        replace the one made here, and the new one is not padded."""
        module, name = self.owners[0]
        self.sharded_param = getattr(module, name)
        local = local_tensor(self.sharded_param)
        if local.is_meta:
            return
        plain = type(self._sharded_param_data) is torch.Tensor  # a subclass may have no memory of its own
        ours = self._sharded_param_data.untyped_storage().data_ptr() if plain else 0
        if ours and ours == local.untyped_storage().data_ptr():
            pass
        elif local.shape == self.padded_sharded_param_size and not self.offload_to_cpu:
            self._sharded_param_data = local.view(-1)  # needs no padding
        else:
            with torch.no_grad():
                self._own_padded_memory(local)
                cast(DTensor, self.sharded_param)._local_tensor = self._padded_rows()  # the object stays
        self._sharding_spec = cast(DTensor, self.sharded_param)._spec
        self.extension = extension_of(self, local_tensor(self.sharded_param))

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        self.mp_policy = mp_policy
        self.orig_dtype = self.sharded_param.dtype
        self.param_dtype, self.reduce_dtype = mixed_dtypes(mp_policy, self.orig_dtype)

    # Moving between the forms

    def alloc_unsharded_param(self, pieces: list[Piece], world_size: int) -> None:
        """Give the unsharded parameter memory (U in the programs); what is in it is for the copy-out to write."""
        if not self.all_gather_outputs:
            self.all_gather_outputs = [
                torch.empty(world_size * numel, dtype=dtype, device=self.device) for numel, dtype in pieces
            ]
        for output in self.all_gather_outputs:
            if (storage := output.untyped_storage()).size() != (n_bytes := output.numel() * output.itemsize):
                storage.resize_(n_bytes)

    def free_unsharded_param(self) -> None:
        for tensor in (*self.all_gather_outputs, *(self.extension.inner_tensors if self.extension else ())):
            if (storage := tensor.untyped_storage()).size():
                storage.resize_(0)

    @torch.no_grad()
    def init_unsharded_param(self) -> None:
        """Make the unsharded parameter, once, of the memory that was copied into; an extension writes it every time."""
        out, whole = self._unsharded_param if self.was_gathered else None, self.all_gather_outputs[0]
        if self.extension is not None:
            shard, dtype = local_tensor(self.sharded_param), self.param_dtype or self.orig_dtype
            whole = self.extension.unshard(shard, self.all_gather_outputs, dtype, out)
        if out is None:
            whole = torch.as_strided(whole, self._orig_size, make_contiguous_strides_for(self._orig_size), 0)
            self._unsharded_param = nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)
            if versions.GRADS_KEEP_ORIGINAL_DTYPE:
                self._unsharded_param.grad_dtype = self.reduce_dtype

    def to_unsharded(self) -> None:
        if self.extension is not None or not self.was_gathered:
            self.init_unsharded_param()
        unsharded_param = self._unsharded_param
        if unsharded_param.requires_grad != self.sharded_param.requires_grad:  # frozen or thawed since the last time
            unsharded_param.requires_grad_(self.sharded_param.requires_grad)
        self._register(unsharded_param)
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            del self._sharded_post_forward_param, self._sharded_post_forward_param_data  # gathered: let go of the slice
        self.sharded_state = ShardedState.UNSHARDED

    def to_sharded(self) -> None:
        self._register(self.sharded_param)
        self.free_unsharded_param()
        self.sharded_state = ShardedState.SHARDED

    def to_sharded_post_forward(self, mesh_info: FSDPMeshInfo) -> torch.Tensor:
        """Keep a slice of the gathered buffer, 1D, and free the rest, see [Note: a slice in between]. Returns it.

        Raises:
            NotImplementedError: of a parameter with an all-gather extension (torch's type).
        """
        if self.extension is not None:
            raise NotImplementedError(
                f"{self._param_fqn} has an all-gather extension, of which reshard_after_forward cannot keep "
                f"1/{mesh_info.shard_mesh_size}; pass True or False"
            )
        n, rank, size = mesh_info.shard_mesh_size, mesh_info.shard_mesh_rank, self._orig_size
        whole = self.all_gather_outputs[0]
        numel = whole.numel() // n
        self._sharded_post_forward_param_data = whole.narrow(0, rank * numel, numel).clone()  # 1D
        rows = -(-size[0] // n)
        shape = (max(0, min(rows, size[0] - rank * rows)), *size[1:])  # what DTensor expects of this rank
        local = self._sharded_post_forward_param_data.as_strided(shape, make_contiguous_strides_for(size))
        dtensor = DTensor.from_local(
            local, mesh_info.mesh, mesh_info.placements, run_check=False, shape=size, stride=self._orig_stride
        )
        self._sharded_post_forward_param = nn.Parameter(dtensor, requires_grad=self.sharded_param.requires_grad)
        self._register(self._sharded_post_forward_param)
        self.free_unsharded_param()
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD
        return self._sharded_post_forward_param_data

    def _register(self, param: nn.Parameter) -> None:
        for module, name in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = param  # without the checks of setattr, which cost time in every hook
            else:
                setattr(module, name, param)

    # What the collectives read and write

    @property
    def was_gathered(self) -> bool:
        """Whether there is an unsharded parameter, with or without memory."""
        return hasattr(self, "_unsharded_param")

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The whole parameter, shape (d0, ...); without memory while the group is sharded."""
        if not self.was_gathered:
            raise RuntimeError(f"{self._param_fqn} was never gathered; run the forward of its module first")
        return self._unsharded_param

    @property
    def local_data(self) -> torch.Tensor:
        """1D, padded: what this rank keeps at the moment, its shard or its slice."""
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            return self._sharded_post_forward_param_data
        return self._sharded_param_data

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        """This rank's contribution to the all-gather, on the device and in ``param_dtype``: one tensor, 1D, padded."""
        if self.extension is not None:
            shard = local_tensor(self.sharded_param)
            return self.extension.all_gather_inputs(
                to_device(shard, self.device) if self.offload_to_cpu else shard, self.mp_policy
            )
        data = self.local_data
        if self.offload_to_cpu and self.sharded_state is ShardedState.SHARDED:
            data = to_device(data, self.device)
        return [to_dtype(data, self.param_dtype)]

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of U, padding included."""
        return sum(output.numel() * output.itemsize for output in self.all_gather_outputs)

    def take_unsharded_grad(self) -> torch.Tensor | None:
        """Hand over the gradient of the whole parameter, if there is one: the parameter lets go of it."""
        if not self.was_gathered:
            return None
        grad, self.unsharded_accumulated_grad = self.unsharded_accumulated_grad, None
        if grad is None:
            grad, self._unsharded_param.grad = self._unsharded_param.grad, None
        return grad

    def __repr__(self) -> str:
        return f"FSDPParam(fqn={self._param_fqn}, orig_size={tuple(self._orig_size)})"


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without autograd (which `DTensor.to_local` takes part in)."""
    return cast(DTensor, tensor)._local_tensor


def owners_of(params: list[nn.Parameter], modules: tuple[nn.Module, ...]) -> dict[nn.Parameter, list[Owner]]:
    """For each parameter every place it is registered in: tied weights, and modules that occur twice."""
    owners: dict[nn.Parameter, list[Owner]] = {p: [] for p in params}
    for module in modules:
        for submodule in module.modules():
            for name, param in submodule._parameters.items():
                if param in owners and (submodule, name) not in owners[param]:
                    owners[param].append((submodule, name))
    return owners
