"""Different layers on different GPUs: true or false?"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Claim
from fsdp_sim.schedule import toy_program
from fsdp_sim.timeline import Op, Phase

LAYERS, RANKS = 6, 3


def who_computes_what():
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with CommDebugMode() as counted:
        model(torch.randn(2, 96))
    gathered = sum(
        n for op, n in counted.get_comm_counts().items() if "all_gather" in str(op) or "allgather" in str(op)
    )
    return gathered < 6, gathered


def computed() -> int:
    """Layers in the forward of one rank, in the program that the simulator builds."""
    program = toy_program(LAYERS, world_size=RANKS)
    return sum(i.op is Op.FWD and i.phase is Phase.FORWARD and i.unit.startswith("layers.") for i in program.ops)


EXERCISE = Exercise(
    title="Settle who computes which layer",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=5,
    minutes=15,
    contract='"With FSDP each GPU computes only the layers it holds, and passes activations on to the next GPU." On 3 '
    "ranks, make each of 6 layers a unit of torch's fully_shard and then shard the model. A layer is gathered where it "
    "is computed: run one forward (no backward) and count this rank's all-gathers. Return (True or False, the number).",
    reference=who_computes_what,
    why="Every rank gathers, and computes, all 6 layers, each on its own rows of the batch; the account shows "
    "all-gathers and nothing that is sent on to a next rank. Layers on different GPUs are pipeline parallelism. What "
    "FSDP divides is where numbers are kept between their uses: a third of each tensor, on each of 3 ranks.",
    hints=(
        "What would you see travel if a layer lived on one rank only: weights, or activations?",
        "A rank that computes a layer needs its whole weight, so it gathers it. Count with CommDebugMode.",
        "fully_shard each layer, then the model; one forward within CommDebugMode; compare the count with 6.",
    ),
    judge=Claim(
        statement="With FSDP each GPU computes only the layers it holds",
        measured="layers gathered and computed on this rank in one forward",
        truth=computed,
        holds=lambda layers: layers < LAYERS,
        ranks=RANKS,
        counts="all_gather",
        beside=(("reduce_scatter", 0),),
        causes=(
            (LAYERS // RANKS, "so it would be if layers were shared out, which is pipeline parallelism"),
            (1, "that is one unit: the model alone was sharded, so all layers came in one all-gather"),
            (2 * LAYERS, "you ran a backward too, which gathers every layer again; count the forward alone"),
        ),
    ),
    wrong=(
        mutant(
            {"gathered < 6, gathered": "True, LAYERS // RANKS"},
            "if layers were shared out, which is pipeline parallelism",
            name="shared out",
        ),
        mutant({"for layer in model:\nfully_shard(layer)": ""}, "the model alone was sharded", name="root alone"),
        mutant(
            {"model(torch.randn(2, 96))": "model(torch.randn(2, 96)).sum().backward()"},
            "you ran a backward too",
            name="with backward",
        ),
        mutant({"gathered < 6": "gathered == 6"}, "the number is right, 6 layers gathered", name="other conclusion"),
    ),
    shortcuts=(Wrong(lambda: (False, 6), "measure it"),),
    covers=("misconception 1", "coverage 000.5", "coverage 000.6", "coverage 004.10", "coverage 004.28"),
)
