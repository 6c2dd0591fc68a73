"""A run that goes on from a checkpoint and is not the same run: what was left out?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.folders import new_folder
from fsdp_sim.learn.judges import InFiles, Inputs, OnRanks
from fsdp_sim.learn.on_disk import WIDTH, Training, network

RANKS, STEPS = 2, 6


def stub(batches, killed_at, folder):
    run = Training(batches)
    losses = run.train(killed_at)
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=folder)
    run = Training(batches)  # a new process: everything from the start
    state = {"model": run.model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    run.model.load_state_dict(state["model"])
    return losses + run.train(len(batches) - killed_at)


def case_17(batches, killed_at, folder):
    run, random = Training(batches), f"random.{dist.get_rank()}"
    losses = run.train(killed_at)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state: dict = {"model": model, "optimizer": optimizer, "step": run.step, random: torch.get_rng_state()}
    dcp.save(state, checkpoint_id=folder)
    run = Training(batches)  # a new process: everything from the start
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0, random: torch.get_rng_state()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    run.step = state["step"]
    torch.set_rng_state(state[random])
    return losses + run.train(len(batches) - killed_at)


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    killed_at, folder = int(torch.randint(2, 4, (1,), generator=draw)), new_folder()
    return [(list(torch.randn(STEPS, 4, WIDTH, generator=draw).unbind()), killed_at, folder) for _ in range(RANKS)]


def in_one_process(inputs: Inputs, forgotten: Sequence[str] = ()) -> list[list[float]]:
    """Both ranks' losses, with a restart at which some of what is kept is not."""
    killed_at, losses = inputs[0][1], [[] for _ in inputs]  # type: ignore[var-annotated]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = network()
        first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fresh = [torch.Generator().manual_seed(1 + rank).get_state() for rank in range(len(inputs))]
        optimizer, random, place = torch.optim.AdamW(model.parameters(), lr=0.05), list(fresh), 0
        for step in range(STEPS):
            if step == killed_at:
                if "model" in forgotten:
                    model.load_state_dict(first)
                if "optimizer" in forgotten:
                    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
                random = list(fresh) if "random" in forgotten else random
                for rank in range(len(inputs)):
                    random = [random[rank]] * len(inputs) if f"own {rank}" in forgotten else random
                place = 0 if "step" in forgotten else place
            for rank, (batches, *_) in enumerate(inputs):
                torch.set_rng_state(random[rank])
                loss = model(batches[place]).square().mean()
                (loss / len(inputs)).backward()
                random[rank] = torch.get_rng_state()
                losses[rank].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            place += 1
    return losses


def random_when_killed(inputs: Inputs) -> list[list[torch.Tensor]]:
    """By rank, where its random numbers stood: of what has to be kept the one thing that is the same to a bit in one
    process."""
    states = []
    with torch.random.fork_rng():
        model = network()
        for rank, (batches, killed_at, _) in enumerate(inputs):
            torch.manual_seed(1 + rank)
            for batch in batches[:killed_at]:
                model(batch)
            states.append([torch.get_rng_state()])
    return states


def loads_its_own(batches, killed_at, folder):
    run = Training(batches)
    losses = run.train(killed_at)
    run = Training(batches)
    run.model.load_state_dict(run.model.state_dict())  # what it has already
    return losses + run.train(len(batches) - killed_at)


MISSING = {
    ("optimizer", "step", "random"): "only the weights were kept; training is more than its weights",
    ("model", "optimizer", "step", "random"): "the run began anew: what was saved was never put into the model",
    ("optimizer",): "AdamW's moments and step counts were not kept, so it begins with a jump",
    ("step",): "the place in the data was not kept: the run reads its first batches a second time",
    ("random",): "the state of the random numbers was not kept: dropout begins its sequence again",
    ("own 0",): "under one name the random numbers of one rank were saved for all: give each rank a name of its own",
    ("own 1",): "under one name the random numbers of one rank were saved for all: give each rank a name of its own",
}

EXERCISE = Exercise(
    title="Resume so that nobody can tell",
    kind=ExerciseKind.FAULT,
    difficulty=4,
    importance=5,
    minutes=30,
    contract="A Training (model with dropout, optimizer, batches, step: how many batches it has read) is saved after "
    "killed_at steps, in a folder that all ranks see, and another one goes on. The losses after "
    "that are wrong. Mend it: return the losses of all steps on this rank, equal to those of a run that was never "
    "interrupted.",
    reference=case_17,
    stub=stub,
    why="The next step depends on the weights, the optimizer's moments, which batch comes next and which random "
    "numbers. Leave out the first two and the loss jumps; leave out the others and nobody sees it: data that are read "
    "twice even look like progress. Random numbers differ by rank, so each needs a name of its own; DCP writes what "
    "has the same name on all ranks once.",
    cause="only the weights were saved: no moments, no place in the data, no random state",
    hints=(
        "List everything that the next step's result depends on. What of it does a new Training begin with?",
        "Four things: weights, optimizer, the place in the data, random numbers. The last are another on each rank.",
        "get_state_dict(model, optimizer) gives both dicts, set_state_dict puts them back; add run.step and "
        "torch.get_rng_state(), the latter under a name with the rank in it.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        checks=(InFiles(random_when_killed, "the state of the random numbers"),),
        causes=tuple(
            (partial(in_one_process, forgotten=names), cause) for names, cause in MISSING.items()
        ),
        rel=1e-4,
    ),
    wrong=(
        Wrong(stub, "only the weights were kept"),
        Wrong(loads_its_own, "the run began anew"),
        mutant(
            {
                "set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)":
                "run.model.load_state_dict(model)\n"
                "run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.05)"
            },
            MISSING["optimizer",],
        ),
        mutant({'run.step = state["step"]': ""}, MISSING["step",]),
        mutant({"torch.set_rng_state(state[random])": "torch.manual_seed(1 + dist.get_rank())"}, MISSING["random",]),
        mutant({'f"random.{dist.get_rank()}"': '"random"'}, "under one name the random numbers of one rank"),
    ),
    shortcuts=(
        Wrong(lambda batches, killed_at, folder: [0.0] * STEPS, "expected"),
        Wrong(lambda batches, killed_at, folder: Training(batches).train(killed_at), "values are asked for"),
    ),
    covers=(
        "pitfall 41", "pitfall 42", "coverage 004.63", "coverage 001.19", "coverage 001.32", "coverage 004.61",
    ),
    stub_says="only the weights were kept",
)  # fmt: skip
