"""How large a unit should be: from the whole model down to each linear layer, predicted, then run.

    python -m labs.experiments.units
    python -m labs.experiments.units --bandwidth-gbps 1 --latency-us 5000

A unit is what is gathered, computed and freed together. Every policy here moves the same bytes. One unit: three
collectives carry everything, nothing can be computed meanwhile, and all parameters are there at once. A unit per linear
layer: many small collectives, and each pays the latency. Somewhere between is the fastest step. The simulator looks for
it on a cluster of 16 GPUs; then it is predicted and measured here, on a slow network between CPU ranks
(`fsdp_sim.ranks.Network`). Steps are timed with the project's own FSDP: torch's waits for each collective where it
issues it on a CPU, so there nothing would overlap. Memory and collectives are those of torch's FSDP2.

On GPUs: ``labs.experiments.memory`` for memory; for time, train with ``--wrap=root``, ``block`` and ``Linear``.
Exit status: 0 when done, 1 when a run failed, 2 when asked wrongly, 130 after Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import tyro

from fsdp_sim.engine import replay
from fsdp_sim.measure.model_from_module import model_from_module
from fsdp_sim.ranks import Network, track
from fsdp_sim.ranks import run as on_ranks
from fsdp_sim.schedule import build as build_program
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster
from fsdp_sim.spec.texts import text_of
from fsdp_sim.timeline import Op, Timeline
from fsdp_sim.timeline.analysis import median_step, piece_durations, step_time_s
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.experiments.command import command
from labs.experiments.memory import MIB, PEAK, MemoryCase, count
from labs.experiments.on_rank import on_rank
from labs.experiments.result import COLUMNS, LabResult, ResultRow, this_machine
from labs.measure.simulated import plan_of
from labs.model import empty

if TYPE_CHECKING:
    from fsdp_sim.viz import Picture

POLICIES = {"one unit": "root", "each block": "block", "attention and MLP": "Attention,MLP", "each linear": "Linear"}
"""Wrap policies of the trainer, the coarsest first."""

FINEST = {"each linear and norm": "Linear,LayerNorm"}

WIRE = (Op.ALL_GATHER, Op.REDUCE_SCATTER)
ALIKE = TrainConfig(reshard_after_forward=True, forward_prefetch=1)
"""Of all policies: every unit is freed after forward, so that all move the same bytes, and the next is prefetched."""

WARM_UP_STEPS, TIMED_STEPS = 2, 3
SLOW = Network(bandwidth_gbps=0.32, latency_us=2000)
CLUSTER = Cluster("a100", gpus=16, inter="IB HDR x1")

UNITS, COLLECTIVES, LARGEST, STEP = "units", "collectives per step", "largest all-gather", "step time"


# ---- On a cluster: predicted -----------------------------------------------------------------------------------------


def on_a_cluster(
    cluster: Cluster = CLUSTER, model: str = "gpt2-medium", rows: int = 2, seq_len: int = 1024
) -> list[ResultRow]:
    """Units, step time and peak memory of every policy, in bf16, by the simulator alone: nothing is measured.

    Args:
        rows: per GPU.
    """
    found: list[ResultRow] = []
    place = RankPlace(world_size=cluster.gpus, local_world_size=cluster.node_size)
    tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
    for name, wrap_policy in (POLICIES | FINEST).items():
        config = ALIKE.replace(
            model=model, wrap=wrap_policy, global_batch=rows * cluster.gpus, seq_len=seq_len, param_dtype="bf16"
        )
        plan = plan_of(config, place)
        traced = model_from_module(
            empty(config.model_config), (tokens, tokens), plan=plan, name=model, device="gpu", progress=False
        )
        simulation = simulate(traced, cluster, plan)
        found += [
            ResultRow(name, UNITS, len(gathered_units(simulation.timeline)), None, ""),
            ResultRow(name, STEP, 1e3 * simulation.step_time_s, None, "ms"),
            ResultRow(name, PEAK, simulation.peak_memory_bytes / 2**30, None, "GiB"),
        ]
    return found


# ---- Here: predicted and measured ------------------------------------------------------------------------------------


def settings(ranks: int, rows: int, seq_len: int, policies: Sequence[str] = tuple(POLICIES)) -> dict[str, MemoryCase]:
    """A setting per policy."""
    base = ALIKE.replace(global_batch=ranks * rows, seq_len=seq_len)
    return {name: MemoryCase(base.replace(wrap=POLICIES[name]), ranks) for name in policies}


def train(config: TrainConfig) -> None:
    """On a rank: some steps with the project's FSDP, which records compute too."""
    training = on_rank(config)
    for step in track(range(WARM_UP_STEPS + TIMED_STEPS)):
        training.step(step)


