"""A plan from the words of a command line."""

import pytest

from fsdp_sim.cli.options import with_pairs
from fsdp_sim.spec import Plan
from fsdp_sim.spec.texts import plan_fields


@pytest.mark.parametrize(
    ("pairs", "plan"),
    [
        ([], Plan()),
        (["reshard_after_forward=true"], Plan(reshard_after_forward=True)),
        (["reshard_after_forward=False"], Plan(reshard_after_forward=False)),
        (["reshard_after_forward=1"], Plan(reshard_after_forward=1)),  # a number, not true
        (["reshard_after_forward = 2", " shard_size=4 "], Plan(reshard_after_forward=2, shard_size=4)),
        (["param_dtype=bf16", "reduce_dtype=float32"], Plan(param_dtype="bf16", reduce_dtype="fp32")),
        (["param_dtype=torch.float16"], Plan(param_dtype="fp16")),
        (["api=fsdp1", "backward_prefetch=none"], Plan(api="fsdp1", backward_prefetch="none")),  # off, in FSDP1
        (["backward_prefetch=none", "api=fsdp1"], Plan(api="fsdp1", backward_prefetch="none")),
        (["api=fsdp1", "backward_prefetch=backward_post"], Plan(api="fsdp1", backward_prefetch="BACKWARD_POST")),
        (["activation_checkpointing=FULL"], Plan(activation_checkpointing="full")),
        (["activation_checkpointing=mm"], Plan(activation_checkpointing=("mm",))),
        (["activation_checkpointing=mm,addmm"], Plan(activation_checkpointing=("mm", "addmm"))),
        (["gradient_divide_factor=3"], Plan(gradient_divide_factor=3)),
        (["wrap=layers.0,layers.1"], Plan(wrap=("layers.0", "layers.1"))),
        (["wrap=Block"], Plan(wrap=("Block",))),  # a module, whose name is as it is
        (["wrap=0,1"], Plan(wrap=("0", "1"))),
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
        (["grad_accum="], "Plan.grad_accum is ''; it must be"),
        (["grad_accum=nan"], "Plan.grad_accum is nan; it must be"),
        (["param_dtype=int8"], "Plan.param_dtype is 'int8'; it must be None, 'fp32', 'bf16' or 'fp16'"),
        (["sharding_strategy=FULL_SHART", "api=fsdp1"], r"did you mean 'FULL_SHARD'\?"),
        (["grad_accum=2", "grad_accum=3"], "grad_accum is given twice"),
        (["backward_prefetch=none", "shard_size=3", "reshard_after_forward=2"], "which does not divide shard_size 3"),
        (["api=ddp", "forward_prefetch=1"], "Plan.forward_prefetch is 1, which is a setting of fsdp2 and fsdp1"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(pairs, message):
    with pytest.raises(ValueError, match=message):
        Plan(**plan_fields(with_pairs({}, pairs)))
