"""What ``fsdp-sim demo`` does: two experiments, what they show in the terminal, and the page."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from fsdp_sim.cli.demo_words import COUNTED, INTRO, KNOWN, PredictionGap, PrefetchGain, order_sentence
from fsdp_sim.packages import in_checkout
from fsdp_sim.timeline import Timeline, exposed_comm_s, median_step, step_time_s
from fsdp_sim.words import human_ms
from labs.experiments.prefetch import WARM_UP_STEPS, Experiment, same_order, training_only
from labs.experiments.sleeping_blocks import SleepTimes

SLEEPING_STEPS = 4
TIMED_STEPS = WARM_UP_STEPS + 3
NAMES = {None: "prefetch off", 1: "prefetch on"}


@dataclass(frozen=True)
class SleepExperiment:
    """Blocks that sleep, with prefetch off and on: the step by arithmetic, and the fastest one on ranks.

    Of steps whose length is known the fastest is the least disturbed: other work can make them longer only.
    """

    lengths: SleepTimes
    predicted: dict[int | None, Timeline]
    measured: dict[int | None, Timeline]

    @property
    def gain(self) -> PrefetchGain:
        off_s, on_s = (seconds_of(self.measured[depth]) for depth in NAMES)
        return PrefetchGain(off_s, on_s, self.lengths.hideable_s)


@dataclass(frozen=True)
class GptExperiment:
    """A GPT trained with prefetch: its step as predicted, and as it was."""

    predicted: Timeline
    measured: Timeline
    losses: list[float]

    @property
    def gap(self) -> PredictionGap:
        steps = list(self.measured.steps)[1:]  # caches are cold in the first one
        return PredictionGap(seconds_of(self.predicted), [step_time_s(self.measured, step) for step in steps])


def show(experiment: Experiment, steps: int, out: str) -> None:
    """Run both experiments, print what they show, and write the page."""
    console = Console()
    known = sleep(console, experiment.world_size)
    trained = train(console, experiment, steps)
    console.print(f"\n[bold]3. A page[/] of all that: {out}", end=" ", highlight=False)
    write_page(out, known, trained)
    console.print("is written. Open it in a browser; it needs no network.", highlight=False)
    console.print(
        in_checkout(
            "Go on:  [bold]make lab[/]  opens the first notebook;  [bold]make test[/]  runs everything.",
            "Go on:  [bold]fsdp-sim course here[/]  writes the notebooks;  [bold]fsdp-sim lab here[/]  opens them.",
        )
    )
    console.print("With sliders, in a notebook:  [bold]from fsdp_sim import viz; viz.explorer()[/]")


def sleep(console: Console, ranks: int) -> SleepExperiment:
    """The first experiment."""
    lengths = SleepTimes(world_size=ranks)
    console.print(
        f"\n[bold]1. What prefetch hides.[/] {ranks} ranks, {lengths.blocks} blocks of known length: forward sleeps "
        f"{human_ms(lengths.forward_s)}, backward {human_ms(lengths.backward_s)}; a collective takes "
        f"{human_ms(lengths.collective_s)}.",
        highlight=False,
    )
    known = SleepExperiment(
        lengths,
        {depth: lengths.predict(forward_prefetch=depth) for depth in NAMES},  # predict before measuring
        {depth: fastest(lengths.run(SLEEPING_STEPS, forward_prefetch=depth)) for depth in NAMES},
    )
    table = Table("forward prefetch", "a step by arithmetic", "on the ranks", "of that exposed")
    for depth in NAMES:
        measured = known.measured[depth]
        row = (seconds_of(known.predicted[depth]), seconds_of(measured), exposed_s(measured))
        table.add_row("off" if depth is None else f"depth {depth}", *map(human_ms, row))
    console.print(table)
    console.print(known.gain.sentence(), highlight=False)
    return known


def train(console: Console, experiment: Experiment, steps: int) -> GptExperiment:
    """The second experiment."""
    corpus = experiment.corpus
    console.print(
        f"\n[bold]2. A GPT that computes.[/] {experiment.model} GPT on {experiment.world_size} ranks, "
        f"{experiment.batch} rows of {experiment.seq_len} bytes a step.\nText: {corpus.name}, "
        f"{len(corpus.train) + len(corpus.val):,} bytes, sha256 {corpus.sha256[:12]}...",
        highlight=False,
    )
    pieces = experiment.measure_pieces(TIMED_STEPS)
    predicted = experiment.predict(pieces, forward_prefetch=1)  # before it is measured
    results = experiment.run(steps, forward_prefetch=1)
    trained = GptExperiment(predicted, training_only(results.timeline), results[0])
    shown = sorted({0, *range(4, steps, 5), steps - 1})
    console.print("Loss:  " + "  ".join(f"step {step}: {trained.losses[step]:.3f}" for step in shown), highlight=False)
    close = trained.gap
    console.print(
        f"A step: predicted {human_ms(close.predicted_s)} from pieces that were timed alone, measured "
        f"{human_ms(close.median_s)} (median).",
        highlight=False,
    )
    for line in (close.noise_sentence(), close.sentence(), order_sentence(same_order(predicted, trained.measured))):
        console.print(line, highlight=False)
    return trained


def seconds_of(timeline: Timeline) -> float:
    """Seconds of the median step."""
    return step_time_s(timeline, median_step(timeline))


def exposed_s(timeline: Timeline) -> float:
    """Exposed communication of the median step, the mean over the ranks."""
    one = timeline.select(step=median_step(timeline))
    return sum(exposed_comm_s(one, rank) for rank in one.ranks) / len(one.ranks)


def fastest(timeline: Timeline) -> Timeline:
    return timeline.select(step=min(timeline.steps, key=lambda step: step_time_s(timeline, step)))


def write_page(out: str, known: SleepExperiment, trained: GptExperiment) -> None:
    from fsdp_sim import viz  # plotly, which nothing above needs

    lengths, gain, close = known.lengths, known.gain, trained.gap
    both = viz.compare(known.measured[None], known.measured[1], titles=tuple(NAMES.values()), rank=0)
    by_design = KNOWN.format(
        blocks=lengths.blocks, ranks=lengths.world_size, forward=human_ms(lengths.forward_s),
        backward=human_ms(lengths.backward_s), collective=human_ms(lengths.collective_s),
    )  # fmt: skip
    step = viz.timeline({"predicted": trained.predicted, "measured": trained.measured})
    order = order_sentence(same_order(trained.predicted, trained.measured))
    sections = [
        viz.Section.of(both, gain.heading(), f"{gain.sentence()}\n\n{by_design}"),
        viz.Section.of(
            step,
            close.heading(),
            f"{close.noise_sentence()} {close.sentence()}\n\n{order} Above is the simulator: the same program, "
            f"replayed with durations from another run, in which every piece ran alone. Below is what "
            f"happened. {COUNTED}",
        ),
        viz.Section.of(
            viz.shard_map(trained.measured),
            "Who holds what, moment by moment",
            "The GPT's step again. A column is a rank, a row a shard of a layer; the shard that a rank keeps is "
            "outlined. Play it, or step with the slider, and watch how few layers are whole at once.",
        ),
    ]
    viz.save_html(
        out,
        sections,
        title="One training step of Fully Sharded Data Parallel",
        intro=INTRO.format(ranks=lengths.world_size),
    )
