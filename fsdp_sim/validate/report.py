"""`write_report`: the accuracy page, with its pictures, from the measurements and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from fsdp_sim.cost import Calibration, fitted
from fsdp_sim.validate.errors import PredictedRow, Summary, group_by, summary
from fsdp_sim.validate.fitting import FREE
from fsdp_sim.validate.leave_out import GROUPS, HeldOut, fitting_rows, leave_out
from fsdp_sim.validate.noise import constant_mfu_errors, repeated
from fsdp_sim.validate.predict import compare
from fsdp_sim.validate.published import PublishedRun

Draw = Callable[[Sequence[HeldOut], Sequence[PredictedRow], Mapping[str, float]], dict[str, Any]]

FOLDER = "accuracy"
WIDTH_PX = 900  # of a figure
WORST = 12
WORDS = {"model": "model", "gpu_type": "type of GPU", "n_gpus": "number of GPUs"}


def write_report(path: Path, rows: Sequence[PublishedRun], progress: Any, draw: Draw) -> None:
    """Write the page to ``path`` and its pictures to a folder beside it. Needs plotly and kaleido.

    Args:
        progress: called with a line of text as the work goes on (`rich.console.Console.print`).
        draw: makes the figures; `fsdp_sim.viz.accuracy_figures`, which comes after this room.
    """
    chosen = fitting_rows(rows)
    held: dict[str, list[HeldOut]] = {}
    for name in GROUPS:
        progress(f"fitting without each {name}")
        held[name] = leave_out(chosen, name)[1]
    progress("predicting every row")
    mine = set(map(id, chosen))
    compared = [compare(row) for row in rows]
    others = [c for c in compared if id(c.row) not in mine]
    ours = summary(e for h in held["model"] for e in h.errors)
    naive = summary(constant_mfu_errors(chosen, [row.model.name for row in chosen]))
    folder = path.parent / FOLDER
    folder.mkdir(exist_ok=True)
    progress("drawing")
    means = {"one utilisation for each GPU": naive.mape, "this simulator": ours.mape}
    for name, figure in draw(held["model"], others, means).items():
        figure.write_image(folder / f"{name}.svg", width=WIDTH_PX)
    path.write_text(_page(chosen, compared, held, naive))
    progress(f"wrote {path}")


def _page(
    chosen: Sequence[PublishedRun], compared: Sequence[PredictedRow], held: dict[str, list[HeldOut]], naive: Summary
) -> str:
    mine = set(map(id, chosen))
    off = [ratio for _, _, ratio in repeated(chosen)]
    wrong = [c.row.id for c in compared if not c.fits and not c.row.remark]
    plain = sum(not c.row.remark for c in compared)
    every_fits = f"All {plain} plain FSDP runs, which did fit, are predicted to fit."
    overall = [
        [f"each {WORDS[name]}", *_cells(summary(e for h in some for e in h.errors))] for name, some in held.items()
    ]
    overall += [["nothing (fitted to all)", *_cells(summary(c.time_error for c in compared if id(c.row) in mine))]]
    overall += [["each model; no simulator, one utilisation for each GPU", *_cells(naive)]]
    page = Template(files("fsdp_sim.validate").joinpath("page.md").read_text())
    return page.substitute(
        n_rows=len(chosen),
        n_numbers=len(FREE),
        n_worst=WORST,
        folder=FOLDER,
        overall=_table(["left out, one at a time", "rows", "mean", "median", "90th percentile"], overall),
        n_pairs=len(off),
        pair_mean=f"{np.mean(off):.1%}",
        pair_max=f"{max(off):.0%}",
        biases=_biases(held["model"]),
        worst=_worst(held["model"]),
        groups="\n\n".join(_groups(name, some) for name, some in held.items()),
        others=_others([c for c in compared if id(c.row) not in mine]),
        memory=_memory(compared),
        fits=f"Predicted not to fit although they ran: {', '.join(wrong)}." if wrong else every_fits,
        numbers=_numbers(held["model"]),
    )


def _biases(held: Sequence[HeldOut]) -> str:
    """Models that are wrong in one direction."""
    biased = [(h.group, float(np.mean(h.errors))) for h in held if abs(np.mean(h.errors)) > 0.01]
    return ", ".join(f"{name} {bias:+.1%}" for name, bias in sorted(biased, key=lambda b: -abs(b[1]))) or "none"


def _groups(name: str, held: Sequence[HeldOut]) -> str:
    rows = [[h.group, *_cells(h.summary), f"{np.mean(h.errors):+.1%}"] for h in held]
    return _table([f"{WORDS[name]} left out", "rows", "mean", "median", "90th percentile", "bias"], rows)


def _worst(held: Sequence[HeldOut]) -> str:
    every = [(e, p, row) for h in held for e, p, row in zip(h.errors, h.predicted_s, h.rows, strict=True)]
    rows = [
        [
            row.id, row.model.name, _gpus(row), f"{row.plan.micro_batch} x {row.plan.seq_len}",
            f"{row.step_time_s:.2f}", f"{predicted:.2f}", f"{error:+.1%}",
        ]
        for error, predicted, row in sorted(every, key=lambda item: -abs(item[0]))[:WORST]
    ]  # fmt: skip
    return _table(["row", "model", "GPUs", "micro-batch", "measured s", "predicted s", "error"], rows)


def _others(compared: Sequence[PredictedRow]) -> str:
    rows = []
    for source, some in group_by(compared, lambda row: row.source).items():
        for c in some:
            how = [c.row.plan.api, c.row.plan.sharding_strategy if c.row.plan.api == "fsdp1" else "", c.row.remark]
            how += ["compiled" if c.row.plan.compile else "eager"]
            measured = f"{c.row.step_time_s:.3f}" if c.row.step_time_s else ""
            error = "" if c.time_error is None else f"{c.time_error:+.0%}"
            shown = ", ".join(filter(None, how))
            rows.append(
                [source, c.row.model.name, _gpus(c.row), shown, measured, f"{c.predicted_step_time_s:.3f}", error]
            )
    return _table(["source", "model", "GPUs", "how", "measured s", "predicted s", "error"], rows)


def _memory(compared: Sequence[PredictedRow]) -> str:
    rows = [
        [
            c.row.id, c.row.source, c.row.model.name, c.row.cluster.gpu.name, c.row.remark or c.row.peak_memory_kind,
            f"{(c.row.peak_memory_bytes or 0) / 2**30:.1f}", f"{c.predicted_peak_memory_bytes / 2**30:.1f}",
            f"{c.memory_error or 0:+.1%}",
        ]
        for c in compared
        if c.row.peak_memory_bytes is not None
    ]  # fmt: skip
    return _table(["row", "source", "model", "GPU", "kind", "measured GiB", "predicted GiB", "error"], rows)


def _numbers(held: Sequence[HeldOut]) -> str:
    meanings, now = Calibration.meanings(), fitted()
    rows = []
    for name, meaning in meanings.items():
        if name in FREE:
            values = [getattr(h.calibration, name) for h in held]
            spread = f"{min(values):.3g} to {max(values):.3g}"
        else:
            spread = "not fitted"
        rows.append([f"`{name}`", f"{getattr(now, name):.3g}", spread, meaning])
    return _table(["number", "value", "with a model left out", "meaning"], rows)


def _gpus(row: PublishedRun) -> str:
    return f"{row.cluster.gpus} x {row.cluster.gpu.name}"


def _cells(s: Summary) -> list[str]:
    return [str(s.n), *(f"{value:.1%}" for value in (s.mape, s.median_abs_error, s.p90_abs_error))]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
