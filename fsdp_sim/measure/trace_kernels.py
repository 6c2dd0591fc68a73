"""From one operator that torch dispatched to the kernels it runs: what they compute, read and write."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fsdp_sim.cost import Kernel, KernelKind
from fsdp_sim.timeline import dtype_name

MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "mv": 0, "addmv": 1, "dot": 0, "vdot": 0}
"""Position of the first factor; the second follows it."""
LOSSES = ("_log_softmax", "nll_loss")
EMBEDDINGS = ("embedding",)
ALLOCATIONS = ("empty", "new_empty")
FUSED = ("norm", "softmax", "_to_copy", "clone", "copy_", "cat", "stack", "slice_backward", "fill", "zero")
"""Parts of names of operators beside the pointwise ones and reductions that a compiler fuses with their neighbours."""
FP8 = ("torch.float8", "torch.float4")
OURS = ("rms_norm", "rms_norm_backward")  # of trace_gpu
ARITHMETIC = re.compile(
    r"linalg|cholesky|lu_solve|lu_unpack|geqrf|ormqr|triangular_solve|_fft_|cdist|pdist|^_trilinear|euclidean"
    r"|rnn|lstm_mps|ctc_loss|mm$|_mm_|mm_activation|matmul|linear_backward|mkldnn_linear|mixed_dtypes_linear"
    r"|conv(?!ert)|multi_head|transformer_encoder|attention|dot_product"
)
"""torch's own operators that compute more than they move, of which `kernels_of` does not know how much."""


@functools.cache
def only_views(func: Any) -> bool:
    """Whether an operator moves no data: its results are views of its inputs, or it answers a question."""
    schema = func._schema
    if func.namespace == "prim" or func.is_view:
        return True
    return not schema.returns or not any("Tensor" in str(r.type) for r in schema.returns)


class NotPricedError(Exception):
    """An operator whose work is not known; says which, why and the remedy."""


def kernels_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Kernel]:
    """The kernels of one call; none for a view.

    Raises:
        NotPricedError: it may compute something, and nobody knows how much.
    """
    outputs = [t for t in tensors_in(out) if t.numel()]
    if only_views(func) or not outputs:
        return []
    name = func._opname
    inputs = list(tensors_in((args, kwargs)))
    if name.startswith(ALLOCATIONS) or (not func._schema.is_mutable and _shared(inputs, outputs)):
        return []
    moved = float(sum(moved_bytes(t) for t in inputs) + sum(moved_bytes(t) for t in outputs))
    dtype = dtype_name(outputs[0].dtype)
    low = next((t.dtype for t in (*inputs, *outputs) if str(t.dtype).startswith(FP8)), None)
    if low is not None:
        raise NotPricedError(f"{func}, on {low}: what fp8 takes is not priced yet; trace the model in bf16")
    if name in MATMULS:
        return [_matmul(args[MATMULS[name]], args[MATMULS[name] + 1], moved, dtype)]
    if name == "_grouped_mm":
        return [_grouped_matmul(args[0], args[1], moved, dtype)]
    if name in ("convolution", "_convolution", "convolution_backward"):
        return _convolution(name, args, outputs, dtype)
    if name.startswith("_scaled_dot_product") and "math" not in name:
        return [_attention(func, args, kwargs, moved)]
    if func.overloadpacket in flop_registry:
        flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
        return [Kernel("matmul", flops, moved, (1, *_factor(flops, inputs)), dtype)]
    if name == "linalg_solve_triangular":  # a row after the other, each from all before it
        flops = float(outputs[0].numel() * outputs[0].shape[-2])
        return [Kernel("matmul", flops, moved, (1, *_factor(flops, inputs)), dtype)]
    known = func.namespace == "aten" and not ARITHMETIC.search(name)
    if not known and not (func.namespace == "fsdp_sim" and name in OURS):
        raise NotPricedError(
            f"{func}, whose work is not known; say it with torch's register_flop_formula(torch.ops."
            f"{func.namespace}.{name}) (torch.utils.flop_counter)"
        )
    kind: KernelKind = "memory"
    if name.startswith(LOSSES):
        kind = "cross_entropy"
        if name.startswith("nll_loss"):  # reads or writes one logit per row, and sets the gradient to zero
            moved = float(sum(moved_bytes(t) for t in outputs))
    elif name.startswith(EMBEDDINGS):
        kind = "embedding"
        rows = args[1] if name == "embedding" else args[0]  # the table is read by rows
        moved = float(2 * outputs[0].nbytes + rows.nbytes if name == "embedding" else moved + 2 * rows.nbytes)
    fusable = kind == "memory" and _fusable(func)
    return [Kernel(kind, 0.0, moved, (), dtype, 1, fusable)] if moved else []


