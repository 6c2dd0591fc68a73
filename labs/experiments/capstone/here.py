"""The tuned plan at a small scale, for real: torch's FSDP2 on gloo ranks of this machine, beside its prediction."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_sim import Model, Plan
from fsdp_sim.ranks import run as on_ranks
from fsdp_sim.schedule import Instruction
from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import Event, Op, ring_share
from labs.config import TrainConfig
from labs.experiments.calibrated_times import calibrated_rows
from labs.experiments.memory import PEAK, MemoryCase, count
from labs.experiments.on_rank import on_rank
from labs.experiments.result import LabResult, ResultRow, this_machine

SENT = (Op.ALL_GATHER, Op.REDUCE_SCATTER)
WIRE = "bytes sent per rank"
MIB = 2**20
SAME = ("reshard_after_forward", "forward_prefetch", "activation_checkpointing")
MOST_ROWS = 8
STEPS = 2


def scaled(model: Model, plan: Plan, ranks: int = 2) -> tuple[TrainConfig, tuple[str, ...]]:
    """The plan on the labs' small model, and what of it stays behind, in sentences."""
    preset = "teaching" if model.d_ffn == 4 * model.d_model else "teaching-llama"
    rows = min(plan.micro_batch * plan.grad_accum, MOST_ROWS)
    micro_batch = min(plan.micro_batch, rows)
    while rows % micro_batch:
        micro_batch -= 1
    keys = {key: getattr(plan, key) for key in SAME}
    config = TrainConfig(model=preset, seq_len=64, global_batch=rows * ranks, micro_batch=micro_batch, **keys)
    left = [f"{rows} rows of 64 tokens per rank, in micro-batches of {micro_batch}, of the model {preset}, in fp32."]
    others = {"compile": plan.compile, "shard_size": plan.shard_size, "cpu_offload": plan.cpu_offload}
    if named := [f"{key}={value}" for key, value in others.items() if value]:
        left.append(f"Left out here: {', '.join(named)}.")
    if plan.activation_checkpointing:
        left.append("Calibration trains without checkpointing, whose hooks take Python time: expect a longer step.")
    return config, tuple(left)


def run_here(model: Model, plan: Plan, cluster: Cluster) -> LabResult:
    """Predict step time, peak memory and traffic of the small step, then run it.

    Args:
        cluster: this machine, as ``fsdp-sim calibrate`` measured it.

    Raises:
        ValueError: a cluster of GPUs. RanksError: a rank failed.
    """
    ranks = cluster.gpus
    config, notes = scaled(model, plan, ranks)
    case = MemoryCase(config, ranks)
    wire = _sent_bytes(case.simulation.program.ops, ranks)
    rows = calibrated_rows({"your plan": config}, ranks, cluster)
    rows.append(ResultRow("your plan", PEAK, case.peak_bytes / MIB, count({"": case})[""] / MIB, "MiB"))
    rows.append(ResultRow("your plan", WIRE, wire / MIB, sent_bytes(config, ranks) / MIB, "MiB"))
    return LabResult("capstone", "measured", tuple(rows), this_machine("cpu", ranks), notes=notes)


def sent_bytes(config: TrainConfig, ranks: int) -> float:
    """What a rank sends in a step for parameters and gradients, recorded from the process group of torch's FSDP2."""
    results = on_ranks(_steps, ranks, config, show_output=False, timeout_s=120.0, title="counting what is sent")
    return _sent_bytes((event for event in results.timeline.ops if event.rank == 0), ranks) / STEPS


def _sent_bytes(ops: Iterable[Instruction | Event], ranks: int) -> float:
    return sum(one.bytes * ring_share(one.op, ranks) for one in ops if one.op in SENT)


def _steps(config: TrainConfig) -> None:
    training = on_rank(config)
    for step in range(STEPS):
        training.step(step)
