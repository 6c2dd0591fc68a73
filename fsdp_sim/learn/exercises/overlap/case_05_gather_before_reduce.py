"""A backward whose all-gathers queue behind its reduce-scatters."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import ExposedTime, Inputs, OnlyCollectives, OnRanks, PeakBytes
from fsdp_sim.ranks import Network
from fsdp_sim.timeline import RECORDER, Op

RANKS, UNITS, WIDTH = 2, 6, 320
COMPUTE_S, COLLECTIVE_S = 0.05, 0.02
UNIT_BYTES = WIDTH * WIDTH * 4
NETWORK = Network(bandwidth_gbps=8 * UNIT_BYTES / RANKS / COLLECTIVE_S / 1e9)


def backward(unit: int, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One unit's backward, which the timeline shows as BWD: gradients of its input and of its whole weight."""
    with RECORDER.span(Op.BWD, f"layers.{unit}"):
        before = torch.tanh(weight.T @ grad)
        return before, torch.outer(grad, before)


stub = Edit(
    {
        "if unit:\nfollowing = gather(shards[unit - 1])  # before this unit computes, and so before its reduction": (
            ""
        ),
        "if unit == 0:": "if unit:\n    following = gather(shards[unit - 1])\nelse:",
    }
)


def case_05(shards, grad, backward):
    def gather(shard):
        whole = torch.empty(shard.shape[0] * dist.get_world_size(), shard.shape[1])
        return whole, dist.all_gather_into_tensor(whole, shard, async_op=True)

    reduced, reduction = [torch.empty_like(shard) for shard in shards], None
    following = gather(shards[-1])
    for unit in reversed(range(len(shards))):
        (whole, work), following = following, None
        work.wait()
        if unit:
            following = gather(shards[unit - 1])  # before this unit computes, and so before its reduction
        grad, whole_grad = backward(unit, whole, grad)
        if reduction:
            reduction[0].wait()
        reduction = dist.reduce_scatter_tensor(reduced[unit], whole_grad, async_op=True), whole_grad
        if unit == 0:
            reduction[0].wait()
    return reduced


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(UNITS, WIDTH // RANKS, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(RANKS)]
    return [(list(mine.unbind()), torch.randn(WIDTH, generator=draw), backward) for mine in rows]


def in_one_process(inputs: Inputs) -> list[list[torch.Tensor]]:
    sums = [torch.zeros(WIDTH, WIDTH) for _ in range(UNITS)]
    wholes = [torch.cat([shards[unit] for shards, _, _ in inputs]) for unit in range(UNITS)]
    for _, grad, _ in inputs:
        for unit in reversed(range(UNITS)):
            before = torch.tanh(wholes[unit].T @ grad)
            sums[unit] += torch.outer(grad, before)
            grad = before
    return [[whole.chunk(RANKS)[rank] for whole in sums] for rank in range(RANKS)]


def least_bytes(trial: Trial) -> int:
    return 2 * UNITS * UNIT_BYTES // RANKS + 4 * UNIT_BYTES


def gather(shard):
    whole = torch.empty(shard.shape[0] * RANKS, shard.shape[1])
    return whole, dist.all_gather_into_tensor(whole, shard, async_op=True)


def reduces_at_the_end(shards, grad, backward):
    reduced, whole_grads = [torch.empty_like(shard) for shard in shards], list[torch.Tensor]()
    following = gather(shards[-1])
    for unit in reversed(range(len(shards))):
        (whole, work), following = following, None
        work.wait()
        if unit:
            following = gather(shards[unit - 1])
        grad, whole_grad = backward(unit, whole, grad)
        whole_grads.insert(0, whole_grad)
    works = [dist.reduce_scatter_tensor(r, w, async_op=True) for r, w in zip(reduced, whole_grads, strict=True)]
    for work in works:
        work.wait()
    return reduced


def gathers_everything_first(shards, grad, backward):
    reduced, reductions = [torch.empty_like(shard) for shard in shards], []
    wholes = [gather(shard) for shard in reversed(shards)][::-1]
    for unit in reversed(range(len(shards))):
        whole, work = wholes[unit]
        work.wait()
        grad, whole_grad = backward(unit, whole, grad)
        reductions.append((dist.reduce_scatter_tensor(reduced[unit], whole_grad, async_op=True), whole_grad))
    for reduction, _ in reductions:
        reduction.wait()
    return reduced


def never_reduces(shards, grad, backward):
    reduced = list[torch.Tensor]()
    for unit in reversed(range(len(shards))):
        whole, work = gather(shards[unit])
        work.wait()
        grad, whole_grad = backward(unit, whole, grad)
        reduced.insert(0, whole_grad.chunk(RANKS)[dist.get_rank()].clone())
    return reduced


EXERCISE = Exercise(
    title="Mend a backward whose gathers queue behind its reductions",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=5,
    minutes=20,
    contract="Every rank has its rows of each unit's weight, the gradient of its output, and backward(unit, weight, "
    "grad), which returns the gradients of the unit's input and of its whole weight. The code returns, for each unit, "
    "this rank's rows of the gradient summed over ranks: right numbers, and nearly nothing overlaps. On the network "
    "meant here an all-gather or a reduce-scatter takes 20 ms, one at a time; a unit's backward takes 50 ms.",
    targets="Optimal: only the first all-gather and the last reduce-scatter are exposed. A pass: one collective more. "
    "Never more than 4 whole weights and gradients at a time.",
    reference=case_05,
    stub=stub,
    why="Collectives of one communicator run in the order in which they are issued. A gather that is issued after a "
    "reduction waits for it, and compute waits for the gather: both are exposed in every unit. Issued before the "
    "backward that it can hide behind, the gather is done when it is needed, and the reduction runs under the next "
    "backward. That one line is BACKWARD_PRE of FSDP1 and what FSDP2 always does.",
    cause="each all-gather is issued after the reduce-scatter of the unit before it",
    hints=(
        "One wire, one queue. In which order do the gather of the next unit and the reduction of this one enter it?",
        "The next unit's gather needs nothing that this unit's backward computes. What is the earliest line for it?",
        "Move the two lines that gather shards[unit - 1] up: after the wait for this unit's weight, before backward.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        checks=(
            OnlyCollectives(frozenset({"all_gather", "reduce_scatter"}), "these two are all it takes"),
            ExposedTime(
                NETWORK,
                COMPUTE_S,
                least=2,
                good=2.5,
                passes=3,
                cure="issue the next all-gather before backward computes, and wait for a reduce-scatter only when the "
                "next one is to be issued",
            ),
            PeakBytes(
                least_bytes,
                proof="shards and reduced gradients; a weight and its gradient, and beside them on the wire the next "
                "weight and the last gradient",
                good=1.05,
                passes=1.2,
                cure="gather one unit ahead, not all, and let go of a whole gradient when it is reduced",
            ),
        ),
        metered=True,
        abs_=1e-4,
    ),
    wrong=(
        Wrong(stub, "issue the next all-gather before backward computes"),
        mutant(
            {
                "if reduction:\nreduction[0].wait()": "",
                (
                    "reduction = dist.reduce_scatter_tensor(reduced[unit], whole_grad, async_op=True), "
                    "whole_grad\n"
                    "if unit == 0:\n"
                    "reduction[0].wait()"
                ): "dist.reduce_scatter_tensor(reduced[unit], whole_grad)",
            },
            "after BWD layers.5 a collective was issued and waited for at once",
            name="waits for each reduction",
        ),
        Wrong(reduces_at_the_end, "expected at most 3 collectives' time exposed"),
        Wrong(gathers_everything_first, "gather one unit ahead, not all"),
    ),
    shortcuts=(
        Wrong(never_reduces, "numbers differ"),
        Wrong(lambda shards, grad, backward: [torch.zeros_like(shard) for shard in shards], "numbers differ"),
    ),
    covers=("coverage 002.19", "coverage 004.104", "misconception 4.115", "misconception 4.117", "misconception 4.118"),
    stub_says="issue the next all-gather before backward computes",
)
