"""Write all-gather with sends and receives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import BusiestRankBytes, Inputs, OnlyCollectives, OnRanks

RANKS, NUMBERS = 4, 50_000


def all_gather_from_sends(shard):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = [torch.empty_like(shard) for _ in range(ranks)]
    whole[rank].copy_(shard)
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        ops = [dist.P2POp(dist.isend, shard, to), dist.P2POp(dist.irecv, whole[source], source)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return torch.cat(whole)


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(NUMBERS, generator=draw),) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.cat([shard for (shard,) in inputs])] * RANKS


def own_shard_everywhere(inputs: Inputs) -> list[torch.Tensor]:
    return [shard.repeat(RANKS) for (shard,) in inputs]


def only_its_own(inputs: Inputs) -> list[torch.Tensor]:
    """By rank: its own shard in its place, and zeros."""
    places = torch.eye(RANKS)
    return [torch.outer(places[rank], shard).flatten() for rank, (shard,) in enumerate(inputs)]


def as_they_arrive(inputs: Inputs) -> list[torch.Tensor]:
    """By rank: its own shard first, then those of the ranks before it, one after the other."""
    return [torch.cat([inputs[rank - distance][0] for distance in range(RANKS)]) for rank in range(RANKS)]


def least_bytes(trial: Trial) -> int:
    return RANKS * (RANKS - 1) * NUMBERS * 4


def exchange(to: int, leaving: torch.Tensor, source: int, arriving: torch.Tensor) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, leaving, to), dist.P2POp(dist.irecv, arriving, source)]):
        work.wait()


def sends_everything(shard):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(ranks, len(shard))
    whole[rank] = shard
    for distance in range(1, ranks):
        arrived = torch.empty_like(whole)
        source = (rank - distance) % ranks
        exchange((rank + distance) % ranks, whole, source, arrived)
        whole[source] = arrived[source]
    return whole.flatten()


def by_way_of_rank_0(shard):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.empty(ranks, len(shard))
    if rank == 0:
        whole[0] = shard
        for source in range(1, ranks):
            dist.recv(whole[source], source)
        for to in range(1, ranks):
            dist.send(whole, to)
    else:
        dist.send(shard, 0)
        dist.recv(whole, 0)
    return whole.flatten()


def with_a_collective(shard):
    whole = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, shard)
    return torch.cat(whole)


def around_its_account(shard):
    group: Any = dist.distributed_c10d._get_default_group()
    whole = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    group._plain.allgather([whole], [shard]).wait()
    return torch.cat(whole)


EXERCISE = Exercise(
    title="Write all-gather with sends and receives",
    kind=ExerciseKind.CODE,
    difficulty=2,
    importance=5,
    minutes=12,
    contract="Every rank has a shard, a 1-D tensor of the same length. Return the whole tensor on every rank: the "
    "shards of ranks 0, 1, 2, ... end to end. Use torch.distributed's sends and receives (isend, irecv, "
    "batch_isend_irecv, ...) only.",
    targets="Optimal: no rank sends more than W-1 shards, the least possible. A pass: up to 3 times that.",
    reference=all_gather_from_sends,
    why="W-1 shards have to reach each of W ranks, so some rank sends W-1 shards at least, and W-1 are enough when "
    "all send alike. Here each shard goes straight to everyone; a ring passes on what came last, sends as much, and "
    "needs a link to one neighbour only. By way of rank 0 its link carries W (W-1) shards while the others rest: so "
    "FSDP has no owner that broadcasts a layer, but a shard of it on every rank. Send without waiting, then receive: "
    "if all wait in a send first, nobody receives.",
    hints=(
        "How many shards must reach a rank? If all ranks send alike, how many does each send?",
        "In round d send to the rank d ahead and receive from the rank d behind, into the place of that rank.",
        "A list of W empty shards, the own one copied in; each round one P2POp with isend and one with irecv, both to "
        "batch_isend_irecv; wait for both; at last torch.cat.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (own_shard_everywhere, "it is this rank's own shard again and again: nothing has come from the others"),
            (only_its_own, "it is this rank's own shard among zeros: nothing has come from the others"),
            (as_they_arrive, "all shards are there, in the order of arrival: shard r belongs in place r on every rank"),
            (
                lambda i: [w - own for w, own in zip(in_one_process(i), only_its_own(i), strict=True)],
                "all came but its own: a rank does not send to itself, so copy it in",
            ),
        ),
        checks=(
            OnlyCollectives(frozenset({"send", "recv"}), "build it from sends and receives"),
            BusiestRankBytes(
                least_bytes,
                proof="W-1 shards have to reach each of the W ranks",
                good=1.5,
                passes=3.1,
                cure="let every rank send its own shard, and nothing else, to each of the others",
            ),
        ),
    ),
    wrong=(
        mutant(
            {"torch.cat(whole)": "torch.cat([whole[(rank - distance) % ranks] for distance in range(ranks)])"},
            "in the order of arrival",
            name="in order of arrival",
        ),
        mutant(
            {"torch.empty_like": "torch.zeros_like", "whole[rank].copy_(shard)": ""},
            "a rank does not send to itself",
            name="forgets its own",
        ),
        mutant({"torch.cat(whole)": "torch.stack(whole)"}, "its shape should be", name="not put together"),
        Wrong(sends_everything, "its own shard, and nothing else"),
        Wrong(by_way_of_rank_0, "rank 0: expected at most"),
        Wrong(with_a_collective, "expected only recv and send, found all_gather"),
    ),
    shortcuts=(
        Wrong(lambda shard: shard.repeat(RANKS), "again and again"),
        Wrong(lambda shard: torch.zeros(RANKS * NUMBERS), "all of it is zero"),
        Wrong(around_its_account, "does something bypass torch.distributed?"),
    ),
    covers=("coverage 003.16", "misconception 18"),
)
