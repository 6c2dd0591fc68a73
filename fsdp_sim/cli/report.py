"""Results as a person reads them: a few numbers, memory as bars, sentences, and what would make it fit."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_sim.diagnose import between_steps
from fsdp_sim.explore import Advice, advice, counted, to_fit
from fsdp_sim.requests import (
    ExplainResult,
    Failure,
    FitResult,
    Job,
    Result,
    TunedPlan,
    TuneResult,
    category_name,
    change_in_words,
)
from fsdp_sim.simulation import peak_dtype, workspace_bytes
from fsdp_sim.spec import text_of
from fsdp_sim.words import human_bytes, human_count, human_ms, human_rate

BAR = 32  # characters of the longest bar
FIT_STYLE = {"fits": "", "on the edge": "yellow", "does not fit": "red"}


def _console() -> Console:
    """As wide as the terminal; 120 columns where the output is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def print_result(result: Result, job: Job) -> None:
    """Print one result."""
    console = _console()
    plan, cluster = job.plan, job.cluster
    nodes = f", {result.nodes} nodes with {cluster.inter_link.name}" if result.nodes > 1 else ""
    console.print(
        f"[bold]{result.model}[/] ({human_count(result.parameters)} parameters) on "
        f"[bold]{result.gpus} x {result.gpu}[/]{nodes}"
    )
    accum = f", {plan.grad_accum} micro-batches" if plan.grad_accum > 1 else ""
    dtype = plan.param_dtype or job.model.dtype
    gradients = job.model.dtype if plan.torch == "2.15" else dtype  # `schedule.layout`: what is reduced by default
    fp8 = f", linear layers of blocks in fp8 ({plan.fp8})" if plan.fp8 else ""
    quantised = f" beside weights in {plan.base_quantization}" if plan.base_quantization else ""
    lora = f", LoRA of rank {plan.lora_rank}" if plan.lora_rank else ""
    dtypes = f"{dtype}{quantised}{fp8}{lora}, reductions in {plan.reduce_dtype or gradients}"
    console.print(f"{plan.api}, {plan.micro_batch} x {plan.seq_len:,} tokens per rank{accum}, {dtypes}")
    for note in result.notes:
        console.print(note, style="dim")
    console.print()

    numbers = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    tokens_per_s = result.tokens_per_s_per_gpu * result.gpus
    exposed, peak = result.exposed_comm_s / result.step_time_s, peak_dtype(dtype, plan)
    between = ""
    if result.between_steps_s:
        loop_s = result.between_steps_s - result.checkpoint_s
        what = between_steps(loop_s, result.checkpoint_s, clips=plan.clip_grad_norm)
        between = f", of it {human_ms(result.between_steps_s)} between steps ({what}), the rest operations"
    on_host = (
        [("memory of the CPUs", f"{human_bytes(result.host_memory_bytes)} a rank, offloaded")]
        if result.host_memory_bytes
        else []
    )
    fit = "" if result.fit == "fits" else f": {result.fit}"
    held = []  # a CPU has no caching allocator: malloc gives back what is freed
    if cluster.kind == "gpu":
        workspaces = f", with cuBLAS's workspaces, 2 x {human_bytes(workspace_bytes(cluster))}"
        held = [("held by the allocator", f"{human_bytes(result.reserved_memory_bytes)}{workspaces}{fit}")]
    for name, value in (
        ("step time", f"{human_ms(result.step_time_s)}{between}"),
        ("four times in five", " to ".join(map(human_ms, result.step_time_interval_s))),
        (
            "throughput",
            f"{human_rate(result.tokens_per_s_per_gpu)} tokens/s per GPU, {human_count(tokens_per_s)} tokens/s in all",
        ),
        ("MFU", f"{result.mfu:.1%}{f' of the peak in {peak}' if plan.fp8 or peak != dtype else ''}"),
        ("exposed communication", f"{human_ms(result.exposed_comm_s)} ({exposed:.1%} of the step)"),
        (
            "peak memory",
            f"{human_bytes(result.peak_memory_bytes)} of {human_bytes(result.memory_limit_bytes)} that a process can "
            f"use{fit if not held else ''}",
        ),
        *held,
        *on_host,
    ):
        numbers.add_row(name, Text(value, style="bold"))
    console.print(numbers, "")

    print_memory(console, result)
    if isinstance(result.explanation, list) and result.explanation:
        console.print("Why it takes as long:")
        for sentence in result.explanation:
            console.print(f"  - {sentence}", markup=False, soft_wrap=True)
    for told in advice(result):
        print_advice(console, told)


