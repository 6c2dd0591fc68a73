"""Seconds of operations: what each depends on."""

from dataclasses import replace
from typing import Any

import pytest

from fsdp_sim.cost import Calibration, workload
from fsdp_sim.cost.collectives import channels
from fsdp_sim.cost.costs import MOST_LOST, Costs
from fsdp_sim.schedule import Program, build
from fsdp_sim.spec import Cluster, Model, Plan, gpu
from fsdp_sim.timeline import COLLECTIVES, Op

GPT = Model.preset("gpt2-124m")
PLAN = Plan(param_dtype="bf16", micro_batch=4, seq_len=512)
CLUSTER = Cluster("A100-SXM-80GB", gpus=16)


def made(plan: Plan = PLAN, cluster: Cluster = CLUSTER, numbers: Calibration | None = None) -> tuple[Program, Costs]:
    work = workload(GPT, plan)
    return build(work.units, plan, cluster.gpus), Costs(work, plan, cluster, numbers)


def seconds(op: Op, plan: Plan = PLAN, cluster: Cluster = CLUSTER, numbers: Calibration | None = None) -> float:
    """Of all operations of a kind in a step."""
    program, costs = made(plan, cluster, numbers)
    return sum(costs.seconds(i) for i in program.ops if i.op is op)


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        replace(PLAN, reduce_dtype="fp32", shard_size=8, cpu_offload=True),
        replace(PLAN, activation_checkpointing="full", grad_accum=2, requires_gradient_sync="last"),
        replace(PLAN, activation_checkpointing="selective", reshard_after_forward=8),
        replace(PLAN, api="fsdp1", reduce_dtype="fp32", cpu_offload=True),
        replace(PLAN, api="fsdp1", sharding_strategy="HYBRID_SHARD", shard_size=8),
        replace(PLAN, api="ddp"),
        replace(PLAN, api="zero1"),
        replace(PLAN, api="zero2"),
    ],
    ids=lambda plan: f"{plan.api} {plan.sharding_strategy} {plan.activation_checkpointing}",
)
def test_every_operation_of_every_program_has_a_cost(plan: Plan) -> None:
    program, costs = made(plan)

    for i in program.ops:
        assert costs.seconds(i) >= 0, i
        assert costs.issue_s(i) > 0, i
        if i.op in (Op.FWD, Op.BWD, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.OPTIM):
            assert costs.seconds(i) > 0, i


def test_recomputing_selectively_costs_less_than_everything_and_more_than_nothing() -> None:
    full, selective = (
        seconds(Op.RECOMPUTE, replace(PLAN, activation_checkpointing=how)) for how in ("full", "selective")
    )
    blocks = seconds(Op.FWD)

    assert 0 < selective < full < blocks


def test_the_optimizer_of_a_larger_world_has_less_to_do_but_never_nothing() -> None:
    two, many = (seconds(Op.OPTIM, cluster=Cluster("A100-SXM-80GB", gpus=n)) for n in (2, 64))

    assert two > 20 * many > 0


def test_an_offloaded_optimizer_is_slow_and_the_gpus_of_a_node_share_the_memory_it_reads() -> None:
    def offloaded(gpus: int, **fields: Any) -> float:
        return seconds(Op.OPTIM, replace(PLAN, cpu_offload=True, **fields), Cluster("H100", gpus=gpus))

    assert offloaded(16) > seconds(Op.OPTIM, cluster=Cluster("H100", gpus=16))
    assert offloaded(1) == offloaded(2) == offloaded(8) == 2 * offloaded(16)  # fewer bytes each, at a smaller share
    assert offloaded(8, optimizer_impl="foreach") == pytest.approx(6 * offloaded(8), rel=0.01)


