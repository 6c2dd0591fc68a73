"""Write reduce-scatter with sends and receives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import BytesSent, Inputs, OnlyCollectives, OnRanks

RANKS, NUMBERS = 4, 50_000


def reduce_scatter_from_sends(chunks):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = chunks[rank].clone()
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        arrived = torch.empty_like(total)
        ops = [dist.P2POp(dist.isend, chunks[to], to), dist.P2POp(dist.irecv, arrived, source)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        total += arrived
    return total


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(RANKS, NUMBERS, generator=draw),) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return list(torch.stack([chunks for (chunks,) in inputs]).sum(0))


def least_bytes(trial: Trial) -> int:
    return (RANKS - 1) * NUMBERS * 4


def with_all_reduce(chunks):
    dist.all_reduce(chunks)
    return chunks[dist.get_rank()]


def own_only(chunks):
    return chunks[dist.get_rank()]


def all_send_first(chunks):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.recv(torch.empty_like(chunks[0]), (rank - 1) % ranks)
    dist.send(chunks[(rank + 1) % ranks], (rank + 1) % ranks)
    return chunks[rank]


def replaces_send(chunks):
    dist.send = dist.all_reduce  # type: ignore[assignment]
    dist.send(chunks)
    return chunks[dist.get_rank()]


def around_its_account(chunks):
    group: Any = dist.distributed_c10d._get_default_group()
    group._plain.allreduce([chunks]).wait()
    return chunks[dist.get_rank()]


def writes_a_false_account(chunks):
    from fsdp_sim.ranks.board import RankBoard
    from fsdp_sim.ranks.work import Context

    rank, ranks = dist.get_rank(), dist.get_world_size()
    group: Any = dist.distributed_c10d._get_default_group()
    whole = [torch.empty_like(chunks) for _ in range(ranks)]
    group._plain.allgather([whole], [chunks]).wait()
    for distance in range(1, ranks):
        for op, peer in (("send", (rank + distance) % ranks), ("recv", (rank - distance) % ranks)):
            record = Context.board.read(rank, 0, 1)[0]._replace(
                op=op, detail=f"peer={peer}", dtype="fp32", numel=NUMBERS, group_seq=-1
            )
            RankBoard.post(Context.board, rank, record)
    return torch.stack(whole).sum(0)[rank]


EXERCISE = Exercise(
    title="Write reduce-scatter with sends and receives",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=4,
    minutes=25,
    contract="Every rank has a tensor of one row for each rank. Return the sum over all ranks of the row that belongs "
    "to this rank, using torch.distributed's sends and receives (isend, irecv, batch_isend_irecv, ...) only.",
    targets="Optimal: each rank sends (W-1)/W of its tensor, the least possible. A pass: up to 4 times that.",
    reference=reduce_scatter_from_sends,
    why="A rank's row for another rank has to leave it once, so W-1 rows are the least; sent straight to their owners "
    "they are also enough. Send without waiting, then receive: if every rank first waited for its receive, none would "
    "send. A ring sends as much, always to the same neighbour.",
    hints=(
        "Rank r needs row r of every other rank, and nothing else of theirs.",
        "In round d send to the rank d ahead and receive from the rank d behind: then everyone sends and receives "
        "once.",
        "Each round: a P2POp with isend, one with irecv, both to batch_isend_irecv; wait for both, then add what "
        "arrived.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                lambda inputs: [chunks[rank] for rank, (chunks,) in enumerate(inputs)],
                "it is this rank's own row: nothing of the other ranks is in it",
            ),
        ),
        checks=(
            OnlyCollectives(frozenset({"send", "recv"}), "build it from sends and receives"),
            BytesSent(
                least_bytes,
                proof="each of its W-1 rows for the others has to leave it once",
                good=1.5,
                passes=3.5,
                cure="send each rank its own row, not all of them",
            ),
        ),
        abs_=1e-4,
    ),
    wrong=(
        Wrong(own_only, "it is this rank's own row"),
        mutant({"return total": "return total / ranks"}, "4 times too small", name="mean"),
        mutant(
            {"rank, ranks = dist": "chunks = chunks.roll(-1, 0)\nrank, ranks = dist"},
            "what rank + 1 should",
            name="the neighbours",
        ),
        Wrong(with_all_reduce, "expected only recv and send, found all_reduce"),
        mutant(
            {
                "chunks[rank].clone()": "chunks.clone()",
                "chunks[to], to": "chunks, to",
                "return total": "return total[rank]",
            },
            "send each rank its own row, not all of them",
            name="everything to everyone",
        ),
        Wrong(all_send_first, "waits in recv"),
    ),
    shortcuts=(
        Wrong(lambda chunks: torch.zeros(NUMBERS), "all of it is zero"),
        Wrong(replaces_send, "your code replaced torch.distributed.send"),
        Wrong(around_its_account, "does something bypass torch.distributed?"),
        Wrong(writes_a_false_account, "the kernel saw"),
    ),
    covers=("coverage 000.13", "misconception 33"),
)
