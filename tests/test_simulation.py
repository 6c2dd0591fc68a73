"""`simulate`: one call from a request to the step, its memory and its reasons."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from fsdp_sim.cost import workload
from fsdp_sim.cost.costs import CollectiveCosts
from fsdp_sim.engine import jitter, slow_node, straggler
from fsdp_sim.schedule import build
from fsdp_sim.simulation import Fit, simulate
from fsdp_sim.spec import Cluster, Link, Model, Plan, link
from fsdp_sim.timeline import Op

PLAN = Plan(param_dtype="bf16", micro_batch=2, seq_len=512)
CLUSTER = Cluster("A100-SXM-80GB", gpus=16)


def test_numbers_of_a_step_belong_together():
    sim = simulate("gpt2-124m", CLUSTER, PLAN)

    assert sim.tokens_per_s_per_gpu == pytest.approx(2 * 512 / sim.step_time_s)
    assert 0 < sim.exposed_comm_s < sim.step_time_s
    assert 0 < sim.mfu < 1
    assert sim.peak_memory_bytes <= sim.memory.reserved_bytes
    assert sim.timeline.span_s == pytest.approx(sim.step_time_s - sim.between_steps_s, rel=0.01)
    assert sim.fits


def test_a_name_dimensions_and_a_workload_are_the_same_request():
    by_name = simulate("gpt2-124m", CLUSTER, PLAN).step_time_s

    assert simulate(Model.preset("gpt2-124m"), CLUSTER, PLAN).step_time_s == by_name
    assert simulate(workload(Model.preset("gpt2-124m"), PLAN), CLUSTER, PLAN).step_time_s == by_name


@pytest.mark.parametrize("api", ["fsdp2", "fsdp1"])
def test_a_prediction_is_the_same_whatever_was_asked_before(api):
    """Programs for two numbers of GPUs share what follows from more than sizes."""

    def model(name):  # units of one name are another model's
        return Model(name, n_layer=8, n_head=4, d_model=128, d_ffn=512, vocab=1000)

    plan = replace(PLAN, api=api, activation_checkpointing="full", grad_accum=2)
    before = simulate(model("asked before"), CLUSTER, plan)
    assert before.step_time_s > 0
    assert before.peak_memory_bytes > 0
    asked, alone = (simulate(model(name), replace(CLUSTER, gpus=64), plan) for name in ("asked before", "alone"))

    assert asked.program.shape.world_size == (16 if api == "fsdp2" else 64)
    assert (asked.step_time_s, asked.exposure) == (alone.step_time_s, alone.exposure)
    assert asked.peak_memory_bytes == alone.peak_memory_bytes
    assert asked.program.state_bytes == alone.program.state_bytes
    assert asked.memory.reserved_bytes == alone.memory.reserved_bytes
    assert list(asked.timeline.events) == list(alone.timeline.events)


def test_ranks_that_do_not_differ_take_the_time_of_one():
    one = simulate("gpt2-124m", CLUSTER, PLAN).step_time_s

    same = simulate("gpt2-124m", CLUSTER, PLAN, skew=lambda s, n: straggler(s, n, rank=3, factor=1.0))

    assert same.run.ranks == 16
    assert same.step_time_s == pytest.approx(one, rel=0.01)


def test_one_slow_rank_slows_all_of_them():
    one = simulate("llama2-7b", CLUSTER, PLAN).step_time_s

    slow = simulate("llama2-7b", CLUSTER, PLAN, skew=lambda s, n: straggler(s, n, rank=3, factor=1.5))

    assert 1.2 * one < slow.step_time_s < 1.5 * one


def test_jitter_costs_more_on_more_ranks():
    def step_time_s(gpus: int) -> float:
        cluster = Cluster("H100", gpus=gpus)
        return simulate("llama2-7b", cluster, PLAN, skew=lambda s, n: jitter(s, n, sigma=0.1)).step_time_s

    assert step_time_s(256) > step_time_s(8)


def test_a_bad_link_on_one_node_holds_up_the_others():
    plan = replace(PLAN, micro_batch=1)
    cluster = Cluster("A100-SXM-80GB", gpus=32, inter="400 Gb/s per node")
    one = simulate("llama2-7b", cluster, plan).step_time_s

    assert simulate("llama2-7b", cluster, plan, skew=lambda s, n: slow_node(s, n, node=2, factor=3)).step_time_s > one


def test_collectives_of_two_communicators_share_the_network_card():
    """A reduce-scatter group of its own lets reductions and gathers overlap, at half the rate each between nodes."""
    plan = replace(PLAN, separate_reduce_scatter_group=True, micro_batch=1)

    def slowest_gather(inter: str, gpus: int) -> float:
        sim = simulate("llama2-7b", Cluster("A100-SXM-80GB", gpus=gpus, inter=inter), plan)
        gathers = [e for e in sim.timeline.ops if e.op is Op.ALL_GATHER and e.unit != "root"]
        return max(e.duration_s for e in gathers) / min(e.duration_s for e in gathers)

    assert slowest_gather("200 Gb/s per node", 16) > 1.5
    assert slowest_gather("200 Gb/s per node", 8) == pytest.approx(1.0)


def test_a_laptop_computes_on_the_thread_that_issues():
    sim = simulate("gpt2-124m", Cluster("cpu", gpus=4, bandwidth_gbps=4), Plan(seq_len=64))

    assert sim.step_time_s > 0.5
    assert sim.between_steps_s == 0


def test_a_laptop_s_rank_may_fill_all_of_its_memory() -> None:
    """No context of CUDA takes a part, and no caching allocator holds more than is alive."""
    cluster = Cluster("cpu", gpus=2)
    sims = [simulate("gpt2-124m", cluster, Plan(seq_len=1024, micro_batch=rows)) for rows in (1, 2, 3)]

    assert [sim.fit for sim in sims] == [Fit.FITS, Fit.FITS, Fit.DOES_NOT_FIT]
    assert sims[1].peak_memory_bytes > 0.75 * sims[1].memory_limit_bytes == 0.75 * cluster.gpu.mem_bytes


def test_hybrid_sharding_stays_within_a_node_unless_told_otherwise():
    plan = Plan(api="fsdp1", sharding_strategy="HYBRID_SHARD", param_dtype="bf16", seq_len=256)

    assert simulate("gpt2-124m", CLUSTER, plan).plan.shard_size == 8


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "message"),
    [
        (
            "gpt2-124m",
            CLUSTER,
            Plan(shard_size=5),
            "Plan.shard_size is 5, which does not divide the 16 GPUs of the cluster",
        ),
        ("gpt2", CLUSTER, PLAN, "no model is called 'gpt2'; the nearest names are gpt2-124m"),
        ("gpt2-124m", Cluster("V100", gpus=8), PLAN, "V100-SXM2-32GB has no bf16; it has fp16"),
        ("gpt2-124m", CLUSTER, Plan(seq_len=4096), "has learned positions for 1024 tokens"),
    ],
)
def test_impossible_requests(model, cluster, plan, message):
    with pytest.raises(ValueError, match=message):
        simulate(model, cluster, plan)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(api="fsdp1", forward_prefetch=True),
        Plan(grad_accum=2, activation_checkpointing="full", param_dtype="bf16"),
        Plan(api="ddp"),
        Plan(cpu_offload=True),
    ],
    ids=lambda plan: f"{plan.api}, {plan.activation_checkpointing}, {plan.grad_accum}",
)
def test_the_timeline_is_the_run_with_all_that_is_alive(plan: Plan) -> None:
    sim = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=4), plan)
    timeline, bare = sim.timeline, sim.run.timeline()

    assert timeline.peak_bytes(0) == sim.peak_memory_bytes
    assert timeline.header.memory_limit_bytes == int(sim.memory_limit_bytes)
    assert {c: int(b[-1]) for c, b in timeline.live_bytes(0)[1].items()} == {
        c: int(b[-1]) for c, b in sim.memory.by_category.items()
    }
    # the same operations, which wait for the same operations
    label = {e.seq: e.label for e in timeline.ops}, {e.seq: e.label for e in bare.ops}
    for ours, theirs in zip(timeline.ops, bare.ops, strict=True):
        assert (ours.label, ours.start_s, ours.end_s) == (theirs.label, theirs.start_s, theirs.end_s)
        assert [label[0][s] for s in ours.waits_on] == [label[1][s] for s in theirs.waits_on]


@pytest.mark.parametrize(
    ("plan", "cluster", "shared"),
    [
        (PLAN, CLUSTER, True),
        (replace(PLAN, micro_batch=4, seq_len=256), replace(CLUSTER, bandwidth_gbps=10.0), True),
        (replace(PLAN, forward_prefetch=2), CLUSTER, False),
        (PLAN, replace(CLUSTER, gpus=32), False),
    ],
)
def test_a_program_is_shared_where_it_is_the_same(plan: Plan, cluster: Cluster, shared: bool) -> None:
    first = simulate("gpt2-124m", CLUSTER, PLAN)
    other = simulate("gpt2-124m", cluster, plan)

    assert (other.program.instructions is first.program.instructions) == shared
    assert other.program == build(list(other.workload.units), plan, cluster.gpus)


@pytest.mark.parametrize("how", [{}, {"micro_batch": 8}, {"activation_checkpointing": "selective"}, {"api": "fsdp1"}])
@pytest.mark.parametrize("cluster", [CLUSTER, replace(CLUSTER, gpus=32), replace(CLUSTER, bandwidth_gbps=10.0)])
def test_what_plans_of_a_program_share_changes_nothing(how: dict[str, Any], cluster: Cluster) -> None:
    """Before each of them the others were simulated: the program, its rates and its collectives may be known."""
    plan = replace(PLAN, **how)
    simulate("gpt2-124m", CLUSTER, replace(plan, micro_batch=1)).run.scaled(network=0.5)
    sim, alone = simulate("gpt2-124m", cluster, plan), simulate("gpt2-124m", cluster, plan)
    alone.__dict__["program"] = build(list(alone.workload.units), plan, cluster.gpus)
    alone.costs.collectives = CollectiveCosts(cluster, alone.costs.calibration)

    assert sim.run.columns == alone.run.columns
    assert (sim.exposure, sim.memory.changes) == (alone.exposure, alone.memory.changes)


def test_a_checkpoint_costs_its_bytes_at_the_rate_of_the_storage_shared_out_among_the_steps_between() -> None:
    cluster, plan = Cluster("H100", gpus=8), Plan(param_dtype="bf16", micro_batch=2, seq_len=512)
    plain = simulate("gpt2-350m", cluster, plan)

    def saving(**fields: object) -> float:
        return simulate("gpt2-350m", cluster, replace(plan, **fields)).step_time_s - plain.step_time_s

    shard = sum(plain.program.state_bytes.values())  # parameters and two moments of one rank
    sync = saving(save_every=10, storage_gb_per_s=2.0)
    assert sync == pytest.approx(shard / 2e9 / 10)
    assert 0 < saving(save_every=10, storage_gb_per_s=2.0, async_save=True) < sync / 5  # a copy to the CPU's memory
    late = saving(save_every=1, storage_gb_per_s=0.5, async_save=True)
    assert late == pytest.approx(shard / 0.5e9 - plain.step_time_s, rel=0.1)  # written slower than it comes


@pytest.mark.parametrize(
    ("gpu", "gpus", "fields", "is_said"),
    [
        ("4090", 4, {"activation_offload": "streams"}, True),
        ("4090", 1, {"activation_offload": "streams"}, False),
        ("4090", 4, {}, False),
        ("A100", 4, {"cpu_offload": True}, False),
    ],
    ids=["one link", "one GPU", "no copies", "NVLink"],
)
def test_that_copies_and_collectives_share_a_link_is_said(gpu: str, gpus: int, fields: dict, is_said: bool) -> None:
    sim = simulate("gpt2-124m", Cluster(gpu, gpus=gpus), Plan(param_dtype="bf16", **fields))
    assert any("take the same PCIe" in note for note in sim.notes) is is_said


def test_tf32_is_for_fp32_on_gpus_that_have_it() -> None:
    plan = Plan(micro_batch=2, seq_len=512)
    tf32 = replace(plan, float32_matmul_precision="high")

    assert simulate("gpt2-350m", Cluster("A100", gpus=8), tf32).step_time_s < 0.6 * (
        simulate("gpt2-350m", Cluster("A100", gpus=8), plan).step_time_s
    )
    with pytest.raises(ValueError, match="V100-SXM2-32GB has no tf32"):
        simulate("gpt2-350m", Cluster("V100", gpus=8), tf32)
    with pytest.raises(ValueError, match="which is for fp32, and gpt2-350m computes in bf16; leave it 'highest'"):
        simulate("gpt2-350m", Cluster("A100", gpus=8), replace(tf32, param_dtype="bf16"))


def test_a_plan_fits_is_on_the_edge_or_does_not_fit():
    """A larger batch first reaches the edge of memory, where torch's allocator holds nearly all, then goes beyond."""
    h100 = Cluster("H100-SXM-80GB", gpus=8)
    plan = Plan(param_dtype="bf16", reduce_dtype="fp32", seq_len=4096)
    sims = [simulate("llama3-8b", h100, replace(plan, micro_batch=n)) for n in (1, 2, 3)]
    assert [sim.fit for sim in sims] == [Fit.FITS, Fit.EDGE, Fit.DOES_NOT_FIT]
    assert [sim.fits for sim in sims] == [True, True, False]
    assert sims[1].peak_memory_bytes < 0.9 * sims[1].memory_limit_bytes < sims[1].memory.reserved_bytes
    assert [str(sim.fit) in repr(sim) for sim in sims] == [False, True, True]


