"""What is said of one GPU: it has no collectives, and no sentence blames one."""

from fsdp_sim import Cluster, Plan, simulate


def test_no_reduction_is_blamed_where_there_is_none():
    sim = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=1), Plan(micro_batch=8, param_dtype="bf16"))

    assert "reductions" not in " ".join(sim.explain().sentences)
