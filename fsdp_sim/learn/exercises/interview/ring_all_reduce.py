"""Write all-reduce as a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.collectives.case_01_ring_of_own_chunk import ToTheNext
from fsdp_sim.learn.judges import BusiestRankBytes, Inputs, OnlyCollectives, OnRanks

RANKS, NUMBERS = 4, 60_000


def ring_all_reduce(gradient):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = gradient.clone()
    pieces = total.tensor_split(ranks)  # views
    for step in range(2 * (ranks - 1)):
        leaving, place = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        arriving = torch.empty_like(place)
        send = dist.P2POp(dist.isend, leaving, (rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        if step < ranks - 1:  # the first time round: a reduce-scatter
            place += arriving
        else:  # the second: an all-gather of finished sums
            place.copy_(arriving)
    return total


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    rest = int(torch.randint(1, RANKS, (1,), generator=draw))
    return [(torch.randn(NUMBERS + rest, generator=draw),) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.stack([gradient for (gradient,) in inputs]).sum(0)] * RANKS


def played(inputs: Inputs, steps: int, adding: int) -> list[torch.Tensor]:
    """The ring in one process: so many steps, of which the first ones add what arrives."""
    totals = [gradient.clone() for (gradient,) in inputs]
    pieces = [total.tensor_split(RANKS) for total in totals]
    for step in range(steps):
        leaving = [pieces[rank][(rank - step) % RANKS].clone() for rank in range(RANKS)]
        for rank in range(RANKS):
            place = pieces[rank][(rank - step - 1) % RANKS]
            place.copy_(leaving[rank - 1] + (place if step < adding else 0))
    return totals


def once_round(inputs: Inputs) -> list[torch.Tensor]:
    return played(inputs, RANKS - 1, RANKS - 1)


def added_to_the_end(inputs: Inputs) -> list[torch.Tensor]:
    return played(inputs, 2 * (RANKS - 1), 2 * (RANKS - 1))


def one_step_short(inputs: Inputs) -> list[torch.Tensor]:
    return played(inputs, 2 * (RANKS - 1) - 1, RANKS - 1)


def least_bytes(trial: Trial) -> int:
    (gradient,) = trial.each[0][0]
    return 2 * (RANKS - 1) * len(gradient) * 4


def pass_on(leaving: torch.Tensor, arriving: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    send = dist.P2POp(dist.isend, leaving, (rank + 1) % ranks)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks)]):
        work.wait()


def whole_tensors_round(gradient):
    total, leaving = gradient.clone(), gradient
    for _ in range(dist.get_world_size() - 1):
        arriving = torch.empty_like(gradient)
        pass_on(leaving, arriving)
        total += arriving
        leaving = arriving
    return total


def the_total_goes_round(gradient):
    total = gradient.clone()
    for _ in range(dist.get_world_size() - 1):
        arriving = torch.empty_like(gradient)
        pass_on(total, arriving)
        total += arriving
    return total


def down_and_back(gradient):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    before, total = torch.zeros_like(gradient), gradient.clone()
    if rank > 0:
        dist.recv(before, rank - 1)
        total += before
    dist.send(total, (rank + 1) % ranks)
    if rank == ranks - 1:
        dist.recv(before, rank - 1)  # its own total, which came all the way round
        return total
    dist.recv(total, (rank - 1) % ranks)
    dist.send(total, rank + 1)
    return total


def straight_to_the_owner(gradient):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = gradient.clone()
    pieces, sums = gradient.tensor_split(ranks), total.tensor_split(ranks)
    for first in (True, False):
        for distance in range(1, ranks):
            to, source = (rank + distance) % ranks, (rank - distance) % ranks
            place = sums[rank] if first else sums[source]
            arriving = torch.empty_like(place)
            send = dist.P2POp(dist.isend, pieces[to] if first else sums[rank], to)
            for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, arriving, source)]):
                work.wait()
            place.copy_(place + arriving if first else arriving)
    return total


def with_a_collective(gradient):
    dist.all_reduce(gradient)
    return gradient


EXERCISE = Exercise(
    title="Write all-reduce as a ring",
    kind=ExerciseKind.CODE,
    difficulty=4,
    importance=5,
    minutes=25,
    contract="Every rank has a gradient, a 1-D tensor of the same length, which need not be a multiple of the number "
    "of ranks W. Return its sum over all ranks, on every rank. It is a ring: a rank sends to rank + 1 and receives "
    "from rank - 1 (both modulo W) and has to do with no one else. And it is spread evenly: no rank sends more than "
    "about 2 (W-1)/W of the tensor.",
    targets="Optimal: each rank sends 2 (W-1)/W of its tensor. A pass: up to 1.2 times that.",
    reference=ring_all_reduce,
    why="Cut the tensor into W pieces, and let each begin its way at another rank: then all links are busy in every "
    "step. The first time round pieces are added up: after W-1 steps a rank has one finished sum, which is a "
    "reduce-scatter. The second time round finished sums replace what is there: an all-gather. Each time W-1 pieces of "
    "1/W leave a rank, however many ranks there are. Whole tensors passed round are W-1 tensors; one running total is "
    "2 tensors, one link at a time.",
    hints=(
        "If the whole tensor goes round, how much does a rank send? Into what must it be cut so that every rank has "
        "something to send in every step?",
        "Twice round. The first time each piece gathers one rank's numbers after the other; where is the finished "
        "piece then, and what has to be done with it?",
        "In step s the piece (rank - s) % W leaves and the piece (rank - s - 1) % W arrives. In the first W-1 steps "
        "add what arrives, in the next W-1 put it in place.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                once_round,
                "after one time round each rank has one finished piece, as after a reduce-scatter; the others are "
                "still to come",
            ),
            (
                added_to_the_end,
                "in the second half, too, what arrives was added: it is a finished sum, and replaces what is there",
            ),
            (one_step_short, "one step is missing: the last piece of each rank is not the sum yet"),
        ),
        checks=(
            OnlyCollectives(frozenset({"send", "recv"}), "build it from sends and receives"),
            ToTheNext(),
            BusiestRankBytes(
                least_bytes,
                proof="each number takes W-1 sends to be summed up and W-1 to come back to all",
                good=1.1,
                passes=1.2,
                cure="do not pass whole tensors round: cut yours into W pieces, so that all ranks always have one to "
                "send",
            ),
        ),
        abs_=1e-4,
    ),
    wrong=(
        Wrong(whole_tensors_round, "do not pass whole tensors round"),
        Wrong(down_and_back, "do not pass whole tensors round"),
        Wrong(the_total_goes_round, "numbers differ"),
        mutant({"range(2 * (ranks - 1))": "range(ranks - 1)"}, "one finished piece, as after a reduce-scatter"),
        mutant({"place.copy_(arriving)": "place += arriving"}, "replaces what is there"),
        mutant({"range(2 * (ranks - 1))": "range(2 * (ranks - 1) - 1)"}, "one step is missing"),
        mutant({"return total": "return total / ranks"}, "4 times too small", name="mean"),
        Wrong(straight_to_the_owner, "in a ring a rank sends to the next rank only"),
        Wrong(with_a_collective, "expected only recv and send, found all_reduce"),
    ),
    shortcuts=(
        Wrong(lambda gradient: gradient * RANKS, "numbers differ"),
        Wrong(lambda gradient: torch.zeros_like(gradient), "all of it is zero"),
    ),
    covers=("coverage 004.57", "misconception 13"),
)
