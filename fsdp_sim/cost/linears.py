"""`linear`: the kernels of one linear layer, whatever becomes of its weight: frozen, adapted, quantised, in fp8."""

from __future__ import annotations

import math
from typing import NamedTuple

from fsdp_sim.cost.weights import Weights
from fsdp_sim.cost.work import Kernel
from fsdp_sim.schedule import DTYPE_BYTES, NEWTON_SCHULZ_STEPS
from fsdp_sim.spec import Gpu, Quantization

Kernels = list[Kernel]


class Recipe(NamedTuple):
    """A way to compute in fp8: torchao's `Float8LinearConfig.from_recipe_name`, and its `MXFP8Linear`.

    Attributes:
        grad_weight_in_fp8: else that product has its operands as they are.
        along_both: a tensor is cast anew for each product it is in, along the axis that the product sums over; else one
            cast does for both.
        block: numbers that share a scale of one byte, where a kernel of its own casts them; 0: pointwise kernels do.
    """

    grad_weight_in_fp8: bool = True
    along_both: bool = True
    block: int = 0


# torchao 0.18: float8/config.py, float8/float8_linear.py, prototype/moe_training/mxfp8_linear.py
RECIPES = {
    "tensorwise": Recipe(along_both=False),
    "rowwise": Recipe(),
    "rowwise_with_gw_hp": Recipe(grad_weight_in_fp8=False),
    "mxfp8": Recipe(block=32),
}


OF_ATTENTION = (".wo", ".proj")  # linear layers whose input attention has made, in the dtype of compute
MXFP8_ARCH = "Blackwell"  # torchtitan's MXFP8 needs SM100


def check_fp8(recipe: str, gpu: Gpu) -> None:
    """Whether a GPU computes in fp8 by a recipe.

    Raises:
        ValueError: it does not.
    """
    if gpu.fp8_flops is None:
        raise ValueError(
            f"Plan.fp8 is {recipe!r}, but {gpu.name} has no fp8 (it has {', '.join(gpu.dtypes)}); take another GPU, or "
            f"leave fp8 None"
        )
    if recipe == "mxfp8" and gpu.arch != MXFP8_ARCH:
        raise ValueError(
            f"Plan.fp8 is 'mxfp8', which needs {MXFP8_ARCH}'s scales by block; {gpu.name} is {gpu.arch}: take "
            f"'tensorwise' or 'rowwise'"
        )


def matmul(m: int, n: int, k: int, dtype: str, *, op: str = "", fp8: bool = False, of_weight: bool = False) -> Kernel:
    """(m, k) @ (k, n). In fp8 the factors are, and the product is of ``dtype``.

    Args:
        of_weight: it is the gradient of a weight, whose factors lie in memory as (k, m) and (k, n): k counts tokens.
    """
    size = DTYPE_BYTES[dtype]
    of_factors = 1 if fp8 else size
    moved = float(of_factors * (m * k + k * n) + size * m * n)
    row = math.gcd(n, m if of_weight else k)
    return Kernel("matmul", 2.0 * m * n * k, moved, (1, m, n, k), "fp8" if fp8 else dtype, op=op, row=row)


def linear_backward(m: int, n: int, k: int, dtype: str) -> Kernels:
    """The gradients of the input (m, k) and of the weight (n, k), from that of the output (m, n)."""
    return [matmul(m, k, n, dtype), matmul(n, k, m, dtype, of_weight=True)]


def pointwise(elements: float, dtype: str, *, fusable: bool = True, count: int = 1) -> Kernel:
    """Kernels that are bound by memory and move this many elements in all, read and written."""
    return Kernel("memory", 0.0, elements * DTYPE_BYTES[dtype] / count, (), dtype, count, fusable)


def linear(
    weights: Weights,
    name: str,
    m: int,
    n: int,
    k: int,
    *,
    bias: bool = False,
    grad: bool = True,
    again: bool = False,
) -> tuple[Kernels, Kernels]:
    """x (m, k) times the weight (n, k) of a block's linear layer, forward and backward.

    Args:
        bias: added within the matmul; backward reads the output's gradient once more to sum it over the tokens.
        grad: its input needs a gradient; only then is that product computed.
        again: another linear layer has the same input: gradients are added up, and a compiler casts to fp8 once.
    """
    dtype, trained = weights.compute_dtype, weights.trains(f"{name}.weight")
    recipe = weights.recipe(n, k)
    if recipe is None:
        forward = [matmul(m, n, k, dtype, op="addmm" if bias else "mm")]
        backward = [matmul(m, k, n, dtype)] * grad + [matmul(n, k, m, dtype, of_weight=True)] * trained
    else:
        forward, backward = _in_fp8(weights, RECIPES[recipe], m, n, k, grads=(grad, trained), again=again)
    given = weights.stream_dtype  # of x; of a quantised layer's output too
    if weights.quantization is not None:
        given = dtype if name.endswith(OF_ATTENTION) else given
        into, out = ([_cast(n_numbers, given, dtype)] * (given != dtype) for n_numbers in (m * k, m * n))
        whole = [_dequantise(weights.quantization, n * k, dtype)]
        forward, backward = [*into, *whole, *forward, *out], [*out, *whole * grad, *backward, *into * grad]
    if weights.adapts(name):
        there, back = _adapter(weights, m, n, k, given, grad=grad)
        forward, backward = forward + there, back + backward
    if bias and weights.trains(f"{name}.bias"):
        backward = [pointwise(float(m * n), dtype), *backward]
    if again and grad:
        backward = [*backward, pointwise(3.0 * m * k, given)]
    return forward, backward


