"""``fsdp-sim tune``: the fastest plan that fits, what each of its changes is worth, and the plan in every form."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
from msgspec import UNSET, UnsetType
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from fsdp_sim.cli.options import (
    INTERRUPTED,
    NO,
    Command,
    KeyValue,
    Whole,
    json_option,
    option,
    print_json,
    request_options,
    schema_option,
    several,
)
from fsdp_sim.explore import LEVERS, Candidate, Tuned
from fsdp_sim.explore import tune as search
from fsdp_sim.forms import FormState, accelerate_yaml, plan_texts, python_code, torch_code, torchtitan_toml
from fsdp_sim.requests import (
    PLAN_FIELDS,
    PricedChange,
    Request,
    TunedPlan,
    TuneResult,
    request_of_texts,
    resolve,
    with_job,
)
from fsdp_sim.simulation import Fit, simulate
from fsdp_sim.spec import Plan, plan_fields
from fsdp_sim.words import human_ms

FORMS: dict[str, Callable[[FormState], str]] = {
    "python": python_code, "torch": torch_code, "torchtitan": torchtitan_toml, "accelerate": accelerate_yaml,
}  # fmt: skip
EPILOG = (
    "Held unless allowed: the tokens of a step over all GPUs, the sequence length, dtypes, fp8, the optimizer, LoRA. "
    "Exit status: 0; 1 if no plan fits; 2 for what was asked wrongly; 130 after Ctrl-C, which shows the best so far."
)


class TuneRequest(Request, forbid_unknown_fields=True, kw_only=True):  # type: ignore[call-arg]
    """A search for the fastest plan: where it begins, and what may vary.

    Attributes:
        vary: fields of the plan with their values as texts; none are those worth trying. By default every lever.
        hold, allow: fields that do not vary; that may though they change what is learnt.
        global_batch: sequences of a step over all GPUs.
        memory_limit_gib: what a rank may need.
    """

    vary: dict[str, list[str]] | UnsetType = UNSET
    hold: list[str] | UnsetType = UNSET
    allow: list[str] | UnsetType = UNSET
    global_batch: int | None = None
    memory_limit_gib: float | None = None


@click.command(cls=Command, epilog=EPILOG)
@option(
    "--vary",
    multiple=True,
    metavar="KEY[=A,B]",
    section="Search",
    type=KeyValue(lambda: LEVERS),
    help="Vary only these, each with these values (a;b where they contain commas) or those worth trying.  "
    "[default: every lever]",
)
@option("--hold", multiple=True, metavar="KEY", section="Search", help="Leave it as it is.")
@option(
    "--allow",
    multiple=True,
    metavar="KEY",
    section="Search",
    help="Vary it though it changes what is learnt, such as param_dtype, fp8 or optimizer.",
)
@option(
    "--global-batch",
    type=Whole(min=1),
    section="Search",
    help="Sequences of a step over all GPUs.  [default: micro-batch x grad-accum x GPUs]",
)
@option(
    "--memory-limit-gib",
    type=click.FloatRange(min=0, min_open=True),
    section="Search",
    help="What a rank may need.  [default: what a process can use of the GPU's memory]",
)
@request_options()
@option("--as", "form", type=click.Choice(list(FORMS)), help="Print the best plan in this form, and nothing else.")
@json_option
@schema_option("tune")
def tune(
    texts: dict[str, str], vary: Sequence[str], hold: Sequence[str], allow: Sequence[str], global_batch: int | None,
    memory_limit_gib: float | None, form: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Find the fastest plan that fits, and say what each of its changes is worth. Every number is simulated.

    \b
    Examples:
      fsdp-sim tune --model llama3-8b --gpu H100 --gpus 8 --seq-len 4096 --global-batch 64
      fsdp-sim tune --model gpt2-1.5b --gpu 4090 --gpus 2 --global-batch 32 --hold compile --as torch
      fsdp-sim tune --model gpt2-124m --gpu A100 --gpus 8 --vary micro_batch \\
          --vary activation_checkpointing=none,full --global-batch 256 --memory-limit-gib 20 --json
      fsdp-sim tune --model gpt2-350m --gpu H100 --gpus 8 --global-batch 64 --allow param_dtype --as torchtitan
    """
    job = resolve(request_of_texts(texts))
    texts = dict(with_job(texts))
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("simulating")

        def report(count: int, best: Candidate | None) -> None:
            so_far = f"the best takes {human_ms(best.step_time_s)}" if best else "none fits yet"
            bar.update(task, description=f"{count} plans simulated, {so_far}")

        found = search(
            job.dimensions, job.cluster, job.plan, vary=_varied(vary, job.plan.api), hold=hold, allow=allow,
            global_batch=global_batch, on_simulated=report,
            memory_limit_bytes=None if memory_limit_gib is None else memory_limit_gib * 2**30, **job.options,
        )  # fmt: skip
    notes = job.notes_of(simulate(job.model, job.cluster, found.start.plan, **job.options))
    if found.sim is not None:  # what is unverified of the plan that was found, such as offload
        known = {*notes, *found.sim.without_effect.values()}
        notes += [note for note in found.sim.notes if note not in known]
    result = _result(found, texts, notes)
    if form and form in result.not_as:
        raise ValueError(result.not_as[form])
    if as_json:
        print_json("tune", result)
    elif form and found.best is not None:
        click.echo(result.forms[form], nl=False)
    else:
        from fsdp_sim.cli.report import print_tuned

        print_tuned(result, job)
    if found.interrupted:
        click.echo(f"Interrupted after {found.simulations} simulations; this is the best so far.", err=True)
        sys.exit(INTERRUPTED)
    if found.best is None:
        click.echo("Error: no plan that was simulated fits", err=True)
        sys.exit(NO)