def print_memory(console: Console, result: Result) -> None:
    """Print the peak by category, as bars."""
    moment = f"{result.peak.phase}, {result.peak.operation}" if result.peak.operation else "always"
    console.print(f"Memory at the peak ({moment}):", markup=False)
    bars = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    bars.add_column()
    bars.add_column(justify="right")
    bars.add_column()
    most = max(result.peak.by_category.values(), default=1)
    for category, n_bytes in result.peak.by_category.items():
        bars.add_row(
            category_name(category, result.plan["api"]), human_bytes(n_bytes), "█" * max(1, round(BAR * n_bytes / most))
        )
    console.print(bars, "")


def print_advice(console: Console, told: Advice) -> None:
    """Print a sentence and the changes that it announces."""
    sentence, changes = told
    console.print(sentence)
    for change in changes:
        console.print(f"  - {change_in_words(change)}", soft_wrap=True, markup=False)


def print_results(results: Sequence[Result | Failure]) -> None:
    """Print several results, a line each."""
    console = _console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", "model", "GPUs"):
        table.add_column(name, overflow="fold")
    for name in ("step time", "tokens/s per GPU", "MFU", "exposed", "peak memory"):
        table.add_column(name, justify="right")
    for number, result in enumerate(results):
        name = str(number) if not isinstance(result.id, str | int) else str(result.id)
        if isinstance(result, Failure):
            continue
        table.add_row(
            name, result.model, f"{result.gpus} x {result.gpu}", human_ms(result.step_time_s),
            human_rate(result.tokens_per_s_per_gpu), f"{result.mfu:.1%}",
            f"{result.exposed_comm_s / result.step_time_s:.1%}",
            Text(human_bytes(result.peak_memory_bytes), style=FIT_STYLE[result.fit]),
        )  # fmt: skip
    console.print(table)
    for number, result in enumerate(results):
        if isinstance(result.error, str):
            which = number if not isinstance(result.id, str | int) else result.id
            console.print(f"{which}: {result.error}", style="red", soft_wrap=True, markup=False)


SHOWN_REASONS = 3  # why plans of a sweep are impossible


def print_front(
    rows: Sequence[Mapping[str, str]], front: Sequence[int], varied: Sequence[str], notes: Sequence[str]
) -> None:
    """Print the Pareto front of a sweep, how many plans there were, and what `notes_of` says of them."""
    console = _console()
    console.print(f"{counted(rows)}.")
    reasons = [row["error"] for row in rows if row["error"]]
    for reason, places in itertools.islice(Counter(reasons).items(), SHOWN_REASONS):
        console.print(f"Impossible{f', {places:,} of them' if places > 1 else ''}: {reason}.")
    if (more := len(set(reasons)) - SHOWN_REASONS) > 0:
        console.print(f"{more:,} more reasons are in the column error (--out FILE).")
    if front:
        _print_plans(console, [rows[place] for place in front], varied)
    for note in notes:
        console.print(note, style="dim")


def _print_plans(console: Console, rows: Sequence[Mapping[str, str]], varied: Sequence[str]) -> None:
    console.print("Pareto front (no plan for the same model beats these both in time per token and in memory):")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in varied:
        table.add_column(name, overflow="fold")
    for name in ("GPU time/token", "tokens/s per GPU", "MFU", "step time", "peak memory"):
        table.add_column(name, justify="right")
    for row in rows:
        rate, peak = float(row["tokens_per_s_per_gpu"]), human_bytes(float(row["peak_memory_bytes"]))
        edge = "" if row["fit"] == "fits" else f", {row['fit']}"
        table.add_row(
            *(row[name] for name in varied), f"{1e6 / rate:,.1f} µs", f"{rate:,.0f}", f"{float(row['mfu']):.1%}",
            human_ms(float(row["step_time_s"])), Text(f"{peak}{edge}", style=FIT_STYLE[row["fit"]]),
        )  # fmt: skip
    console.print(table)


def print_fit(found: FitResult) -> None:
    """Print the largest that fits, what limits it, and what would make the next larger one fit."""
    console = _console()
    console.print(found.answer, style="bold")
    for note in found.notes:
        console.print(note, style="dim")
    console.print(found.limit)
    if isinstance(found.fits, Result):
        console.print(
            f"Step time {human_ms(found.fits.step_time_s)}, "
            f"{human_rate(found.fits.tokens_per_s_per_gpu)} tokens/s per GPU, MFU {found.fits.mfu:.1%}.\n"
        )
        print_memory(console, found.fits)
    if isinstance(found.too_large, Result):
        size = f"{found.next:,}" if isinstance(found.next, int) else found.next
        console.print(f"The next larger one, {size}:" if found.fits else f"Of {size}:")
        print_advice(console, to_fit(found.too_large.would_fit if isinstance(found.too_large.would_fit, list) else ()))


