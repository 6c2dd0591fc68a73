"""`run`: what is computed again, the orders, and the trainer compiled."""

from __future__ import annotations

from labs.cluster.process_group import n_ranks, ranks_on
from labs.cluster.torchrun import train
from labs.experiments.checklist import has_compiler
from labs.experiments.compile.activation_checkpointing import ROWS, arguments, checkpointing
from labs.experiments.compile.transform_orders import lengths_rows, order_rows, orders
from labs.experiments.result import LabResult, ResultRow, this_machine


def compiled(ranks: int = 2, n_layer: int = 5, device: str = "cpu") -> list[ResultRow]:
    """The trainer, compiled in the right order, beside the trainer as it is.

    Raises:
        FailedError: a run failed.
    """
    backend = "inductor" if has_compiler() else "aot_eager"
    eager = train(*arguments(n_layer), ranks=ranks, device=device)
    asked = ("--compile=true", f"--compile_backend={backend}")
    run = train(*arguments(n_layer), *asked, ranks=ranks, device=device)
    worst = max(abs(a / b - 1) for a, b in zip(run.losses, eager.losses, strict=True))
    return [
        ResultRow("eager", "step time", None, 1e3 * eager.report["step_s"], "ms"),
        ResultRow(f"compiled, {backend}", "step time", None, 1e3 * run.report["step_s"], "ms"),
        ResultRow(f"compiled, {backend}", "losses differ by", None, worst, "relative"),
    ]


def run(ranks: int | None = None, n_layer: int = 5, device: str = "cpu") -> LabResult:
    """All of it.

    Args:
        ranks: they divide 16 rows; by default 2, or one on each GPU.
        n_layer: blocks of the model that the trainer trains.

    Raises:
        ValueError: a number that cannot be; GPUs that are missing. FailedError, RanksError: a training failed.
    """
    ranks = ranks_on(device, ranks, rows=ROWS)
    if ranks < 1 or ROWS % ranks or n_layer < 1:
        raise ValueError(f"ranks={ranks}, n_layer={n_layer}: ranks divides {ROWS}, n_layer is at least 1")
    rows = checkpointing(ranks, n_layer, device=device)
    rows += order_rows(orders(ranks=ranks))
    rows += lengths_rows(orders(["right"], ranks=ranks, lengths=(32, 24, 16))["right"])
    rows += compiled(ranks, n_layer, device)
    notes = (
        f"The order was looked at on {n_ranks(ranks)} on CPU cores: what is traced is the same on a GPU.",
        *([] if has_compiler() else ["No C++ compiler was found: aot_eager traced, and nothing was compiled."]),
    )
    return LabResult("compile", "measured", tuple(rows), this_machine(device, ranks), notes=notes)
