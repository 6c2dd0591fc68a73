"""Find a link's latency and bandwidth in measured times."""

from __future__ import annotations

import random

import numpy as np

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.measure.fit import least_squares_above_zero

NOISE = 0.015
SIZES = [2.0**k for k in range(-3, 11)]  # times the message that takes as long to send as the latency

Times = list[tuple[int, float]]


def fit_alpha_beta(times):
    n_bytes, seconds = np.array(times).T
    rows = np.stack([np.ones_like(n_bytes), n_bytes], axis=1)
    relative = rows / seconds[:, None]  # each row says: this sum, over what was measured, is 1
    alpha_s, beta_s_per_byte = np.linalg.lstsq(relative, np.ones_like(seconds), rcond=None)[0]
    return {"latency_s": float(alpha_s), "bytes_per_s": float(1 / beta_s_per_byte)}


def fitted(times: Times) -> dict[str, float]:
    """As `fsdp_sim.measure` fits a link."""
    n_bytes, seconds = np.array(times).T
    rows = np.stack([np.ones_like(n_bytes), n_bytes], axis=1)
    alpha_s, beta_s_per_byte = least_squares_above_zero(rows, seconds, first_needed=0)
    return {"latency_s": float(alpha_s), "bytes_per_s": float(1 / beta_s_per_byte)}


def drawn_times(draw: random.Random) -> Times:
    """Of a link that is drawn, each off by a percent or so, as measured times are."""
    latency_s, bytes_per_s = 10 ** draw.uniform(-5, -3), 10 ** draw.uniform(8, 10.5)
    sizes = [max(64, round(size * latency_s * bytes_per_s)) for size in SIZES for _ in range(2)]
    return [(n, (latency_s + n / bytes_per_s) * (1 + draw.gauss(0, NOISE))) for n in sizes]


def cases(draw: random.Random) -> list[tuple[Times]]:
    return [(drawn_times(draw),) for _ in range(4)]


def of_seconds(times: Times) -> dict[str, float]:
    n_bytes, seconds = np.array(times).T
    beta, alpha = np.polyfit(n_bytes, seconds, 1)
    return {"latency_s": float(alpha), "bytes_per_s": float(1 / beta)}


def ends_alone(times: Times) -> dict[str, float]:
    return {"latency_s": min(times)[1], "bytes_per_s": max(times)[0] / max(times)[1]}


def mean_rate(times: Times) -> dict[str, float]:
    return {"latency_s": 0.0, "bytes_per_s": sum(n for n, _ in times) / sum(s for _, s in times)}


EXERCISE = Exercise(
    title="Fit a link's latency and bandwidth",
    kind=ExerciseKind.NUMBER,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="Given measured times as pairs (bytes sent, seconds), each off by a percent or two, return a dict: "
    "latency_s and bytes_per_s of the link, so that seconds = latency_s + bytes / bytes_per_s, as near as can be to "
    "every measurement, relative to it. An answer may be off by 5%.",
    reference=fit_alpha_beta,
    why="A straight line through times that span a factor of a thousand: ordinary least squares counts seconds, so the "
    "largest message decides, and an error of 1% there is ten latencies. Divide each row by its measured time, and "
    "every measurement counts alike. The message at which the two parts are equal, latency times bandwidth, is what to "
    "remember: a collective of much less is all latency, one of much more is all bandwidth.",
    hints=(
        "Two unknowns, many equations: a + b n = t for each measurement. What makes one equation count more than "
        "another?",
        "Least squares makes the sum of squared errors small, in seconds. You want the errors relative to t.",
        "Divide both sides of each equation by its t, so that the right sides are all 1, then np.linalg.lstsq.",
    ),
    judge=Numbers(
        truth=fitted, source="fitted by least squares of the relative error", cases=cases, rel=0.05, where="", unit=""
    ),
    wrong=(
        Wrong(
            of_seconds,
            "least squares of seconds hears the largest messages only, and the latency drowns; take relative errors",
        ),
        Wrong(ends_alone, "the smallest message has bytes to send too, and the largest waits for the latency as well"),
        mutant(
            {"1 / beta_s_per_byte": "beta_s_per_byte"},
            "that is the seconds per byte; asked for are bytes per second",
            name="upside down",
        ),
        mutant(
            {"1 / beta_s_per_byte": "8 / beta_s_per_byte"},
            "that is in bits per second; asked for are bytes",
            name="in bits",
        ),
        Wrong(mean_rate, "bytes over time hides the latency in the bandwidth; find both"),
    ),
    shortcuts=(Wrong(lambda times: {"latency_s": 1e-4, "bytes_per_s": 1e9}, "expected"),),
    covers=("coverage 001.25",),
)
