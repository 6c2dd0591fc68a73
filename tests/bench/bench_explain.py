"""Published runs with one setting of their configuration said wrongly: does `explain_run` find it?

Every row that says its step time and its memory, and each of the settings it says: the configuration is given with
another value of that one, the numbers are the published ones. The simulator makes none of them.

A run counts as explained if it is ``found``: the likeliest account has the true value. ``decided``: the second has it,
and a number to be measured is named that tells the two apart by two standard deviations. ``looked``: the second has
it, and what is named is a look that says outright which is so (such as the names of kernels in a profile). Else it is
``missed``.

``--seeded`` draws 20 of the runs, of each one setting, and multiplies its numbers by noise: the time by 1.5%, what
requests of llm-foundry that were measured twice are off their mean by, the memory by 1%. The draw is that of one seed,
which was fixed before its outcome was known.

    python -m tests.bench.bench_explain [--seeded] [ROW ...]
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fsdp_sim import simulate
from fsdp_sim.explore import Account, Measured, explain_run
from fsdp_sim.spec import Plan
from fsdp_sim.validate.predict import plan_of
from fsdp_sim.validate.published import PublishedRun, read_csv

SEED, DRAWN = 23, 20
NOISE_OF_TIME, NOISE_OF_MEMORY = 0.015, 0.01
Case = tuple[PublishedRun, str, Any]


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


def cases() -> Iterator[Case]:
    """Rows on GPUs whose rates in training are known, and what their configuration is made to say."""
    for row in read_csv():
        known = row.cluster.gpu.name.startswith(("A100", "H100", "H200"))
        if known and row.cluster.gpus > 1 and row.step_time_s and row.peak_memory_bytes:
            for name, value in said_wrongly(plan_of(row)):
                with suppress(ValueError):
                    plan = replace(plan_of(row), **{name: value})
                    _ = simulate(row.model, row.cluster, plan).program  # refuses what no run can have
                    yield row, name, value


def seeded() -> Iterator[Case]:
    """Of `DRAWN` runs one setting each, and their numbers with noise."""
    of_row: dict[str, list[Case]] = {}
    for case in cases():
        of_row.setdefault(case[0].id, []).append(case)
    draw = random.Random(SEED)
    for id in draw.sample(sorted(of_row), DRAWN):
        row, name, value = draw.choice(of_row[id])
        assert row.step_time_s  # as all cases have
        assert row.peak_memory_bytes
        yield replace(
            row, step_time_s=row.step_time_s * draw.lognormvariate(0, NOISE_OF_TIME),
            peak_memory_bytes=row.peak_memory_bytes * draw.lognormvariate(0, NOISE_OF_MEMORY),
        ), name, value  # fmt: skip


def answer(row: PublishedRun, name: str, value: Any) -> tuple[str, str]:
    """``found``, ``decided``, ``looked`` or ``missed``, and the likeliest account."""
    true = plan_of(row)

    def has_it(account: Account) -> bool:
        return bool(getattr(account.run.plan, name) == getattr(true, name))

    found = explain_run(row.model, row.cluster, replace(true, **{name: value}), measured_of(row))
    first, second = found.accounts[:2]
    if has_it(first):
        return "found", first.what
    if not has_it(second) or found.decides is None:
        return "missed", first.what
    return "looked" if found.decides.apart is None else "decided", first.what


def main(asked: list[str]) -> None:
    counts: Counter[str] = Counter()
    names = [one for one in asked if one != "--seeded"]
    for row, name, value in seeded() if "--seeded" in asked else cases():
        if not names or row.id in names:
            verdict, what = answer(row, name, value)
            counts[verdict] += 1
            true = getattr(plan_of(row), name)
            print(
                f"{row.id:5} {row.model.name:14} {name:24} said {value!s:14} true {true!s:11} {verdict:8} {what}",
                flush=True,
            )
    print(f"{counts.total()} runs:", ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
