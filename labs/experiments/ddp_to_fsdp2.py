"""From DDP to FSDP2 in one diff: the same losses, less memory, other collectives.

    python -m labs.experiments.ddp_to_fsdp2
    python -m labs.experiments.ddp_to_fsdp2 --ranks 4
    python -m labs.experiments.ddp_to_fsdp2 --device cuda         a rank on each GPU

Two training loops that anybody could have written, ``labs/experiments/scripts/train_ddp.py`` and ``train_fsdp2.py``.
The lab shows where they differ, predicts memory and collectives of a step, runs both under torchrun as they are, and
compares. They see GPUs with --device cuda only; started by hand they use them when there is one for each rank.

Exit status: 0 when done, 1 when a run failed or the losses differ, 2 when asked wrongly, 130 after Ctrl-C.
"""

from __future__ import annotations

import difflib
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

import msgspec
import torch
import tyro
from IPython.display import HTML
from rich.console import Console
from rich.syntax import Syntax

from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import Op
from labs.cluster.process_group import RankPlace, ranks_on
from labs.cluster.torchrun import FailedError, launch
from labs.config import TrainConfig
from labs.experiments.checklist_runs import CLOSE, same
from labs.experiments.command import command
from labs.experiments.result import LabResult, ResultRow, this_machine
from labs.experiments.scripts.watch import IssuedCollective, RankStep
from labs.measure.simulated import peak_memory_bytes, simulated

SCRIPTS = {api: Path(__file__).with_name("scripts") / f"train_{api}.py" for api in ("ddp", "fsdp2")}
ROWS, SEQ_LEN = 8, 64
"""What both scripts train on: rows per step over all ranks, tokens per row."""

SMALL_BYTES = 1024
"""Collectives below it reduce single numbers, the loss and the norm: they are left out."""

MIB = 2**20
KINDS = {Op.ALL_REDUCE: "all-reduce", Op.ALL_GATHER: "all-gather", Op.REDUCE_SCATTER: "reduce-scatter"}
STEP = re.compile(r"^step (\d+)  loss (\S+)  norm (\S+)$", re.MULTILINE)
NORM_CLOSE = 1e-4


@dataclass(frozen=True)
class ScriptRun:
    """What a script did under torchrun.

    Attributes:
        losses, norms: of each step, over all ranks.
        watched: one step of each rank.
        weights: what it saved.
    """

    losses: list[float]
    norms: list[float]
    watched: list[RankStep]
    weights: dict[str, torch.Tensor]


def changed_lines() -> list[str]:
    """The diff of the two scripts, without context."""
    before, after = (SCRIPTS[api].read_text().splitlines() for api in ("ddp", "fsdp2"))
    return list(difflib.unified_diff(before, after, "train_ddp.py", "train_fsdp2.py", n=0, lineterm=""))


def diff() -> HTML:
    """The same for a notebook, new lines on green and old ones on red: words keep the colour of the theme."""
    tint = {"+": "#2ea04333", "-": "#f8514933"}
    lines = [
        f'<span style="display: block; background: {tint.get(line[:1], "none")}">{escape(line)}</span>'
        for line in changed_lines()
    ]
    return HTML(f"<pre>{''.join(lines)}</pre>")


def predict(api: str, ranks: int, device: str = "cpu") -> Simulation:
    """A step of the script as the simulator knows it.

    Raises:
        ValueError: ranks that do not divide the rows.
    """
    if ranks < 1 or ROWS % ranks:
        raise ValueError(f"ranks={ranks}: the scripts share {ROWS} rows; use 1, 2, 4 or 8 ranks")
    config = TrainConfig(api=api, global_batch=ROWS, seq_len=SEQ_LEN)
    place = RankPlace(world_size=ranks, local_world_size=ranks)
    return simulated(config, config.model_config, place, torch.device(device))


