"""16, 18 or 20 bytes per parameter? All are right, for different recipes."""

from __future__ import annotations

import itertools
import random

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.spec import DTYPE_BYTES, OPTIMIZER_STATES


def state_bytes_per_parameter(weights, gradients, master_copy, fp32_accumulator):
    size = {"fp32": 4, "bf16": 2}
    moments = 2 * 4  # Adam's mean and variance, in fp32
    return size[weights] + size[gradients] + 4 * master_copy + 4 * fp32_accumulator + moments


def added_up(weights: str, gradients: str, master_copy: bool, fp32_accumulator: bool) -> int:
    """The tensors that stay from step to step, each with its dtype."""
    kept = [weights, gradients, *["fp32"] * OPTIMIZER_STATES["adamw"]]
    kept += ["fp32"] * (master_copy + fp32_accumulator)
    return sum(DTYPE_BYTES[dtype] for dtype in kept)


def cases(draw: random.Random) -> list[tuple[str, str, bool, bool]]:
    every = list(itertools.product(("fp32", "bf16"), ("fp32", "bf16"), (False, True), (False, True)))
    return draw.sample(every, len(every))


EXERCISE = Exercise(
    title="Add up the bytes of one parameter",
    kind=ExerciseKind.NUMBER,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="Given the dtypes of weights and gradients ('fp32' or 'bf16'), whether there is a separate fp32 master "
    "copy of the weights, and whether gradients are accumulated in a separate fp32 buffer, return the bytes that "
    "training with AdamW keeps for each parameter from step to step. AdamW's moments are fp32.",
    reference=state_bytes_per_parameter,
    why="Sources disagree because their recipes differ. FSDP: fp32 weights and gradients, 4 + 4 + 8 = 16, its bf16 "
    "copies live only while a unit is whole. ZeRO's paper: bf16 both and a master copy, 2 + 2 + 4 + 8 = 16. With fp32 "
    "gradients 2 + 4 + 4 + 8 = 18. With bf16 gradients and an fp32 buffer beside them, 20.",
    hints=(
        "Count tensors as large as the model that are alive between two steps. What does AdamW keep beside the "
        "weights?",
        "Weights, gradients, two moments, and perhaps a master copy and an accumulator; each has 4 or 2 bytes.",
        "Two of the six terms are always 4, two are 4 or 2, two are 4 or 0.",
    ),
    judge=Numbers(
        truth=added_up,
        source="added up over the tensors that are kept",
        cases=cases,
        where="for {weights} weights, {gradients} gradients, master copy {master_copy}, accumulator {fp32_accumulator}",
        unit="bytes",
    ),
    wrong=(
        mutant({" + moments": ""}, "you forgot the optimizer: AdamW keeps two moments, 8 bytes"),
        mutant({"2 * 4": "4"}, "AdamW keeps two moments, a mean and a variance; one is momentum SGD"),
        mutant(
            {" + 4 * master_copy": ""}, "you forgot the fp32 master copy: bf16 loses updates below 1/512 of a weight"
        ),
        mutant({" + 4 * fp32_accumulator": ""}, "you forgot the fp32 buffer in which gradients are accumulated"),
        mutant({" + size[gradients]": ""}, "you forgot the gradients: as many as there are parameters"),
        mutant(
            {"2 * 4": "2 * size[weights]"},
            "AdamW's moments are fp32 here, whatever the weights are",
            name="moments as the weights",
        ),
        mutant(
            {
                "size[gradients] + 4 * master_copy + 4 * fp32_accumulator": (
                    "(4 if fp32_accumulator else size[gradients]) + 4 * master_copy"
                )
            },
            "the fp32 buffer is kept beside the gradients, not in their place",
            name="buffer in their place",
        ),
        Wrong(lambda *recipe: 16, "16 is FSDP's and the ZeRO paper's recipe, not every one's"),
    ),
    shortcuts=(Wrong(lambda *recipe: type("Any", (), {"__eq__": lambda a, b: True})(), "cannot be sent back"),),
    covers=("coverage 000.10", "coverage 001.21", "misconception 15", "misconception 16"),
)
