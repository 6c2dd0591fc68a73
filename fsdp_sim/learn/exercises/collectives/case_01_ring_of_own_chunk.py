"""A ring all-gather that is right on two ranks only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import BytesSent, Inputs, OnlyCollectives, OnRanks
from fsdp_sim.learn.verdict import Finding, Grade

RANKS, NUMBERS = 4, 50_000


stub = Edit(
    {
        "leaving, arriving = whole[(rank - step) % ranks], whole[(rank - step - 1) % ranks]": (
            "arriving = whole[(rank - step - 1) % ranks]"
        ),
        "leaving, (rank + 1) % ranks)  # what came last, not always its own": "chunk, (rank + 1) % ranks)",
    }
)


def case_01(chunk):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = [torch.zeros_like(chunk) for _ in range(ranks)]
    whole[rank] = chunk
    for step in range(ranks - 1):
        leaving, arriving = whole[(rank - step) % ranks], whole[(rank - step - 1) % ranks]
        send = dist.P2POp(dist.isend, leaving, (rank + 1) % ranks)  # what came last, not always its own
        receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
    return torch.stack(whole)


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(NUMBERS, generator=draw),) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.stack([chunk for (chunk,) in inputs])] * RANKS


def neighbours_everywhere(inputs: Inputs) -> list[torch.Tensor]:
    """By rank: its own chunk in its place, the one of the rank before it in all others."""
    rows = [[inputs[r if place == r else r - 1][0] for place in range(RANKS)] for r in range(RANKS)]
    return [torch.stack(row) for row in rows]


def in_order_of_arrival(inputs: Inputs) -> list[torch.Tensor]:
    """By rank: its own chunk first, then the ones that came, as they came."""
    return [torch.stack([inputs[r - step][0] for step in range(RANKS)]) for r in range(RANKS)]


def least_bytes(trial: Trial) -> int:
    return (RANKS - 1) * NUMBERS * 4


@dataclass(frozen=True)
class ToTheNext:
    """In a ring a rank sends to the next rank only."""

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        for rank, records in enumerate(ran.records):
            following = f"peer={(rank + 1) % trial.ranks}"
            for record in records:
                if record.op == "send" and record.detail != following:
                    peers = f"expected {following}, found {record.detail}"
                    return Finding(
                        Grade.NOT_YET, f"rank {rank} sends: {peers}; in a ring a rank sends to the next rank only."
                    )
        return Finding(Grade.OPTIMAL, "")


def directly(chunk):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = [torch.zeros_like(chunk) for _ in range(ranks)]
    whole[rank] = chunk
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        ops = [dist.P2POp(dist.isend, chunk, to), dist.P2POp(dist.irecv, whole[source], source)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return torch.stack(whole)


def passes_on_everything(chunk):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(ranks, *chunk.shape)
    whole[rank] = chunk
    for _ in range(ranks - 1):
        arrived = torch.zeros_like(whole)
        send = dist.P2POp(dist.isend, whole, (rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        whole = torch.where(arrived != 0, arrived, whole)
    return whole


def with_a_collective(chunk):
    whole = [torch.zeros_like(chunk) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, chunk)
    return torch.stack(whole)


EXERCISE = Exercise(
    title="Mend a ring that is right on two ranks only",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=4,
    minutes=20,
    contract="A ring all-gather: every rank has a chunk, sends to the next rank and receives from the one before, and "
    "in the end returns all chunks as the rows of one tensor, row r being rank r's. With 2 ranks its tests are green. "
    "With 4 the model does not learn. Mend it; it stays a ring of sends and receives.",
    targets="Optimal: each rank sends W-1 chunks, the least possible.",
    reference=case_01,
    stub=stub,
    why="A ring passes on: in step s a rank sends the chunk that reached it in step s-1, which began s ranks behind. "
    "The faulty one sends its own chunk every time, so nothing travels further than to the next rank. With 2 ranks "
    "there is only one step, and no difference: test collectives with 3 ranks or more.",
    cause="in every step a rank sends its own chunk again",
    hints=(
        "Write down what rank 2 holds after each step. Whose chunk should reach it in step 2, and who has that then?",
        "What is received goes into another place in every step. What is sent?",
        "In step s place (rank - s - 1) arrives; so in that step the one before it is there and must leave: which "
        "index is that?",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                neighbours_everywhere,
                "every place but its own holds the chunk of the rank before it: each step sends the own chunk again",
            ),
            (in_order_of_arrival, "all chunks are there, in the order of arrival: row r should be the chunk of rank r"),
        ),
        checks=(
            OnlyCollectives(frozenset({"send", "recv"}), "the point is to pass chunks on"),
            ToTheNext(),
            BytesSent(
                least_bytes,
                proof="W-1 chunks reach each rank, and each comes from the rank before",
                good=1.1,
                passes=1.2,
                cure="pass on one chunk in each step, the one that came last, not everything that is there",
            ),
        ),
    ),
    wrong=(
        Wrong(stub, "each step sends the own chunk again"),
        mutant(
            {"torch.stack(whole)": "torch.stack([whole[(rank - step) % ranks] for step in range(ranks)])"},
            "in the order of arrival",
            name="as they come",
        ),
        Wrong(directly, "in a ring a rank sends to the next rank only"),
        Wrong(passes_on_everything, "not everything that is there"),
        Wrong(with_a_collective, "expected only recv and send, found all_gather"),
    ),
    shortcuts=(
        Wrong(lambda chunk: torch.stack([chunk] * RANKS), "expected"),
        Wrong(lambda chunk: torch.zeros(RANKS, NUMBERS), "all of it is zero"),
    ),
    covers=("misconception 18",),
    stub_says="each step sends the own chunk again",
)
