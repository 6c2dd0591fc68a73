"""What a run says before its first step, and what it came to: for a terminal a table, for programs report.json."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import torch
from rich.console import Console
from rich.table import Table

from fsdp_sim.timeline import written
from fsdp_sim.words import human_bytes, human_ms
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.loop.preflight import CheckedRun
from labs.measure.prediction import StepPrediction
from labs.measure.utilization import RankMemory
from labs.wrapping import Wrapped

MANY_EPOCHS = 4
"""So often a text may be read before its repetition is worth much less than new text (Muennighoff et al. 2023, "Scaling
Data-Constrained Language Models"): more is warned of."""
GOOD_ERROR = 0.10
MOST_SENTENCES = 4  # that are printed, the most important; the file has all


class PredictedQuantity(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity as predicted and as measured.

    Attributes:
        error: predicted over measured, less one; None where nothing was measured, or 0.
        why: the most likely reason of a large error.
    """

    what: str
    unit: str
    predicted: float
    measured: float | None
    error: float | None
    why: str = ""

    @classmethod
    def of(cls, what: str, unit: str, predicted: float, measured: float | None, why: str = "") -> PredictedQuantity:
        error = predicted / measured - 1 if measured else None
        large = error is not None and abs(error) > GOOD_ERROR
        return cls(what=what, unit=unit, predicted=predicted, measured=measured, error=error, why=why if large else "")


class TrainingReport(msgspec.Struct, frozen=True, kw_only=True):
    """A training on all its ranks, as rank 0 sums it up.

    Attributes:
        label: what was trained and how it was spread, in words.
        hardware: of a rank.
        first_step, last_step: the first and the last that this process did.
        exposed_comm_s: of a recorded step, see `labs.measure.profiling`; None where no step was recorded.
        memory: of each rank so far, see `labs.measure.utilization.Memory`.
        state_bytes: what each rank keeps of parameters and optimizer state.
        tensor_bytes: the most that tensors held on a rank, in a step in which that was measured.
        restarts: how often torchrun has started the ranks anew. resumed_from: the step of the checkpoint gone on from.
        failed_saves: what went wrong, one text each.
        stopped: why it ended before its time, such as ``Ctrl-C``; empty if it did not.
    """

    summary: str
    label: str
    config: dict[str, object]
    versions: dict[str, str]
    hardware: str
    ranks: int
    first_step: int
    last_step: int
    loss_first: float
    loss_last: float
    step_s: float
    tokens_per_s: float
    mfu: float | None
    exposed_comm_s: float | None
    memory: list[RankMemory]
    state_bytes: list[int]
    tensor_bytes: int | None
    restarts: int
    resumed_from: int | None
    saved: int
    failed_saves: list[str]
    stopped: str
    compared: list[PredictedQuantity]
    explanation: list[str]

    def write(self, path: Path) -> None:
        """As JSON; in place of an older one when it is complete.

        Raises:
            OSError: it cannot be written.
        """
        with written(path) as new:
            new.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    def print(self, console: Console | None = None) -> None:
        """The summary in one line, and what there is to say besides: a table on a terminal, else lines."""
        console = console or Console(highlight=False)
        console.print(self.summary, soft_wrap=True, markup=False)
        rows = self.rows()
        if console.is_terminal:
            table = Table(box=None, show_header=False)
            for row in rows:
                table.add_row(*row)
            console.print(table)
        else:
            for what, value in rows:
                console.print(f"  {what:<24}{value}", soft_wrap=True, markup=False)
        self._print_compared(console)

    def rows(self) -> list[tuple[str, str]]:
        """What is known: a heading and a value each."""
        rows = [
            ("trained", self.label),
            ("hardware", self.hardware),
            ("steps", f"{self.first_step} to {self.last_step}"),
            ("loss", f"{self.loss_first:.4f} to {self.loss_last:.4f}"),
            ("median step", human_ms(self.step_s)),
            ("speed", f"{self.tokens_per_s:,.0f} tokens/s" + (f", MFU {self.mfu:.1%}" if self.mfu else "")),
            ("memory, most per rank", ", ".join(human_bytes(memory.peak_bytes) for memory in self.memory)),
        ]
        if self.exposed_comm_s is not None:
            rows.append(("exposed communication", f"{human_ms(self.exposed_comm_s)} of a step"))
        if self.restarts or self.resumed_from is not None:
            went_on = f", went on from step {self.resumed_from}" if self.resumed_from is not None else ""
            rows.append(("restarts", f"{self.restarts}{went_on}"))
        if self.saved or self.failed_saves:
            rows.append(("checkpoints", f"{self.saved} saved, {len(self.failed_saves)} failed"))
        return rows + [("failed to save", text) for text in self.failed_saves]

    def _print_compared(self, console: Console) -> None:
        if self.compared and console.is_terminal:
            table = Table("", "predicted", "measured", "error")
            for one in self.compared:
                table.add_row(*_cells(one))
            console.print(table)
        else:
            for one in self.compared:
                what, predicted, measured, error = _cells(one)
                text = f"  {what:<24}predicted {predicted}, measured {measured}, error {error}"
                console.print(text, soft_wrap=True, markup=False)
        for one in self.compared:
            if one.why:
                console.print(
                    f"{one.what}: an error of {one.error:+.0%}; most likely {one.why}.", soft_wrap=True, markup=False
                )
        for sentence in self.explanation[:MOST_SENTENCES]:
            console.print(sentence, soft_wrap=True, markup=False)


def header(run: CheckedRun, wrapped: Wrapped) -> list[str]:
    """What is about to be trained: the first thing to look at when something seems wrong."""
    config = run.config
    rows = f"{config.global_batch} rows of {config.plan.seq_len} tokens per step"
    if run.micro_batches > 1:
        rows += f", in {run.micro_batches} micro-batches of {run.micro_rows} rows on each rank"
    steps = -(-len(run.loader()) // config.global_batch)
    lines = [
        f"{config.model}: {wrapped.n_params:,} parameters; {wrapped.label}; {run.backend}",
        f"{run.corpus.name}: {len(run.corpus.train):,} tokens to train on, {steps:,} steps an epoch; {rows}",
    ]
    if (epochs := config.steps / steps) > MANY_EPOCHS:
        lines.append(
            f"WARNING: {config.steps:,} steps read this text {epochs:,.0f} times, which teaches a model to repeat it; "
            "give more text with data=PATH, or ask for fewer steps"
        )
    return lines


def summary_line(
    config: TrainConfig, place: RankPlace, device: torch.device, n_params: int, losses: Sequence[float],
    tokens_per_s: float, stopped: str = "",
) -> str:  # fmt: skip
    """The training in one line.

    Args:
        losses: of the steps done here, in order.
        stopped: why it ended before its time.
    """
    done = f"stopped by {stopped} after {len(losses)}" if stopped else f"{len(losses)}"
    from_to = f", loss {losses[0]:.4f} to {losses[-1]:.4f}" if losses else ""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    backend = "nccl" if device.type == "cuda" else "gloo"
    return (
        f"{done} steps of {config.model} ({n_params:,} parameters){from_to}; "
        f"{place.world_size} rank{'s' * (place.world_size != 1)} on {where}, {backend}, torch {torch.__version__}, "
        f"{tokens_per_s:,.0f} tokens/s"
    )


def hardware(place: RankPlace, device: torch.device) -> str:
    """What a rank runs on."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{place.world_size} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB each"
    cores = psutil.cpu_count(logical=True) or 1
    each = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)} per rank"
    return f"{cores} CPU cores ({platform.machine()}), {each}"


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return found | ({"cuda": str(torch.version.cuda)} if torch.cuda.is_available() else {})