def moved_bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading or writing a tensor moves: what is repeated by a stride of 0 is moved once."""
    once = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return once * tensor.element_size() if tensor.numel() else 0


def _shared(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    storages = {t.untyped_storage()._cdata for t in inputs}
    return all(t.untyped_storage()._cdata in storages for t in outputs)


def _matmul(a: torch.Tensor, b: torch.Tensor, moved: float, dtype: str) -> Kernel:
    batch = a.shape[0] if a.dim() == 3 else 1
    m = a.shape[-2] if a.dim() > 1 else 1
    n = b.shape[-1] if b.dim() > 1 else 1
    k = a.shape[-1]
    return Kernel("matmul", 2.0 * batch * m * n * k, moved, (batch, m, n, k), dtype)


def _grouped_matmul(a: torch.Tensor, b: torch.Tensor, moved: float, dtype: str) -> Kernel:
    """Matmuls of groups of rows (2-D by 3-D), of columns (3-D by 2-D), or of the inner dimension (2-D by 2-D).

    How many fall to each group depends on values; together they are what the whole dimension has.
    """
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    groups = a.shape[0] if a.dim() == 3 else b.shape[0] if b.dim() == 3 else 1
    both = groups if a.dim() == 3 and b.dim() == 3 else 1  # then nothing is shared out
    flops = 2.0 * both * m * k * n
    each = max(1, round(m / groups)) if a.dim() == 2 and b.dim() == 3 else m
    return Kernel("matmul", flops, moved, (groups, each, n, k), dtype)


def _convolution(name: str, args: Sequence[Any], outputs: list[torch.Tensor], dtype: str) -> list[Kernel]:
    """A convolution is a matmul of (places, taps x channels in) by (taps x channels in, channels out), by group."""
    backward = name == "convolution_backward"
    grad_out, x, weight = args[:3] if backward else (outputs[0], *args[:2])
    transposed, groups = (args[7], args[9]) if backward else (args[6], args[8])
    near, far = (grad_out, x) if transposed else (x, grad_out)  # near: the side whose channels the taps multiply
    places = far.shape[0] * math.prod(far.shape[2:])
    taps = math.prod(weight.shape[2:])
    channels_in, channels_out = near.shape[1] // groups * taps, far.shape[1] // groups
    shape = (groups, places, channels_out, channels_in)
    moved = float(x.nbytes + weight.nbytes + grad_out.nbytes)
    one = Kernel("matmul", 2.0 * math.prod(shape), moved, shape, dtype)
    if not backward:
        return [one]
    _, m, n, k = shape
    wanted = args[10]  # gradients of the input, of the weight, of the bias
    shapes = [(groups, m, k, n)] * bool(wanted[0]) + [(groups, n, k, m)] * bool(wanted[1])
    return [one._replace(shape=shape) for shape in shapes]


def _attention(func: Any, args: Sequence[Any], kwargs: dict[str, Any], moved: float) -> Kernel:
    """Two products of queries with keys forward, five backward (the scores once more); half of them if causal."""
    backward = "backward" in func._opname
    q, k, v = args[1:4] if backward else args[:3]
    batch, heads, queries, d = q.shape
    keys, d_value = k.shape[-2], v.shape[-1]
    flops = 2.0 * batch * heads * queries * keys * (3 * d + 2 * d_value if backward else d + d_value)
    causal = _argument(func, args, kwargs, "is_causal")
    return Kernel("attention", flops * (0.5 if causal else 1.0), moved, (batch, heads, queries, d), dtype_name(q.dtype))


def _argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name, argument.default_value)
    return None


def _factor(flops: float, inputs: list[torch.Tensor]) -> tuple[int, int, int]:
    """Some (m, n, k) of that many FLOPs, for operators of which only the number is known."""
    k = max(1, inputs[0].shape[-1] if inputs[0].dim() else 1)
    m = max(1, inputs[0].numel() // k)
    return m, max(1, round(flops / (2 * m * k))), k


@functools.cache
def _fusable(func: Any) -> bool:
    tags, name = func.tags, func._opname
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags or any(part in name for part in FUSED)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operator."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
