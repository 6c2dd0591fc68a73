"""FSDP sends exactly 1.5 times as much as DDP: true or false?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.collectives.elements_sent import TIMES
from fsdp_sim.learn.judges import Inputs, OnRanks
from fsdp_sim.learn.judges.account import sent_bytes
from fsdp_sim.learn.verdict import Finding, Grade
from fsdp_sim.ranks.work import Context
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan

RANKS = 2


def more_than_ddp(model, x, sent):
    ddp = DistributedDataParallel(model())
    fsdp = model()
    for block in list(fsdp)[1:]:
        fully_shard(block)
    fully_shard(fsdp)  # the root: what is left, here the first layer
    elements = [sent(lambda m=m: m(x).sum().backward()) for m in (fsdp, ddp)]
    ratio = elements[0] / elements[1]
    return {"exactly 1.5": ratio == 1.5, "ratio": ratio}


@dataclass(frozen=True)
class Model:
    """Makes a model: a first layer and as many blocks as asked for, all without bias."""

    features: int
    width: int
    blocks: int

    def __call__(self) -> nn.Sequential:
        first = nn.Linear(self.features, self.width, bias=False)
        return nn.Sequential(first, *(nn.Linear(self.width, self.width, bias=False) for _ in range(self.blocks)))


def sent(step: Callable[[], Any]) -> float:
    """Elements that this rank sends in ``step``, were its collectives rings."""
    first = Context.board.issued(Context.rank)
    step()
    return sent_bytes(Context.board.read(Context.rank, first, Context.board.issued(Context.rank))) / 4


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    features, width, blocks = (int(torch.randint(*span, (1,), generator=draw)) for span in ((2, 9), (3, 7), (3, 6)))
    model = Model(32 * features, 32 * width, blocks)
    return [(model, torch.randn(2, model.features, generator=draw), sent) for _ in range(RANKS)]


def elements(model: Model, plan: Plan) -> float:
    """What a rank sends in a step, over the collectives of a built program."""
    root = Unit("root", (Param("weight", (model.width, model.features)),), ("first", ...))
    layers = [Unit(f"layers.{i}", (Param("weight", (model.width, model.width)),)) for i in range(model.blocks)]
    program = build([root, *layers], plan, RANKS)
    return sum(TIMES.get(i.op, 0) * (RANKS - 1) / RANKS * i.bytes / 4 for i in program.ops)


def in_the_program(inputs: Inputs) -> list[dict[str, Any]]:
    model = inputs[0][0]
    ratio = elements(model, Plan()) / elements(model, Plan(api="ddp"))
    return [{"exactly 1.5": ratio == 1.5, "ratio": ratio}] * RANKS


def fixed(ratio: float, holds: bool) -> Callable[[Inputs], list[dict[str, Any]]]:
    return lambda inputs: [{"exactly 1.5": holds, "ratio": ratio}] * RANKS


def upside_down(inputs: Inputs) -> list[dict[str, Any]]:
    return [{"exactly 1.5": False, "ratio": 1 / in_the_program(inputs)[0]["ratio"]}] * RANKS


@dataclass(frozen=True)
class BothRan:
    """The account shows a step of each."""

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        for rank, records in enumerate(ran.records):
            for op, whose in (("all_reduce", "DDP"), ("reduce_scatter", "FSDP")):
                if op not in {record.op for record in records}:
                    return Finding(
                        Grade.NOT_YET, f"rank {rank}: expected a step of {whose}, found no {op}; measure it."
                    )
        return Finding(Grade.OPTIMAL, "")


def by_formula(model, x, sent):
    root, rest = model.features * model.width, model.blocks * model.width**2
    ratio = 1.5 - root / (2 * (root + rest))
    return {"exactly 1.5": False, "ratio": ratio}


EXERCISE = Exercise(
    title="Settle whether FSDP sends exactly 1.5 times as much as DDP",
    kind=ExerciseKind.CLAIM,
    difficulty=3,
    importance=5,
    minutes=25,
    contract='"FSDP communicates exactly 1.5 times as much as DDP." Given model(), which makes an nn.Sequential of a '
    "first layer and some blocks, x, and sent(step), which runs a function and returns the elements that this rank "
    "sent in it (as rings): on 2 ranks, run a step (forward and backward) with DistributedDataParallel, and one with "
    "fully_shard and its defaults, a unit for each block and the root. Return a dict: 'exactly 1.5', True or False, "
    "and 'ratio', FSDP's elements over DDP's.",
    reference=more_than_ddp,
    why="Two gathers and a reduce-scatter against an all-reduce: 3 to 2, but only for what is gathered twice. By "
    "default the root stays whole from forward to backward, so its parameters travel twice, as in DDP: 1.5 less half "
    "of the root's share. With reshard_after_forward=False nothing is gathered again, and the ratio is 1: 'the same as "
    "an all-reduce' is true there, and for ZeRO-1 and 2. In bytes it depends on dtypes too, which may differ between "
    "gathers and reductions.",
    hints=(
        "3 to 2 counts two all-gathers of every parameter. Which parameters are gathered only once in a step?",
        "Make one model for each, shard the blocks and then the model, and give sent a function that runs forward and "
        "backward.",
        "sent(lambda: fsdp(x).sum().backward()) over the same of ddp; then compare with 1.5.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_the_program,
        causes=(
            (fixed(1.5, True), "1.5 is what it is when every unit is freed, the root too; the default keeps the root"),
            (fixed(1.0, False), "1 is what it is when nothing is gathered twice: by reshard_after_forward=False, or in "
            "one unit, the root"),
            (upside_down, "that is DDP's over FSDP's"),
            (lambda inputs: [t | {"exactly 1.5": True} for t in in_the_program(inputs)],
             "the ratio is right, and it is not 1.5"),
        ),
        checks=(BothRan(),),
    ),
    wrong=(
        mutant(
            {
                "fully_shard(block)": "fully_shard(block, reshard_after_forward=True)",
                "fully_shard(fsdp)": "fully_shard(fsdp, reshard_after_forward=True)",
            },
            "1.5 is what it is when every unit is freed",
        ),
        mutant(
            {
                "fully_shard(block)": "fully_shard(block, reshard_after_forward=False)",
                "fully_shard(fsdp)": "fully_shard(fsdp, reshard_after_forward=False)",
            },
            "1 is what it is when nothing is gathered twice",
        ),
        mutant(
            {"elements[0] / elements[1]": "elements[1] / elements[0]"},
            "that is DDP's over FSDP's", name="wrong way round",
        ),
        mutant(
            {"m(x).sum().backward()": "m(x).sum().backward() if m is ddp else m(x)"},
            "ratio: expected", name="forward alone",
        ),
        mutant({"ratio == 1.5": "True"}, "the ratio is right, and it is not 1.5", name="rounds"),
    ),
    shortcuts=(
        Wrong(by_formula, "measure it"),
        Wrong(lambda model, x, sent: {"exactly 1.5": False, "ratio": 1.4}, "expected"),
    ),
    covers=("misconception 13", "misconception 14", "coverage 004.57"),
)  # fmt: skip
