"""``fsdp-sim explain``: from what a log says of a run, which settings that it does not say fit best."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click
from msgspec import UNSET, UnsetType
from rich.console import Console

from fsdp_sim.cli.options import NO, Command, json_option, option, print_json, request_options, schema_option
from fsdp_sim.explore import Account, Measured, RunExplained, explain_run
from fsdp_sim.requests import ExplainResult, Request, RunAccount, request_of_texts, resolve, with_job

SHOWN = 6
EPILOG = (
    "Exit status: 0; 1 if nothing that was tried accounts for the numbers; 2 for what was asked wrongly. "
    "Every account is a simulation; how sure it is of a step time was measured (ACCURACY.md)."
)


class ExplainRequest(Request, forbid_unknown_fields=True, kw_only=True):  # type: ignore[call-arg]
    """What a log says of a run with this configuration.

    Attributes:
        tokens_per_s: of all GPUs. tokens_per_s_per_gpu, step_time_s: the same in other words; give one of the three.
        peak_gib, reserved_gib: what torch allocated and reserved at most.
        known: what is known to be as the configuration says: fields of the plan, or dtype, wire, compute.
    """

    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    step_time_s: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    known: list[str] | UnsetType = UNSET


def _number(name: str, help_: str) -> Callable[[Any], Any]:
    return option(name, type=click.FloatRange(min=0, min_open=True), section="The log", help=help_)


@click.command(cls=Command, epilog=EPILOG)
@_number("--tokens-per-s", "Of all GPUs together.")
@_number("--tokens-per-s-per-gpu", "Of one GPU.")
@_number("--step-time-s", "Seconds of an optimizer step, all its micro-batches.")
@_number("--peak-gib", "torch.cuda.max_memory_allocated() / 2**30")
@_number("--reserved-gib", "torch.cuda.max_memory_reserved() / 2**30; torchtitan logs this one.")
@option(
    "--known", multiple=True, metavar="NAME", section="The log",
    help="It is as the configuration says: a field of the plan, dtype (of the weights), wire, or compute.",
)  # fmt: skip
@request_options()
@json_option
@schema_option("explain")
def explain(
    texts: dict[str, str], tokens_per_s: float | None, tokens_per_s_per_gpu: float | None, step_time_s: float | None,
    peak_gib: float | None, reserved_gib: float | None, known: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Say what a run does unlike its configuration, from its step time and its memory. Each guess is simulated.

    \b
    Examples:
      fsdp-sim explain --model llama3-8b --gpu H100 --gpus 8 --seq-len 8192 --plan param_dtype=bf16 \\
          --plan activation_checkpointing=full --tokens-per-s-per-gpu 7600 --peak-gib 60
      fsdp-sim explain --model llama3-8b --gpu H100 --gpus 64 --tokens-per-s 215000 --reserved-gib 24
      fsdp-sim explain --model gpt2-1.5b --gpu A100 --gpus 16 --step-time-s 0.3 --known dtype --json
    """
    job = resolve(request_of_texts(dict(with_job(texts))))
    tokens = job.plan.micro_batch * job.plan.seq_len * job.plan.grad_accum
    said = {
        "--step-time-s": step_time_s,
        "--tokens-per-s-per-gpu": tokens_per_s_per_gpu and tokens / tokens_per_s_per_gpu,
        "--tokens-per-s": tokens_per_s and tokens * job.cluster.gpus / tokens_per_s,
    }
    given = [name for name, value in said.items() if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} say the same in other words; give one")
    measured = Measured(
        next((value for value in said.values() if value), None),
        None if peak_gib is None else peak_gib * 2**30, None if reserved_gib is None else reserved_gib * 2**30,
    )  # fmt: skip
    with Console(stderr=True).status("simulating what could differ"):
        found = explain_run(job.dimensions, job.cluster, job.plan, measured, known, **job.options)
    result = _result(found, job.notes)
    if as_json:
        print_json("explain", result)
    else:
        from fsdp_sim.cli.report import print_explained

        print_explained(result)
    if not result.is_explained:
        sys.exit(NO)


def _result(found: RunExplained, notes: list[str]) -> ExplainResult:
    def told(account: Account) -> RunAccount:
        return RunAccount(
            what=account.what, names=[suspect.name for suspect in account.by],
            check=[suspect.check for suspect in account.by],
            likelihood=account.likelihood, step_time_s=account.sim.step_time_s,
            peak_memory_bytes=account.sim.peak_memory_bytes, reserved_memory_bytes=account.sim.memory.reserved_bytes,
            off=account.off,
        )  # fmt: skip

    shown = [a for number, a in enumerate(found.accounts) if number < SHOWN or not a.by]
    next_ = found.decides
    return ExplainResult(
        measured={name: value for name, value in found.measured.__dict__.items() if value is not None},
        is_explained=found.is_explained, accounts=[told(account) for account in shown], simulations=len(found.accounts),
        decides=None if next_ is None else next_._asdict(), notes=notes,
    )  # fmt: skip
