"""The Pareto picture of a sweep as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_sim.packages import missing


def check_suffix(path: str) -> None:
    """Whether a picture can be written there.

    Raises:
        ValueError: neither .html nor .png, or a package is missing that it takes.
    """
    suffix = Path(path).suffix.lower()
    needed = {".html": ("plotly",), ".png": ("plotly", "kaleido")}
    if suffix not in needed:
        raise ValueError(f"--figure {path}: a picture is .html or .png")
    from importlib.util import find_spec

    for package in needed[suffix]:
        if find_spec(package) is None:
            raise ValueError(missing(package, f"--figure {path}"))


def write_pareto(path: str, rows: Sequence[Mapping[str, str]], varied: Sequence[str]) -> None:
    """Write the picture as .html (which opens without a network) or .png."""
    check_suffix(path)
    from fsdp_sim.viz.charts.pareto_front import pareto

    pareto(rows, varied=varied).save(path)
