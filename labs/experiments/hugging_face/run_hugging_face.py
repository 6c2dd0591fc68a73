"""`run`: T5 and BERT on CPU ranks, by hand and through the frameworks, predicted beside measured."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fsdp_sim.ranks import run as run_ranks
from labs.experiments.hugging_face import models, with_accelerate, with_fabric, with_fully_shard
from labs.experiments.hugging_face.batches import Task
from labs.experiments.hugging_face.measuring import MeasuredTraining, RankMeasurement, watch
from labs.experiments.hugging_face.predicting import StepPrediction, predict
from labs.experiments.hugging_face.with_fully_shard import Start
from labs.experiments.result import LabResult, ResultRow, this_machine

WAYS: dict[str, Start] = {
    "fully_shard": with_fully_shard.start_fsdp2,
    "accelerate": with_accelerate.start_accelerate,
    "fabric": with_fabric.start_fabric,
}
WRITTEN: dict[str, tuple[Callable[..., Any], ...]] = {
    "fully_shard": (with_fully_shard.start_fsdp2, with_fully_shard.weights_from_rank_0),
    "accelerate": (
        with_accelerate.start_accelerate,
        with_accelerate.share_embedding,
        with_accelerate.prepared,
        with_accelerate.accelerate_on,
        with_accelerate.plugin,
    ),
    "fabric": (with_fabric.start_fabric, with_fabric.fabric_on),
}  # fmt: skip
"""What this lab wrote to start a training that way, what CPU ranks need included."""

NOTES = (
    "Losses of two ranks stand beside those of one process, as if predicted.",
    "Accelerate gathers BERT's word embedding apart from the root, and again in backward; hence its bytes.",
    "On CPU ranks Accelerate would train with DDP, whatever its FSDP plugin says: two of its fields were set by hand.",
)


def run(
    families: Iterable[str] = tuple(models.FAMILIES),
    ways: Iterable[str] = tuple(WAYS),
    ranks: int = 2,
    steps: int = 3,
    checkpointing: bool = False,
) -> LabResult:
    """Train each model each way on ``ranks`` CPU ranks, and once in one process.

    Raises:
        ImportError: a package of the extra is missing. ValueError: no such model, or rows that do not divide.
        RanksError: a rank failed.
    """
    tasks = {family: Task(family, checkpointing=checkpointing) for family in families}
    predicted = {family: predict(task, ranks) for family, task in tasks.items()}
    jobs = {
        f"{family} {way}": MeasuredTraining.of(WAYS[way], task, steps) for family, task in tasks.items() for way in ways
    }
    alone = {family: MeasuredTraining.of(with_fully_shard.start_single, task, steps) for family, task in tasks.items()}
    one = run_ranks(watch, 1, alone, record=False, timeout_s=120, title="one process")[0]
    seen = run_ranks(watch, ranks, jobs, record=False, timeout_s=120, title=f"{ranks} ranks")[0]
    rows: list[ResultRow] = []
    for name, saw in seen.items():
        family, way = name.split()
        rows += compared(name, predicted[family], saw, one[family].losses)
        rows.append(ResultRow(name, "lines to start", None, lines_of(WRITTEN[way]), ""))
    timelines = {name: saw.step for name, saw in seen.items()}
    return LabResult(
        "hugging_face", "measured", tuple(rows), this_machine("cpu", ranks), timelines=timelines, notes=NOTES
    )


def compared(
    name: str, predicted: StepPrediction, seen: RankMeasurement, losses: list[float] | None = None
) -> Iterator[ResultRow]:
    """The rows of one training; ``losses`` are those of one process. Units by name where they are those predicted."""
    for step, loss in enumerate(seen.losses):
        yield ResultRow(name, f"loss of step {step}", losses[step] if losses else None, loss, "")
    yield ResultRow(name, "units", len(predicted.units), len(seen.units), "")
    if predicted.units.keys() == seen.units.keys():
        for unit, numbers in seen.units.items():
            yield ResultRow(name, f"numbers in {unit}", predicted.units[unit] / 1e3, numbers / 1e3, "k")
    yield ResultRow(name, "gathered in a step", predicted.gathered_bytes / 2**20, seen.gathered_bytes / 2**20, "MiB")
    yield ResultRow(name, "peak memory", predicted.peak_bytes / 2**20, seen.peak_bytes / 2**20, "MiB")


def lines_of(functions: Iterable[Callable[..., Any]]) -> int:
    """Lines of code, without comments, docstrings and blank lines."""
    return sum(len(ast.unparse(_without_docstrings(function)).splitlines()) for function in functions)


def _without_docstrings(function: Callable[..., Any]) -> ast.Module:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree
