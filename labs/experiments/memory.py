"""What each knob saves: peak memory predicted for a dozen settings, then counted in a real step of each.

    python -m labs.experiments.memory
    python -m labs.experiments.memory --ranks 4 --rows 8
    python -m labs.experiments.memory --cluster laptop.toml        step times too, from `fsdp-sim calibrate`'s file
    python -m labs.experiments.memory --device cuda --model gpt2 --seq-len 512         one rank on each GPU

On CPUs every tensor of a step is counted (`fsdp_sim.measure.live_bytes`) on ranks with torch's own FSDP2. On GPUs the
trainer runs once per setting, and the figure is that of CUDA's allocator, less cuBLAS's workspaces. One knob is turned
at a time. Look for what a knob leaves alone: more ranks divide parameters, gradients and optimizer state; activations
they leave as they are.

Exit status: 0 when done, 1 when a run failed, 2 when asked wrongly, 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from fsdp_sim.measure import live_bytes
from fsdp_sim.ranks import run as on_ranks
from fsdp_sim.ranks import track
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import Timeline
from labs.cluster.process_group import RankPlace, n_ranks, ranks_on
from labs.cluster.torchrun import train
from labs.config import TrainConfig
from labs.experiments.calibrated_times import calibrated_rows
from labs.experiments.command import command
from labs.experiments.on_rank import on_rank
from labs.experiments.result import LabResult, ResultRow, this_machine
from labs.loop.optimizer import make_optimizer
from labs.measure.allocations import counted, recorded
from labs.measure.simulated import peak_memory_bytes, simulated
from labs.measure.utilization import RankMemory
from labs.wrapping import Wrapped
from labs.wrapping.precision import has_bf16

CPU = torch.device("cpu")
MIB = 2**20
PEAK = "peak memory"
PEAK_WITH_HOST = "peak memory, host and device together"
BASE = "as it comes"

Optimizers = Mapping[str, Callable[[Wrapped, TrainConfig], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "adamw": make_optimizer,
    "sgd_momentum": lambda wrapped, config: torch.optim.SGD(wrapped.model.parameters(), config.lr, momentum=0.9),
    "sgd": lambda wrapped, config: torch.optim.SGD(wrapped.model.parameters(), config.lr),
}
"""By the simulator's names; the trainer has AdamW alone."""


@dataclasses.dataclass(frozen=True)
class MemoryCase:
    """A step whose memory is predicted and counted.

    Attributes:
        config: of the trainer; ``global_batch`` is that of all ranks.
        optimizer: one of `OPTIMIZERS`.
    """

    config: TrainConfig
    ranks: int
    optimizer: str = "adamw"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.config.device == "cuda" else CPU

    @cached_property
    def simulation(self) -> Simulation:
        """The step as the simulator knows it."""
        place = RankPlace(world_size=self.ranks, local_world_size=self.ranks)
        simulation = simulated(self.config, self.config.model_config, place, self.device)
        plan = dataclasses.replace(simulation.plan, optimizer=self.optimizer)
        return simulation if plan == simulation.plan else simulate(simulation.workload, simulation.cluster, plan)

    @property
    def peak_bytes(self) -> int:
        """Predicted: the most bytes of tensors alive on a rank's device."""
        return peak_memory_bytes(self.config, self.simulation)


