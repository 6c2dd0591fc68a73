"""``fsdp-sim demo``: the main job in a minute and without a browser."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from fsdp_sim.timeline import Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s, median_step, step_time_s
from labs.overlap import Experiment, hideable_s, same_order, training_only

GOOD_ERROR = 0.10

INTRO = """\
On this machine {ranks} processes train one GPT. Every parameter is cut into {ranks} shards; each rank keeps one and,
layer by layer, all-gathers the whole, computes, frees it again, and reduce-scatters the gradients. A modelled network
makes the transfers slow next to the compute, as on a cluster with slow links. Live memory is what FSDP and the
optimizer hold; activations are not counted.

"Predicted" is the simulator: the same program of operations, replayed with durations from another run in which every
piece ran alone. "Measured" is what happened."""


@click.command()
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(min=2), help="Ranks to train on.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(min=3), help="Training steps.")
@click.option("--batch", default=32, show_default=True, help="Rows per step over all ranks.")
@click.option("--data", help="A text file or a folder of text files.  [default: the source of torch.distributed]")
@click.option("--out", default="demo.html", show_default=True, type=click.Path(dir_okay=False), help="Page to write.")
def demo(ranks: int, steps: int, batch: int, data: str | None, out: str) -> None:
    """Train a GPT on 4 ranks, predict the same step, say how close it came, and draw both.

    \b
    Examples:
      fsdp-sim demo
      fsdp-sim demo --ranks 2 --data my_texts/ --out two.html
    """
    console = Console()
    if not Path(out).absolute().parent.is_dir():
        raise click.ClickException(f"--out {out}: there is no folder {Path(out).absolute().parent}")
    try:
        experiment = Experiment(world_size=ranks, batch=batch, data=data)
        corpus = experiment.corpus
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    console.print(f"Text: {corpus.name}, {len(corpus.train) + len(corpus.val):,} bytes, sha256 {corpus.sha256[:12]}...")
    console.print(
        f"Model: {experiment.model} GPT on {ranks} ranks, {batch} rows of {experiment.seq_len} bytes a step\n"
    )

    pieces = experiment.measure_pieces()
    predicted, measured = {}, {}
    for depth in (None, 1):  # predict before measuring
        predicted[depth] = experiment.predict(pieces, forward_prefetch=depth)
    for depth in (None, 1):
        results = experiment.run(steps, forward_prefetch=depth)
        measured[depth] = training_only(results.timeline)
        if depth is None:
            _print_losses(console, results[0])
    _print_table(console, predicted, measured, hideable_s(pieces))
    _write_page(out, predicted, measured)
    console.print(f"\nWrote [bold]{out}[/]: open it in a browser, it needs no network.")
    console.print("Go on:  [bold]make lab[/]  opens the first notebook;  [bold]make test[/]  runs everything.")
    console.print("With sliders, in a notebook:  [bold]from fsdp_sim import viz; viz.explorer()[/]")


def _print_losses(console: Console, losses: list[float]) -> None:
    shown = [0, *range(4, len(losses), 5)]
    console.print("Loss:  " + "  ".join(f"step {step}: {losses[step]:.3f}" for step in shown) + "\n")


def _print_table(
    console: Console, predicted: dict[int | None, Timeline], measured: dict[int | None, Timeline], promised_s: float
) -> None:
    table = Table("forward prefetch", "predicted", "measured", "error", "exposed: predicted", "measured", "same order")
    times, errors = {}, {}
    for depth in (None, 1):
        predicted_s, predicted_exposed_s = _typical(predicted[depth])
        times[depth], exposed_s = _typical(measured[depth])
        errors[depth] = predicted_s / times[depth] - 1
        table.add_row(
            "off" if depth is None else f"depth {depth}",
            f"{predicted_s * 1e3:.0f} ms",
            f"{times[depth] * 1e3:.0f} ms",
            f"{errors[depth]:+.0%}",
            f"{predicted_exposed_s * 1e3:.0f} ms",
            f"{exposed_s * 1e3:.0f} ms",
            "yes" if same_order(predicted[depth], measured[depth]) else "NO",
        )
    console.print(table)
    gained_s = times[None] - times[1]
    console.print(
        f"Prefetch made the step {gained_s * 1e3:.0f} ms shorter; the arithmetic promises {promised_s * 1e3:.0f} ms "
        "(each layer's all-gather but the first can hide behind the forward before it)."
    )
    if (worst := max(errors.values(), key=abs)) and abs(worst) > GOOD_ERROR:
        cause = "something else was using the cores while it was measured" if worst < 0 else (
            "the pieces were timed while something else was using the cores"
        )  # fmt: skip
        console.print(
            f"[yellow]An error of {worst:+.0%} is larger than {GOOD_ERROR:.0%}: most likely {cause}; try again.[/]"
        )


def _typical(timeline: Timeline) -> tuple[float, float]:
    """Seconds of the median step, and of its exposed communication (mean over the ranks)."""
    step = median_step(timeline)
    one = timeline.select(step=step)
    return step_time_s(one, step), sum(exposed_comm_s(one, rank) for rank in one.ranks) / len(one.ranks)


def _fastest(timeline: Timeline) -> Timeline:
    return timeline.select(step=min(timeline.steps, key=lambda step: step_time_s(timeline, step)))


def _write_page(out: str, predicted: dict[int | None, Timeline], measured: dict[int | None, Timeline]) -> None:
    from fsdp_sim import viz  # plotly, which nothing above needs

    steps = {depth: viz.timeline({"predicted": predicted[depth], "measured": measured[depth]}) for depth in (None, 1)}
    # In the fastest steps other work disturbed the ranks least; between typical ones it hides what prefetch does.
    both = viz.compare(_fastest(measured[None]), _fastest(measured[1]), titles=("prefetch off", "prefetch on"), rank=0)
    held = viz.shard_map(measured[1])
    sections = [
        viz.Section.of(
            steps[None],
            "Prefetch off: every forward all-gather is exposed",
            "On a CPU the thread that would issue the next all-gather is the one that computes, so nothing runs "
            "ahead: each layer waits for its own parameters. In backward the next all-gather is issued before the "
            "layer computes, and hides.",
        ),
        viz.Section.of(
            steps[1],
            "Prefetch of depth 1: the next layer arrives while this one computes",
            "Each layer issues the all-gather of the layer after it before it starts to compute.",
        ),
        viz.Section.of(
            both,
            "Prefetch off and on: the fastest measured step of each on one axis",
            "A line marks the first operation that the two issue in another order. Below is what each layer gains or "
            "loses: by exposed communication, and by computing, which on a shared machine varies from step to step.",
        ),
        viz.Section.of(
            held,
            "Who holds what: the measured step with prefetch, moment by moment",
            "A column is a rank, a row a shard of a layer; the shard that a rank keeps is outlined. Play it, or step "
            "with the slider, and watch how few layers are whole at once.",
        ),
    ]
    viz.save_html(
        out,
        sections,
        title="One training step of Fully Sharded Data Parallel",
        intro=INTRO.format(ranks=measured[1].header.world_size),
    )
