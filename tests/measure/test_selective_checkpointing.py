"""What a checkpointed block keeps and computes again is what torch keeps and computes again, under torch's policies.

The blocks are those of GPT and Llama (`labs/model`, `tests/measure/llama.py`), each within torch's checkpoint.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from fsdp_sim.cost import kept_of, recomputed, workload
from fsdp_sim.engine import memory
from fsdp_sim.measure.model_from_module import model_from_module
from fsdp_sim.schedule import build, policy_of
from fsdp_sim.spec import Model, Plan, aten_names
from labs.wrapping.checkpoint_and_compile import checkpoint_blocks
from tests.measure.llama import Llama
from tests.measure.mem_tracker import WORLD_SIZE, FusedNorm, gpt_of, tokens_of, tracked, with_layers
from tests.some import some

SDPA = "scaled_dot_product_attention"
MODELS = {  # with few words, so that the blocks make the peak, not the head
    "gpt": with_layers("gpt2-124m", 3, vocab=1024),
    "llama": with_layers("llama3-8b", 3, vocab=4096),
    "experts": with_layers("mixtral-8x7b", 2, vocab=4096),
}
POLICIES: list[Any] = ["selective", ("mm", "addmm", SDPA), (SDPA,), ("addmm",), ("mm",), ("_grouped_mm", SDPA)]
# torchtitan's for all models; of the others each for one of those that have such operators
CASES = [
    *((name, "selective") for name in MODELS),
    *zip(("llama", "llama", "gpt", "gpt", "experts"), POLICIES[1:], strict=True),
]
of_cases = pytest.mark.parametrize("case", some(CASES, first=4), ids=str)


def plan_of(policy: Any) -> Plan:
    return Plan(micro_batch=2, seq_len=1024, param_dtype="bf16", reduce_dtype="fp32", activation_checkpointing=policy)


def module_of(model: Model, policy: Any = None) -> nn.Module:
    module: Any = gpt_of(model) if model.bias is True else Llama(model, norm=FusedNorm)
    if model.bias is not True and policy == "selective":
        for i, layer in enumerate(module.layers):
            contexts = functools.partial(torchtitans_contexts, (model.d_model, model.n_expert))
            module.layers[i] = checkpoint_wrapper(layer, context_fn=contexts)
    else:
        checkpoint_blocks(module, policy)
    return module


def torchtitans_contexts(router: tuple[int, int | None]) -> Any:
    """Of `_apply_op_sac` (torchtitan 0.2.2, distributed/activation_checkpoint.py), with all kernels of attention.

    That of 0.3.0 (`SelectiveAC`) is the same for these models.
    """
    count = {False: 0, True: 0}
    attention = [getattr(torch.ops.aten, name).default for name in aten_names(SDPA)]

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func == torch.ops.aten.mm.default:
            if args[1].shape == router:  # per_op_sac_force_recompute_mm_shapes_by_fqns: "moe.router.gate"
                return CheckpointPolicy.PREFER_RECOMPUTE
            count[ctx.is_recompute] += 1
        keep = func in attention or (func == torch.ops.aten.mm.default and count[ctx.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@functools.cache
def backward_flops(name: str, policy: Any) -> int:
    """Of matmuls; torch's counter has no formula for attention on a CPU, nor for those of groups."""
    inputs = [torch.zeros_like(t, device="cpu") for t in tokens_of(plan_of(None))]
    with FakeTensorMode(allow_non_fake_inputs=True), set_checkpoint_early_stop(False):
        if name == "experts":  # grouped ones take no other dtype
            torch.set_default_dtype(torch.bfloat16)
        try:
            module = module_of(MODELS[name], policy)
            loss = module(*inputs)
            with FlopCounterMode(display=False) as backward:
                loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)
    return backward.get_total_flops()


@of_cases
def test_as_many_bytes_are_kept_as_torch_keeps(case: tuple[str, Any]) -> None:
    name, policy = case
    plan, model = plan_of(policy), MODELS[name]
    build_it = functools.partial(module_of, model, policy)
    theirs = model_from_module(build_it, tokens_of(plan), plan=plan_of(None), progress=False).work["layers.1"]
    ours = workload(model, plan).work["layers.1"]
    kept = ours.output_bytes + kept_of(ours.outputs, policy_of(plan)).bytes
    assert kept == pytest.approx(theirs.saved_bytes, rel=0.01)


@of_cases
def test_peak_memory_is_that_of_torch(case: tuple[str, Any]) -> None:
    name, policy = case
    plan = plan_of(policy)
    work = workload(MODELS[name], plan)
    ours = memory(build(work.units, plan, WORLD_SIZE), work).peak_bytes
    build_it = functools.partial(module_of, MODELS[name], policy)
    with set_checkpoint_early_stop(False):
        theirs = tracked(build_it, plan_of(None))["Total"]
    assert ours == pytest.approx(theirs, rel=0.01)


@of_cases
def test_as_many_flops_are_computed_again_as_torch_counts(case: tuple[str, Any]) -> None:
    name, policy = case
    plan, model = plan_of(policy), MODELS[name]
    blocks = [work for work in workload(model, plan).work.values() if work.is_block]
    kernels = [k for work in blocks for k in recomputed(work, plan)]
    ours = [k.flops * k.count for k in kernels if k.kind == "matmul" and k.op != "_grouped_mm"]
    assert sum(ours) == backward_flops(name, policy) - backward_flops(name, None)