def timed(setting: MemoryCase, network: Network, *, serial: bool = False) -> Timeline:
    """The steps as they were, on a network; ``serial``: with every collective completed where it is issued."""
    config = dataclasses.replace(setting.config, api="mini")
    how: dict[str, Any] = {"network": network, "serial": serial, "show_output": False, "timeout_s": 120.0}
    results = on_ranks(train, setting.ranks, config, title=text_of(config.plan.wrap), **how)
    # What the trainer agrees on after each step is no part of a unit's life.
    return results.timeline.select(lambda event: event.op is not Op.ALL_REDUCE)


def predicted(setting: MemoryCase, alone: Timeline) -> Timeline:
    """The program that torch issues, played with what each piece took alone: of several steps the median."""
    place = RankPlace(world_size=setting.ranks, local_world_size=setting.ranks)
    units = setting.simulation.workload.units
    program = build_program(units, plan_of(setting.config, place), setting.ranks, steps=2)
    steps = [piece_durations(alone, step) for step in alone.steps[WARM_UP_STEPS:]]
    pieces = {piece: np.median([durations[piece] for durations in steps], axis=0) for piece in steps[0]}
    return replay(program, pieces, device="cpu")


def collectives(timeline: Timeline, step: int) -> list[int]:
    """Bytes of each all-gather and reduce-scatter that rank 0 issued in a step; of one that all ranks have done."""
    return [event.bytes for event in timeline.ops if (event.rank, event.step) == (0, step) and event.op in WIRE]


def gathered_units(timeline: Timeline) -> set[str]:
    """The units, by who is gathered."""
    return {event.unit for event in timeline.ops if event.op is Op.ALL_GATHER}


def measured_step_s(timeline: Timeline) -> float:
    """The median step, without those that warm up."""
    return statistics.median(step_time_s(timeline, step) for step in timeline.steps[WARM_UP_STEPS:])


def sweet_spot(rows: Sequence[ResultRow], *, by: str = "predicted") -> str:
    """The setting with the shortest step."""
    steps = {row.name: getattr(row, by) for row in rows if row.quantity == STEP}
    return min(steps, key=lambda name: steps[name])