def settings(base: TrainConfig, ranks: int, rows: int) -> dict[str, MemoryCase]:
    """The base, and each knob turned alone. Every setting has ``rows`` rows per rank but those that change them."""

    def turned(world_size: int = ranks, n_rows: int = rows, optimizer: str = "adamw", **change: Any) -> MemoryCase:
        return MemoryCase(dataclasses.replace(base, global_batch=world_size * n_rows, **change), world_size, optimizer)

    half = "bf16" if has_bf16(torch.device(base.device if base.device == "cuda" else "cpu")) else "fp16"
    knobs: dict[str, Any] = {"reshard_after_forward": False, "wrap": "root", "param_dtype": half,
                             "activation_checkpointing": ("selective", "full"), "cpu_offload": True}  # fmt: skip
    found = {BASE: turned(), "api=ddp": turned(api="ddp")}
    for knob, values in knobs.items():
        for value in values if isinstance(values, tuple) else (values,):
            found[f"{knob}={value}"] = turned(**{knob: value})
    found[f"micro_batch={rows // 2}"] = turned(micro_batch=rows // 2)
    found[f"{2 * rows} rows per rank"] = turned(n_rows=2 * rows)
    if base.device == "cuda":  # the trainer has one optimizer, and a machine its GPUs
        return found
    found |= {f"optimizer={name}": turned(optimizer=name) for name in OPTIMIZERS if name != "adamw"}
    return found | {f"{n} ranks": turned(world_size=n) for n in (2 * ranks, 4 * ranks)}


# ---- Counted --------------------------------------------------------------------------------------------------------


def count(cases: Mapping[str, MemoryCase]) -> dict[str, int]:
    """Bytes at the peak of a real step, for each setting: the rank that has the most.

    Raises:
        FailedError: a run failed. On CPUs `fsdp_sim.ranks.RanksError`.
    """
    if any(setting.device.type == "cuda" for setting in cases.values()):
        return {name: _peak_on_gpus(setting) for name, setting in cases.items()}
    found: dict[str, int] = {}
    for ranks in sorted({setting.ranks for setting in cases.values()}):
        of_ranks = {name: setting for name, setting in cases.items() if setting.ranks == ranks}
        items = [(setting.config, setting.optimizer) for setting in of_ranks.values()]
        peaks = on_ranks(_peaks, ranks, items, record=False, show_output=False, timeout_s=300.0, title=f"{ranks} ranks")
        found |= dict(zip(of_ranks, (max(of_setting) for of_setting in zip(*peaks, strict=True)), strict=True))
    return {name: found[name] for name in cases}


def _peaks(items: list[tuple[TrainConfig, str]]) -> list[int]:
    return [peak_of_a_step(config, optimizer) for config, optimizer in track(items)]


def peak_of_a_step(config: TrainConfig, optimizer_name: str = "adamw") -> int:
    """On a rank, a CPU: the most bytes of tensors alive in the second step. The first makes the optimizer's state."""
    training = on_rank(config, OPTIMIZERS[optimizer_name])
    training.step(0)
    with live_bytes(training.wrapped.model, training.optimizer) as meter:
        training.step(1)
    return meter.peak_bytes


def counted_step(setting: MemoryCase) -> Timeline:
    """What is alive in the second step on a rank, and what it is for: the simulator's categories.

    On CPU cores every storage is counted; on GPUs torch's allocator records, see `labs.measure.allocations.on_gpu`.

    Raises:
        RanksError: a rank failed.
    """
    found: list[Timeline] = on_ranks(
        _counted, setting.ranks, setting.config, setting.optimizer, device=setting.device.type, record=False,
        show_output=False, title=f"counting a step on {n_ranks(setting.ranks)}",
    )  # fmt: skip
    return found[0]


def _counted(config: TrainConfig, optimizer_name: str) -> Timeline:
    training = on_rank(config, OPTIMIZERS[optimizer_name])
    training.step(0)
    measured = recorded if config.device == "cuda" else counted
    with measured(training.wrapped.model, training.optimizer, api=config.api) as memory:
        training.step(1)
    return memory.timeline


def _peak_on_gpus(setting: MemoryCase) -> int:
    ran = train(*setting.config.arguments(), "--steps=3", "--predict=false", ranks=setting.ranks, device="cuda")
    of_ranks = [RankMemory(*of_rank) for of_rank in ran.report["memory"]]
    return max(of_rank.peak_bytes - of_rank.workspace_bytes for of_rank in of_ranks)


# ---- The lab --------------------------------------------------------------------------------------------------------


def run(
    model: str = "teaching",
    ranks: int | None = None,
    rows: int = 4,
    seq_len: int = 64,
    cluster: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> LabResult:
    """Predict each setting, then count it.

    Args:
        model: a preset of `labs.train`.
        ranks: by default 2, or one on each GPU.
        rows: per rank; even, for one knob halves them.
        cluster: a file of ``fsdp-sim calibrate`` for as many CPU ranks: what the knobs cost in time is then predicted,
            and timed, too.
        device: ``cpu`` or ``cuda``.

    Raises:
        ValueError: a number that cannot be, another machine's file, GPUs that are missing. FailedError, RanksError: a
            run failed.
    """
    ranks = ranks_on(device, ranks)
    if ranks < 1 or rows < 2 or rows % 2:
        raise ValueError(f"ranks={ranks}, rows={rows}: at least 1 rank, and an even number of rows, one knob halves it")
    if cluster and device == "cuda":
        raise ValueError(f"cluster={cluster}: step times are predicted from a file for CPU ranks only; use device=cpu")
    base = TrainConfig(model=model, seq_len=seq_len, device=device)
    cases = settings(base, ranks, rows)
    predicted = {name: setting.peak_bytes for name, setting in cases.items()}
    times = calibrated_rows(timed(cases, ranks), ranks, Cluster.from_file(cluster)) if cluster else []
    counted = count(cases)
    notes: tuple[str, ...] = (f"{rows} rows of {seq_len} tokens per rank, {n_ranks(ranks)}, if not said otherwise.",)
    result = []
    for name, setting in cases.items():
        quantity, expected = PEAK, predicted[name]
        if setting.config.plan.cpu_offload and setting.device.type == "cpu":  # where both memories are one
            result.append(ResultRow(name, PEAK, expected / MIB, None, "MiB"))
            quantity, expected = PEAK_WITH_HOST, predicted[BASE]  # what leaves the device stays in that one
            notes += ("A CPU rank has one memory, so there cpu_offload moves nothing out of it.",)
        result.append(ResultRow(name, quantity, expected / MIB, counted[name] / MIB, "MiB"))
    return LabResult("memory", "measured", (*result, *times), this_machine(base.device, ranks), notes=notes)


def timed(cases: Mapping[str, MemoryCase], ranks: int) -> dict[str, TrainConfig]:
    """The settings whose time a calibrated machine says something about: the trainer's own, on as many ranks.

    Not bf16, whose pointwise kernels cores emulate, nor checkpointing, whose hooks around each saved tensor take Python
    longer than the kernels that run again: calibration trains in fp32 and without.
    """
    return {
        name: setting.config
        for name, setting in cases.items()
        if (setting.ranks, setting.optimizer) == (ranks, "adamw")
        and (setting.config.plan.param_dtype, setting.config.plan.activation_checkpointing) == ("fp32", None)
        and not setting.config.plan.cpu_offload
    }


def main(
    model: str = "teaching",
    ranks: int | None = None,
    rows: int = 4,
    seq_len: int = 64,
    cluster: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> int:
    """The command; returns its exit status."""
    return command("memory", lambda: run(model, ranks, rows, seq_len, cluster, device))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
