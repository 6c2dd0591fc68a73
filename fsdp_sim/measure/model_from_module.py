"""`model_from_module`: the work of any `nn.Module`, read off one step under fake tensors.

Nothing is allocated and nothing is computed: every tensor has a shape, a dtype and no values. What is read is what
torch would run, operator by operator, forward and backward, so it holds for models that no formula describes.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.utils import _apply_to_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from fsdp_sim.cost import Work, Workload
from fsdp_sim.measure.trace import Trace
from fsdp_sim.measure.trace_fake import cast_parameters, fake_inputs, fake_model
from fsdp_sim.measure.trace_gpu import GpuKernels, refuse_recurrence
from fsdp_sim.measure.trace_segment import Segment, tensors_anywhere
from fsdp_sim.measure.trace_wrap import Wrap, wrap_names
from fsdp_sim.measure.units import DTYPES, units_from_module
from fsdp_sim.schedule import Param, Unit
from fsdp_sim.spec import Plan

PACKED = "find_packed_sequence_indices"
"""Where transformers looks whether a row is one sequence, which values tell: of what it does not know it makes a mask,
which fused attention would not need. Without ``position_ids`` a row is one."""
NO_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def model_from_module(
    build: Callable[[], nn.Module] | nn.Module,
    example_inputs: Any,
    wrap: Wrap | None = None,
    *,
    plan: Plan | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    name: str | None = None,
    device: Literal["gpu", "cpu"] = "gpu",
    progress: bool = True,
) -> Workload:
    """Trace one micro-batch of a module, forward and backward, without its weights.

    Args:
        build: returns the model; called under fake tensors, so a model of any size fits. Or the model itself, on any
            device, which is left as it is.
        example_inputs: of one micro-batch on one rank: a tensor, a tuple of positional arguments, a mapping of
            keyword arguments, or a function that returns one of these. Only shapes and dtypes matter.
        wrap: what FSDP makes units of, see `wrap_names`; None is ``plan.wrap``, and without a plan ``"block"``.
        plan: of it, ``param_dtype`` (the dtype of compute), ``wrap`` and ``attention_impl`` (``math`` or not) are used.
        loss: makes a scalar of the model's output. Without it the output must be one, or have one named ``loss``
            (Hugging Face models that are given ``labels``); else the sum of its floating-point tensors stands in.
        name: for headings; the class of the model by default.
        device: whose kernels: a GPU's (fused attention, fused `rms_norm`) or the CPU's.
        progress: show a progress bar when tracing takes more than a second.

    Returns:
        the units in execution order, the root first, and the work of each segment: kernels, and bytes as
        `fsdp_sim.cost.Work` defines them. A module that is called several times is one segment with the work of all
        calls. What the root runs between two units is work of its last segment. ``tokens`` is the number of elements
        of the first integer input of two dimensions or more, or else the size of the first dimension.

    Raises:
        ValueError: the forward depends on values, there is nothing to train, or an operator or a recurrent layer runs
            whose work is not known; names the module or the operator, and the remedy.
        TypeError: ``build`` is neither a module nor a function that returns one.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        >>> work = model_from_module(model, torch.zeros(4, 8), wrap=("0", "1")).work
        >>> [(segment, work[segment].forward_flops) for segment in ("0", "1")]
        [('0', 512.0), ('1', 128.0)]
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_model(build, mode)
    chosen = wrap if wrap is not None else plan.wrap if plan is not None else "block"
    units = units_from_module(model, wrap_names(model, chosen))
    title = name or type(model).__name__
    if not any(p.requires_grad for unit in units for p in unit.params):
        raise ValueError(f"{title} has no parameter that requires gradients; there is nothing to train and to shard")
    refuse_recurrence(model, title)
    args, kwargs = fake_inputs(example_inputs, mode)
    tokens = _tokens(args, kwargs)
    bar = tqdm(
        total=2 * len(units) - 1, desc=f"tracing {title}", unit="unit", delay=1, disable=not progress, leave=False
    )
    trace = Trace(model, units, bar.update)
    with bar, mode:
        if plan is not None and plan.param_dtype is not None:
            dtype = DTYPES[plan.param_dtype]
            cast_parameters(model, dtype)
            for unit in units:
                module = model if unit.name == "root" else model.get_submodule(unit.name)
                module.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
        trace.inputs((args, kwargs))
        composed = plan is not None and plan.attention_impl == "math"
        with sdpa_kernel(SDPBackend.MATH) if composed else nullcontext():
            gpu = GpuKernels(fused_attention=not composed) if device == "gpu" else nullcontext()
            _run(model, args, kwargs, loss, trace, gpu, title)
    if trace.not_priced:
        what = "; ".join(f"in {segment} {operator}" for operator, segment in list(trace.not_priced.items())[:3])
        more = f", and {len(trace.not_priced) - 3} more" if len(trace.not_priced) > 3 else ""
        raise ValueError(f"{title} runs what cannot be priced: {what}{more}")
    made = _workload(title, units, trace, tokens)
    return replace(made, attention_impl="math" if composed else "sdpa", loose_blocks=_loose(model, units))


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    trace: Trace,
    gpu: AbstractContextManager[Any],
    title: str,
) -> None:
    masks = sys.modules.get("transformers.masking_utils")
    unpacked = masks is not None and hasattr(masks, PACKED) and "position_ids" not in kwargs
    try:
        with (
            torch.enable_grad(), gpu, trace.watching(),
            patch.object(masks, PACKED, lambda position_ids: None) if unpacked else nullcontext(),
        ):  # fmt: skip
            value = _loss_of(model(*args, **kwargs), loss, title)
            trace.start_backward(value)
            _backward(value)
    except NO_VALUES as error:
        where = _module_in(error.__traceback__, model)
        raise ValueError(
            f"{where or title} asks for the values of a tensor ({_first_line(error)}), and a traced tensor has none. "
            f"Give that module a branch that needs only shapes (pass masks and lengths as None or as Python numbers), "
            f"or make it return a result of the usual shape while it is traced"
        ) from error
    except Exception as error:
        if where := _module_in(error.__traceback__, model):
            error.add_note(f"while {where} of {title} was traced with inputs {_described((args, kwargs))}")
        raise


