"""Experts that ranks share out: what each computes, keeps and sends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.cost import collective_s, workload
from fsdp_sim.timeline import Memory, Op

MOE = Model(
    "moe", n_layer=3, d_model=128, n_head=4, d_ffn=256, vocab=500, bias=False, ffn_type="swiglu", norm="rmsnorm",
    positions="rope", tied_embeddings=False, n_expert=16, experts_per_token=2, d_expert=64, first_dense=1,
)  # fmt: skip
PLAN = Plan(param_dtype="bf16", reduce_dtype="fp32", micro_batch=2, seq_len=64)
TOKENS = 2 * 64

models = st.builds(
    replace, st.just(MOE), n_shared_expert=st.sampled_from([0, 1]), experts_per_token=st.sampled_from([1, 2, 4]),
    norm_position=st.sampled_from(["pre", "both"]), ffn_type=st.sampled_from(["swiglu", "gelu"]),
    moe_every=st.sampled_from([1, 2]), parallel=st.sampled_from([None, 2]),
)  # fmt: skip
ranks = st.sampled_from([2, 4, 8, 16])


@given(models, ranks)
def test_every_token_is_computed_once_and_kept_once_wherever_it_is(model, k):
    """Beside that a rank keeps where each of the tokens that came was laid; and it lays them out, forth and back."""
    one, many = workload(model, PLAN), workload(model, replace(PLAN, expert_parallel=k))
    with_experts = [name for name in many.work if name.endswith(".experts")]
    assert {name.removesuffix(".experts") for name in with_experts} == {
        u.name for u in one.units if any(p.name.startswith("experts.") for p in u.params)
    }

    def total(found, what):
        return sum(getattr(work, what) for work in found.work.values())

    for what in ("forward_flops", "backward_flops"):
        assert total(many, what) == pytest.approx(total(one, what), rel=1e-12)
    rows = TOKENS * (model.experts_per_token or 0)
    assert total(many, "saved_bytes") == total(one, "saved_bytes") + 8 * rows * len(with_experts)
    assert many.param_count == one.param_count


@given(models, ranks)
def test_of_experts_a_rank_gathers_and_keeps_its_part(model, k):
    cluster = Cluster("H100", gpus=16)
    one, many = (simulate(model, cluster, replace(PLAN, expert_parallel=n)) for n in (1, k))
    of_experts = sum(
        p.bytes for p in next(u for u in many.program.units if u.exchange).params
    )  # in fp32; gathered in bf16
    gathers = {i.bytes for i in many.program.ops if i.op is Op.ALL_GATHER and i.unit.endswith(".experts")}
    assert gathers == ({of_experts // 2 // k} if k < 16 else set())
    sent = [i for i in many.program.ops if i.op is Op.ALL_TO_ALL and i.dtype == "bf16"]
    assert {i.bytes for i in sent} == {TOKENS * (model.experts_per_token or 0) * 128 * 2}
    assert len(sent) == 4 * sum(unit.exchange is not None for unit in many.program.units)
    for category in (Memory.SHARDED, Memory.OPTIMIZER):
        kept = [sum(n for (of, _), n in s.program.state_bytes.items() if of is category) for s in (one, many)]
        assert kept[0] == kept[1]
    assert many.fits


@given(models, ranks)
def test_a_checkpointed_block_keeps_its_output_alone_and_sends_its_tokens_again(model, k):
    plan = replace(PLAN, activation_checkpointing="full")
    one, many = (simulate(model, Cluster("H100", gpus=16), replace(plan, expert_parallel=n)) for n in (1, k))
    most = [max(sim.memory.by_category[Memory.CHECKPOINT]) for sim in (one, many)]
    assert most[0] == most[1] > 0
    exchanges = sum(unit.exchange is not None for unit in many.program.units)
    assert sum(i.op is Op.ALL_TO_ALL and i.dtype == "bf16" for i in many.program.ops) == 6 * exchanges


def test_experts_that_are_not_trained_are_gathered_and_not_reduced():
    plan = replace(PLAN, expert_parallel=4, freeze=("layers.*.experts",))
    ops = {(i.op, i.unit) for i in simulate(MOE, Cluster("H100", gpus=16), plan).program.ops}
    assert (Op.ALL_GATHER, "layers.1.experts") in ops
    assert (Op.REDUCE_SCATTER, "layers.1.experts") not in ops


@given(st.integers(0, 2**30), st.sampled_from(["H100", "A100-SXM-80GB", "B200", "L4"]))
def test_an_all_to_all_takes_no_less_time_with_more_ranks_and_more_bytes(n_bytes, gpu):
    cluster = Cluster(gpu, gpus=64)
    seconds = [collective_s("all_to_all", n_bytes, n, cluster) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert seconds[0] == 0
    assert seconds == sorted(seconds)
    assert collective_s("all_to_all", 2 * n_bytes, 16, cluster) >= seconds[4]
    leaves = n_bytes * (64 - cluster.node_size) / 64
    assert seconds[-1] >= leaves / cluster.inter_link.bytes_per_s


def test_compute_waits_for_tokens_and_it_is_said():
    said = str(simulate("mixtral-8x7b", Cluster("H100", gpus=16), replace(PLAN, expert_parallel=8)).explain())
    assert "Compute waits for tokens that travel to the ranks of their experts, or back" in said


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("llama3-8b", {}, "expert_parallel is 2, but llama3-8b has no experts"),
        (MOE, {"expert_parallel": 3}, "expert_parallel is 3, but moe has 16 experts in a layer; take a divisor"),
        (MOE, {"expert_parallel": 16, "shard_size": 8}, "no divisor of shard_size 8"),
        (MOE, {"api": "ddp"}, "a setting of fsdp2"),
        (MOE, {"wrap": "root"}, "it must be 'block'"),
        (MOE, {"reshard_after_forward": 4}, "groups of a few ranks are not known for experts"),
        (MOE, {"activation_checkpointing": "selective"}, "which outputs of all-to-alls it keeps is not known"),
        (MOE, {"optimizer": "muon"}, "take another optimizer"),
    ],
)
def test_what_is_not_defined_is_refused(model, fields, message):
    with pytest.raises(ValueError, match=message):
        simulate(model, Cluster("H100", gpus=48), Plan(**{"expert_parallel": 2} | fields))