def run_script(api: str, ranks: int = 2, device: str = "cpu") -> ScriptRun:
    """Run a script under torchrun.

    Raises:
        FailedError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="ddp-to-fsdp2-") as folder:
        weights = Path(folder, "weights.pt")
        command = ("-m", "labs.experiments.scripts.watch", folder, str(SCRIPTS[api]), str(weights))
        printed = launch(*command, ranks=ranks, device=device)
        steps = STEP.findall(printed)
        watched = [
            msgspec.json.decode(Path(folder, f"{rank}.json").read_bytes(), type=RankStep) for rank in range(ranks)
        ]
        saved = torch.load(weights, weights_only=True, map_location="cpu")
    return ScriptRun([float(loss) for _, loss, _ in steps], [float(norm) for *_, norm in steps], watched, saved)


def issued(simulation: Simulation) -> list[IssuedCollective]:
    """The collectives of the simulator's program, in order."""
    return [IssuedCollective(KINDS[i.op], i.bytes) for i in simulation.program.ops if i.op in KINDS]


def totals(name: str, predicted: Iterable[IssuedCollective], recorded: Iterable[IssuedCollective]) -> list[ResultRow]:
    """How many of each kind, and their bytes; large ones."""
    both = [[c for c in some if c.bytes >= SMALL_BYTES] for some in (predicted, recorded)]
    rows = []
    for kind in KINDS.values():
        sizes = [[c.bytes for c in some if c.kind == kind] for some in both]
        if any(sizes):
            rows.append(ResultRow(name, f"{kind}s per step", len(sizes[0]), len(sizes[1]), ""))
            rows.append(ResultRow(name, f"bytes of {kind}s", sum(sizes[0]) / MIB, sum(sizes[1]) / MIB, "MiB"))
    return rows


def run(ranks: int | None = None, device: str = "cpu") -> LabResult:
    """Predict both scripts, run both, compare.

    Args:
        ranks: by default 2, or one on each GPU.
        device: ``cpu`` or ``cuda``.

    Raises:
        ValueError: ranks that do not divide the rows; GPUs that are missing. FailedError: a script failed, or losses,
            norms or saved weights are not the same to `CLOSE`, `NORM_CLOSE` and `CLOSE`.
    """
    ranks = ranks_on(device, ranks, rows=ROWS)
    simulations = {api: predict(api, ranks, device) for api in SCRIPTS}
    ran = {api: run_script(api, ranks, device) for api in SCRIPTS}
    rows = []
    for api, simulation in simulations.items():
        config = TrainConfig(api=api)
        most = max(of_rank.peak_bytes for of_rank in ran[api].watched)
        rows.append(ResultRow(api, "peak memory", peak_memory_bytes(config, simulation) / MIB, most / MIB, "MiB"))
        rows += totals(api, issued(simulation), ran[api].watched[0].collectives)
    ddp, fsdp2 = ran["ddp"], ran["fsdp2"]
    rows.append(ResultRow("fsdp2", "last loss (predicted: DDP's)", ddp.losses[-1], fsdp2.losses[-1], ""))
    notes = (
        f"FSDP2 has {same('the losses of DDP', fsdp2.losses, ddp.losses)} "
        f"(allowed: {CLOSE:g}), and {same('its norms', fsdp2.norms, ddp.norms, NORM_CLOSE)} (allowed: {NORM_CLOSE:g}).",
        f"What both saved: {_same_weights(ddp.weights, fsdp2.weights)}.",
        f"Collectives below {SMALL_BYTES} bytes, of the loss and the norm, are left out.",
    )
    return LabResult("ddp_to_fsdp2", "measured", tuple(rows), this_machine(device, ranks), notes=notes)


def _same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> str:
    if a.keys() != b.keys():
        raise FailedError(f"saved under other names: {sorted(a.keys() ^ b.keys())[:3]}")
    worst = max(float((a[name] - b[name]).abs().max()) for name in a)
    if not worst <= 1e-3:  # AdamW divides by a gradient's size: where that is tiny, rounding shows
        raise FailedError(f"saved weights differ by {worst:.1e}")
    return f"{len(a)} tensors under the same names, no number further off than {worst:.0e}"


def main(ranks: int | None = None, device: Literal["cpu", "cuda"] = "cpu") -> int:
    """The command; returns its exit status.

    Args:
        ranks: by default 2, or one on each GPU.
    """
    Console().print(Syntax("\n".join(changed_lines()), "diff", theme="ansi_dark", background_color="default"))
    return command("ddp_to_fsdp2", lambda: run(ranks, device))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
