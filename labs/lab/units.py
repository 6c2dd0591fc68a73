"""How large a unit should be: from the whole model down to each linear layer, predicted, then run.

    python -m labs.lab.units
    python -m labs.lab.units --bandwidth-gbps 1 --latency-us 5000

A unit is what is gathered, computed and freed together. Every policy here moves the same bytes. One unit: three
collectives carry everything, and nothing can be computed meanwhile. A unit per linear layer: many small collectives,
and each pays the latency. Somewhere between is the fastest step, and the lab finds it, on a slow network between CPU
ranks (`fsdp_sim.ranks.Network`). Steps are timed with the project's own FSDP: torch's waits for each collective where
it issues it on a CPU, so there nothing would overlap. Memory and collectives are those of torch's FSDP2.

On GPUs: ``labs.lab.memory`` for memory; for time, train with ``--wrap=root``, ``block`` and ``Linear``.
Exit status: 0 when done, 1 when a run failed, 2 when asked wrongly, 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
import tyro

from fsdp_sim.engine import replay
from fsdp_sim.ranks import Network, track
from fsdp_sim.ranks import run as on_ranks
from fsdp_sim.schedule import build as build_program
from fsdp_sim.timeline import Op, Timeline
from fsdp_sim.timeline.analysis import median_step, piece_durations, step_time_s
from labs.config import TrainConfig
from labs.lab.command import command
from labs.lab.memory import CPU, MIB, PEAK, Setting, count, random_batch
from labs.lab.result import Result, Row, this_machine
from labs.optimizer import make_optimizer
from labs.place import Place
from labs.simulated import plan_of
from labs.step import train_step
from labs.wrapping import wrap

POLICIES = {"one unit": "root", "each block": "block", "attention and MLP": "Attention,MLP", "each linear": "Linear"}
"""Wrap policies of the trainer, the coarsest first."""

WIRE = (Op.ALL_GATHER, Op.REDUCE_SCATTER)
WARM_UP_STEPS, TIMED_STEPS = 2, 5
SLOW = Network(bandwidth_gbps=0.32, latency_us=2000)

COLLECTIVES, LARGEST, STEP = "collectives per step", "largest all-gather", "step time"


def settings(ranks: int, rows: int, seq_len: int, policies: Sequence[str] = tuple(POLICIES)) -> dict[str, Setting]:
    """A setting per policy: all units are freed after forward, so that all policies move the same bytes."""
    base = TrainConfig(global_batch=ranks * rows, seq_len=seq_len, reshard_after_forward=True, forward_prefetch=1)
    return {name: Setting(dataclasses.replace(base, wrap=POLICIES[name]), ranks) for name in policies}


def train(config: TrainConfig) -> None:
    """On a rank: some steps with the project's FSDP, which records compute too."""
    place = Place(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), torchrun=True)
    wrapped = wrap(config, config.model_config, place, CPU)
    optimizer = make_optimizer(wrapped, config)
    batch, n_micro_batches = random_batch(config, place)
    for step in track(range(WARM_UP_STEPS + TIMED_STEPS)):
        train_step(wrapped, optimizer, batch, step, config, n_micro_batches=n_micro_batches)


def timed(setting: Setting, network: Network, *, serial: bool = False) -> Timeline:
    """The steps as they were, on a network; ``serial``: with every collective completed where it is issued."""
    config = dataclasses.replace(setting.config, api="mini")
    how: dict[str, Any] = {"network": network, "serial": serial, "show_output": False, "timeout_s": 120.0}
    results = on_ranks(train, setting.ranks, config, title=config.wrap, **how)
    # What the trainer agrees on after each step is no part of a unit's life.
    return results.timeline.select(lambda event: event.op is not Op.ALL_REDUCE)


def predicted(setting: Setting, alone: Timeline) -> Timeline:
    """The program that torch issues, played with what each piece took alone: of several steps the median."""
    place = Place(world_size=setting.ranks, local_world_size=setting.ranks)
    units = setting.simulation.workload.units
    program = build_program(units, plan_of(setting.config, place), setting.ranks, steps=2)
    steps = [piece_durations(alone, step) for step in alone.steps[WARM_UP_STEPS:]]
    pieces = {piece: np.median([durations[piece] for durations in steps], axis=0) for piece in steps[0]}
    return replay(program, pieces, device="cpu")


def collectives(timeline: Timeline, step: int) -> list[int]:
    """Bytes of each all-gather and reduce-scatter that rank 0 issued in a step; of one that all ranks have done."""
    return [event.bytes for event in timeline.ops if (event.rank, event.step) == (0, step) and event.op in WIRE]


def measured_step_s(timeline: Timeline) -> float:
    """The median step, without those that warm up."""
    return statistics.median(step_time_s(timeline, step) for step in timeline.steps[WARM_UP_STEPS:])


def sweet_spot(result: Result, *, by: str = "predicted") -> str:
    """The setting with the shortest step."""
    steps = {row.name: getattr(row, by) for row in result.rows if row.quantity == STEP}
    return min(steps, key=lambda name: steps[name])


def run(
    network: Network = SLOW, ranks: int = 2, rows: int = 8, seq_len: int = 64,
    policies: Sequence[str] = tuple(POLICIES),
) -> Result:  # fmt: skip
    """Predict each policy, then run it.

    Returns:
        with two timelines per policy: ``NAME, predicted`` and ``NAME, measured``.

    Raises:
        ValueError: a number that cannot be. RanksError: a run failed.
    """
    if ranks < 2 or rows < 1:
        raise ValueError(f"ranks={ranks}, rows={rows}: a network is between 2 ranks or more, with a row each at least")
    asked = settings(ranks, rows, seq_len, policies)
    for setting in asked.values():
        setting.config.check()
    result: list[Row] = []
    timelines: dict[str, Timeline] = {}
    for name, setting in asked.items():
        program = setting.simulation.program
        before = predicted(setting, timed(setting, network, serial=True))
        after = timed(setting, network)
        issued = [i.bytes for i in program.ops if i.op in WIRE]
        recorded = collectives(after, median_step(after))
        result += [
            Row(name, COLLECTIVES, len(issued), len(recorded), ""),
            Row(name, LARGEST, max(issued) / MIB, max(recorded) / MIB, "MiB"),
            Row(name, STEP, 1e3 * step_time_s(before, 1), 1e3 * measured_step_s(after), "ms"),
        ]
        timelines |= {f"{name}, predicted": before, f"{name}, measured": after}
    counted = count(asked)
    result += [Row(name, PEAK, asked[name].peak_bytes / MIB, counted[name] / MIB, "MiB") for name in asked]
    result.sort(key=lambda row: list(asked).index(row.name))
    notes = (
        f"Network: {network.bandwidth_gbps:g} Gbit/s, {network.latency_us:g} us per collective; "
        f"{rows} rows of {seq_len} tokens per rank. Steps of the mini-FSDP, memory of torch's FSDP2.",
    )
    return Result("units", "measured", tuple(result), this_machine("cpu", ranks), timelines=timelines, notes=notes)


def main(
    bandwidth_gbps: float = SLOW.bandwidth_gbps, latency_us: float = SLOW.latency_us, ranks: int = 2, rows: int = 8,
    seq_len: int = 64,
) -> int:  # fmt: skip
    """The command; returns its exit status."""

    def closing(result: Result) -> str:
        return f"Fastest: {sweet_spot(result)} was predicted, {sweet_spot(result, by='measured')} was measured."

    return command("units", lambda: run(Network(bandwidth_gbps, latency_us), ranks, rows, seq_len), closing)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