def test_expandable_segments_hold_less_and_are_a_gpu_s():
    plan = Plan(param_dtype="bf16", reduce_dtype="fp32", seq_len=4096, activation_checkpointing="full")
    pieces, grown = (
        simulate("llama3-70b", Cluster("H100-SXM-80GB", gpus=64), replace(plan, expandable_segments=expandable))
        for expandable in (False, True)
    )
    assert pieces.peak_memory_bytes == grown.peak_memory_bytes < grown.memory.reserved_bytes
    assert grown.memory.reserved_bytes < 0.95 * pieces.memory.reserved_bytes
    with pytest.raises(ValueError, match=r"Plan\.expandable_segments is True, a setting of torch's allocator for GPUs"):
        simulate("gpt2-124m", Cluster("cpu", gpus=2), Plan(expandable_segments=True))


def test_streams_that_copy_activations_at_once_cost_nothing_and_slow_ones_share_the_way_with_shards() -> None:
    plan = Plan(micro_batch=2, seq_len=2048, param_dtype="bf16", reduce_dtype="fp32")
    at_once = replace(link("PCIe5"), bytes_per_s=1e18, fraction=1.0, base_s=0.0)

    def step_s(host: Link | None = None, **fields: Any) -> float:
        cluster = Cluster("H100", gpus=8, host=host, host_memory_gb_per_s=1e12)
        return simulate("llama3-8b", cluster, replace(plan, **fields)).step_time_s

    assert step_s(at_once, activation_offload="streams") == pytest.approx(step_s(at_once), rel=1e-3)
    assert step_s(activation_offload="save_on_cpu") > step_s(activation_offload="streams") > 1.1 * step_s()
    both_s = step_s(activation_offload="streams", cpu_offload=True)
    assert both_s > step_s(activation_offload="streams") + step_s(cpu_offload=True) - step_s()


