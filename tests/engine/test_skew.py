"""Durations per rank: stragglers, jitter and slow nodes, alone and on top of each other; groups of ranks."""

import numpy as np
import pytest

from fsdp_sim.engine import run
from fsdp_sim.engine.groups import group_of, over_group
from fsdp_sim.engine.skew import jitter, slow_node, straggler
from fsdp_sim.schedule import Instruction, Kind, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op, Phase
from tests.engine.programs import durations, layers_only


def an(op, unit="layers.0", **fields):
    return Instruction(kind=Kind.OP, step=0, micro_batch=0, phase=Phase.FORWARD, op=op, unit=unit, **fields)


FWD, GATHER = an(Op.FWD), an(Op.ALL_GATHER)


def test_a_straggler_computes_slowly_and_everyone_waits():
    program = build(layers_only(3), Plan(), 8)
    slow = straggler(durations(), 8, rank=5, factor=2.0)
    assert slow(FWD).tolist() == [25] * 5 + [50] + [25] * 2
    assert slow(GATHER) == 10
    played = run(program, slow)
    assert played.ranks == 8
    assert played.step_time_s() == 10 + 2 * 225 + 10  # the reduce-scatters wait for it


def test_a_node_with_a_bad_link_slows_the_groups_it_is_in():
    slow = slow_node(durations(), 8, node=1, factor=3.0, gpus_per_node=4)
    assert slow(GATHER).tolist() == [10] * 4 + [30] * 4
    assert slow(FWD) == 25
    whole = run(build(layers_only(3), Plan(), 8), slow)
    halves = run(build(layers_only(3), Plan(shard_size=4), 8), slow)
    first = next(k for k, i in enumerate(whole.ops) if i.op is Op.ALL_GATHER)
    assert whole.array(whole.columns.end_s)[first].tolist() == [30] * 8
    assert halves.array(halves.columns.end_s)[first].tolist() == [10] * 4 + [30] * 4


def test_jitter_has_mean_1_and_is_the_same_for_the_same_seed():
    made = jitter({(Op.FWD, "layers.0"): 2.0}, 4096, sigma=0.1, seed=3)
    assert made(FWD).shape == (4096,)
    assert made(FWD).mean() == pytest.approx(2.0, rel=0.01)
    assert np.log(made(FWD)).std() == pytest.approx(0.1, rel=0.05)
    again = jitter({(Op.FWD, "layers.0"): 2.0}, 4096, sigma=0.1, seed=3)
    assert made(FWD).tolist() == again(FWD).tolist()
    assert made(FWD).tolist() != jitter({(Op.FWD, "layers.0"): 2.0}, 4096, sigma=0.1, seed=4)(FWD).tolist()


def test_jitter_differs_from_step_to_step():
    program = build(layers_only(2), Plan(), 8, steps=2)
    played = run(program, jitter(durations(), 8, sigma=0.1))
    forward = [played.costs.seconds[k] for k, i in enumerate(program.ops) if (i.op, i.unit) == (Op.FWD, "layers.0")]
    assert not np.array_equal(*forward)


def test_two_plans_are_compared_under_the_same_luck():
    seconds = jitter(durations(), 8, sigma=0.1)
    plans = [run(build(layers_only(3), plan, 8), seconds) for plan in (Plan(), Plan(forward_prefetch=1))]
    drawn = [
        {(i.op, i.unit): np.asarray(s).tolist() for i, s in zip(p.ops, p.costs.seconds, strict=True)} for p in plans
    ]
    assert drawn[0][Op.BWD, "layers.1"] == drawn[1][Op.BWD, "layers.1"]


def test_without_jitter_nothing_changes_and_with_it_a_step_is_longer():
    program = build(layers_only(8), Plan(), 64)
    plain = run(program, durations()).step_time_s()
    assert run(program, jitter(durations(), 64, sigma=0.0)).step_time_s() == pytest.approx(plain)
    assert run(program, jitter(durations(), 64, sigma=0.1)).step_time_s() > plain  # the slowest of 64 sets the pace


def test_skews_add_up():
    slow = straggler(straggler(durations(), 4, rank=0, factor=2.0), 4, rank=0, factor=3.0, of="all")
    assert slow(FWD).tolist() == [150, 25, 25, 25]
    assert slow(GATHER).tolist() == [30, 10, 10, 10]
    shaky = slow_node(jitter(durations(), 4, sigma=0.1), 4, node=0, factor=2.0)
    assert shaky.per_occurrence


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: straggler(durations(), 4, rank=4, factor=2.0), "rank is 4; with 4 ranks it must be 0 to 3"),
        (lambda: straggler(durations(), 4, rank=0, factor=0.0), "factor is 0.0; it must be a number > 0"),
        (lambda: slow_node(durations(), 16, node=2, factor=2.0), "node is 2; 16 ranks on nodes of 8 make nodes 0 to 1"),
        (lambda: jitter(durations(), 4, sigma=-1.0), "sigma is -1.0; it must be a number >= 0"),
        (lambda: jitter(durations(), 0, sigma=0.1), "ranks is 0; it must be a whole number >= 1"),
        (lambda: jitter(durations(), 4, sigma=0.1, of="gpu"), "of is 'gpu'; it must be 'compute', 'network' or 'all'"),
    ],
)
def test_wrong_skews_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- groups


@pytest.mark.parametrize("ranks", [1, 3, 5, 8, 12, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("communicator", ["shard", "replicate"])
def test_a_group_is_a_block_or_the_same_place_of_each_block(ranks, size, communicator):
    """By the definition, and equal to the reshaped form that a pass uses."""
    i = an(Op.ALL_GATHER, group_size=size, communicator=communicator)
    values = np.random.default_rng(ranks).permutation(ranks).astype(float)
    largest = np.broadcast_to(over_group(values, i, 16, ranks), (ranks,))
    for rank in range(ranks):
        if communicator == "shard":
            members = [r for r in range(ranks) if r // size == rank // size]
        else:
            members = [r for r in range(ranks) if r % (16 // size) == rank % (16 // size)]
        assert list(group_of(i, rank, 16, ranks)) == members
        assert largest[rank] == values[members].max()