def _varied(vary: Sequence[str], api: str) -> dict[str, list[Any] | None] | None:
    """What ``--vary`` gives, read; None where it is not given."""
    found: dict[str, list[Any] | None] = {}
    for pair in vary:
        name, equals, values = (part.strip() for part in pair.partition("="))
        if name in found:
            raise ValueError(f"--vary {pair!r}: {name} is given twice; give all its values at once")
        found[name] = None
        if equals:
            if name not in PLAN_FIELDS:
                raise ValueError(f"--vary {pair!r}: a plan has no field {name}")
            found[name] = [plan_fields({"api": api, name: text})[name] for text in several(values)]
    return found or None


def _result(found: Tuned, texts: dict[str, str], notes: list[str]) -> TuneResult:
    def told(one: Candidate) -> TunedPlan:
        start = found.start.plan
        changed = {
            name: getattr(one.plan, name) for name in PLAN_FIELDS if getattr(one.plan, name) != getattr(start, name)
        }
        fit = Fit.FITS if one.fits else Fit.DOES_NOT_FIT
        if not one.fits and one.peak_memory_bytes <= found.memory_limit_bytes:
            fit = simulate(found.model, found.space.cluster, one.plan, **found.options).fit
        return TunedPlan(changed, one.step_time_s, one.tokens_per_s_per_gpu, one.peak_memory_bytes, one.fits, str(fit))

    forms, not_as = {}, {}
    state = ""
    if found.best is not None:
        words = {name: text for name, text in texts.items() if name not in Plan.__dataclass_fields__}
        best = FormState(words | plan_texts(found.best.plan, found.space.cluster))
        state = best.line
        for name, write in FORMS.items():
            try:
                forms[name] = write(best)
            except ValueError as error:
                not_as[name] = str(error)
    return TuneResult(
        start=told(found.start), best=None if found.best is None else told(found.best),
        step_time_interval_s=list(found.sim.step_time_interval_s) if found.sim else [],
        worth=[PricedChange(one.before, one.after, told(one.without)) for one in found.worth],
        front=[told(one) for one in found.front],
        nearest=None if found.nearest is None else told(found.nearest), would_fit=list(found.would_fit),
        simulations=found.simulations, memory_limit_bytes=int(found.memory_limit_bytes), interrupted=found.interrupted,
        state=state, forms=forms, not_as=not_as, notes=notes,
    )  # fmt: skip
