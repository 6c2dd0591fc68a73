"""Prefetch and overlap: when an all-gather is issued decides what can hide it. Predicted, run, and read from a trace.

    python -m labs.lab.overlap
    python -m labs.lab.overlap --ranks 4 --bandwidth-gbps 0.16
    python -m labs.lab.overlap --model gpt2 --rows 8 --seq-len 1024        on GPUs: one rank on each

Three things, in this order:

    order     torch's FSDP1 with BACKWARD_PRE, BACKWARD_POST and without, its FSDP2 without and with explicit prefetch:
              a step of each is profiled, and its order compared with the program that was predicted
    overlap   what that order is worth. On GPUs the same settings timed. On CPUs torch's FSDP waits for each collective
              where it issues it, so there nothing would overlap: the project's own FSDP, on a slow network, does
    limiter   how many all-gathers FSDP1's CPU issues before their units compute, with limit_all_gathers and without

Exit status: 0 when done, 1 when a run failed, 2 when asked wrongly.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from fsdp_sim.ranks import Network, track
from fsdp_sim.ranks import run as on_ranks
from fsdp_sim.simulate import simulate
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import Op, Timeline, read_timeline
from fsdp_sim.timeline.analysis import exposed_comm_s, median_step, step_time_s
from labs.config import TrainConfig
from labs.lab.command import command
from labs.lab.result import Result, Row, this_machine
from labs.loader import Batch
from labs.models import empty
from labs.optimizer import make_optimizer
from labs.overlap import Experiment, training_only
from labs.place import Place
from labs.profiling import Recording, gathered, profiled
from labs.run_summary import COMPUTE, ROOT, summarize
from labs.simulated import simulated
from labs.step import train_step
from labs.trained import train
from labs.wrapping import wrap
from labs.wrapping.units import find_units

SETTINGS: Mapping[str, Mapping[str, str | int]] = {
    "FSDP1, BACKWARD_PRE": {"api": "fsdp1", "backward_prefetch": "BACKWARD_PRE"},
    "FSDP1, BACKWARD_POST": {"api": "fsdp1", "backward_prefetch": "BACKWARD_POST"},
    "FSDP1, no prefetch": {"api": "fsdp1", "backward_prefetch": "off"},
    "FSDP2, as it comes": {"api": "fsdp2"},
    "FSDP2, forward prefetch 1": {"api": "fsdp2", "forward_prefetch": 1},
}
ASKED = (
    "api", "model", "seq_len", "global_batch", "device", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
)  # fmt: skip
PREFETCHES = {"slow network, no forward prefetch": None, "slow network, forward prefetch 1": 1}
AHEAD, REDUCE = "all-gathers issued before another unit computes", "all-gathers issued before a reduce-scatter only"
STEP, EXPOSED = "step time", "exposed communication"
UNUSED = "most all-gathers issued and not yet computed with"
PROFILED_STEPS, TIMED_STEPS = 3, 8
LIMITED = "8 H100 at 1 row of gpt2-774m, FSDP1, limit_all_gathers="


def ahead(timeline: Timeline, rank: int = 0) -> tuple[int, int]:
    """How many all-gathers of a step have something to hide behind, in the order in which the CPU issues.

    The root's are left out: its forward and backward have parts, of which each record names others.

    Returns:
        those issued before another unit computes; those issued, if not so, before another's reduce-scatter.
    """
    ops = [event for event in timeline.select(step=median_step(timeline)).ops if event.rank == rank]
    before_compute = before_reduce = 0
    for i, gather in enumerate(ops):
        if gather.op is not Op.ALL_GATHER or gather.unit in (ROOT, ""):
            continue
        between: set[Op] = set()
        for event in ops[i + 1 :]:
            if event.op in COMPUTE and event.unit == gather.unit:
                break
            between.add(event.op)
        before_compute += bool(between & set(COMPUTE))
        before_reduce += Op.REDUCE_SCATTER in between and not between & set(COMPUTE)
    return before_compute, before_reduce


def most_unused(timeline: Timeline, rank: int = 0) -> int:
    """The most all-gathers at a time that the CPU has issued and whose units have not begun to compute."""
    ops = [event for event in timeline.select(step=median_step(timeline)).ops if event.rank == rank]
    changes: list[tuple[float, int]] = []
    for i, gather in enumerate(ops):
        if gather.op is not Op.ALL_GATHER or gather.unit in (ROOT, ""):
            continue
        used = next((e.start_s for e in ops[i + 1 :] if e.op in COMPUTE and e.unit == gather.unit), None)
        if used is not None:
            changes += [(gather.issue_s, 1), (used, -1)]
    alive = most = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


# ---- Order: torch's FSDP ---------------------------------------------------------------------------------------------


def configs(base: TrainConfig) -> dict[str, TrainConfig]:
    """Each of `SETTINGS`."""
    return {name: dataclasses.replace(base, **changes) for name, changes in SETTINGS.items()}  # type: ignore[arg-type]


def predicted_step(config: TrainConfig, ranks: int, device: str = "cpu") -> Timeline:
    """The program that torch will issue, with the catalogue's costs."""
    place = Place(0, ranks, 0, ranks, torchrun=True)
    return simulated(config, config.model_config, place, torch.device(device)).timeline