def compare(
    prediction: StepPrediction,
    *,
    step_s: float,
    exposed_comm_s: float | None,
    peak_bytes: int | None,
    device: torch.device,
    busy: float | None = None,
) -> list[PredictedQuantity]:
    """Prediction beside measurement.

    Args:
        step_s: the median step, nothing recorded.
        exposed_comm_s: of a recorded step; recording and a rank's lateness make it longer.
        peak_bytes: of tensors, on the rank with the most.
        busy: processes that wanted a core on average over the last minute, per core; by default what the system says.
    """
    on_cpu = device.type == "cpu"
    if busy is None:
        busy = psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
    if not on_cpu:
        slow = (
            "the model is small for this GPU, or the CPU, the data or logging held it up: the simulator knows neither"
        )
    elif prediction.step_time_s < step_s:
        slow = "something else used the cores during training, or torch's hooks took longer than the mini-FSDP's"
    else:
        slow = "something else used the cores while the pieces were timed"
    if on_cpu and busy > 1:
        slow += f" (the system says that {busy:.1f} processes wanted each core)"
    late = "ranks come late to collectives" + (", most of all where they share cores" if on_cpu else "")
    other = "buffers that the simulator does not know, such as those of kernels"
    return [
        PredictedQuantity.of("step time", "s", prediction.step_time_s, step_s, slow),
        PredictedQuantity.of("exposed communication", "s", prediction.exposed_comm_s, exposed_comm_s, late),
        PredictedQuantity.of("peak memory of tensors", "bytes", float(prediction.peak_memory_bytes), peak_bytes, other),
    ]


def _cells(one: PredictedQuantity) -> tuple[str, str, str, str]:
    shown = human_ms if one.unit == "s" else human_bytes
    measured = shown(one.measured) if one.measured is not None else "not measured"
    return one.what, shown(one.predicted), measured, f"{one.error:+.0%}" if one.error is not None else "-"
