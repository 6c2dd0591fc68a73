"""Two ranks, however they are sharded, have one process's losses; and do what `fully_shard` by hand does.

The lab's notebook trains T5 through Fabric, and with Accelerate as it is.
"""

import pytest

from labs.experiments.hugging_face.predicting import predict

pytestmark = pytest.mark.tail  # see make test-all

ALL = ["bert fully_shard", "bert accelerate", "bert fabric", "t5 fully_shard", "t5 accelerate", "t5 checkpointing"]


@pytest.mark.parametrize("name", ALL)
def test_losses_are_those_of_one_process(name, seen, alone):
    one = alone[name.split()[0]].losses
    assert len(one) == 2
    for rank in seen:
        assert rank[name].losses == pytest.approx(one, rel=1e-5)


def test_the_mean_of_means_is_another_number(seen):
    """T5's headlines have unequally many tokens; of BERT each row is one target."""
    assert seen[0]["t5 fully_shard"].mean_of_means != pytest.approx(seen[0]["t5 fully_shard"].losses[0], rel=1e-5)
    assert seen[0]["bert fully_shard"].mean_of_means == pytest.approx(seen[0]["bert fully_shard"].losses[0], rel=1e-5)


@pytest.mark.parametrize("family", ["t5", "bert"])
def test_units_are_the_blocks_and_the_root_as_predicted(family, seen, jobs):
    saw, predicted = seen[0][f"{family} fully_shard"], predict(jobs[f"{family} fully_shard"].task, 2)
    assert saw.units == predicted.units
    assert len(saw.units) == {"t5": 5, "bert": 4}[family]
    assert saw.gathered_bytes == predicted.gathered_bytes


@pytest.mark.parametrize("name", ["t5 fully_shard", "bert fully_shard", "bert fabric", "t5 checkpointing"])
def test_peak_memory_is_the_predicted_one(name, seen, jobs):
    predicted = predict(jobs[name].task, 2).peak_bytes
    for rank in seen:
        assert rank[name].peak_bytes == pytest.approx(predicted, rel=0.05)


def test_checkpointing_saves_memory_and_gathers_nothing_more(seen):
    plain, saved = seen[0]["t5 fully_shard"], seen[0]["t5 checkpointing"]
    assert saved.peak_bytes < 0.8 * plain.peak_bytes
    assert saved.collectives == plain.collectives


def test_fabric_does_what_is_done_by_hand(seen):
    by_hand, fabric = seen[0]["bert fully_shard"], seen[0]["bert fabric"]
    assert fabric.units == by_hand.units
    assert fabric.collectives == by_hand.collectives


def test_accelerate_gives_embeddings_a_unit_of_their_own(seen):
    t5, bert = seen[0]["t5 accelerate"], seen[0]["bert accelerate"]
    assert t5.units["shared"] == 384 * 128
    assert sum(t5.units.values()) == sum(seen[0]["t5 fully_shard"].units.values())
    assert t5.gathered_bytes == seen[0]["t5 fully_shard"].gathered_bytes
    embedding = bert.units["bert.embeddings.word_embeddings"]
    assert embedding == 384 * 128
    assert bert.gathered_bytes == seen[0]["bert fully_shard"].gathered_bytes + 4 * embedding  # again in backward
