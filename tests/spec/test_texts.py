"""A plan from the words of a command line."""

import doctest

import pytest

from fsdp_sim.cli.options import with_pairs
from fsdp_sim.spec import Plan, texts
from fsdp_sim.spec.texts import plan_fields


def test_examples_run_as_printed():
    assert doctest.testmod(texts).failed == 0


@pytest.mark.parametrize(
    ("pairs", "plan"),
    [
        ([], Plan()),
        (["reshard_after_forward=true"], Plan(reshard_after_forward=True)),
        (["reshard_after_forward=False"], Plan(reshard_after_forward=False)),
        (["reshard_after_forward=none"], Plan(reshard_after_forward=None)),
        (["reshard_after_forward=1"], Plan(reshard_after_forward=1)),  # a number, not true
        (["reshard_after_forward = 2", " shard_size=4 "], Plan(reshard_after_forward=2, shard_size=4)),
        (["param_dtype=bf16", "reduce_dtype=float32"], Plan(param_dtype="bf16", reduce_dtype="fp32")),
        (["param_dtype=torch.float16"], Plan(param_dtype="fp16")),
        (["requires_gradient_sync=last", "grad_accum=3"], Plan(requires_gradient_sync="last", grad_accum=3)),
        (["is_last_backward=false"], Plan(is_last_backward=False)),
        (["backward_prefetch=none"], Plan(backward_prefetch=None)),
        (["api=fsdp1", "backward_prefetch=none"], Plan(api="fsdp1", backward_prefetch="none")),  # off, in FSDP1
        (["backward_prefetch=none", "api=fsdp1"], Plan(api="fsdp1", backward_prefetch="none")),
        (["api=fsdp1", "backward_prefetch=backward_post"], Plan(api="fsdp1", backward_prefetch="BACKWARD_POST")),
        (["api=fsdp1", "sharding_strategy=SHARD_GRAD_OP"], Plan(api="fsdp1", sharding_strategy="SHARD_GRAD_OP")),
        (["activation_checkpointing=full"], Plan(activation_checkpointing="full")),
        (["activation_checkpointing=FULL"], Plan(activation_checkpointing="full")),
        (["activation_checkpointing=2"], Plan(activation_checkpointing=2)),
        (["activation_checkpointing=mm"], Plan(activation_checkpointing=("mm",))),
        (["activation_checkpointing=mm,addmm"], Plan(activation_checkpointing=("mm", "addmm"))),
        (["gradient_divide_factor=3"], Plan(gradient_divide_factor=3)),
        (["gradient_divide_factor=2.5"], Plan(gradient_divide_factor=2.5)),
        (["wrap=layers.0,layers.1"], Plan(wrap=("layers.0", "layers.1"))),
        (["wrap=block"], Plan(wrap="block")),
        (["wrap=Block"], Plan(wrap=("Block",))),  # a module, whose name is as it is
        (["wrap=1000"], Plan(wrap=1000)),
        (["wrap=0,1"], Plan(wrap=("0", "1"))),
        (["wrap=0,"], Plan(wrap=("0",))),
        (["api=ddp", "backward_prefetch=none"], Plan(api="ddp")),
        (["api=ddp", "bucket_cap_mb=1e1"], Plan(api="ddp", bucket_cap_mb=10.0)),
    ],
)
def test_pairs_say_what_the_fields_of_a_plan_say(pairs, plan):
    assert Plan(**plan_fields(with_pairs({}, pairs))) == plan


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["forward_prefech=2"], r"a plan has no field forward_prefech; did you mean forward_prefetch\?"),
        (["zzz=1"], "a plan has no field zzz; there are api, reshard_after_forward"),
        (["forward_prefetch"], "'forward_prefetch' is no pair; write key=value"),
        (["=2"], "'=2' is no pair"),
        (["grad_accum=0"], "Plan.grad_accum is 0; it must be a whole number >= 1"),
        (["grad_accum="], "Plan.grad_accum is ''; it must be"),
        (["grad_accum=2.5"], "Plan.grad_accum is 2.5; it must be"),
        (["grad_accum=nan"], "Plan.grad_accum is nan; it must be"),
        (["wrap=0"], "Plan.wrap is 0; it must be"),
        (["reduce_scatter_max_input_buffers=true"], "Plan.reduce_scatter_max_input_buffers is True; it must be"),
        (["param_dtype=int8"], "Plan.param_dtype is 'int8'; it must be None, 'fp32', 'bf16' or 'fp16'"),
        (["sharding_strategy=FULL_SHART", "api=fsdp1"], r"did you mean 'FULL_SHARD'\?"),
        (["requires_gradient_sync=first"], "it must be True, False or 'last'"),
        (["grad_accum=2", "grad_accum=3"], "grad_accum is given twice"),
        (["backward_prefetch=none", "shard_size=3", "reshard_after_forward=2"], "which does not divide shard_size 3"),
        (["api=ddp", "forward_prefetch=1"], "Plan.forward_prefetch is 1, which is a setting of fsdp2 and fsdp1"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(pairs, message):
    with pytest.raises(ValueError, match=message):
        Plan(**plan_fields(with_pairs({}, pairs)))
