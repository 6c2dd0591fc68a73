"""A loss that depends on the number of ranks: the padding takes part in it."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, WIDTH, TOKENS = 4, 64, 32


stub = Edit({"head[:vocabulary].T, target)  # what is beyond is no word": "head.T, target)"})


def case_03(own_rows, vocabulary, x, target):
    ranks = dist.get_world_size()
    most = math.ceil(vocabulary / ranks)
    padded = F.pad(own_rows, (0, 0, 0, most - len(own_rows)))
    head = torch.empty(ranks * most, x.shape[1])
    dist.all_gather_into_tensor(head, padded)
    return F.cross_entropy(x @ head[:vocabulary].T, target)  # what is beyond is no word


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    vocabulary = RANKS * int(torch.randint(800, 1000, (1,), generator=draw)) + 1
    rows = torch.randn(vocabulary, WIDTH, generator=draw).chunk(RANKS)
    return [
        (
            rows[rank],
            vocabulary,
            torch.randn(TOKENS, WIDTH, generator=draw) / WIDTH,
            torch.randint(vocabulary, (TOKENS,), generator=draw),
        )
        for rank in range(RANKS)
    ]


def losses(inputs: Inputs, before: int = 0, after: int = 0, cut: int = 0) -> list[torch.Tensor]:
    """Over the head with rows of zeros before or after it, or without its first rows."""
    head = torch.cat([rows for rows, *_ in inputs])[cut:]
    head = F.pad(head, (0, 0, before, after))
    return [F.cross_entropy(x @ head.T, target) for _, _, x, target in inputs]


def padding_of(inputs: Inputs) -> int:
    return -inputs[0][1] % RANKS


def with_padding(inputs: Inputs) -> list[torch.Tensor]:
    return losses(inputs, after=padding_of(inputs))


def last_rows(inputs: Inputs) -> list[torch.Tensor]:
    """Cut at the wrong end: the first words are gone, and every target means another word."""
    return losses(inputs, after=padding_of(inputs), cut=padding_of(inputs))


def mean_of_ranks(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.stack(losses(inputs)).mean()] * RANKS


def averaged(own_rows, vocabulary, x, target):
    loss = case_03(own_rows, vocabulary, x, target)
    pieces = torch.empty(RANKS)
    dist.all_gather_into_tensor(pieces, loss.view(1))
    return pieces.mean()


EXERCISE = Exercise(
    title="Mend a loss that depends on the number of ranks",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=15,
    contract="A head's weight (a row for each word of the vocabulary) is sharded over the ranks. Each is given its own "
    "rows, the number of words, its own x and its own targets, and gathers the head to compute its loss. On one rank "
    "the loss is right. On 4 it is a little too large, and on 8 more so, with the same weights: GPT-2's 50,257 words "
    "divide by neither. Mend it.",
    reference=case_03,
    stub=stub,
    why="Pieces of a collective are equal, so the last ranks pad theirs, and the gathered buffer is longer than the "
    "parameter. Rows of zeros are not nothing: to a softmax each is a word with the logit 0, which takes its share of "
    "the probability. The same leak makes means too small and counts too large. FSDP hands out a view of the first "
    "rows of the buffer, so what is padding never reaches the module.",
    cause="rows of padding take part in the softmax",
    hints=(
        "What is the shape of the logits, on 1 rank and on 4? How many words are there?",
        "The gathered head has more rows than the vocabulary. Where are the rows that are too many, and what is in "
        "them?",
        "Use only the first `vocabulary` rows of the gathered head.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=losses,
        causes=(
            (with_padding, "the padding takes part: to the softmax each of its rows is a word with the logit 0"),
            (last_rows, "the head is cut at the wrong end: the padding comes after the last rank's rows"),
            (mean_of_ranks, "it is the mean over the ranks; each is to return the loss of its own targets"),
        ),
        checks=(OnlyCollectives(frozenset({"all_gather"}), "one all-gather brings the head"),),
        rel=1e-6,
        abs_=1e-6,
    ),
    wrong=(
        Wrong(stub, "the padding takes part"),
        mutant({"head[:vocabulary]": "head[-vocabulary:]"}, "cut at the wrong end", name="cut at the wrong end"),
        Wrong(averaged, "it is the mean over the ranks"),
        mutant(
            {"len(own_rows))": "len(own_rows)), value=1.0", "head[:vocabulary]": "head"},
            "of 1 numbers differ",
            name="padded with ones",
        ),
    ),
    shortcuts=(
        Wrong(lambda own_rows, vocabulary, x, target: torch.tensor(math.log(vocabulary)), "expected"),
        Wrong(lambda own_rows, vocabulary, x, target: torch.tensor(0.0), "all of it is zero"),
    ),
    covers=("coverage 004.96",),
    stub_says="the padding takes part",
)
