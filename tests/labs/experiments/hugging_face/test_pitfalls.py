"""The mistakes are mistakes, and what they cost is what is said."""

import pytest
import torch
from packaging.version import Version

from fsdp_sim.ranks import run
from labs.experiments.hugging_face import models, with_fabric, with_fully_shard
from labs.experiments.hugging_face.batches import Task
from labs.experiments.hugging_face.measuring import MeasuredTraining, watch
from labs.experiments.hugging_face.pitfalls import loading, tied_in_two_units


@pytest.mark.parametrize("through", ["fully_shard", "accelerate"])
@pytest.mark.tail
def test_a_tied_embedding_in_two_units_is_there_twice(through):
    found = run(tied_in_two_units, 2, through, record=False, timeout_s=120, progress=False)[0]
    model = models.empty("t5")
    assert found.params == sum(p.numel() for p in model.parameters()) + model.shared.weight.numel()
    if Version(torch.__version__) >= Version("2.13"):
        assert "already managed by another FSDP group" in found.refused


@pytest.mark.tail
def test_pretrained_weights_are_held_by_one_rank_and_reach_both(tmp_path):
    model = models.build("t5", seed=7)
    model.save_pretrained(tmp_path)
    size = sum(p.nbytes for p in model.parameters())
    held = run(loading, 2, str(tmp_path), record=False, timeout_s=120, progress=False)
    assert list(held) == [{"every rank": size, "rank 0": size}, {"every rank": size, "rank 0": 0}]

    whole = MeasuredTraining.of(with_fully_shard.start_single, Task("t5", seed=7), 2)
    read = MeasuredTraining(with_fully_shard.start_fsdp2, Task("t5", seed=7), whole.whole)
    jobs = {
        "pretrained": MeasuredTraining(with_fully_shard.start_fsdp2, Task("t5", pretrained=str(tmp_path)), whole.whole),
        "seed": read,
    }
    seen = run(watch, 2, jobs, record=False, timeout_s=120, progress=False)[1]
    assert seen["pretrained"].losses == seen["seed"].losses


def test_fabrics_fsdp1_refuses_cpus_in_its_own_words():
    said = run(with_fabric.refusal, 2, torch.device("cpu"), record=False, timeout_s=120, progress=False)
    assert said[0].startswith("You selected the FSDP strategy but FSDP is only available on GPU")