def print_explained(found: ExplainResult) -> None:
    """Print what accounts for a run's numbers, the likeliest first, and what to measure next."""
    console = _console()
    for note in found.notes:
        console.print(note, style="dim")
    said = {"step_time_s": human_ms, "peak_bytes": human_bytes, "reserved_bytes": human_bytes}
    named = {"step_time_s": "a step", "peak_bytes": "allocated at the peak", "reserved_bytes": "reserved at the peak"}
    told = ", ".join(f"{said[name](value)} {named[name]}" for name, value in found.measured.items())
    console.print(f"The log says {told}. {found.simulations} accounts of it were simulated:")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", "likely", "step time", "allocated", "reserved", "off by"):
        table.add_column(name, overflow="fold", justify="left" if not name else "right")
    for number, account in enumerate(found.accounts, 1):
        table.add_row(
            Text(f"{number} {account.what}"), f"{account.likelihood:.0%}", human_ms(account.step_time_s),
            human_bytes(account.peak_memory_bytes), human_bytes(account.reserved_memory_bytes),
            f"{max(account.off.values()):.1f} σ",
        )  # fmt: skip
    console.print(table)
    if not found.is_explained:
        console.print("None of them, alone or in pairs, accounts for the numbers: each is more than 2 σ off.")
    looked_at = found.decides["what"] if found.decides else None
    for number, account in enumerate(found.accounts[:2], 1):
        for check in account.check:
            if check != looked_at:
                console.print(f"To see {number}: {check}", markup=False, soft_wrap=True)
    if found.decides:
        next_ = found.decides
        console.print(
            f"What decides between 1 and 2: {next_['what']}. Under 1: {next_['first']}; under 2: {next_['second']}.",
            markup=False, soft_wrap=True,
        )  # fmt: skip


def print_tuned(found: TuneResult, job: Job) -> None:
    """Print the fastest plan that fits, what each change is worth, and what else is worth choosing from."""
    console = _console()
    console.print(
        f"[bold]{job.model.name}[/] on [bold]{job.cluster.gpus} x {job.cluster.gpu.name}[/]: {found.simulations} plans "
        f"simulated, for {human_bytes(found.memory_limit_bytes)} a rank"
    )
    for note in found.notes:
        console.print(note, style="dim")
    rows = [("as it was", found.start)]
    rows += [("best", found.best)] if found.best else []
    rows += [("needs least memory", found.nearest)] if found.nearest else []
    console.print(_plans("", [(name, plan, "" if plan.fits else plan.fit) for name, plan in rows]))
    if found.step_time_interval_s:
        low, high = map(human_ms, found.step_time_interval_s)
        console.print(f"Four times in five the best plan's step takes between {low} and {high}.")
    if found.worth:
        console.print("\nWhat each change is worth: the best plan simulated without it.")
        priced = [
            (f"{_settings(one.before)}  instead of  {_settings(one.after)}", one.without,
             "" if one.without.fits else one.without.fit)
            for one in found.worth
        ]  # fmt: skip
        console.print(_plans("with", priced))
    if len(found.front) > 1:
        console.print("\nOf what was simulated nothing beats these in both time and memory:")
        console.print(_plans("changes", [(_settings(one.set) or "none", one, "") for one in found.front]))
    if found.best is None:
        print_advice(console, to_fit(found.would_fit))
    else:
        console.print(
            f"\nThe best plan in words, which viz.explorer(state=...) opens: {found.state}",
            soft_wrap=True, markup=False,
        )  # fmt: skip
        console.print("As a program or a configuration: --as " + ", ".join(found.forms), soft_wrap=True)


def _plans(title: str, rows: Sequence[tuple[str, TunedPlan, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(title, overflow="fold")
    for name in ("step time", "tokens/s per GPU", "peak memory"):
        table.add_column(name, justify="right")
    table.add_column("")
    for name, plan, remark in rows:
        numbers = human_ms(plan.step_time_s), human_rate(plan.tokens_per_s_per_gpu), human_bytes(plan.peak_memory_bytes)
        table.add_row(Text(name), *numbers, remark)
    return table


def _settings(fields: Mapping[str, object]) -> str:
    return " ".join(f"{key}={text_of(value)}" for key, value in fields.items())
