"""Published runs with one setting of their configuration said wrongly: does `explain_run` find it?

Every row that says its step time and its memory, and each of the settings it says: the configuration is given with
another value of that one, the numbers are the published ones. ``found``: the true value is in the likeliest account;
``decided``: it is in the second, and a measurement is named that tells the two apart by `APART` standard deviations.

    python -m tests.bench.bench_explain [ROW ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fsdp_sim import simulate
from fsdp_sim.explore import Account, Measured, explain_run
from fsdp_sim.spec import Plan
from fsdp_sim.validate.predict import plan_of
from fsdp_sim.validate.published import PublishedRun, read_csv

APART = 2.0


def said_wrongly(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Settings that a source says, each with a value that it does not have."""
    yield "activation_checkpointing", None if plan.activation_checkpointing else "full"
    yield "attention_impl", "math" if plan.attention_impl != "math" else "sdpa"
    yield "compile", not plan.compile
    if plan.param_dtype == "bf16":
        yield "param_dtype", "fp32"
    if plan.api == "fsdp2":
        yield "wrap", "root"
    if plan.api == "fsdp1" and plan.sharding_strategy == "FULL_SHARD":
        yield "sharding_strategy", "SHARD_GRAD_OP"


def measured_of(row: PublishedRun) -> Measured:
    kind = "reserved_bytes" if row.peak_memory_kind == "reserved" else "peak_bytes"
    return Measured(**{"step_time_s": row.step_time_s, kind: row.peak_memory_bytes})


def cases() -> Iterator[tuple[PublishedRun, str, Any]]:
    """Rows on GPUs whose rates in training are known, and what their configuration is made to say."""
    for row in read_csv():
        known = row.cluster.gpu.name.startswith(("A100", "H100", "H200"))
        if known and row.cluster.gpus > 1 and row.step_time_s and row.peak_memory_bytes:
            for name, value in said_wrongly(plan_of(row)):
                with suppress(ValueError):
                    plan = replace(plan_of(row), **{name: value})
                    _ = simulate(row.model, row.cluster, plan).program  # refuses what no run can have
                    yield row, name, value


def answer(row: PublishedRun, name: str, value: Any) -> tuple[str, str]:
    """``found``, ``decided`` or ``missed``, and the likeliest account."""
    true = plan_of(row)

    def has_it(account: Account) -> bool:
        return bool(getattr(account.run.plan, name) == getattr(true, name))

    found = explain_run(row.model, row.cluster, replace(true, **{name: value}), measured_of(row))
    first, second = found.accounts[:2]
    if has_it(first):
        return "found", first.what
    decides = found.decides
    return "decided" if has_it(second) and decides and decides.apart >= APART else "missed", first.what


def main(names: list[str]) -> None:
    counts = {"found": 0, "decided": 0, "missed": 0}
    for row, name, value in cases():
        if not names or row.id in names:
            verdict, what = answer(row, name, value)
            counts[verdict] += 1
            true = getattr(plan_of(row), name)
            print(
                f"{row.id:5} {row.model.name:14} {name:24} said {value!s:14} true {true!s:11} {verdict:8} {what}",
                flush=True,
            )
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
