"""What is said of one GPU: it has no collectives, and neither sentence nor advice names one."""

import pytest

from fsdp_sim import Cluster, Plan, simulate


@pytest.mark.parametrize("offload", [False, True])
def test_nothing_is_blamed_or_advised_that_is_not_there(offload: bool) -> None:
    plan = Plan(micro_batch=4, param_dtype="bf16", reduce_dtype="fp32", cpu_offload=offload)
    why = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=1), plan).explain()

    said = " ".join([*why.sentences, *(tip for blame in why.culprits for tip in blame.advice)])
    assert "Copies and casts of parameters and gradients" in said
    assert not any(word in said for word in ("collective", "reduction", "gathered", "prefetch", "larger units"))
