"""The learner's own intervals, beside the simulator's."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_sim import Simulation
from fsdp_sim.viz import Table

Interval = tuple[float, float]
ASKED = {"step_s": "step time", "peak_gib": "peak memory", "mfu": "MFU"}


def truths(step: Simulation) -> dict[str, Interval]:
    """What counts as the simulator's answer: its interval of 80% in time and MFU, its one number of memory."""
    low, high = step.step_time_interval_s
    mfu, peak_gib = step.mfu or 0.0, step.peak_memory_bytes / 2**30
    mfus = (mfu * step.step_time_s / high, mfu * step.step_time_s / low)
    return {"step_s": (low, high), "peak_gib": (peak_gib, peak_gib), "mfu": mfus}


def compared(mine: Mapping[str, Interval], step: Simulation) -> Table:
    """Each interval of the learner's against the simulator's: whether they meet, and how wide the learner's is.

    Raises:
        ValueError: a quantity that is not asked for or not answered, or what is no interval of numbers above 0.
    """
    if mine.keys() != ASKED.keys():
        raise ValueError(f"you predict {', '.join(mine) or 'nothing'}; predict each of {', '.join(ASKED)}")
    rows = []
    for name, simulated in truths(step).items():
        low, high = checked(name, mine[name])
        meet = low <= simulated[1] and simulated[0] <= high
        told = "they meet" if meet else "too low" if high < simulated[0] else "too high"
        rows.append((ASKED[name], _text(name, (low, high)), _text(name, simulated), told, f"factor {high / low:.2g}"))
    return Table("your prediction", ("what", "you", "the simulator", "", "your interval"), tuple(rows))


def checked(name: str, interval: Interval) -> Interval:
    """An interval, if it is one.

    Raises:
        ValueError: it is not.
    """
    try:
        low, high = map(float, interval)
        good = 0 < low <= high
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"{name} is {interval!r}; give the lower and the upper end, as in (0.5, 2.0)")
    return low, high


def _text(name: str, interval: Interval) -> str:
    unit = {"step_s": "s", "peak_gib": "GiB", "mfu": ""}[name]
    ends = list(dict.fromkeys(f"{end:.3g}" for end in interval))
    return f"{' to '.join(ends)} {unit}".strip()