def test_a_gap_takes_its_time_from_each_kernel_and_no_more_than_some_of_its_own_from_a_small_one() -> None:
    none, some = Calibration(kernel_gap_s=0.0), Calibration(kernel_gap_s=1e-5)
    large, small = replace(PLAN, micro_batch=64, seq_len=1024), replace(PLAN, micro_batch=1, seq_len=1)
    launched = sum(k.count for k in workload(GPT, large).work["layers.0"].forward)

    def block_s(plan: Plan, numbers: Calibration) -> float:
        program, costs = made(plan, numbers=numbers)
        return next(costs.seconds(i) for i in program.ops if i.op is Op.FWD and i.unit == "layers.0")

    lost = block_s(large, some) - block_s(large, none)
    assert lost == pytest.approx(launched * 1e-5, rel=0.02)
    assert block_s(small, some) < (1 + MOST_LOST) * block_s(small, none)


def test_a_collective_slows_compute_in_proportion_to_the_bytes_it_moves() -> None:
    def slowdown(inter: str) -> float:
        program, costs = made(cluster=Cluster("A100-SXM-80GB", gpus=16, inter=inter))
        gather = next(i for i in program.ops if i.op is Op.ALL_GATHER)
        forward = next(i for i in program.ops if i.op is Op.FWD)
        return costs.collectives.slowdown(forward, gather)

    assert 1.0 < slowdown("100 Gb/s per node") < slowdown("1600 Gb/s per node") <= 1 + Calibration().contention * 2


def test_a_collective_keeps_multiprocessors_from_compute_also_while_it_waits_for_a_slow_network() -> None:
    program, costs = made(cluster=Cluster("A100-SXM-80GB", gpus=16, inter="1 Gb/s per node"))
    gather, forward, copy = (
        next(i for i in program.ops if i.op is op) for op in (Op.ALL_GATHER, Op.FWD, Op.AG_COPY_OUT)
    )

    assert costs.collectives.slowdown(forward, gather) == pytest.approx(1 + 24 / (108 - 24), rel=1e-3)
    assert costs.collectives.slowdown(copy, gather) == pytest.approx(1.0, rel=1e-3)


def test_a_group_with_one_gpu_of_each_node_keeps_what_its_network_card_needs() -> None:
    cluster = Cluster("H100", gpus=16)

    assert (channels(16, cluster), channels(8, cluster), channels(2, cluster, stride=8)) == (32, 32, 2)


MEASURED_PLAN = Plan(micro_batch=4, seq_len=512)
MEASURED = {"launch_s": 3e-5, "backward_launch_s": 1e-5, "collective_s": 2e-3, "stream_bytes_per_s": 4e10}


class TestMeasuredCores:
    """A cluster that ``fsdp-sim calibrate`` wrote."""

    def cores(self, **changed: float) -> Cluster:
        return Cluster(replace(gpu("cpu"), **(MEASURED | changed)), gpus=2)

    @pytest.mark.parametrize(
        ("op", "launch", "phase"), [(Op.FWD, "launch_s", "forward"), (Op.BWD, "backward_launch_s", "backward")]
    )
    def test_each_kernel_is_launched_by_the_core_that_computes_it(self, op: Op, launch: str, phase: str) -> None:
        kernels = sum(
            kernel.count for work in workload(GPT, MEASURED_PLAN).work.values() for kernel in getattr(work, phase)
        )
        slow, fast = (seconds(op, MEASURED_PLAN, self.cores(**{launch: s})) for s in (1.0, 0.0))
        assert slow - fast == pytest.approx(kernels)

    def test_only_collectives_take_time_to_issue(self) -> None:
        program, costs = made(MEASURED_PLAN, self.cores())
        assert {costs.issue_s(i) for i in program.ops if i.op in COLLECTIVES} == {2e-3}
        assert {costs.issue_s(i) for i in program.ops if i.op not in COLLECTIVES} == {0.0}

    def test_the_optimizer_moves_its_bytes_as_a_copy_does(self) -> None:
        once, twice = (seconds(Op.OPTIM, MEASURED_PLAN, self.cores(stream_bytes_per_s=rate)) for rate in (2e10, 4e10))
        assert once == pytest.approx(2 * twice)

    def test_a_core_that_was_not_measured_is_issued_to_as_before(self) -> None:
        program, costs = made(MEASURED_PLAN, Cluster("cpu", gpus=2))
        assert all(costs.issue_s(i) > 0 for i in program.ops)
