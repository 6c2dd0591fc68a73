"""``fsdp-sim fit``: the largest model, micro-batch or sequence that fits a cluster, and what stands in the way."""

from __future__ import annotations

import sys
from typing import Any

import click

from fsdp_sim.cli.options import (
    NO,
    Command,
    Whole,
    json_option,
    option,
    print_json,
    request_options,
    schema_option,
    working,
)
from fsdp_sim.explore import LARGEST_OF, LargestFit, changes_that_fit, largest
from fsdp_sim.requests import (
    FitResult,
    Request,
    Result,
    category_name,
    on_the_edge,
    request_of_texts,
    resolve,
    result_of,
)
from fsdp_sim.requests.job import UNNAMED
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.words import human_bytes, signed_bytes

STEP = {"seq-len": 128}  # the answer is a multiple of it, unless --multiple-of says otherwise
FIELD = {"micro-batch": "micro_batch", "seq-len": "seq_len", "layers": "layers", "model": "model"}
LABELS = {"model": "model", "layers": "number of layers", "micro-batch": "micro-batch", "seq-len": "sequence length"}


@click.command(cls=Command, epilog="Exit status: 0; 1 if none fits; 2 for what was asked wrongly.")
@option("--largest", "what", type=click.Choice(LARGEST_OF), default="micro-batch", show_default=True, help="Of what.")
@option("--multiple-of", type=Whole(min=1), help="The answer is a multiple of it.  [default: 1; seq-len 128]")
@option("--family", default="", metavar="NAME", help="With --largest model: only names that begin so, such as llama3.")
@request_options()
@json_option
@schema_option("fit")
def fit(what: str, multiple_of: int | None, family: str, texts: dict[str, str], as_json: bool) -> None:
    """Find the largest that fits, say what limits it, and what would make the next larger one fit.

    \b
    Examples:
      fsdp-sim fit --largest micro-batch --model llama3-8b --gpu H100 --gpus 8 --seq-len 4096
      fsdp-sim fit --largest seq-len --model llama3-8b --gpu H100 --gpus 64 --activation-checkpointing full
      fsdp-sim fit --largest model --gpu A100-SXM-80GB --gpus 64 --seq-len 1024 --json
      fsdp-sim fit --largest layers --d-model 4096 --heads 32 --d-ffn 16384 --vocab 50304 --gpu A100 --gpus 8
    """
    field = FIELD[what]
    if field in texts:
        raise ValueError(f"--{field.replace('_', '-')} is what is searched for; leave it out")
    if what == "layers" and not {"model", "model_file", "torchtitan", "config"} & set(texts):
        texts = {**texts, "layers": "1"}  # a model needs a number; the search replaces it
    if what == "model":
        request: Request = request_of_texts({"model": "gpt2-124m", **texts})
    else:
        request = request_of_texts(texts)
    job = resolve(request)
    with working(f"looking for the largest {LABELS[what]} that fits"):
        found = largest(
            what, None if what == "model" else job.dimensions, job.cluster, job.plan,
            multiple_of=multiple_of or STEP.get(what, 1), family=family, **job.options,
        )  # fmt: skip
        shown = found.fits or found.too_large
        result = FitResult(
            largest=what, value=found.value, answer=_answer(found, job.model.name), limit=_limit(found),
            notes=job.notes_of(shown) if shown else job.notes,
            fits=None if found.fits is None else result_of(found.fits, explained=False),
            next=found.next,
            too_large=None if found.too_large is None else _too_large(found, found.too_large, job.options),
        )  # fmt: skip
    if as_json:
        print_json("fit", result)
    else:
        from fsdp_sim.cli.report import print_fit

        print_fit(result)
    if found.value is None:
        click.echo(f"Error: {result.answer}", err=True)
        sys.exit(NO)


def _too_large(found: LargestFit, sim: Simulation, options: dict[str, Any]) -> Result:
    changes = lambda: changes_that_fit(found.model, sim.cluster, found.plan, **options)  # noqa: E731
    return result_of(sim, explained=False, changes=changes)


def _answer(found: LargestFit, name: str) -> str:
    of = found.fits or found.too_large
    assert of is not None
    where = f"{of.cluster.gpus} x {of.cluster.gpu.name}"
    if found.value is None:
        return f"No {LABELS[found.what]} fits {where}, not even {found.next}."
    value = found.value if isinstance(found.value, str) else f"{found.value:,}"
    whose = "" if found.what == "model" or name == UNNAMED else f" of {name}"
    return f"The largest {LABELS[found.what]}{whose} that fits {where} is {value}."


def _limit(found: LargestFit) -> str:
    """What limits it: at the next larger one, which memory, and when."""
    sim = found.too_large
    if sim is None:
        return f"Memory does not limit it: {found.ends}."
    memory = sim.memory
    (category, n_bytes), *_ = memory.peak_by_category.items()
    at = memory.peak_instruction
    when = f" when {at.what} is issued in {at.phase}" if at else ""
    grown = ""
    if found.fits is not None:
        before = found.fits.memory.peak_by_category
        growth = {c: b - before.get(c, 0) for c, b in memory.peak_by_category.items()}
        most = max(growth, key=lambda c: growth[c])
        grown = f"; what grew most is {category_name(most, sim.plan.api)} ({signed_bytes(growth[most])})"
    name = found.next if isinstance(found.next, str) else f"a {LABELS[found.what]} of {found.next:,}"
    if sim.fit is Fit.EDGE:
        return f"What limits it: with {name} there is no margin. {on_the_edge(sim)}{grown}."
    return (
        f"What limits it: with {name} a rank would need {human_bytes(sim.peak_memory_bytes)} of the "
        f"{human_bytes(sim.memory_limit_bytes)} it can use{when}; most of that is "
        f"{category_name(category, sim.plan.api)} "
        f"({human_bytes(n_bytes)}, {n_bytes / sim.peak_memory_bytes:.0%}){grown}."
    )
