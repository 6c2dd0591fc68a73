"""All-gather extensions: parameters of a tensor subclass that says itself what is gathered of it (float8, NF4).

Training in float8 wants to gather float8 and not the float32 of the shards, and a scale beside it. The subclass has
two methods, torch's protocol, and every shard (which is of the subclass too) is asked:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (inputs, metadata)
        what this rank contributes instead of its rows: one tensor or several, and what the second method needs to know
    fsdp_post_all_gather(outputs, metadata, param_dtype, out=None) -> (unsharded, inner tensors)
        what the module computes with, and the tensors whose memory is freed with it. From the second all-gather on
        ``out`` is the unsharded parameter: to be written, if it does not share memory with the outputs

Example: torchao's ``WeightWithDynamicFloat8CastTensor``.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

if TYPE_CHECKING:
    from fsdp_sim.mini.param import FSDPParam


class AllGatherExtension:
    """The extension of one parameter (torch: `_fsdp_param.ExtensionsData`, and what `FSDPParam` does with it).

    Attributes:
        inner_tensors: made by the subclass for the unsharded parameter; freed and given memory again with it.
    """

    def __init__(self, fsdp_param: FSDPParam) -> None:
        self._param = fsdp_param
        self._metadata: Any = None  # of the all-gather under way, as are the sizes of its inputs
        self._input_sizes: list[torch.Size] = []
        self.inner_tensors: list[torch.Tensor] = []

    def all_gather_inputs(self, shard: Any, mp_policy: MixedPrecisionPolicy) -> list[torch.Tensor]:
        """What this rank sends, each 1D.

        Raises:
            AssertionError: a method that takes other arguments; a parameter that does not divide by the ranks, of which
                other than padded rows are sent: the ranks would send different sizes (torch's type).
        """
        p, info = self._param, self._param.mesh_info
        mesh = info.mesh if info.mesh.ndim == 1 else info.mesh[(info.mesh.mesh_dim_names or ())[-1]]
        n_arguments = len(inspect.signature(shard.fsdp_pre_all_gather).parameters)
        if n_arguments not in (1, 5):  # 1: the mesh alone, the first version of the protocol
            raise AssertionError(
                f"fsdp_pre_all_gather of {p._param_fqn} must take (mesh, outer_size, outer_stride, module, mp_policy), "
                f"not {inspect.signature(shard.fsdp_pre_all_gather)}"
            )
        arguments = (mesh, p._orig_size, p._orig_stride, p.owners[0][0], mp_policy)
        inputs, self._metadata = shard.fsdp_pre_all_gather(*arguments[:n_arguments])
        self._input_sizes = [t.size() for t in inputs]
        padded = p.padded_sharded_param_size
        if n_arguments == 5 and shard.size() != padded and any(size != padded for size in self._input_sizes):
            raise AssertionError(
                f"{p._param_fqn} of shape {tuple(p._orig_size)} does not divide by {info.shard_mesh_size} ranks, so "
                f"fsdp_pre_all_gather must return tensors of the padded shape {tuple(padded)}, not "
                f"{[tuple(size) for size in self._input_sizes]}"
            )
        return [t.view(-1) for t in inputs]

    def unshard(
        self, shard: Any, outputs: list[torch.Tensor], dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Have the subclass make the whole tensor, or write it into ``out``, of what was gathered."""
        gathered = tuple(o.view(-1, *size[1:]) for o, size in zip(outputs, self._input_sizes, strict=True))
        metadata, self._metadata = self._metadata, None
        if out is None:
            out, self.inner_tensors = shard.fsdp_post_all_gather(gathered, metadata, dtype)
            return out
        for tensor in self.inner_tensors:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
        shard.fsdp_post_all_gather(gathered, metadata, dtype, out=out)
        return out


def extension_of(fsdp_param: FSDPParam, shard: torch.Tensor) -> AllGatherExtension | None:
    """The extension of a parameter, None for a plain tensor.

    Raises:
        AssertionError: only one of the two methods is there (torch's type).
    """
    has = [hasattr(shard, method) for method in ("fsdp_pre_all_gather", "fsdp_post_all_gather")]
    if any(has) != all(has):
        raise AssertionError(
            f"{fsdp_param._param_fqn}: {type(shard).__name__} has only one of fsdp_pre_all_gather and "
            "fsdp_post_all_gather; an all-gather extension needs both"
        )
    return AllGatherExtension(fsdp_param) if all(has) else None
