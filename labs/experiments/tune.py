"""Lab 10: the fastest plan that fits a given cluster, found by the simulator, then checked on the pretend cluster.

    python -m labs.experiments.tune                             8 ranks, a slow link, 16 MiB each
    python -m labs.experiments.tune --ranks 64 --limit-mib 20
    python -m labs.experiments.tune --device cuda --cluster here --ranks 64 --model gpt2-xl --limit-mib 60000

What is asked: a model, rows per rank and a cluster are given, and so much memory per rank. Of all ways to shard,
prefetch and recompute, which trains fastest and fits? What one does: have every plan simulated, which trains nothing,
and take the fastest that fits. What one sees: the front of time against memory, and three of its plans tried for real:
the one chosen, torch's defaults, and the fastest of all, which does not fit.
Exit status: 0 done; 1 no plan fits, or what was chosen does not fit when it is tried; 2 asked wrongly; 130 Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import tyro
from rich.console import Console

from fsdp_sim import engine
from fsdp_sim.explore import pareto, results
from fsdp_sim.simulation import Fit
from fsdp_sim.spec import Cluster
from fsdp_sim.words import human_bytes
from labs.cluster.pretend import Setup, StepPieces, compare, predict, timed
from labs.cluster.pretend.recorder import Piece
from labs.cluster.process_group import ranks_on
from labs.config import TrainConfig
from labs.experiments.result import LabResult
from labs.measure.simulated import gpu_here

SPACE: dict[str, tuple[Any, ...]] = {
    "activation_checkpointing": ("none", "full"),
    "micro_batch": (None, 2),
    "reshard_after_forward": (None, False),
    "forward_prefetch": (None, 1),
}
"""Keys of the trainer's config with the values to try."""

DEFAULTS = "torch's defaults"
ROUNDS = 2

COMPUTES = ("activation_checkpointing", "micro_batch", "wrap", "param_dtype", "n_layer")
"""Keys that change what a unit computes at once; the others only change what is gathered and freed when."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan, simulated.

    Attributes:
        keys: what it sets of the trainer's config.
        run: torch's program of it, played.
    """

    keys: Mapping[str, Any]
    setup: Setup
    run: engine.Run

    @property
    def name(self) -> str:
        """The keys that differ from torch's defaults."""
        given, defaults = self.setup.config.by_key(), TrainConfig().by_key()
        changes = [f"{key}={value}" for key, value in self.keys.items() if given[key] != defaults[key]]
        return ", ".join(changes) or DEFAULTS

    @cached_property
    def step_time_s(self) -> float:
        """Predicted."""
        between_s = self.setup.simulation.between_steps_s if self.setup.device.type == "cuda" else 0.0
        return self.run.step_time_s() + between_s

    @property
    def peak_bytes(self) -> int:
        """Predicted."""
        return self.setup.simulation.peak_memory_bytes

    def fits(self, limit_bytes: float) -> bool:
        """Into so much memory for tensors; no allocator is asked, as there is none on CPUs."""
        return self.peak_bytes <= limit_bytes


def search(
    config: TrainConfig,
    cluster: Cluster,
    space: Mapping[str, Sequence[Any]] = SPACE,
    *,
    device: str | torch.device = "cpu",
    steps: int = 3,
    report: Callable[[str], object] = lambda _: None,
) -> list[Candidate]:
    """Simulate every plan of a space, fastest first; of equally fast ones the one that needs the least memory.

    On CPUs the pieces of a step are timed once for each way to compute, see `COMPUTES`; nothing else is run.

    Args:
        config: what all plans share.
        space: keys of the config, each with the values to try.
        steps: to time, in each of two rounds.
        report: is called with what is timed.

    Raises:
        ValueError: a value that cannot be pretended here. TypeError: a key that does not exist.
    """
    plans = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    setups = [Setup(dataclasses.replace(config, **keys), cluster, torch.device(device)) for keys in plans]
    for setup in setups:
        setup.check()
    if torch.device(device).type == "cuda":
        runs = [setup.simulation.run for setup in setups]
    else:
        pieces = _time(setups, steps, report)
        runs = [predict(setup.simulation, pieces[_computes(setup)]) for setup in setups]
    found = [Candidate(*one) for one in zip(plans, setups, runs, strict=True)]
    return sorted(found, key=lambda candidate: (candidate.step_time_s, candidate.peak_bytes))


def _time(setups: Sequence[Setup], steps: int, report: Callable[[str], object]) -> dict[tuple[Any, ...], StepPieces]:
    """The pieces of each way to compute, in rounds: what else the machine does should slow all of them."""
    first = {_computes(setup): setup for setup in reversed(setups)}
    of_steps: dict[tuple[Any, ...], list[Mapping[Piece, float]]] = {computes: [] for computes in first}
    for _ in range(ROUNDS):
        for computes, setup in first.items():
            report("timing the pieces of a step: " + ", ".join(map(str, computes)))
            of_steps[computes] += timed(setup, steps).of_steps
    return {computes: StepPieces(first[computes].simulation, of_steps[computes]).undisturbed for computes in first}


def _computes(setup: Setup) -> tuple[Any, ...]:
    return tuple(setup.config.by_key()[key] for key in COMPUTES)


