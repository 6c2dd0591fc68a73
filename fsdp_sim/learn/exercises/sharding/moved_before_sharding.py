"""A model must be on its device before it is sharded: true or false?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks
from fsdp_sim.measure import live_bytes

RANKS, LAYERS = 2, 6


def moved_before_sharding(make):
    def peak_bytes(begins_on):
        with live_bytes() as meter:
            with torch.device(begins_on):
                model = make()
            for layer in model:
                fully_shard(layer)
            if begins_on == "meta":
                model.to_empty(device="cpu")  # memory for the shards, and for nothing else
        return meter.peak_bytes

    return {"on device first": peak_bytes("cpu"), "sharded first": peak_bytes("meta"), "needed": False}


@dataclass(frozen=True)
class Layers:
    """Makes layers without bias."""

    width: int

    def __call__(self) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)))


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return [(Layers(32 * int(torch.randint(4, 9, (1,), generator=draw))),)] * RANKS


def peaks(inputs: Inputs) -> list[dict[str, Any]]:
    """What both ways need."""
    layer_bytes = inputs[0][0].width ** 2 * 4
    whole = LAYERS * layer_bytes + layer_bytes // RANKS  # all of it, and the first shard, made before its whole goes
    return [{"on device first": whole, "sharded first": LAYERS * layer_bytes // RANKS, "needed": False}] * RANKS


def whole_first(inputs: Inputs) -> list[dict[str, Any]]:
    return [found | {"sharded first": LAYERS * inputs[0][0].width ** 2 * 4} for found in peaks(inputs)]


def memory_before_shards(make):
    """On the meta device, but given memory before it is sharded."""
    found = moved_before_sharding(make)
    with live_bytes() as meter:
        with torch.device("meta"):
            model = make()
        model.to_empty(device="cpu")
    return found | {"sharded first": meter.peak_bytes}


EXERCISE = Exercise(
    title="Settle whether a model must be moved before it is sharded",
    kind=ExerciseKind.CLAIM,
    difficulty=3,
    importance=4,
    minutes=20,
    contract='"The model must be on its device before it is sharded." Given make(), which makes some layers: on 2 '
    "ranks, measure the most bytes alive while a model is made and sharded, layer by layer, with fully_shard (1) if it "
    "is made on the device, here the CPU, and (2) if it is made on the meta device, sharded, and then given memory "
    "with to_empty. Use `with live_bytes() as meter:` from fsdp_sim.measure, and meter.peak_bytes. Return a dict: 'on "
    "device first', 'sharded first', and 'needed', whether (1) is the only way.",
    reference=moved_before_sharding,
    why="Both orders work; what differs is memory. Made on the device first, the whole model is there at once, and the "
    "first shard beside it. Made on the meta device it is shapes without memory; fully_shard cuts the shapes, and only "
    "the shards are ever allocated. So 'never move it first' is as wrong as 'always': moving first is for models that "
    "fit. (Made on the CPU for GPUs, the host holds the whole, once per rank: eight ranks of a 160 GB model want 1,280 "
    "GB.)",
    hints=(
        "On the meta device a tensor has a shape and no numbers. What can fully_shard cut there?",
        "to_empty gives memory to what the parameters are at that moment: shards, if the model is sharded by then.",
        "with torch.device(...): model = make(); fully_shard each layer; then, if it is on meta, "
        "to_empty(device='cpu').",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=peaks,
        causes=(
            (whole_first, "memory was given before the model was sharded: to_empty comes after fully_shard"),
            (
                lambda inputs: [found | {"sharded first": 0} for found in peaks(inputs)],
                "the shards have no memory yet: they are on the meta device until to_empty",
            ),
            (
                lambda inputs: [found | {"on device first": found["sharded first"]} for found in peaks(inputs)],
                "these are the shards alone; begin to measure before the model is made",
            ),
            (
                lambda inputs: [found | {"needed": True} for found in peaks(inputs)],
                "both ways have worked, as your numbers show",
            ),
        ),
        rel=0.02,
        abs_=100,
    ),
    wrong=(
        Wrong(memory_before_shards, "to_empty comes after fully_shard"),
        mutant(
            {
                (
                    'if begins_on == "meta":\n'
                    'model.to_empty(device="cpu")  # memory for the shards, and for nothing else'
                ): ""
            },
            "on the meta device until to_empty",
            name="never given memory",
        ),
        mutant(
            {'peak_bytes("cpu")': 'peak_bytes("meta")'},
            "begin to measure before the model is made",
            name="shards alone",
        ),
        mutant({'"needed": False': '"needed": True'}, "both ways have worked", name="other conclusion"),
    ),
    shortcuts=(
        Wrong(lambda make: {"on device first": 640_000, "sharded first": 160_000, "needed": False}, "expected"),
    ),
    covers=("misconception 10", "pitfall 21", "coverage 004.85"),
)
