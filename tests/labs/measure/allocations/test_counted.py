"""A real step of every wrapping: nothing is left out, and each category is what the simulator predicts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fsdp_sim.timeline import Memory, Op, Phase
from labs.measure.allocations import FOR_COMPUTE, at_peak
from labs.model import empty
from tests.labs.measure.allocations.steps import CASES, RANKS, config_of

RANK = 0
ACCUMULATING, DDP = "fsdp2, accumulating", "ddp"  # two peaks that the simulator has a little low, and why: see below


def compute(parts):
    return sum(parts.get(category, 0) for category in FOR_COMPUTE)


@pytest.mark.parametrize("case", CASES)
def test_the_categories_add_up_to_what_is_alive(found, case):
    """Change for change what `live_bytes` counts, which knows no categories, in another step."""
    timeline = found[case].of("timeline")
    _, live = timeline.live_bytes(RANK)
    alive, meter = np.sum(list(live.values()), axis=0), np.array(found[case].meter)
    changes = np.diff(meter)
    changes = changes[changes != 0]
    assert alive[-len(changes) - 1] == meter[0]
    assert np.diff(alive)[-len(changes) :].tolist() == changes.tolist()
    assert timeline.peak_bytes(RANK) == meter.max()
    assert all(n_bytes.min() >= 0 for n_bytes in live.values())


@pytest.mark.parametrize("case", CASES)
def test_at_the_peak_each_category_is_as_predicted(found, predicted, case):
    """Those above 5% of the peak within 10%; what the model and autograd hold for a moment together, within 1%."""
    measured, expected = at_peak(found[case].of("timeline"), RANK), predicted[case].memory.peak_by_category
    peak = sum(measured.values())
    for category in (set(measured) | set(expected)) - set(FOR_COMPUTE):
        if max(measured.get(category, 0), expected.get(category, 0)) > 0.05 * peak:
            assert measured.get(category, 0) == pytest.approx(expected.get(category, 0), rel=0.1), category
    if case not in (ACCUMULATING, DDP):
        assert compute(measured) == pytest.approx(compute(expected), rel=0.01)
    assert measured.get(Memory.NONE, 0) < 0.01 * peak  # the tokens


@pytest.mark.parametrize("case", ["fsdp2", "fsdp2, kept after forward", "fsdp2, bf16", "mini", "ddp"])
def test_activations_alone_are_as_predicted(found, predicted, case):
    """But for the gradient of one block's input, see [Note: other names than the simulator's] in `purpose`."""
    measured, expected = at_peak(found[case].of("timeline"), RANK), predicted[case].memory.peak_by_category
    assert measured[Memory.ACTIVATION] == pytest.approx(expected[Memory.ACTIVATION], rel=0.1)


def test_a_tied_weight_has_two_gradients_under_ddp(found, predicted):
    """Autograd keeps the head's until it has that of the embedding, which is the same parameter: not predicted."""
    config = config_of(DDP).model_config
    assert config.tied
    measured, expected = at_peak(found[DDP].of("timeline"), RANK), predicted[DDP].memory.peak_by_category
    tied_bytes = 4 * config.vocab_size * config.d_model
    assert compute(measured) - compute(expected) == pytest.approx(tied_bytes, rel=0.01)


def test_new_gradients_are_there_until_they_are_added(found, predicted):
    """Of a micro-batch that accumulates, some of a block's gradients beside the sums so far: not predicted."""
    measured = at_peak(found[ACCUMULATING].of("timeline"), RANK)
    expected = predicted[ACCUMULATING].memory.peak_by_category
    assert measured[Memory.UNSHARDED_GRAD] == expected[Memory.UNSHARDED_GRAD]
    block = predicted[ACCUMULATING].workload.units[1]
    assert 0 < compute(measured) - compute(expected) < sum(param.bytes for param in block.params)


@pytest.mark.parametrize("case", ["fsdp2", "fsdp1", "mini"])
def test_what_is_sharded_is_half_of_it_on_each_of_two_ranks(found, case):
    _, live = found[case].of("timeline").live_bytes(RANK)
    whole = 4 * empty(config_of(case).model_config).num_params()
    assert live[Memory.SHARDED].max() == pytest.approx(whole / RANKS, rel=0.01)
    assert live[Memory.OPTIMIZER].max() == pytest.approx(whole, rel=0.01)  # two moments
    assert live[Memory.RS_OUTPUT][-1] == pytest.approx(whole / RANKS, rel=0.01)


def test_reshard_after_forward_is_seen(found):
    whole = 4 * empty(config_of("fsdp2").model_config).num_params()
    kept, freed = (
        found[case].of("timeline").live_bytes(RANK)[1][Memory.UNSHARDED].max()
        for case in ("fsdp2, kept after forward", "fsdp2")
    )
    assert kept == whole
    assert freed < 0.6 * whole


def test_phases_follow_each_other(found):
    """A forward and a backward for each micro-batch; fused AdamW allocates nothing."""
    for case, n in (("fsdp2", 1), (ACCUMULATING, 2)):
        ops = found[case].of("timeline").ops
        assert [op.phase for op in ops] == [Phase.FORWARD, Phase.BACKWARD] * n
        assert [op.micro_batch for op in ops] == [i for i in range(n) for _ in range(2)]
        assert all(a.end_s == b.start_s for a, b in pairwise(ops))


def test_checkpointed_blocks_keep_their_outputs_alone(found):
    plain, again = (found[case].of("timeline").live_bytes(RANK)[1] for case in ("fsdp2", "fsdp2, checkpointed"))
    assert Memory.CHECKPOINT not in plain
    config = config_of("fsdp2, checkpointed")
    rows = config.global_batch // RANKS
    output_bytes = 4 * rows * config.plan.seq_len * config.model_config.d_model
    assert again[Memory.CHECKPOINT].max() == config.model_config.n_layer * output_bytes


def in_the_step(timeline):
    """Bytes by category from when all is there that was there before; its order differs."""
    there = next(i for i, event in enumerate(timeline) if event.op is not Op.ALLOC)
    return {category: n_bytes[there - 1 :] for category, n_bytes in timeline.live_bytes(RANK)[1].items()}


@pytest.mark.tail
@pytest.mark.parametrize("case", CASES)
def test_a_snapshot_of_the_same_calls_says_what_counting_says(found, case):
    """At every moment, when cut to what a GPU's allocator sees: see ``steps``. But for the loss's backward: with no
    operator among the calls it is any temporary."""
    counted, seen = (in_the_step(found[case].of(name)) for name in ("timeline", "as_gpu"))
    for live in (counted, seen):
        live[Memory.TEMPORARY] = live[Memory.TEMPORARY] + live.pop(Memory.LOGITS)
    assert {c: n.tolist() for c, n in seen.items()} == {c: n.tolist() for c, n in counted.items()}
