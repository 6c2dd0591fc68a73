"""After how much training should a checkpoint be taken?"""

from __future__ import annotations

import math
import random

import numpy as np

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers

DAY_S = 24 * 3600
# Grattafiori et al. 2024 (Llama 3), arXiv 2407.21783, section 3.3.4: unexpected interruptions, days, GPUs
FAILURES, DAYS, ON_GPUS = 419, 54, 16_384
GPUS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
GOLDEN = (math.sqrt(5) - 1) / 2


def how_often_to_save(save_s, gpus):
    fails_every_s = 54 * 24 * 3600 / 419 * 16_384 / gpus  # twice the GPUs fail twice as often
    return (2 * save_s * fails_every_s) ** 0.5  # Young: where the costs of saving and of losing work are equal


def mtbf_s(gpus: int) -> float:
    """Seconds between two interruptions of a job, with the rate per GPU that Llama 3's training counted."""
    return DAYS * DAY_S / FAILURES * ON_GPUS / gpus


def expected(every_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """Goodput when failures are independent of each other: of the checkpoints before one, each keeps ``every_s``.

    Nothing is neglected but failures during a restart.
    """
    saved = 1 / math.expm1((every_s + save_s) / mtbf_s)  # the expected number of whole periods before a failure
    return saved * every_s / (mtbf_s + restart_s)


def played(
    every_s: float, save_s: float, mtbf_s: float, restart_s: float, failures: int = 20_000, seed: int = 0
) -> float:
    """The same by so many random failures: what of the time was trained, saved and not lost again."""
    until_s = np.random.default_rng(seed).exponential(mtbf_s, failures)
    kept_s = np.floor(until_s / (every_s + save_s)) * every_s
    return float(kept_s.sum() / (until_s + restart_s).sum())


def best(save_s: float, gpus: int) -> float:
    """The interval with the largest expected goodput, by golden section; the time of a restart changes nothing."""
    low, high = save_s / 10, mtbf_s(gpus)
    while high - low > 1e-6 * high:
        a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if expected(a, save_s, mtbf_s(gpus), 0.0) < expected(b, save_s, mtbf_s(gpus), 0.0):
            low = a
        else:
            high = b
    return high


def cases(draw: random.Random) -> list[tuple[int, int]]:
    return [(draw.randint(5, 90), gpus) for gpus in draw.sample(GPUS, 4)]


EXERCISE = Exercise(
    title="Find how often a job should save",
    kind=ExerciseKind.NUMBER,
    difficulty=2,
    importance=4,
    minutes=8,
    contract="The training of Llama 3 405B counted 419 unexpected interruptions in 54 days, on 16,384 GPUs. Your job "
    "has the same rate per GPU, and a failure throws away what was trained since the last checkpoint. Given how many "
    "seconds a checkpoint stops training (save_s) and how many GPUs the job has (gpus), return the seconds of training "
    "between two checkpoints with which most of the time counts, to within 10%.",
    reference=how_often_to_save,
    why="Of every T seconds saving costs save_s: save_s / T. Of every MTBF seconds a failure costs half an interval: "
    "T / (2 MTBF). One falls with T, the other grows, and their sum is least where they are equal: at "
    "T = sqrt(2 save_s MTBF) (Young 1974). What a restart takes is lost whatever T is, so it does not matter here. "
    "Four times the GPUs fail four times as often, and should save twice as often.",
    hints=(
        "Saving costs more the more often you do it; a failure costs more the longer ago you did. First: how long does "
        "your job run between two failures?",
        "Write the share of time that is lost with T seconds between two checkpoints: what saving takes of them, and "
        "half of them for each failure. For which T is it least?",
        "save_s / T + T / (2 MTBF) is least where both terms are equal. MTBF: 54 days over 419, times 16,384 over "
        "gpus, in seconds.",
    ),
    judge=Numbers(
        truth=best,
        source="found by trying intervals, with failures at random times",
        cases=cases,
        where="for a save of {save_s} s on {gpus:,} GPUs",
        unit="s",
        rel=0.1,
    ),
    wrong=(
        mutant(
            {"2 * save_s": "save_s"},
            "a failure comes halfway between two checkpoints on average, so it costs T / 2, not T",
            name="loses whole intervals",
        ),
        mutant({" * 16_384 / gpus": ""}, "that is on 16,384 GPUs, whatever yours are", name="for their job"),
        mutant(
            {"16_384 / gpus": "gpus / 16_384"},
            "more GPUs fail more often: their time is divided",
            name="more gpus fail less",
        ),
        mutant(
            {"16_384 / gpus": "16_384"},
            "that is how long a single GPU runs; a job stops when any of its own does",
            name="for one gpu",
        ),
        mutant({"54 * 24 * 3600": "54"}, "that mixes days and seconds", name="in days"),
        mutant({"54 * 24 * 3600": "54 * 24"}, "that mixes hours and seconds", name="in hours"),
        mutant(
            {"(2 * save_s * fails_every_s) ** 0.5": "fails_every_s / 2"},
            "half the time between failures leaves out what a save costs",
            name="halfway to a failure",
        ),
        mutant({" ** 0.5": ""}, "the root is missing", name="without the root"),
    ),
    shortcuts=(Wrong(lambda save_s, gpus: 1800.0, "expected"),),
    covers=("coverage 001.31",),
)