def _adapter(weights: Weights, m: int, n: int, k: int, given: str, *, grad: bool) -> tuple[Kernels, Kernels]:
    """peft's ``result + lora_B(lora_A(x)) * scaling``: A is (rank, k), B is (n, rank). It copies a quantised result.

    Args:
        given: the dtype of x and of the result; what the adapter computes in is autocast's.
    """
    rank, dtype = weights.lora_rank or 0, weights.compute_dtype

    def moves(elements: int, of: str = dtype) -> Kernel:  # all that eager kernels move is counted: no more
        return pointwise(float(elements), of, fusable=weights.compiled)

    copy = [moves(2 * m * n, given)] if weights.quantization is not None else []
    narrow, narrow_back = ([_cast(n_numbers, given, dtype)] * (given != dtype) for n_numbers in (m * k, m * n))
    scale, add, add_inputs = moves(2 * m * n), moves(3 * m * n, given), moves(3 * m * k, given)
    forward = [*copy, *narrow, matmul(m, rank, k, dtype, op="mm"), matmul(m, n, rank, dtype, op="mm"), scale, add]
    of_input = [matmul(m, k, rank, dtype), *narrow, add_inputs] if grad else []
    back = [
        *narrow_back,
        scale,
        *linear_backward(m, n, rank, dtype),
        *of_input,
        matmul(rank, k, m, dtype, of_weight=True),
    ]
    return forward, back


def _cast(elements: int, one: str, other: str) -> Kernel:
    """From one dtype to another: reads one, writes the other."""
    return Kernel("memory", 0.0, float(elements * (DTYPE_BYTES[one] + DTYPE_BYTES[other])), (), one, 1, True)


def _dequantise(quantization: Quantization, elements: int, dtype: str) -> Kernel:
    """Reads bits and scales, writes the weight whole (bitsandbytes' ``dequantize_4bit``, before every matmul)."""
    stored = quantization.bits / 8 + quantization.scale_bytes
    return Kernel("memory", 0.0, elements * (stored + DTYPE_BYTES[dtype]), (), dtype)


def _in_fp8(
    weights: Weights, recipe: Recipe, m: int, n: int, k: int, *, grads: tuple[bool, bool], again: bool
) -> tuple[Kernels, Kernels]:
    """Casts and products. torchao saves x and the weight as they are, so backward casts both again.

    Its backward computes the gradient of the weight whether it is wanted or not; a compiler leaves that out.
    """
    dtype, compiled = weights.compute_dtype, weights.compiled
    grad_input, grad_weight = grads[0], grads[1] or not compiled

    def cast(elements: int) -> Kernels:
        return [_cast_to_fp8(elements, dtype, recipe, compiled)]

    x, weight, grad = cast(m * k), [] if weights.fp8_all_gather else cast(n * k), cast(m * n)
    forward = ([] if again and compiled else x) + weight + [matmul(m, n, k, dtype, op="mm", fp8=True)]
    once = compiled and not recipe.along_both  # one cast of the output's gradient serves both products
    backward: Kernels = []
    if grad_input or not compiled:
        backward += grad + weight + [matmul(m, k, n, dtype, fp8=True)]
    if grad_weight and recipe.grad_weight_in_fp8:
        backward += ([] if once and grad_input else grad) + ([] if again and compiled else x)
    if grad_weight:
        backward.append(matmul(n, k, m, dtype, fp8=recipe.grad_weight_in_fp8, of_weight=True))
    return forward, backward


def _cast_to_fp8(elements: int, dtype: str, recipe: Recipe, compiled: bool) -> Kernel:
    """A cast to fp8 with its scales, in kernels that torchao or a compiler has fused as far as they can be, or in six.

    Fused: what decides the scale is read, then it is read and written (float8_utils.py). Eager: the absolute value,
    its maximum, to fp32, times the scale, clamped, to fp8.
    """
    size = DTYPE_BYTES[dtype]
    if recipe.block:
        return Kernel("memory", 0.0, elements * (size + 1 + 1 / recipe.block), (), dtype)
    if compiled:
        return Kernel("memory", 0.0, elements * (2.0 * size + 1), (), dtype)
    return Kernel("memory", 0.0, elements * (3 * size + (size + 4) + 8 + 8 + 5) / 6, (), dtype, 6)


def orthogonalisation(rows: int, columns: int, shards: int) -> Kernels:
    """`torch.optim.Muon` of a matrix, on one of the ranks that share it (see `fsdp_sim.schedule.optimizer`)."""
    small, large = min(rows, columns), max(rows, columns)
    inner, outer = (small, -(-large // shards)) if rows > columns else (-(-small // shards), large)
    gram, update = matmul(inner, small, outer, "bf16"), matmul(inner, outer, small, "bf16")
    return [gram, matmul(inner, small, small, "bf16"), update] * NEWTON_SCHULZ_STEPS
