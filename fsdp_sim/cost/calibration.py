"""`Calibration`: the fitted numbers of the time model, each with its physical meaning.

There are few, and none belongs to a model or to a row of measurements. The defaults are what is known without any run
of training: the attention rates are those of FlashAttention-2 measured alone (Azure AI benchmarking guide; L40S and RTX
PRO 6000 by ``tests/bench/bench_kernels.py``), the bandwidth that of BabelStream. ``calibration.toml`` holds the numbers
fitted to published training runs, which `fitted` reads; `fsdp-sim validate --leave-out` fits them again without a group
of runs and prints them.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from fsdp_sim.spec import toml_or_json
from fsdp_sim.timeline import read_text
from fsdp_sim.words import did_you_mean

FITTED_ARCHS = ("Ampere", "Hopper")  # of the runs that the numbers are fitted to


def _number(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Calibration:
    """How real kernels, collectives and steps fall short of the hardware's figures. `meanings` says what each is."""

    matmul_fraction: float = _number(0.93, "matmul rate in training over what matmuls alone sustain")
    matmul_ramp_k: float = _number(320.0, "a matmul tile's start and end cost as much as this many elements of k")
    attention_fraction_ampere: float = _number(
        0.677, "rate of fused attention, forward, over what matmuls alone sustain, A100"
    )
    attention_fraction_hopper: float = _number(0.463, "the same for H100")
    attention_fraction_ada: float = _number(0.8, "the same for L40S, measured alone: no fitted row has such a GPU")
    attention_fraction_blackwell: float = _number(0.66, "the same for RTX PRO 6000")
    attention_fraction_other: float = _number(
        0.463, "the same, as H100, for architectures of which nothing is measured"
    )
    attention_flops_per_sm: float = _number(
        2.484e12, "the most that FlashAttention-2 does in a multiprocessor, forward: on H100, and no more on newer GPUs"
    )
    attention_backward: float = _number(
        1.3, "time per FLOP of attention's backward over its forward's, flash 2 and SDPA"
    )
    attention_backward_flash1: float = _number(1.95, "the same for the kernels of 2023: FlashAttention 1, triton")
    copy_fraction: float = _number(1.0, "bandwidth of memory-bound kernels over that of a copy alone")
    eager_bytes: float = _number(1.0, "bytes eager pointwise kernels move over those counted: casts, masks, dropout")
    compiled_bytes: float = _number(0.3, "the same for compiled ones, which keep what they can in registers")
    link_fraction: float = _number(1.0, "rate of collectives in training over that measured alone")
    contention: float = _number(
        1.0, "compute slows down by this times the bandwidth and the multiprocessors that a collective takes beside it"
    )
    slowest_per_doubling: float = _number(
        0.009, "compute of the slowest rank takes this much longer for each doubling of the nodes"
    )
    kernel_gap_s: float = _number(
        4e-5, "seconds a kernel takes beside its work: the gap before it, and its first and last blocks of threads"
    )
    step_s: float = _number(0.05, "seconds between two steps: data, clipping, logging; FSDP has no part in them")

    def attention_fraction(self, arch: str) -> float:
        """Of what matmuls sustain, what fused attention reaches on an architecture."""
        own: float | None = getattr(self, f"attention_fraction_{arch.lower()}", None)
        return self.attention_fraction_other if own is None else own

    @staticmethod
    def knows(arch: str) -> bool:
        """Whether published runs show what an architecture's kernels reach in training."""
        return arch in FITTED_ARCHS

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each number means."""
        return {f.name: f.metadata["meaning"] for f in fields(cls)}


@functools.cache
def fitted(stack: str = "") -> Calibration:
    """The numbers for a software stack (`fsdp_sim.spec.Plan.stack`), most of them fitted to published measurements.

    Without a stack: those of every stack that has none of its own.
    """
    numbers = tomllib.loads(files("fsdp_sim.cost").joinpath("calibration.toml").read_text())
    of_stack = numbers.pop("stack")
    return Calibration(**numbers | of_stack.get(stack, {}))


def numbers_of_file(path: str | Path) -> dict[str, float]:
    """The table ``calibration`` of a cluster file, such as ``fsdp-sim calibrate --trace`` writes; empty without one.

    Raises:
        ValueError: a number that a `Calibration` does not have, or that is none.
    """
    numbers = toml_or_json(read_text(path)).get("calibration", {})
    for name, value in numbers.items():
        if name not in Calibration.meanings():
            near = did_you_mean(name, Calibration.meanings())
            raise ValueError(f"{path}: a calibration has no number {name}; {near}")
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise ValueError(f"{path}: {name} is {value!r}; it must be a number >= 0")
    return {name: float(value) for name, value in numbers.items()}
