"""Draws a fault, runs the training that has it, and judges the one that is handed in."""

from __future__ import annotations

import ast
import os
import platform
import random
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from fsdp_sim.learn import mine, progress
from fsdp_sim.learn.apart import StoppedError, Trial, TrialRun, carry_out
from fsdp_sim.learn.compare import difference
from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.hunts.trainings import TRAININGS, Fault, Training
from fsdp_sim.learn.judges.account import dishonest
from fsdp_sim.learn.predictions import causes
from fsdp_sim.learn.predictions.prediction import Prediction
from fsdp_sim.learn.verdict import Grade, Use, Verdict

MORE_BYTES = 1.02  # times the sound training's peak
REFUSED = "fsdp_sim"  # mended code has no use for it, and the sound training stands in it


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
    """Which of the training's faults is it?"""
    choices = [fault.cause for fault in training(number).faults]
    return causes.asked(f"hunt_{number}", f"hunt {number}", drawn(number).cause, choices, random.Random(number))


def trial_of(of: Training, seed: int) -> Trial:
    return Trial((((seed,),),) * of.ranks, None, True)


@dataclass(frozen=True, repr=False)
class Evidence:
    """A training and what it left behind: its log, its collectives and its memory, or where its ranks stood."""

    title: str
    source: str
    left: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.title, "", self.source, "", "What it left behind:", *self.left])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        left = escape("\n".join(self.left))
        return (
            f"<h4>{escape(self.title)}</h4><pre>{escape(self.source)}</pre><b>What it left behind</b><pre>{left}</pre>"
        )


def hunt(number: int) -> Evidence:
    """Run the training with the learner's fault, and show its source and what it left behind.

    Raises:
        ValueError: there is no such hunt.
    """
    of = training(number)
    faulty = of.faulty(drawn(number))
    source = faulty.source.replace(f"def {of.sound.__name__}(", f"def hunt_{number}(", 1)
    trial = trial_of(of, 0)
    return Evidence(f"Hunt {number}: {of.title}", source, tuple([*left_by(trial, faulty), *plan_of(trial, of)]))


def plan_of(trial: Trial, of: Training) -> list[str]:
    """What was planned: the sound training's memory and first loss, as one knows them from a run before."""
    ran = carry_out(trial, of.sound)
    return [f"planned: {rank_of(ran, rank)}" for rank in range(of.ranks)]


def left_by(trial: Trial, function: Callable[..., Any]) -> list[str]:
    """What a run leaves behind, line by line."""
    try:
        ran = carry_out(trial, function)
    except StoppedError as stopped:
        return [str(stopped)]
    return [f"{'found:':8} {rank_of(ran, rank)}" for rank in range(len(ran.answers))]


def rank_of(ran: TrialRun, rank: int) -> str:
    answer = ran.answers[rank][0]
    log = "; ".join(
        f"{name} {', '.join(f'{float(x):.4f}' for x in answer[name])}" for name in answer if name != "weights"
    )
    counts = ", ".join(f"{n} {op}" for op, n in sorted(collectives(ran)[rank].items()))
    return f"rank {rank}: {log}; {counts}; peak {ran.peak_bytes[rank]:,} bytes"


def collectives(ran: TrialRun) -> list[Counter[str]]:
    """By rank, how many of each."""
    return [Counter(record.op for record in of_rank) for of_rank in ran.records]


def hand_in(number: int, solution: Callable[[int], Any], seed: int | None = None) -> Verdict:
    """Judge a mended training: with a seed that is drawn anew its results, its collectives and its peak of memory are
    those of the sound one.

    Raises:
        ValueError: there is no such hunt. TypeError: it is no function.
    """
    of = training(number)
    if not callable(solution):
        raise TypeError(f"hand_in({number}, {solution!r}): the second argument is your training, without calling it")
    trial = trial_of(of, random.SystemRandom().randrange(2**31) if seed is None else seed)
    wrong = refused(solution, number) or off(of, trial, solution)
    if wrong:
        return Verdict(f"hunt_{number}", Grade.NOT_YET, wrong, Use(of.sound, "the sound"))
    named = progress.estimates().get(f"hunt_{number}")
    message = f"it trains as the sound one does. {causes.told(drawn(number).cause, named)}"
    return Verdict(f"hunt_{number}", Grade.PASS, message, Use(solution, "your"))


def refused(solution: Callable[..., Any], number: int) -> str:
    """Why a training is not run: it takes the sound one from where it stands."""
    if isinstance(solution, Edit):
        return ""
    try:
        tree = ast.parse(mine.source_of(solution, f"hunt_{number}"))
    except ValueError as error:
        return f"{error}."
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    taken = sorted(
        name for name in names if name.partition(".")[0] in (REFUSED, "importlib", "__import__", "eval", "exec")
    )
    return f"it uses {taken[0]}; a training of its own is asked for, with torch alone." if taken else ""


def off(of: Training, trial: Trial, solution: Callable[..., Any]) -> str:
    """In what a training differs from the sound one, or nothing."""
    sound = carry_out(trial, of.sound)
    try:
        ran = carry_out(trial, solution)
    except StoppedError as stopped:
        return str(stopped)
    for rank, (right, found) in enumerate(zip(sound.answers, ran.answers, strict=True)):
        if (amiss := difference(right[0], found[0], rel=1e-4, abs_=1e-5)) is not None:
            return f"rank {rank}: {amiss}."
    if ran.replaced or dishonest(ran):
        return f"{dishonest(ran)}."
    for rank, (right_counts, counts) in enumerate(zip(collectives(sound), collectives(ran), strict=True)):
        for op in sorted(right_counts | counts):
            if right_counts[op] != counts[op]:
                return f"rank {rank}: expected {right_counts[op]} of {op}, found {counts[op]}."
        if ran.peak_bytes[rank] > MORE_BYTES * sound.peak_bytes[rank]:
            return f"rank {rank}: expected a peak of {sound.peak_bytes[rank]:,} bytes, found {ran.peak_bytes[rank]:,}."
    return ""
