"""The parity ladder told: two tables and the sentences below them, for the terminal, the notebook and JSON."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from fsdp_sim.timeline import Op, Phase
from fsdp_sim.viz.table import Table
from fsdp_sim.words import human_bytes
from labs.experiments.ladder.divergence import ORDERS, Divergence, ranges
from labs.experiments.ladder.rungs import RUNGS

if TYPE_CHECKING:
    from labs.experiments.ladder import Count, Ladder, RungComparison, RungResult

SHORT = {Op.ALL_GATHER: "AG", Op.REDUCE_SCATTER: "RS", Op.ALL_REDUCE: "AR", Op.BROADCAST: "BC"}
EQUAL, CLOSE, OFF = "=", "≈", "✗"
LEGEND = (
    f"{EQUAL} every bit equal; {CLOSE} within the tolerance, with the largest relative error; {OFF} diverges. "
    "AG all-gather, RS reduce-scatter, AR all-reduce, BC broadcast: of one step on one rank; bytes are those of whole "
    "messages. Peak live: all tensors of a rank at once, activations too."
)


def numbers(ladder: Ladder) -> Table:
    """What every rung computed, and how it compares. Norms are 2-norms, of the last step."""
    rows = [
        (
            _title(row),
            f"{row.losses[-1]:.4f}",
            f"{row.grad_norms[-1]:.4f}",
            f"{row.parameter_norms[-1]:.4f}",
            _compared(row.against_above),
            _compared(row.against_one),
        )
        for row in ladder.rows
    ]
    header = ("rung", f"loss, step {ladder.setting.steps}", "|gradients|", "|parameters|", "as above", "as one process")
    return Table("The same numbers", header, tuple(rows))


def costs(ladder: Ladder) -> Table:
    """What every rung communicated in a step, and the most bytes it held at once."""
    rows = []
    for row in ladder.rows:
        moved = sum(n_bytes for phase in row.collectives.values() for _, n_bytes in phase.values())
        counted = (_counted(row.collectives[phase]) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
        rows.append((_title(row), *counted, human_bytes(moved) if moved else "–", human_bytes(row.peak_bytes)))
    header = ("rung", "forward", "backward", "optimizer", "bytes", "peak live")
    return Table("At another price", header, tuple(rows))


def _title(row: RungResult) -> str:
    return row.rung.title + (f" [{row.fault}]" if row.fault else "")


def _counted(collectives: dict[Op, Count]) -> str:
    return " + ".join(f"{n} {SHORT.get(op, str(op))}" for op, (n, _) in collectives.items()) or "–"


def _compared(comparison: RungComparison | None) -> str:
    if comparison is None:
        return "–"
    if comparison.beyond is not None:
        return f"{OFF} {comparison.error:.0e}"
    return EQUAL if comparison.bitwise is None else f"{CLOSE} {comparison.error:.0e}"


def first_bits(ladder: Ladder) -> list[str]:
    """Where bits begin to differ, for each pair that is close and not equal; pairs with one answer share a line."""
    titles_of: dict[tuple[str, str], list[str]] = {}
    for row in ladder.rows:
        for c in (row.against_above, row.against_one):
            if c is not None and c.beyond is None and c.bitwise is not None:
                titles_of.setdefault((RUNGS[c.against].title, str(c.bitwise)), []).append(row.rung.title)
    all_others = len(ladder.rows) - 1
    return [
        f"{'all rungs' if len(titles) == all_others > 1 else ', '.join(titles)}, against {against}: {where}."
        for (against, where), titles in titles_of.items()
    ]


def legend(ladder: Ladder) -> str:
    """What the signs in the tables mean."""
    shards = f"in {ladder.setting.ranks // 2} shards" if ladder.setting.ranks > 2 else "whole"
    hybrid = f" HSDP: 2 replicas, each {shards}." if any(row.rung.even_ranks for row in ladder.rows) else ""
    own = [
        f" {row.rung.title}: {row.rung.micro_batches} micro-batches a step."
        for row in ladder.rows
        if row.rung.micro_batches > 1 and not row.rung.twin
    ]
    return LEGEND + hybrid + "".join(own) + f" {tolerance(ladder)}"


def tolerance(ladder: Ladder) -> str:
    """How far is too far, and why."""
    same = f"Tolerance: {ladder.setting.tolerance:g} between rungs that add in the same order"
    if ladder.to_one == ladder.setting.tolerance:
        return f"{same}, and against one process."
    return (
        f"{same}; {ladder.to_one:.0e} against one process, {ORDERS} times what the order of the sums alone makes: one "
        f"process that adds the batch up in {max(ladder.setting.ranks, 2)} parts is {ladder.to_one / ORDERS:.0e} off."
    )


def programs(ladder: Ladder) -> str:
    """Which rungs issue the collectives of their twins."""
    same = [f"{row.rung.title} those of {RUNGS[row.twin].title}" for row in ladder.rows if row.twin and not row.program]
    return f"Same collectives, in the same order: {', '.join(same)}." if same else ""


def not_by_value(ladder: Ladder) -> str:
    """The parameters whose values are not compared, named."""
    if not ladder.noise:
        return "No parameter has a true gradient of zero: all are compared by value."
    named = ", ".join(ranges(name, mask) for name, mask in ladder.noise.items())
    return (
        f"Compared by loss and not by value: {named}. Their true gradient is zero (found in double precision), what is "
        "computed is rounding noise, and Adam makes full steps of it."
    )


def verdict(ladder: Ladder) -> str:
    n, ranks = len(ladder.rows), ladder.setting.ranks
    where = f"on {ranks} rank{'s' * (ranks > 1)}, {ladder.setting.steps} step{'s' * (ladder.setting.steps > 1)}"
    if ladder.divergences:
        wrong = sum(bool(row.divergences) for row in ladder.rows)
        return f"{wrong} of {n} rungs {'diverges' if wrong == 1 else 'diverge'} ({where})."
    return f"All {n} rungs agree ({where})."


def html(ladder: Ladder) -> str:
    """For a notebook. Every text is escaped; the verdict has a word, an edge and a colour of Okabe and Ito."""
    tables = "".join(f"<div>{table(ladder).to_html()}</div>" for table in (numbers, costs))
    colour = "#D55E00" if ladder.divergences else "#009E73"
    lines = "".join(f"<div>{escape(text)}</div>" for text in (verdict(ladder), *ladder.divergences))
    details = "".join(
        f"<p>{escape(text)}</p>" for text in (legend(ladder), programs(ladder), not_by_value(ladder)) if text
    )
    bits = "".join(f"<li>{escape(text)}</li>" for text in first_bits(ladder))
    fold = f"<details><summary>Where the first bit differs</summary><ul>{bits}</ul></details>" if bits else ""
    edge = f'<div style="border-left:5px solid {colour};padding:.4em .8em;margin:.6em 0">{lines}</div>'
    side = f'<div style="display:flex;flex-wrap:wrap;gap:0 3em;overflow-x:auto">{tables}</div>'
    return f'{side}{edge}<div style="max-width:60em">{details}{fold}</div>'


def as_json(ladder: Ladder) -> dict[str, Any]:
    """Everything but the tensors, as plain values."""

    def divergence(found: Divergence | None) -> dict[str, Any] | None:
        if found is None:
            return None
        keys = ("step", "what", "unit", "tensor", "error", "ranks", "rows", "shard_of")
        return {key: getattr(found, key) for key in keys} | {"text": str(found)}

    def comparison(c: RungComparison | None) -> dict[str, Any] | None:
        if c is None:
            return None
        return {"rung": c.against, "error": c.error, "first_bit": divergence(c.bitwise),
                "beyond_tolerance": divergence(c.beyond)}  # fmt: skip

    rows = [
        {
            "rung": row.rung.name,
            "ranks": row.ranks,
            "fault": row.fault or None,
            "loss": row.losses,
            "grad_norm": row.grad_norms,
            "parameter_norm": row.parameter_norms,
            "collectives": {
                str(phase): {str(op): {"count": n, "bytes": n_bytes} for op, (n, n_bytes) in of_phase.items()}
                for phase, of_phase in row.collectives.items()
            },
            "peak_bytes": row.peak_bytes,
            "against_above": comparison(row.against_above),
            "against_one_process": comparison(row.against_one),
            "same_collectives_as": row.twin or None,
            "first_other_collective": divergence(row.program),
            "more_memory": divergence(row.memory),
        }
        for row in ladder.rows
    ]
    setting = {key: getattr(ladder.setting, key) for key in ("ranks", "steps", "batch", "seq_len", "model", "seed",
                                                             "tolerance")}  # fmt: skip
    return {
        "setting": setting,
        "tolerance_to_one_process": ladder.to_one,
        "agree": not ladder.divergences,
        "divergences": ladder.divergences,
        "not_compared_by_value": [ranges(name, mask) for name, mask in ladder.noise.items()],
        "rungs": rows,
    }
