"""`write_report`: the accuracy page, with its pictures, from the measurements and nothing else."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from fsdp_sim.cost import Calibration, fitted, fitted_spread, rates_are_known
from fsdp_sim.validate.errors import PredictedRow, Summary, summary
from fsdp_sim.validate.fitting import FittedCalibration
from fsdp_sim.validate.leave_out import FREE, GROUPS, OF_STACK, HeldOut, fitting_rows, leave_out, other_rows, refit
from fsdp_sim.validate.noise import constant_mfu_errors, repeated
from fsdp_sim.validate.predict import compare
from fsdp_sim.validate.published import DATA, LATER, MEASURED, PublishedRun, Refused
from fsdp_sim.validate.spread import Coverage, Member, coverages, ensemble, misses, spread_of

Draw = Callable[[Sequence[HeldOut], Sequence[PredictedRow], Mapping[str, float]], dict[str, Any]]

FOLDER = "accuracy"
WIDTH_PX = 900  # of a figure
OFF = 0.15  # rows that are off by more are listed with their cause
OFF_MEMORY = 0.06
CORRELATED = 0.5
WORDS = {"model": "model", "gpu_type": "type of GPU", "n_gpus": "number of GPUs", "source": "source"}
GOALS = {"llm-foundry": (0.023, 0.05), "other stacks": (0.06, 0.12)}  # mean and 90th percentile


@dataclass(frozen=True)
class Findings:
    """All that the page shows.

    Attributes:
        held: by what was left out.
        compared: every row, predicted with the numbers of the files.
        best: llm-foundry's fit; ``members`` with other numbers held elsewhere.
    """

    chosen: Sequence[PublishedRun]
    held: Mapping[str, Sequence[HeldOut]]
    compared: Sequence[PredictedRow]
    refused: Sequence[Refused]
    naive: Summary
    best: FittedCalibration
    members: Sequence[Member]
    coverage: Sequence[Coverage]


def write_report(path: Path, rows: Sequence[PublishedRun | Refused], progress: Any, draw: Draw) -> None:
    """Write the page to ``path`` and its pictures to a folder beside it. Needs plotly and kaleido.

    Args:
        rows: of `published`.
        progress: called with a line of text as the work goes on (`rich.console.Console.print`).
        draw: makes the figures; `fsdp_sim.viz.accuracy_figures`, which comes after this room.
    """
    found = _findings(rows, progress)
    ours = summary(e for h in found.held["model"] for e in h.errors)
    folder = path.parent / FOLDER
    folder.mkdir(exist_ok=True)
    progress("drawing")
    means = {"one utilisation for each GPU": found.naive.mape, "this simulator": ours.mape}
    others = [c for c in found.compared if c.row.id not in {row.id for row in found.chosen}]
    for name, figure in draw(found.held["model"], others, means).items():
        figure.write_image(folder / f"{name}.svg", width=WIDTH_PX)
    path.write_text(_page(found))
    progress(f"wrote {path}")


def _findings(rows: Sequence[PublishedRun | Refused], progress: Any) -> Findings:
    read = [row for row in rows if isinstance(row, PublishedRun)]
    chosen, others = fitting_rows(read), other_rows(read)
    progress("fitting, and with other numbers held elsewhere")
    fitter, best = refit(chosen)
    members = ensemble(fitter)
    held: dict[str, Sequence[HeldOut]] = {}
    for name in GROUPS:
        progress(f"fitting without each {name}")
        held[name] = leave_out(others if name == "source" else chosen, name, hardware=best.calibration)[1]
    progress("predicting every row")
    missed = misses([*held["model"], *held["source"]])
    return Findings(
        chosen, held, [compare(row) for row in read], [row for row in rows if isinstance(row, Refused)],
        summary(constant_mfu_errors(chosen, [row.model.name for row in chosen])), best, members,
        coverages(spread_of(best, members, chosen, missed, fitted_spread().between), missed),
    )  # fmt: skip


def _page(found: Findings) -> str:
    held = found.held
    off = [ratio for _, _, ratio in repeated(found.chosen)]
    wrong = [c.row.id for c in found.compared if not c.fits]
    page = Template(files("fsdp_sim.validate").joinpath("page.md").read_text())
    return page.substitute(
        files=", ".join(f"[{file.name}](validate/data/{file.name})" for file in (MEASURED, LATER)),
        folder=FOLDER,
        overall=_overall(found),
        goals=_goals(found),
        n_pairs=len(off),
        pair_mean=f"{np.mean(off):.1%}",
        pair_max=f"{max(off):.0%}",
        floor=f"{np.mean(off) / 2:.1%}",
        coverage=_coverage(found.coverage),
        off=_off([*held["model"], *held["source"]]),
        groups="\n\n".join(_groups(name, some) for name, some in held.items()),
        stacks=", ".join(f"`{name}`" for name in dict.fromkeys(c.row.plan.stack for c in found.compared)),
        others=_others(held["source"]),
        refused=_refused(found.refused),
        memory_summary=_memory_summary(found.compared),
        memory=_memory(found.compared),
        fits=f"Predicted not to fit although they ran: {', '.join(wrong)}." if wrong else "All are predicted to fit.",
        ensemble=_ensemble(found),
        correlations=_correlations(found.best),
        numbers=_numbers(held["model"], held["source"]),
    )


def _by_stack(found: Findings) -> dict[str, list[float]]:
    held = {"llm-foundry": found.held["model"], "other stacks": found.held["source"]}
    return {name: [e for h in some for e in h.errors] for name, some in held.items()}


def _overall(found: Findings) -> str:
    chosen = {row.id for row in found.chosen}
    of_stack = _by_stack(found)
    of_names = {name: [e for h in some for e in h.errors] for name, some in found.held.items()}
    in_sample = [c for c in found.compared if c.time_error is not None]
    known = [h for h in found.held["source"] if h.rows]
    on_known = [e for h in known for row, e in zip(h.rows, h.errors, strict=True) if rates_are_known(row.cluster.gpu)]
    rows = [
        ["llm-foundry: each model", *_cells(summary(of_stack["llm-foundry"]))],
        ["other stacks: each source", *_cells(summary(of_stack["other stacks"]))],
        ["of these, on A100, H100 and H200", *_cells(summary(on_known))],
        ["llm-foundry: each type of GPU", *_cells(summary(of_names["gpu_type"]))],
        ["llm-foundry: each number of GPUs", *_cells(summary(of_names["n_gpus"]))],
        ["llm-foundry: each model; no simulator, one utilisation for each GPU", *_cells(found.naive)],
        ["nothing (in-sample), llm-foundry", *_cells(summary(c.time_error for c in in_sample if c.row.id in chosen))],
        ["nothing, other stacks", *_cells(summary(c.time_error for c in in_sample if c.row.id not in chosen))],
    ]
    return _table(["left out, one at a time", "rows", "mean", "median", "90th percentile"], rows)


def _goals(found: Findings) -> str:
    told = []
    for name, errors in _by_stack(found).items():
        got, (mean, p90) = summary(errors), GOALS[name]
        reached = round(got.mape, 3) <= mean and round(got.p90_abs_error, 3) <= p90  # as printed
        told.append(f"On {name} they are {'reached' if reached else 'not reached'}.")
    return " ".join(told)


def _coverage(coverage: Sequence[Coverage]) -> str:
    rows = [[c.belongs, str(c.rows), f"{c.inside:.0%}", f"±{c.half_width:.1%}"] for c in coverage]
    return _table(["predictions of", "rows", "inside", "median half-width"], rows)


def _off(held: Sequence[HeldOut]) -> str:
    why = _causes("cause")
    every = [(e, p, row) for h in held for e, p, row in zip(h.errors, h.predicted_s, h.rows, strict=True)]
    rows = [
        [
            row.id, row.source, row.model.name, _gpus(row), f"{row.plan.micro_batch} x {row.plan.seq_len}",
            f"{row.step_time_s:.2f}", f"{predicted:.2f}", f"{error:+.1%}", why.get(row.id, "not known"),
        ]
        for error, predicted, row in sorted(every, key=lambda item: -abs(item[0]))
        if abs(error) > OFF
    ]  # fmt: skip
    head = ["row", "source", "model", "GPUs", "micro-batch", "measured s", "predicted s", "error", "likely cause"]
    return _table(head, rows)


def _causes(kind: str) -> dict[str, str]:
    """By row why it is predicted far off."""
    return {
        row: cause["why"]
        for cause in tomllib.loads(DATA.joinpath("causes.toml").read_text())[kind]
        for row in cause["rows"]
    }


def _ensemble(found: Findings) -> str:
    rows = [[f"`{m.name}`", f"{m.value:g}", f"{m.fit.loss / found.best.loss - 1:+.1%}"] for m in found.members]
    return _table(["held", "at", "loss against the best fit"], rows)


def _correlations(best: FittedCalibration) -> str:
    inverse = np.linalg.inv(best.slopes.T @ best.slopes)
    of = inverse / np.sqrt(np.outer(np.diag(inverse), np.diag(inverse)))
    pairs = [
        f"`{FREE[i]}` and `{FREE[j]}` {of[i, j]:+.2f}"
        for i in range(len(FREE))
        for j in range(i)
        if abs(of[i, j]) > CORRELATED
    ]
    return ", ".join(pairs) or "none"


def _groups(name: str, held: Sequence[HeldOut]) -> str:
    rows = [[h.group, *_cells(h.summary), f"{np.mean(h.errors):+.1%}"] for h in held]
    return _table([f"{WORDS[name]} left out", "rows", "mean", "median", "90th percentile", "bias"], rows)


def _others(held: Sequence[HeldOut]) -> str:
    rows = []
    for h in held:
        for row, predicted, error in zip(h.rows, h.predicted_s, h.errors, strict=True):
            plan = row.plan
            how = [plan.api, plan.stack, row.remark, plan.fp8 or "", "compiled" if plan.compile else "eager"]
            rows.append(
                [
                    row.id, row.source, row.model.name, _gpus(row), ", ".join(filter(None, how)),
                    f"{row.step_time_s:.3f}", f"{predicted:.3f}", f"{error:+.0%}",
                ]
            )  # fmt: skip
    return _table(["row", "source", "model", "GPUs", "how", "measured s", "predicted s", "error"], rows)


def _refused(refused: Sequence[Refused]) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in refused:
        reasons.setdefault((row.source, row.why), []).append(row.id)
    return _table(["source", "rows", "why"], [[source, ", ".join(ids), why] for (source, why), ids in reasons.items()])


def _memory_summary(compared: Sequence[PredictedRow]) -> str:
    """Of the rows with LoRA, of the others, and of all."""
    kinds: dict[str, list[float]] = {"LoRA and QLoRA": [], "all others": [], "all": []}
    for c in compared:
        if c.memory_error is not None:
            kinds["LoRA and QLoRA" if c.row.plan.lora_rank else "all others"].append(c.memory_error)
            kinds["all"].append(c.memory_error)
    rows = [
        [kind, *_cells(summary(errors)), str(sum(abs(e) <= OFF_MEMORY for e in errors))]
        for kind, errors in kinds.items()
    ]
    return _table(["peak memory of", "rows", "mean", "median", "90th percentile", f"within {OFF_MEMORY:.0%}"], rows)


def _memory(compared: Sequence[PredictedRow]) -> str:
    why = _causes("memory")
    rows = [
        [
            c.row.id, c.row.source, c.row.model.name, c.row.cluster.gpu.name, c.row.remark or c.row.peak_memory_kind,
            f"{(c.row.peak_memory_bytes or 0) / 2**30:.1f}", f"{c.predicted_peak_memory_bytes / 2**30:.1f}",
            f"{c.memory_error or 0:+.1%}",
            why.get(c.row.id, "not known") if abs(c.memory_error or 0) > OFF_MEMORY else "",
        ]
        for c in compared
        if c.row.peak_memory_bytes is not None
    ]  # fmt: skip
    return _table(
        ["row", "source", "model", "GPU", "kind", "measured GiB", "predicted GiB", "error", "likely cause"], rows
    )


def _numbers(held: Sequence[HeldOut], elsewhere: Sequence[HeldOut]) -> str:
    rows = []
    for stack, of, names, some in (
        ("llm-foundry", "`llm-foundry`", Calibration.meanings(), held),
        ("training-script", "other stacks", OF_STACK, elsewhere),
    ):
        for name in names:
            values = [getattr(h.calibration, name) for h in some]
            spread = f"{min(values):.3g} to {max(values):.3g}" if name in FREE else "not fitted"
            where = of if name in OF_STACK else "all"
            value = f"{getattr(fitted(stack), name):.3g}"
            rows.append([f"`{name}`", where, value, spread, Calibration.meanings()[name]])
    return _table(["number", "stacks", "value", "with a model or source left out", "meaning"], rows)


def _gpus(row: PublishedRun) -> str:
    return f"{row.cluster.gpus} x {row.cluster.gpu.name}"


def _cells(s: Summary) -> list[str]:
    return [str(s.n), *(f"{value:.1%}" for value in (s.mape, s.median_abs_error, s.p90_abs_error))]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