def test_a_program_is_gone_with_its_simulation_before_garbage_is_looked_for():
    work = workload(Model.preset("gpt2-124m"), PLAN)
    sim = simulate(replace(work, units=[*work.units]), CLUSTER, PLAN)  # the program of a list is not kept for others
    assert min(sim.step_time_s, sim.exposed_comm_s, sim.peak_memory_bytes) > 0
    program = weakref.ref(sim.program)

    gc.disable()
    del sim
    gone = program() is None
    gc.enable()

    assert gone


@pytest.mark.parametrize(("plan", "of"), [
    (Plan(float32_matmul_precision="high"), "tf32"),
    (Plan(fp8="tensorwise"), "bf16"),
    (Plan(), "fp32"),
    (Plan(param_dtype="fp16", fp8="tensorwise"), "fp16"),
])  # fmt: skip
def test_utilisation_is_of_the_peak_of_what_the_matmuls_compute_in(plan, of):
    """Of fp32's, fp8 and TF32 would reach several times all of it."""
    sim = simulate("llama3.2-1b", Cluster("H100", gpus=8), plan)
    flops = sim.tokens_per_s_per_gpu * sim.workload.model_flops_per_token

    assert sim.mfu == pytest.approx(flops / sim.cluster.gpu.peak_flops(of))


@pytest.mark.parametrize(("model", "plan", "message"), [
    ({"n_expert": 1025, "experts_per_token": 2}, {"experts_impl": "loop"},
     r"has 1,025 experts in a layer, .* up to 1,024 of those: take experts_impl='grouped'"),
    ({"n_layer": 5_000}, {"forward_prefetch": 400},
     r"Plan.forward_prefetch is 400 for each of 5,000 layers .* take a depth of 200 or less"),
])  # fmt: skip
def test_what_would_take_minutes_is_refused_with_what_does_not(model, plan, message):
    small = {"n_layer": 2, "d_model": 64, "n_head": 1, "d_ffn": 64, "vocab": 100}
    with pytest.raises(ValueError, match=message):
        simulate(Model("m", **(small | model)), Cluster("H100", gpus=8), Plan(**plan))
