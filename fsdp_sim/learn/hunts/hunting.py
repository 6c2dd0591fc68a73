"""Draws a fault, runs the training that has it, and judges the one that is handed in."""

from __future__ import annotations

import ast
import os
import platform
import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec import structs

from fsdp_sim.learn import inside, mine, progress
from fsdp_sim.learn.apart import StoppedError, TrialRun, carry_out
from fsdp_sim.learn.compare import difference
from fsdp_sim.learn.exercise import AS_GIVEN
from fsdp_sim.learn.hunts.evidence import Evidence, collectives, left_by, trial_of
from fsdp_sim.learn.hunts.on_rank import alone
from fsdp_sim.learn.hunts.training import Fault, Leaves, Training
from fsdp_sim.learn.hunts.trainings import TRAININGS
from fsdp_sim.learn.judges.account import dishonest
from fsdp_sim.learn.predictions import causes
from fsdp_sim.learn.predictions.prediction import Prediction
from fsdp_sim.learn.verdict import Grade, Use, Verdict
from fsdp_sim.timeline import Op

MORE_BYTES = 1.02  # times the sound training's peak
FEWER_BYTES = 0.7  # times it: what holds less was not seen by the meter


def training(number: int) -> Training:
    """The training of a hunt.

    Raises:
        ValueError: there is no such hunt.
    """
    if number not in range(1, len(TRAININGS) + 1):
        raise ValueError(f"there is no hunt {number!r}; there are 1 to {len(TRAININGS)}")
    return TRAININGS[number - 1]


def drawn(number: int) -> Fault:
    """The learner's fault: the same every time, and another one on another learner's machine."""
    seed = os.environ.get("FSDP_SIM_SEED") or str(zlib.crc32(f"{platform.node()} {progress.path()}".encode()))
    return random.Random(f"{seed} {number}").choice(training(number).faults)


def question(number: int) -> Prediction:
    """Which of five causes is it? They are the training's, and where it has fewer, those of the hunts after it."""
    cause, draw = drawn(number).cause, random.Random(number)
    others = [
        fault.cause
        for of in (*TRAININGS[number - 1 :], *TRAININGS[: number - 1])
        for fault in draw.sample(of.faults, len(of.faults))
    ]
    choices = [*dict.fromkeys([cause, *others])][: causes.CHOICES]
    return causes.asked(f"hunt_{number}", f"hunt {number}", cause, choices, draw)


def given(number: int) -> str:
    """The source of the training with the learner's fault, under the name that it is handed in with."""
    return mine.source_of(training(number).faulty(drawn(number)), f"hunt_{number}")


def hunt(number: int) -> Evidence:
    """Run the training with the learner's fault, and show its source and what it left behind.

    Raises:
        ValueError: there is no such hunt.
    """
    of = training(number)
    left, shows = left_by(of, of.faulty(drawn(number)), 0), of.leaves in (Leaves.MEMORY, Leaves.TIMELINE)
    return Evidence(f"Hunt {number}: {of.title}", given(number), tuple(left.lines), left.pictures, left.files, shows)


def hand_in(number: int, solution: Callable[[int], Any], seed: int | None = None) -> Verdict:
    """Judge a mended training, and keep the try in the learner's progress.

    With a seed that is drawn anew its results and its reductions are those of the sound training; where the hunt is
    about memory, its peak as well; where it is about time, it issues no more and hides as many all-gathers. It runs
    where `fsdp_sim.learn`, in which the sound training stands, is not there.

    Raises:
        ValueError: there is no such hunt. TypeError: it is no function.
    """
    of, name = training(number), f"hunt_{number}"
    if not callable(solution):
        raise TypeError(f"hand_in({number}, {solution!r}): the second argument is your training, without calling it")
    wrong = off(of, solution, random.SystemRandom().randrange(2**31) if seed is None else seed)
    named = progress.estimates().get(name)
    unchanged = is_as_given(number, solution)  # to run all cells is no try
    if not wrong:
        grade, use = Grade.PASS, Use(solution, "your")
        message = f"it trains as the sound one does. {causes.told(name, drawn(number).cause, named)}"
    else:
        grade, use, message = Grade.NOT_YET, Use(of.sound, "the sound"), wrong
        if unchanged:
            message = f'{wrong} This is {AS_GIVEN}. What is its cause? Say it with `predict("{name}")`, and mend it.'

    def note(entry: progress.ExerciseEntry) -> progress.ExerciseEntry:
        return structs.replace(entry, tries=entry.tries + (not unchanged), grade=max(entry.grade, int(grade)))

    trouble = progress.change(name, note)
    return Verdict(name, grade, f"{message} {trouble}".strip(), use)