def front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats both in time and in memory, fastest first."""
    places = pareto([(candidate.step_time_s, candidate.peak_bytes) for candidate in candidates])
    return [candidates[place] for place in places]


def rows_of(candidates: Sequence[Candidate], limit_bytes: float) -> list[dict[str, str]]:
    """As the rows of a sweep, for `fsdp_sim.viz.pareto`."""
    return [
        {"model": candidate.setup.config.model}
        | {key: str(value) for key, value in candidate.keys.items()}
        | results(
            candidate.step_time_s,
            _tokens(candidate.setup) / candidate.step_time_s,
            None,
            engine.exposure(candidate.run).exposed_s,
            candidate.peak_bytes,
            limit_bytes,
            Fit.FITS if candidate.fits(limit_bytes) else Fit.DOES_NOT_FIT,
        )
        for candidate in candidates
    ]


def _tokens(setup: Setup) -> int:
    """Of a rank and step."""
    return setup.config.global_batch // setup.cluster.gpus * setup.config.plan.seq_len


class NothingFitsError(ValueError):
    """An answer: no plan has room in so much memory."""


def choose(candidates: Sequence[Candidate], limit_bytes: float) -> dict[str, Candidate]:
    """What is to be checked: the fastest that fits, torch's defaults, and the fastest of all, where they differ.

    Raises:
        NothingFitsError: says how much the smallest needs.
    """
    fitting = [candidate for candidate in candidates if candidate.fits(limit_bytes)]
    if not fitting:
        least = min(candidate.peak_bytes for candidate in candidates)
        raise NothingFitsError(
            f"none of {len(candidates)} plans fits {human_bytes(limit_bytes)}: the smallest needs "
            f"{human_bytes(least)}; allow that much, take more ranks or fewer rows"
        )
    chosen = {"fastest that fits": fitting[0]}
    defaults = next((candidate for candidate in candidates if candidate.name == DEFAULTS), None)
    for name, other in ((DEFAULTS, defaults), ("fastest of all", candidates[0])):
        if other is not None and other not in chosen.values():
            chosen[name] = other
    return chosen


def check(
    chosen: Mapping[str, Candidate], *, steps: int = 5, report: Callable[[str], object] = lambda _: None
) -> LabResult:
    """Try the chosen plans on the pretend cluster, each beside its prediction. On CPUs their pieces are timed again, in
    turns with the steps that are tried."""
    setups = {name: candidate.setup for name, candidate in chosen.items()}
    result = compare(setups, steps=steps, lab="tune", report=report)
    plans = tuple(f"{name}: {candidate.name}" for name, candidate in chosen.items())
    return dataclasses.replace(result, notes=(*plans, *result.notes))


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """What to tune."""

    model: str = "teaching"
    """A preset of labs.model."""
    cluster: str = "cpu"
    """cpu, the name of a GPU, whose servers' links the wire has, or here: this machine's GPU."""
    ranks: int = 8
    """Of the cluster."""
    bandwidth_gbps: float | None = None
    """Of the link between nodes (cpu: between ranks), in 1e9 bits per second; for cpu 0.5, else the link's own."""
    limit_mib: float = 16.0
    """Memory of a rank for tensors."""
    rows: int = 4
    """Per rank and step."""
    device: str = "cpu"
    """cpu or cuda: of this process."""

    @property
    def asks(self) -> tuple[TrainConfig, Cluster]:
        slow = self.cluster == "cpu"
        bandwidth_gbps = self.bandwidth_gbps or (0.5 if slow else None)
        gpu: Any = gpu_here(torch.device("cuda", 0)) if self.cluster == "here" else self.cluster
        cluster = Cluster(gpu, gpus=self.ranks, bandwidth_gbps=bandwidth_gbps, latency_us=200.0 if slow else None)
        return TrainConfig(model=self.model, global_batch=self.rows * self.ranks), cluster


ON_GPU = TuneOptions(model="gpt2", cluster="here", ranks=64, limit_mib=4_000.0, device="cuda")
"""Rank 0 of 64 GPUs like this machine's."""


def run(
    options: TuneOptions | None = None, report: Callable[[str], object] = lambda _: None, *, device: str | None = None
) -> LabResult:
    """Search, choose, check.

    Args:
        device: in place of ``options.device``; with ``cuda`` and nothing else asked, `ON_GPU`.

    Raises:
        NothingFitsError: no plan does. ValueError: it cannot be pretended here.
    """
    options = options or (ON_GPU if device == "cuda" else TuneOptions())
    options = dataclasses.replace(options, device=device or options.device)
    ranks_on(options.device, 1)
    config, cluster = options.asks
    space = SPACE | {"micro_batch": (None, options.rows // 2) if options.rows % 2 == 0 else (None,)}
    candidates = search(config, cluster, space, device=options.device, report=report)
    return check(choose(candidates, options.limit_mib * 2**20), report=lambda name: report(f"pretending: {name}"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = tyro.cli(TuneOptions, args=arguments, prog="python -m labs.experiments.tune", description=__doc__)
    console = Console()
    try:
        with console.status("") as status:
            result = run(options, status.update)
    except ValueError as error:
        console.print(f"labs.experiments.tune: {error}", markup=False, soft_wrap=True)
        return 1 if isinstance(error, NothingFitsError) else 2
    except KeyboardInterrupt:
        console.print("labs.experiments.tune: stopped")
        return 130
    console.print(result.table())
    for note in result.notes:
        console.print(note, markup=False)
    tried = next(row for row in result.rows if row.quantity == "peak memory").measured
    return 0 if tried is not None and tried <= options.limit_mib else 1


if __name__ == "__main__":
    sys.exit(main())