def _backward(value: torch.Tensor) -> None:
    """``value.backward()``; that one is itself a function that a mode handles, and is off meanwhile, but a checkpointed
    module has to be computed again as it was computed first."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (value,), (torch.ones_like(value),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _loss_of(output: Any, loss: Callable[[Any], torch.Tensor] | None, title: str) -> torch.Tensor:
    if loss is not None:
        value = loss(output)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ValueError(f"loss returned {_described(value)}; it must return a tensor with one element")
    elif (own := _own_loss(output)) is not None:
        value = own
    else:
        usable = [t for t in tensors_anywhere(output) if t.requires_grad]
        if not usable:
            raise ValueError(
                f"the output of {title}, {_described(output)}, holds no tensor that depends on a parameter; pass "
                f"loss=, a function from the output to a scalar"
            )
        value = torch.stack([t.float().sum() for t in usable]).sum()
    if not value.requires_grad:
        raise ValueError(
            f"the loss of {title} does not depend on any parameter that requires gradients; is the model run under "
            f"no_grad, or its output detached?"
        )
    return value.reshape(())


def _own_loss(output: Any) -> torch.Tensor | None:
    """The scalar that a model returned, alone, first in a tuple, or under the name ``loss``."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    for value in candidates:
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
            return value
    return None


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What `fully_shard` does to the inputs of every unit (``cast_forward_inputs``)."""
    return _apply_to_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))


def _workload(title: str, units: Sequence[Unit], trace: Trace, tokens: int) -> Workload:
    idle = [unit.name for unit in units if unit.name not in trace.order]
    if idle:
        warnings.warn(
            f"{len(idle)} of {len(units)} units of {title} did not run with these inputs ({', '.join(idle[:3])}); "
            f"they are taken to cost nothing, and are gathered last",
            stacklevel=3,
        )
    place = {name: i for i, name in enumerate([*trace.order, *idle])}
    ordered = sorted(units, key=lambda unit: place[unit.name])
    used = [_with_uses(unit, trace) for unit in ordered]
    order = sorted(trace.segments, key=lambda name: trace.segments[name].last)
    _join([trace.segments[segment] for segment in order])
    kept = 0
    work: dict[str, Work] = {}
    shared: dict[Work, Work] = {}
    for segment in order:
        seen = trace.segments[segment]
        kept += seen.saved_bytes
        one = _work(seen, kept, is_block=segment not in units[0].segments)
        work[segment] = shared.setdefault(one, one)
    for unit in used:
        for segment in unit.names_of_segments:
            work.setdefault(segment, Work())
    flops = sum(one.forward_flops + one.backward_flops for one in work.values()) - trace.recomputed_flops
    return Workload(
        name=title,
        units=tuple(used),
        work={segment: work[segment] for unit in used for segment in unit.names_of_segments},
        param_count=sum(torch.Size(p.shape).numel() for unit in units for p in unit.params),
        model_flops_per_token=flops / tokens,
        tokens=tokens,
        dtype=_compute_dtype(work.values()),
    )


def _loose(model: nn.Module, units: Sequence[Unit]) -> tuple[str, ...]:
    """Blocks that are neither units nor in one, and have none inside."""
    names = [unit.name for unit in units if unit.name != "root"]
    return tuple(
        block
        for block in wrap_names(model, "block")
        if not any(block == name or block.startswith(f"{name}.") or name.startswith(f"{block}.") for name in names)
    )


def _compute_dtype(work: Iterable[Work]) -> str:
    """The dtype of most FLOPs of matmuls and convolutions."""
    flops: Counter[str] = Counter()
    for one in work:
        for kernel in (*one.forward, *one.backward):
            flops[kernel.dtype] += int(kernel.flops * kernel.count)
    return flops.most_common(1)[0][0] if flops else "fp32"


def _join(segments: Sequence[Segment]) -> None:
    """A segment of the root has no inputs and outputs of its own: they are those of its neighbours."""
    for before, after in itertools.pairwise(segments):
        before.output_bytes = before.output_bytes or after.input_bytes
        after.input_bytes = after.input_bytes or before.output_bytes


def _work(seen: Segment, kept: int, *, is_block: bool) -> Work:
    """From what was seen; ``kept`` is what this segment and those before it save."""
    return Work(
        forward=tuple(seen.forward),
        backward=tuple(seen.backward),
        saved_bytes=seen.saved_bytes,
        input_bytes=seen.input_bytes,
        output_bytes=seen.output_bytes,
        forward_temporary_bytes=max(0, seen.forward_peak_bytes - kept),
        backward_temporary_bytes=seen.backward_peak_bytes - kept - seen.grad_bytes,
        outputs=tuple(seen.outputs),
        is_block=is_block,
        logits_bytes=seen.loss_bytes,
    )


def _with_uses(unit: Unit, trace: Trace) -> Unit:
    """Say of each parameter which segments use it, where there are several."""
    if len(unit.names_of_segments) < 2:
        return unit

    def used(param: Param) -> Param:
        segments = trace.used_by.get((unit.name, param.name), [])
        return replace(param, used_by=tuple(s for s in unit.names_of_segments if s in segments))

    return replace(unit, params=tuple(used(p) for p in unit.params))


def _tokens(args: Any, kwargs: Any) -> int:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()]
    if not tensors:
        raise ValueError(
            f"example_inputs holds no tensor of at least one dimension (it is {_described((args, kwargs))}); give the "
            f"inputs of one micro-batch"
        )
    ids = (tensor for tensor in tensors if tensor.dim() >= 2 and not tensor.is_floating_point())
    first = next(ids, None)
    tokens = tensors[0].shape[0] if first is None else first.numel()
    if not tokens:
        raise ValueError(
            f"example_inputs holds {_described(tensors[0] if first is None else first)}, in which there is nothing; "
            f"give the inputs of one micro-batch"
        )
    return tokens


def _module_in(traceback: TracebackType | None, model: nn.Module) -> str:
    """The innermost module on a traceback: its name and class."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            found = f"{names[id(module)] or 'the model'} ({type(module).__name__})"
        traceback = traceback.tb_next
    return found


def _first_line(error: BaseException) -> str:
    func = getattr(error, "func", None)
    return str(func) if func is not None else str(error).splitlines()[0] if str(error) else type(error).__name__


def _described(value: Any) -> str:
    """Shapes in place of tensors."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_described(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_described, value)) + ")"
    return type(value).__name__ if not isinstance(value, (int, float, bool, str, type(None))) else repr(value)