def record(settings: Mapping[str, TrainConfig], ranks: int) -> dict[str, Timeline]:
    """Some steps of torch's FSDP in each setting, on CPU ranks: all ranks on one clock.

    Raises:
        RanksError: a rank failed.
    """
    how = {"record": False, "show_output": False, "title": "profiling torch's FSDP"}
    (recordings, *_) = on_ranks(_profile, ranks, list(settings.values()), **how)  # type: ignore[arg-type]
    return {name: recording.timeline for name, recording in zip(settings, recordings, strict=True)}


def _profile(settings: Sequence[TrainConfig]) -> list[Recording | None]:
    """On a rank: a few steps of each setting, on random tokens."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place, cpu = Place(rank, world_size, rank, world_size, torchrun=True), torch.device("cpu")
    found = []
    for config in track(settings):
        wrapped = wrap(config, config.model_config, place, cpu)
        optimizer = make_optimizer(wrapped, config)
        tokens = torch.randint(0, 256, (config.global_batch // world_size, config.seq_len + 1))
        batch = Batch(tokens[:, :-1], tokens[:, 1:], config.global_batch * config.seq_len, 0)
        units = find_units(empty(config.model_config), config.wrap).names
        train_step(wrapped, optimizer, batch, 0, config)
        with profiled(rank=rank, api=config.api, units=units) as profile:
            for step in range(PROFILED_STEPS):
                train_step(wrapped, optimizer, batch, step, config)
        found.append(gathered(profile.timeline))
    return found


def order_rows(predicted: Mapping[str, Timeline], measured: Mapping[str, Timeline]) -> list[Row]:
    """What each setting issues ahead, as predicted and as profiled."""
    rows = []
    for name, timeline in measured.items():
        of_both = zip((AHEAD, REDUCE), ahead(predicted[name]), ahead(timeline), strict=True)
        rows += [Row(name, quantity, float(a), float(b), "a step") for quantity, a, b in of_both]
    return rows


def said_of_order(predicted: Mapping[str, Timeline], measured: Mapping[str, Timeline]) -> list[str]:
    """For each setting whether torch issued what was predicted, in its order."""
    return [f"{name}: {summarize(measured[name], predicted[name]).line()}" for name in measured]


# ---- Overlap: on a slow network, or on GPUs ------------------------------------------------------------------------


def on_slow_network(experiment: Experiment) -> tuple[list[Row], dict[str, Timeline]]:
    """The project's own FSDP without and with prefetch, predicted from pieces that were timed alone; then run.

    Raises:
        RanksError: a rank failed.
    """
    pieces = experiment.measure_pieces(TIMED_STEPS)
    rows: list[Row] = []
    timelines: dict[str, Timeline] = {}
    for name, depth in PREFETCHES.items():
        predicted = experiment.predict(pieces, forward_prefetch=depth)
        predicted = predicted.select(step=predicted.steps[-1])
        measured = training_only(experiment.run(TIMED_STEPS, forward_prefetch=depth).timeline)
        measured = measured.select(step=median_step(measured, skip=2))
        rows += _times(name, predicted, measured)
        timelines |= {f"{name}, predicted": predicted, f"{name}, measured": measured}
    return rows, timelines


def _times(name: str, predicted: Timeline, measured: Timeline) -> list[Row]:
    """A step of each, in milliseconds."""

    def exposed_ms(timeline: Timeline) -> float:
        return 1e3 * statistics.fmean(exposed_comm_s(timeline, rank) for rank in timeline.ranks)

    def step_ms(timeline: Timeline) -> float:
        return 1e3 * step_time_s(timeline, timeline.steps[0])

    return [
        Row(name, STEP, step_ms(predicted), step_ms(measured), "ms"),
        Row(name, EXPOSED, exposed_ms(predicted), exposed_ms(measured), "ms"),
    ]


def on_gpus(settings: Mapping[str, TrainConfig], ranks: int) -> tuple[list[Row], dict[str, Timeline]]:
    """The trainer in each setting, timed and then profiled; predicted from the catalogue. Not run without GPUs.

    Raises:
        FailedError: a run failed. ValueError: the catalogue does not have this GPU.
    """
    rows: list[Row] = []
    timelines: dict[str, Timeline] = {}
    for name, config in settings.items():
        predicted = predicted_step(config, ranks, "cuda")
        asked = [f"--{key}={value}" for key in ASKED if (value := getattr(config, key)) is not None]
        with tempfile.TemporaryDirectory() as folder:
            done = train(*asked, "--profile=4", "--predict=false", ranks=ranks, out=Path(folder))
            measured = read_timeline(Path(folder, "timeline.jsonl.gz"))
        summary = summarize(measured)
        of_prediction = summarize(predicted)
        rows += [
            Row(name, STEP, 1e3 * of_prediction.step_s, 1e3 * done.report["step_s"], "ms"),
            Row(name, EXPOSED, 1e3 * of_prediction.exposed_s, 1e3 * summary.exposed_s, "ms"),
        ]
        timelines |= {f"{name}, predicted": predicted, f"{name}, measured": measured}
    return rows, timelines


# ---- The rate limiter ----------------------------------------------------------------------------------------------


def limiter_rows() -> list[Row]:
    """Predicted: on CPUs nothing is queued, so the rate limiter has nothing to limit."""
    rows = []
    for limit in (True, False):
        plan = Plan(api="fsdp1", limit_all_gathers=limit, micro_batch=1, seq_len=1024)
        timeline = simulate("gpt2-774m", Cluster("h100", gpus=8), plan).timeline
        rows.append(Row(f"{LIMITED}{limit}", UNUSED, float(most_unused(timeline)), None, "all-gathers"))
    return rows


# ---- The lab -------------------------------------------------------------------------------------------------------


def run(
    model: str = "teaching",
    ranks: int | None = None,
    rows: int = 4,
    seq_len: int = 128,
    bandwidth_gbps: float = 0.25,
    latency_us: float = 200.0,
) -> Result:
    """Predict, then run.

    Args:
        ranks: by default one on each GPU, or 2 on CPUs.
        rows: of each rank.
        bandwidth_gbps, latency_us: of the slow network between CPU ranks.

    Raises:
        ValueError: no such model, or it does not take such rows. RanksError, FailedError: a run failed.
    """
    gpus = torch.cuda.device_count()
    ranks = ranks or gpus or 2
    device = "cuda" if gpus else "cpu"
    base = TrainConfig(model=model, global_batch=ranks * rows, seq_len=seq_len, device=device)  # type: ignore[arg-type]
    base.check()
    settings = configs(base)
    predicted = {name: predicted_step(config, ranks, device) for name, config in settings.items()}
    if gpus:
        off = dataclasses.replace(settings["FSDP1, BACKWARD_PRE"], limit_all_gathers=False)
        times, timelines = on_gpus({**settings, "FSDP1, limit_all_gathers=False": off}, ranks)
        measured = {name: timelines[f"{name}, measured"] for name in settings}
        kept = timelines
    else:
        measured = record(settings, ranks)
        network = Network(bandwidth_gbps, latency_us)
        times, kept = on_slow_network(Experiment(model, ranks, ranks * rows, seq_len, network))
    notes = [
        *said_of_order(predicted, measured),
        "Of torch's FSDP on CPUs only the order is to be compared: its predicted times are those of a catalogue.",
        "Waiting for late ranks is time in a collective that another rank had not entered yet.",
    ]
    for name in measured:
        kept |= {f"{name}, profiled": measured[name].select(step=median_step(measured[name]))}
    return Result(
        lab="overlap", kind="measured", rows=(*order_rows(predicted, measured), *times, *limiter_rows()),
        hardware=this_machine(device, ranks), timelines=kept, notes=tuple(notes),
    )  # fmt: skip


def main(
    model: str = "teaching",
    ranks: int | None = None,
    rows: int = 4,
    seq_len: int = 128,
    bandwidth_gbps: float = 0.25,
    latency_us: float = 200.0,
) -> int:
    """The command; returns its exit status."""
    return command("overlap", lambda: run(model, ranks, rows, seq_len, bandwidth_gbps, latency_us))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
