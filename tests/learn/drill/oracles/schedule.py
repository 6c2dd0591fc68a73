"""Answers about the schedule: torch itself is asked. Its program is recorded on small models, and read line by line.

A count is linear in blocks and in micro-batches: two sizes say what each further one adds.
"""

from __future__ import annotations

import functools
from typing import Any

from fsdp_sim.learn.drill.questions.schedule.accumulation import ACCUMULATE
from fsdp_sim.learn.drill.questions.schedule.counts import STRATEGY
from fsdp_sim.learn.drill.questions.schedule.order import BACKWARD, FORWARD, PLACES
from fsdp_sim.schedule import toy
from fsdp_sim.spec import Plan
from tests.schedule.against_torch import torch_lines
from tests.schedule.fsdp1_torch import recorded


@functools.cache
def lines_of(layers: int, **settings: Any) -> tuple[str, ...]:
    """What torch issues in a step of the toy model."""
    asked = recorded if settings.get("api") == "fsdp1" else torch_lines
    return tuple(asked(toy(layers), Plan(**settings), 8, every_op=True))


def between(lines: tuple[str, ...], phase: str) -> list[str]:
    """The lines of one phase."""
    found, inside = [], False
    for line in lines:
        inside = line.endswith(phase) if line.startswith("---") else inside
        found += [line] * inside
    return found


def count(word: str, layers: int, **settings: Any) -> int:
    """How many lines have an operation, for any number of blocks."""
    two, three = (sum(f" {word}(" in line for line in lines_of(n, **settings)) for n in (2, 3))
    return two + (layers - 2) * (three - two)


def accumulated(word: str, layers: int, micro_batches: int, **settings: Any) -> int:
    two, three = (count(word, layers, grad_accum=n, **settings) for n in (2, 3))
    return two + (micro_batches - 2) * (three - two)


def gathers_in_a_step(layers: int, reshard: bool | None, **_: object) -> int:
    return count("ALL_GATHER", layers, reshard_after_forward=reshard)


def collectives_of_a_wrapping(units: int, **_: object) -> int:
    return count("ALL_GATHER", units) + count("REDUCE_SCATTER", units)


@functools.cache
def gathered_again(mode: str, **_: object) -> str:
    backward = between(lines_of(3, **STRATEGY[mode]), "backward")
    gathered = [line.split("ALL_GATHER(")[1].split(")")[0] for line in backward if "ALL_GATHER(" in line]
    blocks = len([unit for unit in gathered if unit != "root"])
    assert blocks in (0, 3)
    return {
        (3, True): "all blocks and the root", (3, False): "all blocks, but not the root",
        (0, True): "the root alone", (0, False): "no unit",
    }[blocks, "root" in gathered]  # fmt: skip


def said_of(line: str, blocks: dict[str, int]) -> str:
    """An operation on a block of interest, in words; empty for all others."""
    words = {"ALL_GATHER": "all-gather", "REDUCE_SCATTER": "reduce-scatter", "FWD": "forward", "BWD": "backward"}
    what = line[28:].replace("(", " ").replace(")", " ").split()
    if not line.startswith("op") or what[0] not in words or what[1] not in blocks:
        return ""
    return f"{words[what[0]]} of block {blocks[what[1]]}"


@functools.cache
def issued_in_forward(mode: str, **_: object) -> tuple[str, ...]:
    forward = between(lines_of(5, **FORWARD[mode]), "forward")
    return tuple(filter(None, (said_of(line, {f"layers.{i}": i + 1 for i in range(3)}) for line in forward)))


@functools.cache
def issued_in_backward(mode: str, layers: int, **_: object) -> tuple[str, ...]:
    """Of five blocks the middle ones, called so that the second of them is just above the middle of the model."""
    middle = layers // 2
    backward = between(lines_of(5, **BACKWARD[mode]), "backward")
    told = [said_of(line, {"layers.3": middle + 1, "layers.2": middle, "layers.1": middle - 1}) for line in backward]
    outside = {"", f"all-gather of block {middle + 1}"}
    outside |= {f"{what} of block {middle - 1}" for what in ("backward", "reduce-scatter")}
    return tuple(one for one in told if one not in outside)


@functools.cache
def life_of_a_block(reshard: bool, hsdp: bool, offload: bool, **_: object) -> tuple[str, ...]:
    settings: dict[str, Any] = {
        "reshard_after_forward": reshard,
        "shard_size": 4 if hsdp else None,
        "cpu_offload": offload,
    }
    recording = lines_of(3, **settings)
    told = []
    for phase in ("forward", "backward"):
        words = {
            "op h2d": f"its shard is copied to the GPU for {phase}", "op ALL_GATHER": f"its all-gather for {phase}",
            "op FWD": "its forward", "op BWD": "its backward", "op REDUCE_SCATTER": "its reduce-scatter",
            "op ALL_REDUCE": "the all-reduce of its gradients", "op d2h": "its gradient is copied to the CPU",
        }  # fmt: skip
        if phase == "backward":
            words["free unsharded"] = "its whole parameters are freed in backward"
        for line in between(recording, phase):
            kind, (what, *rest) = line[:12].strip(), line[28:].replace("(", " ").replace(")", " ").split()
            if rest[:1] == ["layers.1"] and f"{kind} {what}" in words:
                told.append(words[f"{kind} {what}"])
    return tuple(told)


def collectives_of_accumulation(layers: int, micro_batches: int, mode: str, what: str, **_: object) -> int:
    return accumulated(what, layers, micro_batches, **ACCUMULATE[mode])


def all_reduces_of_hsdp(layers: int, micro_batches: int, last: bool, **_: object) -> int:
    return accumulated(
        "ALL_REDUCE", layers, micro_batches, shard_size=4, requires_all_reduce="last" if last else True
    )  # fmt: skip


def gathers_with_checkpointing(layers: int, reshard: bool | None, **_: object) -> int:
    return count("ALL_GATHER", layers, reshard_after_forward=reshard, activation_checkpointing="full")


def units_of_calls(layers: int, group: int, own: tuple[str, ...], **_: object) -> int:
    """Calls one after the other, each taking the parameters that no earlier one has taken."""
    left = {"embedding", "norm", "head", *(f"block {i}" for i in range(layers))}
    calls = [{f"block {i}" for i in range(start, start + group)} for start in range(0, layers, group)]
    units = 0
    for call in (*calls, *({name} for name in own), set(left)):
        units += bool(call & left)
        left -= call
    return units


@functools.cache
def ends_of_backward(mode: str, end: str, layers: int, **_: object) -> str:
    backward = between(lines_of(3, **PLACES[mode]), "backward")
    ops = [line[28:] for line in backward if line[28:].startswith(("ALL_GATHER", "REDUCE_SCATTER", "ALL_REDUCE"))]
    what, unit = ops[0 if end == "first" else -1].split(")")[0].split("(")
    place = {"root": "the root", "layers.0": "block 0", "layers.2": f"block {layers - 1}"}[unit]
    return f"{what.lower().replace('_', '-')} of {place}"
