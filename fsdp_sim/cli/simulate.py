"""``fsdp-sim simulate``: how long a training step takes, what memory it needs, and why."""

from __future__ import annotations

import sys
from functools import partial

import click

from fsdp_sim.cli.options import (
    NO,
    WRONG,
    Command,
    json_option,
    option,
    print_json,
    request_options,
    schema_option,
    working,
)
from fsdp_sim.cli.written import check_folder, drawn
from fsdp_sim.explore import answer
from fsdp_sim.requests import Failure, Job, Request, Result, read_requests, request_of_texts, resolve, with_job
from fsdp_sim.simulation import Simulation
from fsdp_sim.spec import UnknownModelError
from fsdp_sim.timeline import read_bytes, write_chakra, write_chrome
from fsdp_sim.words import shortened

MOST_BYTES = 10**8  # of requests

EPILOG = (
    "Exit status: 0 if it fits; 1 if it does not (then the changes that would make it fit are listed, each simulated); "
    '2 for what was asked wrongly. With --from, a request that is wrong has {"error": ...} in its place, and the exit '
    "status is 2 if there is one, else 1 if one does not fit."
)


@click.command(cls=Command, epilog=EPILOG)
@request_options()
@option("--from", "source", metavar="FILE", help="A JSON list of requests ('-' reads stdin); results in their order.")
@json_option
@option("--timeline", metavar="FILE", help="Write the step's events as JSON lines.")
@option("--chrome", metavar="FILE", help="Write the step for https://ui.perfetto.dev (.gz compresses).")
@option("--chakra", metavar="PREFIX", help="Write the step as a Chakra execution trace, PREFIX.RANK.et.")
@option("--html", metavar="FILE", help="Write the step as a page that opens without a network.")
@option("--explain/--no-explain", "explained", default=True, help="Say why it takes as long.  [default: --explain]")
@schema_option("simulate")
def simulate(
    texts: dict[str, str],
    source: str | None,
    as_json: bool,
    timeline: str | None,
    chrome: str | None,
    chakra: str | None,
    html: str | None,
    explained: bool,
) -> None:
    """Predict one training step: time, throughput, memory, and why.

    \b
    Examples:
      fsdp-sim simulate --model llama3-8b --gpu H100-SXM-80GB --gpus 64 --micro-batch 1 --seq-len 8192
      fsdp-sim simulate --model gpt2-124m --gpu A100 --gpus 8 --micro-batch 16 --json
      fsdp-sim simulate --layers 16 --d-model 2048 --heads 16 --d-ffn 8192 --vocab 50304 --gpu 4090 --gpus 4
      fsdp-sim simulate --model llama3-70b --gpu H100 --gpus 256 --seq-len 8192 --plan shard_size=64 \\
          --plan activation_checkpointing=full --inter "400 Gb/s RoCE per GPU"
      fsdp-sim simulate --model gpt2-124m --gpu A100 --gpus 8 --chrome step.json.gz
    """
    if source is not None:
        files = {"timeline": timeline, "chrome": chrome, "chakra": chakra, "html": html}
        if other := next((name for name in (*texts, *files) if name in texts or files[name]), ""):
            other = other.replace("_", "-")
            raise ValueError(f"--from reads whole requests; put {other} into them")
        _many(source, as_json, explained)
        return
    try:
        job = resolve(request_of_texts(texts))
    except UnknownModelError as error:
        job = _traced(texts, error)
    with working(f"simulating {job.model.name}"):
        simulation = job.simulate()
        result = answer(job, simulation, explained=explained)
    if timeline:
        check_folder("--timeline", timeline)
        simulation.timeline.to_jsonl(timeline)
    if chrome:
        check_folder("--chrome", chrome)
        write_chrome(simulation.timeline, chrome)
    if chakra:
        check_folder("--chakra", chakra)
        nodes = write_chakra(simulation.timeline, chakra)
    if html:
        check_folder("--html", html)
        _page(html, simulation, result)
    if as_json:
        print_json("simulate", result)
    else:
        from fsdp_sim.cli.report import print_result

        print_result(result, job)
        for what, path in (("events", timeline), ("trace", chrome), ("page", html)):
            if path:
                click.echo(f"Wrote the {what} to {path}.")
        if chakra:
            click.echo(f"Wrote the execution trace to {', '.join(map(str, nodes))}; other ranks do the same.")
    if not result.fits:
        click.echo(f"Error: {result.error}", err=True)
        sys.exit(NO)


def _traced(texts: dict[str, str], error: UnknownModelError) -> Job:
    """A job whose model is traced as transformers has it."""
    path = with_job(texts)["model_file"]
    try:
        from fsdp_sim.measure import model_from_config  # which needs torch

        trace = partial(model_from_config, path, progress=sys.stderr.isatty())
        job = resolve(request_of_texts(texts, without_file=True), trace)
    except ModuleNotFoundError as lacking:
        raise ValueError(f"{error}; {lacking}") from None
    job.notes.append(
        f"The simulator has no dimensions of {job.model.name}: its module was traced as transformers has it, in "
        f"torch's own operators. With kernels of its own, where it has any (flash-linear-attention, mamba-ssm), a step "
        f"takes less time and far less memory. Changes that would help are not looked for."
    )
    return job


def _many(source: str, as_json: bool, explained: bool) -> None:
    if source == "-":
        data = sys.stdin.buffer.read(MOST_BYTES)
    else:
        try:
            data = read_bytes(source, MOST_BYTES)
        except OSError as error:
            raise ValueError(f"--from {source} cannot be read: {error.strerror}") from None
    requests = read_requests(data, source if source != "-" else "stdin")
    with working(f"simulating {len(requests):,} requests"):
        results = [_one(request, explained) for request in requests]
    if as_json:
        print_json("simulate", results)
    else:
        from fsdp_sim.cli.report import print_results

        print_results(results)
    failed = [n for n, result in enumerate(results) if isinstance(result, Failure) or not result.fits]
    if failed:
        click.echo(
            f"Error: {len(failed)} of {len(results)} requests cannot be carried out, the first is {failed[0]}", err=True
        )
        sys.exit(WRONG if any(isinstance(result, Failure) for result in results) else NO)


def _one(request: Request | Failure, explained: bool) -> Result | Failure:
    if isinstance(request, Failure):
        return request
    try:
        job = resolve(request)
        return answer(job, job.simulate(), id=request.id, explained=explained)
    except ValueError as error:
        return Failure(error=shortened(str(error)), id=request.id)


def _page(path: str, simulation: Simulation, result: Result) -> None:
    viz = drawn("--html")
    text = result.explanation if isinstance(result.explanation, list) else []
    title = f"One training step of {result.model} on {result.gpus} x {result.gpu}"
    section = viz.Section.of(viz.timeline({"predicted": simulation.timeline}), "", "\n\n".join(text))
    viz.save_html(path, [section], title=title)
