"""A plan has torch's names and defaults, and refuses what it does not mean."""

import pytest

from fsdp_sim.spec import Plan


def test_defaults_are_those_of_fully_shard():
    plan = Plan()
    assert plan.api == "fsdp2"
    assert plan.reshard_after_forward is None
    assert plan.forward_prefetch is None
    assert plan.backward_prefetch is None
    assert plan.grad_accum == 1
    assert plan.requires_gradient_sync is True


def test_a_misspelt_field_is_a_type_error_with_the_right_name():
    with pytest.raises(TypeError, match=r"forward_prefech=1\); did you mean forward_prefetch\?"):
        Plan(forward_prefech=1)


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("api", "fsdp3", "'fsdp2'"),
        ("reshard_after_forward", 0, "True, False or None or a whole number >= 1"),
        ("forward_prefetch", 0, r"None \(implicit prefetch\) or a whole number >= 1 \(depth"),
        ("backward_prefetch", "BACKWARD", "'BACKWARD_PRE', 'BACKWARD_POST' or 'none'"),
        ("grad_accum", 0, "whole number >= 1"),
        ("requires_gradient_sync", "first", "True, False or 'last'"),
        ("param_dtype", "int8", "'fp32', 'bf16' or 'fp16'"),
        ("micro_batch", -1, "whole number >= 1"),
        ("seq_len", 1.5, "whole number >= 1"),
    ],
)
def test_a_wrong_value_names_field_value_and_what_is_right(field, value, right):
    with pytest.raises(ValueError, match=rf"Plan\.{field} is {value!r}; it must be .*{right}"):
        Plan(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forward_prefetch": True}, "forward_prefetch is True, which is fsdp1's; .* None .implicit. or a depth >= 1"),
        ({"backward_prefetch": "BACKWARD_PRE"}, "backward_prefetch is 'BACKWARD_PRE', which is fsdp1's"),
        ({"api": "fsdp1", "forward_prefetch": 1}, "which is fsdp2's; with api='fsdp1' it must be True, False or None"),
        ({"api": "fsdp1", "backward_prefetch": 2}, "'BACKWARD_PRE', 'BACKWARD_POST' or 'none'"),
        ({"api": "fsdp1", "reshard_after_forward": True}, "a setting of fsdp2; .* fsdp1 has sharding_strategy"),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "a setting of fsdp1; .* fsdp2 has reshard_after_forward"),
        ({"limit_all_gathers": False}, "a setting of fsdp1; api is 'fsdp2'"),
        ({"bucket_cap_mb": 1.0}, "a setting of ddp and zero1 and zero2; api is 'fsdp2': leave it None"),
        ({"api": "ddp", "shard_size": 2}, "a setting of fsdp2 and fsdp1; api is 'ddp': leave it None"),
        ({"api": "zero1", "reshard_after_forward": 1}, "reshard_after_forward is 1, which is a setting of fsdp2"),
        ({"api": "fsdp1", "shard_size": 4}, "sharding_strategy is 'FULL_SHARD'; give 'HYBRID_SHARD'"),
        ({"activation_checkpointing": ("matmul",)}, "a tuple of operators to keep .of mm, addmm, _grouped_mm, scaled"),
        ({"activation_checkpointing": ("mm",), "expert_parallel": 2}, "all-to-alls it keeps is not known; take 'full'"),
        ({"lora_targets": ("wq",)}, "lora_targets .* without effect where lora_rank is None; make that a number"),
        ({"base_quantization": "nf4"}, "without effect where lora_rank is None; .* four bits cannot be trained"),
        ({"fp8": "rowwise", "fp8_all_gather": True}, "fp8 is 'rowwise'; make that 'tensorwise', the one recipe"),
        ({"fp8_precompute_scale": True}, "without effect where fp8_all_gather is False; make that True"),
        ({"freeze": ("embed",), "lora_rank": 8}, "lora_rank=8: LoRA trains nothing but its adapters; leave one out"),
        ({"fp8": "mxfp8", "base_quantization": "nf4", "lora_rank": 8}, "multiplied in the dtype of compute"),
        ({"fp8": "tensorwise", "fp8_all_gather": True, "api": "fsdp1"}, "fp8_all_gather is True, which is a setting"),
        ({"fp8": "tensorwise", "fp8_all_gather": True, "reshard_after_forward": 2}, "gathered in fp8"),
        ({"shard_size": 4, "reshard_after_forward": 3}, "does not divide shard_size 4; .* one of 1, 2, 4"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_with_the_remedy(fields, message):
    with pytest.raises(ValueError, match=rf"Plan\..*{message}"):
        Plan(**fields)


def test_fields_that_go_together():
    assert Plan(api="fsdp1", forward_prefetch=True, backward_prefetch="none", limit_all_gathers=False)
    assert Plan(api="fsdp1", sharding_strategy="HYBRID_SHARD", shard_size=8)
    assert Plan(shard_size=8, reshard_after_forward=4)
    assert Plan(api="ddp", bucket_cap_mb=1, requires_gradient_sync="last", grad_accum=2, param_dtype="bf16")


def test_plans_that_say_1_and_true_are_two_plans():
    assert Plan(reshard_after_forward=1) != Plan(reshard_after_forward=True)
    assert Plan(bucket_cap_mb=25, api="ddp") == Plan(bucket_cap_mb=25.0, api="ddp")


@pytest.mark.parametrize(("dtype", "instead"), [
    ("fp8", "Plan.fp8 (such as 'tensorwise')"), ("float8_e4m3fn", "Plan.fp8"), ("torch.float8_e5m2", "Plan.fp8"),
    ("int4", "Plan.base_quantization (such as 'nf4'), beside lora_rank"), ("nf4", "Plan.base_quantization"),
    ("int8", "Plan.optimizer='adamw_8bit'"), ("tf32", "Plan.float32_matmul_precision='high'"),
    ("torch.bfloat16", "did you mean 'bf16'?"),
])  # fmt: skip
def test_a_dtype_that_is_none_of_gathers_names_the_field_that_is_meant(dtype: str, instead: str) -> None:
    for field in ("param_dtype", "reduce_dtype"):
        with pytest.raises(ValueError, match=f"^Plan.{field} is '{dtype}'; it must be None, 'fp32'") as refused:
            Plan(**{field: dtype})
        assert instead in str(refused.value)