def is_as_given(number: int, solution: Callable[..., Any]) -> bool:
    """Nothing has been mended; comments do not count."""
    try:
        return ast.dump(ast.parse(mine.source_of(solution, f"hunt_{number}"))) == ast.dump(ast.parse(given(number)))
    except ValueError:  # it cannot be read, so it is no cell as it was given
        return False


def off(of: Training, solution: Callable[..., Any], seed: int) -> str:
    """In what a training differs from the sound one, or nothing."""
    trial = trial_of(of, seed)
    sound = carry_out(trial, of.sound)
    try:
        ran = carry_out(trial, alone(solution))
    except (StoppedError, ValueError) as stopped:
        return str(stopped)
    for rank, (right, found) in enumerate(zip(sound.answers, ran.answers, strict=True)):
        if (amiss := difference(right[0], found[0], rel=of.rel, abs_=of.abs_)) is not None:
            return f"rank {rank}: {amiss}."
    if ran.replaced or dishonest(ran):
        return f"{dishonest(ran)}."
    for rank, most_bytes in enumerate(ran.peak_bytes):
        if most_bytes > MORE_BYTES * sound.peak_bytes[rank]:
            return f"rank {rank}: expected a peak of {sound.peak_bytes[rank]:,} bytes, found {most_bytes:,}."
        if most_bytes < FEWER_BYTES * sound.peak_bytes[rank]:
            return (
                f"rank {rank}: found a peak of {most_bytes:,} bytes, where the sound training cannot do with less than "
                f"{sound.peak_bytes[rank]:,}; does something hide its tensors?"
            )
    for rank, (right_counts, counts) in enumerate(zip(collectives(sound), collectives(ran), strict=True)):
        for op in sorted(right_counts | counts):
            more = counts[op] > right_counts[op] and of.leaves in (Leaves.LOGS, Leaves.TIMELINE)
            if more or (op == "reduce_scatter" and counts[op] != right_counts[op]):
                return f"rank {rank}: expected {right_counts[op]} of {op}, found {counts[op]}."
    if of.leaves is Leaves.TIMELINE and computed(ran) != computed(sound):
        return f"expected {computed(sound)} times that a unit computes, by rank, found {computed(ran)}."
    for rank, (least, most) in enumerate(zip(bare_gathers(sound), bare_gathers(ran), strict=True)):
        if most > least and of.leaves is Leaves.TIMELINE:
            return f"rank {rank}: it waits for {most} all-gathers beside which nothing computes, and {least} will do."
    return ""


def computed(ran: TrialRun) -> list[int]:
    """By rank, how often a unit has computed."""
    counts = Counter(event.rank for event in ran.timeline.events if event.op in (Op.FWD, Op.BWD))
    return [counts[rank] for rank in range(len(ran.records))]


def bare_gathers(ran: TrialRun) -> list[int]:
    """By rank, the all-gathers that were waited for before any unit had begun to compute since they were issued."""
    bare: Counter[int] = Counter()
    computes: Counter[int] = Counter()  # units that have begun to compute
    issued: dict[tuple[int, int], int] = {}  # by rank and number of an all-gather, how many had when it was issued
    for event in sorted(ran.timeline.events, key=lambda event: (event.rank, event.seq)):
        if event.op in (Op.FWD, Op.BWD):
            computes[event.rank] += 1
        elif event.op is Op.ALL_GATHER:
            issued[event.rank, event.seq] = computes[event.rank]
        elif event.unit == inside.WAIT:
            for seq in event.waits_on:
                bare[event.rank] += issued.pop((event.rank, seq), -1) == computes[event.rank]
    return [bare[rank] for rank in range(len(ran.records))]
