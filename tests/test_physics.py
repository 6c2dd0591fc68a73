"""Laws that every prediction obeys, whatever the model, the plan and the cluster: metamorphic tests."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_sim.cost.collectives import collective_s, family_of
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster, Model, Plan, gpu_names
from fsdp_sim.timeline import Op

GPT = Model("gpt", n_layer=4, d_model=512, n_head=8, d_ffn=2048, vocab=5000)
LLAMA = Model(
    "llama", n_layer=4, d_model=512, n_head=8, n_kv_head=2, d_ffn=1408, vocab=5000, ffn_type="swiglu", norm="rmsnorm",
    bias=False, positions="rope", tied_embeddings=False,
)  # fmt: skip
T5 = dataclasses.replace(LLAMA, name="t5", n_encoder_layer=2, positions="none")
models = st.sampled_from([GPT, LLAMA, T5])
clusters = st.sampled_from([Cluster("H100", gpus=8), Cluster("A100", gpus=16), Cluster("MI300X", gpus=4)])
wraps = st.sampled_from(["block", "root", 1, 10**9, "first", "last"])
plans = st.builds(
    dict, api=st.sampled_from(["fsdp2", "fsdp1", "ddp", "zero1", "zero2"]), micro_batch=st.sampled_from([1, 2, 4]),
    seq_len=st.sampled_from([128, 512]), grad_accum=st.sampled_from([1, 2]),
    param_dtype=st.sampled_from([None, "bf16"]), attention_impl=st.sampled_from(["sdpa", "math"]),
)  # fmt: skip


def names(model: Model) -> list[str]:
    decoder = "decoder" if model.n_encoder_layer else "layers"
    return [f"encoder.{i}" for i in range(model.n_encoder_layer)] + [f"{decoder}.{i}" for i in range(model.n_layer)]


def cut(model: Model, wrap: object) -> object:
    """``first`` and ``last`` are two blocks at an end."""
    return {"first": tuple(names(model)[:2]), "last": tuple(names(model)[-2:])}.get(str(wrap), wrap)


def predict(model: Model, cluster: Cluster, plan: dict, **changes: object) -> Simulation:
    return simulate(model, cluster, Plan(**plan | changes))


@settings(max_examples=15)
@given(models, clusters, plans, wraps)
def test_checkpointing_computes_blocks_again_takes_longer_and_keeps_less(model, cluster, plan, wrap):
    plan |= {"wrap": cut(model, wrap)}
    none, full, second, selective = (
        predict(model, cluster, plan, activation_checkpointing=how) for how in (None, "full", 2, "selective")
    )
    blocks = names(model) * plan["grad_accum"]

    def again(sim: Simulation) -> list[str]:
        return sorted(i.unit for i in sim.program.ops if i.op is Op.RECOMPUTE)

    assert again(none) == []
    assert again(full) == again(selective) == sorted(blocks)
    assert again(second) == sorted(names(model)[1::2] * plan["grad_accum"])
    times = [busy(sim) for sim in (none, second, full)]
    assert times == sorted(times)
    assert times[0] < busy(selective) < times[2]
    assert none.step_time_s <= second.step_time_s <= full.step_time_s  # a CPU that is late hides what it computes again
    assert full.peak_memory_bytes <= second.peak_memory_bytes <= none.peak_memory_bytes
    assert full.peak_memory_bytes <= selective.peak_memory_bytes <= none.peak_memory_bytes
    kept = [end_of_forward(sim) for sim in (full, selective, none)]
    assert kept == sorted(kept)
    assert kept[0] < kept[2]


def busy(sim: Simulation) -> float:
    """Seconds of compute."""
    return sum(sim.costs.seconds(i) for i in sim.program.ops if i.op in (Op.FWD, Op.BWD, Op.RECOMPUTE))


def end_of_forward(sim: Simulation) -> int:
    """Bytes kept from the forward for the backward, of all blocks."""
    work, again = sim.workload.work, {i.unit for i in sim.program.ops if i.op is Op.RECOMPUTE}
    selective = sim.plan.activation_checkpointing == "selective"
    return sum(
        w.output_bytes + (w.selective_bytes if selective else 0) if name in again else w.saved_bytes
        for name, w in work.items()
    )


@settings(max_examples=15)
@given(models, clusters, plans, wraps)
def test_attention_that_is_not_fused_keeps_its_scores_and_in_bf16_is_slower(model, cluster, plan, wrap):
    """Fused, the scores are computed again in the backward: in fp32, where matmuls are slow, that may take longer."""
    plan |= {"wrap": cut(model, wrap)}
    fused, composed = (predict(model, cluster, plan, attention_impl=how) for how in ("sdpa", "math"))

    scores = 4 * plan["micro_batch"] * model.n_head * plan["seq_len"] ** 2
    row_sums = scores // plan["seq_len"]  # which fused attention keeps
    layers = model.n_layer * (2 if model.n_encoder_layer else 1) + model.n_encoder_layer
    assert end_of_forward(composed) - end_of_forward(fused) >= (scores - row_sums) * layers
    assert composed.step_time_s >= fused.step_time_s or fused.plan.param_dtype != "bf16"
    assert composed.peak_memory_bytes >= fused.peak_memory_bytes


@settings(max_examples=10)
@given(models, clusters, plans)
def test_scores_grow_with_the_square_of_the_sequence(model, cluster, plan):
    plan |= {"attention_impl": "math"}
    once, twice = (end_of_forward(predict(model, cluster, plan, seq_len=n)) for n in (256, 512))

    assert 2 * once < twice < 4 * once


@pytest.mark.parametrize("name", gpu_names())
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_a_collective_of_more_ranks_never_takes_less_time(name, op):
    """In a node, over nodes, and from one to the other; but for what is measured to be faster (see `collectives`)."""
    gpu = Cluster(name, gpus=1)
    size, mesh = gpu.node_size, gpu.intra_link.mesh
    inside = [n for n in (2, 4, 8, 16, 32, 64) if n < size and not mesh]
    ranks = [*inside, *(size * n for n in (1, 2, 4, 8, 16, 32, 64, 256))]
    for n_bytes in (1e3, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10):
        times = [collective_s(op, n_bytes, n, Cluster(name, gpus=n)) for n in ranks]
        for (few, before), (many, after) in itertools.pairwise(zip(ranks, times, strict=True)):
            in_switch = op == "all_reduce" and many <= size and family_of(gpu.intra_link).nvls_fraction
            least = before * ((1 + 1 / many) / (1 + 1 / few) if in_switch else 1)
            assert after >= least * (1 - 1e-12), f"{op} of {n_bytes:g} bytes: {few} ranks {before}, {many} {after}"


def test_an_all_reduce_in_the_switch_gets_as_much_faster_as_published():
    """8 GiB on 4 and on 8 of H200 and B200 (data/nccl_collectives.csv, "default")."""
    for name, few_s, many_s in (("H200", 35.47e-3, 31.77e-3), ("B200", 19.14e-3, 17.94e-3)):
        for ranks, measured_s in ((4, few_s), (8, many_s)):
            assert collective_s("all_reduce", 2**33, ranks, Cluster(name, gpus=ranks)) == pytest.approx(
                measured_s, rel=0.06
            )


@given(
    st.sampled_from(gpu_names()), st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast"]),
    st.integers(1, 2**34), st.integers(1, 2**34),
)  # fmt: skip
def test_a_larger_message_never_takes_less_time(name, op, some, other):
    cluster = Cluster(name, gpus=2 * Cluster(name, gpus=1).gpu.gpus_per_node)
    few, many = sorted((some, other))
    assert collective_s(op, few, cluster.gpus, cluster) <= collective_s(op, many, cluster.gpus, cluster)