def in_a_sentence(rows: Sequence[ResultRow]) -> str:
    """Of each setting its predicted step time and peak memory, in words."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.quantity in (STEP, PEAK):
            found.setdefault(row.name, []).append(f"{row.predicted:,.4g} {row.unit}")
    return "; ".join(f"{name} {' and '.join(numbers)}" for name, numbers in found.items())


def picture(rows: Sequence[ResultRow], sentence: str) -> Picture:
    """Step time, and below it peak memory, over the number of units.

    Args:
        rows: of each setting its `UNITS`, `STEP` and `PEAK`; what was not measured is not drawn.
        sentence: the title; what is to be seen.
    """
    import plotly.graph_objects as go  # where it is drawn: ranks import this module, too

    from fsdp_sim.viz import Picture, Table, chart

    of = {(row.name, row.quantity): row for row in rows}
    names = [row.name for row in rows if row.quantity == UNITS]
    places = [f"<b>{of[name, UNITS].predicted:.0f}</b><br>{name}" for name in names]
    figure = go.Figure()
    for number, by in enumerate(("predicted", "measured")):
        look = chart.series(number)
        for axis, quantity in (("y", STEP), ("y2", PEAK)):
            values = [getattr(of[name, quantity], by) for name in names]
            if None in values:
                continue
            figure.add_scatter(
                x=places, y=values, yaxis=axis, name=by, showlegend=axis == "y", mode="lines+markers",
                line={"color": look.color, "dash": look.dash, "width": 2.5},
                marker={"color": look.color, "symbol": look.symbol, "size": 10},
            )  # fmt: skip
    fastest = sweet_spot(rows)
    figure.add_annotation(
        x=places[names.index(fastest)], y=of[fastest, STEP].predicted, text="fastest, predicted", showarrow=False,
        yshift=-18,
    )  # fmt: skip
    figure.update_xaxes(title="units", type="category")
    figure.update_layout(
        xaxis={"anchor": "y2"},
        yaxis={"domain": [0.45, 1], "title": f"step ({of[fastest, STEP].unit})"},
        yaxis2={"domain": [0, 0.33], "title": f"peak ({of[fastest, PEAK].unit})", "rangemode": "tozero"},
        legend={"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom"},
    )
    chart.frame(figure, sentence, plot_px=380, right=60, bottom=110)
    shown = [row for row in rows if row.quantity in (UNITS, STEP, PEAK)]
    return Picture(figure, f"{sentence}.", (Table("unit size", COLUMNS, tuple(row.cells for row in shown)),))


def run(
    network: Network = SLOW, ranks: int = 2, rows: int = 8, seq_len: int = 64,
    policies: Sequence[str] = tuple(POLICIES),
) -> LabResult:  # fmt: skip
    """Predict each policy, then run it.

    Returns:
        with two timelines per policy: ``NAME, predicted`` and ``NAME, measured``.

    Raises:
        ValueError: a number that cannot be. RanksError: a run failed.
    """
    if ranks < 2 or rows < 1:
        raise ValueError(f"ranks={ranks}, rows={rows}: a network is between 2 ranks or more, with a row each at least")
    cases = settings(ranks, rows, seq_len, policies)
    result: list[ResultRow] = []
    timelines: dict[str, Timeline] = {}
    for name, setting in cases.items():
        program = setting.simulation.program
        before = predicted(setting, timed(setting, network, serial=True))
        after = timed(setting, network)
        issued = [i.bytes for i in program.ops if i.op in WIRE]
        recorded = collectives(after, median_step(after))
        result += [
            ResultRow(name, UNITS, len(gathered_units(before)), len(gathered_units(after)), ""),
            ResultRow(name, COLLECTIVES, len(issued), len(recorded), ""),
            ResultRow(name, LARGEST, max(issued) / MIB, max(recorded) / MIB, "MiB"),
            ResultRow(name, STEP, 1e3 * step_time_s(before, 1), 1e3 * measured_step_s(after), "ms"),
        ]
        timelines |= {f"{name}, predicted": before, f"{name}, measured": after}
    counted = count(cases)
    result += [ResultRow(name, PEAK, cases[name].peak_bytes / MIB, counted[name] / MIB, "MiB") for name in cases]
    result.sort(key=lambda row: list(cases).index(row.name))
    notes = (
        f"Network: {network.bandwidth_gbps:g} Gbit/s, {network.latency_us:g} us per collective; "
        f"{rows} rows of {seq_len} tokens per rank. Steps of the mini-FSDP, memory of torch's FSDP2.",
    )
    return LabResult("units", "measured", tuple(result), this_machine("cpu", ranks), timelines=timelines, notes=notes)


def main(
    bandwidth_gbps: float = SLOW.bandwidth_gbps, latency_us: float = SLOW.latency_us, ranks: int = 2, rows: int = 8,
    seq_len: int = 64,
) -> int:  # fmt: skip
    """The command; returns its exit status."""

    def closing(result: LabResult) -> str:
        before, after = (sweet_spot(result.rows, by=by) for by in ("predicted", "measured"))
        simulated = f"Simulated, gpt2-medium on {CLUSTER.gpus} {CLUSTER.gpu.name}: {in_a_sentence(on_a_cluster())}."
        return f"Fastest here: {before} was predicted, {after} was measured.\n{simulated}"

    return command("units", lambda: run(Network(bandwidth_gbps, latency_us), ranks, rows, seq_len), closing)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m labs.experiments.units", description=__doc__))
