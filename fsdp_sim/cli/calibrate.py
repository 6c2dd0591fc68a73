"""``fsdp-sim calibrate``: measure this machine, or read a trace of a run, and write what a simulation takes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from fsdp_sim.cli.options import Command, option, print_json, request_options, schema_option
from fsdp_sim.cli.written import check_folder
from fsdp_sim.measure.calibrate import MachineNumbers, calibrate
from fsdp_sim.measure.from_trace import StackNumbers, calibrate_from
from fsdp_sim.measure.train_probe import ProbeShape
from fsdp_sim.requests import request_of_texts, resolve
from fsdp_sim.words import human_latency, human_ms


@click.command(
    "calibrate",
    cls=Command,
    epilog="Exit status: 0 if the file was written, 1 if a rank failed, 2 for what was asked wrongly.",
)
@click.option(
    "-o", "--output", default="cluster.toml", show_default=True, type=click.Path(path_type=Path), help="The file."
)
@click.option("--overwrite", is_flag=True, help="Replace the file if there is one.")
@click.option("--ranks", type=click.IntRange(1, 64), help="Processes or GPUs.  [default: 4, or all GPUs]")
@click.option(
    "--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]), help="What to measure."
)
@click.option("--quick", is_flag=True, help="Fewer sizes, each measured for less time.")
@click.option("--json", "as_json", is_flag=True, help="Print all that was measured as JSON instead of tables.")
@schema_option("calibrate")
@option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="A trace of torch.profiler of a run with FSDP, one per rank; with the model, cluster and plan that ran.",
)
@request_options()
def command(
    output: Path, overwrite: bool, ranks: int | None, device: str, quick: bool, as_json: bool, traces: tuple[Path, ...],
    texts: dict[str, str],
) -> None:  # fmt: skip
    """Time kernels and collectives on this machine and fit the simulator's numbers to them.

    On CPU cores that is gloo between processes, and the forward and backward of a small transformer; where torch
    finds GPUs, NCCL between those of this node. Measure with as many ranks as will train. The file holds rates,
    latencies and the names of the processor or GPU, nothing else of this machine.

    With --trace nothing is measured: the numbers of the stack (how near to their peaks kernels come, what lies between
    kernels and between steps, what links carry) are taken from profiles of a run of yours. Record two steps or more,
    with record_shapes=True.

    \b
    Examples:
      fsdp-sim calibrate --quick
      fsdp-sim calibrate --trace rank0.json.gz --model llama3-8b --gpu H100 --gpus 16 --seq-len 8192 -o node.toml
      fsdp-sim calibrate --ranks 2 --output laptop.toml
      fsdp-sim calibrate --device cuda --json
    """
    if output.exists() and not overwrite:
        raise click.UsageError(f"{output} exists; give another --output, or --overwrite")
    check_folder("--output", str(output))
    if traces:
        _from_traces(traces, texts, output, as_json)
        return
    if texts:
        raise click.UsageError(f"{', '.join(sorted(texts))} describe the run that a trace is of; give --trace too")
    try:
        found = calibrate(ranks, device=device, quick=quick, progress=not as_json)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except RuntimeError as error:  # a rank failed: RanksError, or what one on a GPU raised
        raise click.ClickException(str(error)) from error
    found.cluster.to_file(output)
    if as_json:
        print_json("calibrate", {"file": str(output)} | found.as_dict())
    else:
        _print(found, output)


def _from_traces(traces: Sequence[Path], texts: dict[str, str], output: Path, as_json: bool) -> None:
    job = resolve(request_of_texts(texts))
    found = calibrate_from(traces, job.dimensions, job.cluster, job.plan)
    found.to_file(output)
    if as_json:
        print_json("calibrate", {"file": str(output)} | found.as_dict())
    else:
        _print_stack(found, output)


def _print_stack(found: StackNumbers, output: Path) -> None:
    console = Console(highlight=False)
    values = {name: f"{value:.3g}" for name, value in found.numbers.items()}
    rows = [(name, values.get(name, ""), source) for name, source in found.sources.items()]
    console.print(_table(("number", "value", "from"), rows, words=1), "")
    if found.collectives:
        timed = [
            (t.op, str(t.group_size), f"{t.n_bytes / 2**20:,.1f} MiB", human_latency(t.seconds))
            for t in found.collectives
        ]
        console.print(_table(("collective", "ranks", "message", "measured"), timed, words=1), "")
    for name, why in found.kept.items():
        console.print(f"{name} keeps its default: {why}.", soft_wrap=True)
    for note in found.notes:
        console.print(note, soft_wrap=True)
    console.print(
        f"A step took {human_ms(found.measured_step_s)}; with these numbers it is predicted to take "
        f"{human_ms(found.fitted_step_s)} ({found.fitted_step_s / found.measured_step_s - 1:+.1%}).",
        soft_wrap=True,
    )
    console.print(f"Wrote {output}. Use it: fsdp-sim simulate --cluster {output} ...", soft_wrap=True)


def _print(found: MachineNumbers, output: Path) -> None:
    console = Console(highlight=False)
    cluster = found.cluster
    console.print(f"{cluster.gpu.name}, {cluster.gpus} ranks\n")
    kernels = [
        (k.name, k.dtype, " x ".join(map(str, k.shape)), human_latency(k.seconds), _billions(k.flops / k.seconds),
         _billions(k.bytes / k.seconds))
        for k in found.kernels
    ]  # fmt: skip
    console.print(_table(("kernel", "dtype", "shape", "time", "GFLOP/s", "GB/s"), kernels, words=3), "")
    if found.probes:
        trained = [
            (name, probe.shape, seconds)
            for probe in found.probes
            for name, seconds in (("forward", probe.forward_s), ("backward", probe.backward_s))
        ]
        trained += [("both, sharded", time.shape, time.seconds) for time in found.sharded]
        rows = [
            (name, _size(shape), *_compared(seconds, error))
            for (name, shape, seconds), error in zip(trained, found.probe_errors + found.sharded_errors, strict=True)
        ]
        size = "rows x tokens x width, vocabulary, layers"
        console.print(_table(("training", size, "measured", "fitted", "error"), rows, words=2), "")
    if found.collectives:
        alone = [
            (time.op, str(time.group_size), f"{time.n_bytes / 1024:,.0f} KiB", *_compared(time.seconds, error))
            for time, error in zip(found.collectives, found.errors, strict=True)
        ]
        columns = ("collective", "ranks", "message", "measured", "fitted", "error")
        console.print(_table(columns, alone, words=1), "")
        console.print(_verdict(found))
    console.print(f"Wrote {output}. Use it: fsdp_sim.Cluster.from_file({str(output)!r})")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> Table:
    """A table whose first ``words`` columns are text and whose others are numbers."""
    table = Table(*columns, box=None, header_style="bold")
    for column in table.columns[words:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def _size(shape: ProbeShape) -> str:
    return f"{shape.rows} x {shape.seq_len} x {shape.width}, {shape.vocab}, {shape.layers}"


def _compared(seconds: float, error: float) -> tuple[str, str, str]:
    """Measured, fitted, and how far off."""
    return human_latency(seconds), human_latency((1 + error) * seconds), f"{error:+.0%}"


def _verdict(found: MachineNumbers) -> str:
    link, errors = found.cluster.intra_link, sorted(map(abs, found.errors))
    peak = link.bytes_per_s * (link.fraction or 1.0)
    return (
        f"The link carries {peak / 1e9:.3g} GB/s per rank; a collective of two ranks starts in "
        f"{human_latency((link.base_s or 0.0) + (link.hop_s or 0.0))}. Half of the collectives are fitted to within "
        f"{errors[len(errors) // 2]:.0%}, the worst to within {errors[-1]:.0%}; other work on the machine adds to that."
    )


def _billions(rate: float) -> str:
    return f"{rate / 1e9:,.1f}" if rate else ""
