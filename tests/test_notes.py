"""A simulation says which of the settings that were given change nothing, and why."""

from dataclasses import replace

import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.engine import jitter
from fsdp_sim.requests import request_of_texts, resolve, result_of

NODE = Cluster("A100", gpus=8)


@pytest.mark.parametrize(("model", "cluster", "plan", "names", "why"), [
    ("gpt2-124m", NODE, Plan(rms_norm="composed"), ["rms_norm"], "for RMSNorm"),
    ("llama3-8b", NODE, Plan(rms_norm="composed"), [], ""),
    ("llama3-8b", NODE, Plan(rms_norm="composed", compile=True), ["rms_norm"], "compiler"),
    ("llama3-8b", NODE, Plan(stack="hf-trainer"), [], ""),
    ("gpt2-124m", NODE, Plan(stack="hf-trainer"), ["stack"], "those of 'plain'"),
    ("gpt2-124m", Cluster("A100", gpus=8, bandwidth_gbps=100), Plan(), ["bandwidth_gbps"], "in one node"),
    ("gpt2-124m", Cluster("A100", gpus=16, bandwidth_gbps=100), Plan(), [], ""),
    ("gpt2-124m", NODE, Plan(requires_gradient_sync="last"), ["requires_gradient_sync"], "one micro-batch"),
    ("gpt2-124m", NODE, Plan(requires_gradient_sync="last", grad_accum=2), [], ""),
    ("gpt2-124m", NODE, Plan(torch="2.14"), ["torch"], "what 2.13 does"),
    ("gpt2-124m", Cluster("A100", gpus=1), Plan(separate_reduce_scatter_group=True),
     ["separate_reduce_scatter_group"], "no other"),
    ("gpt2-124m", NODE, Plan(shard_size=8), ["shard_size"], "all GPUs"),
    ("gpt2-124m", NODE, Plan(activation_checkpointing=24), ["activation_checkpointing"], "those of None"),
    ("gpt2-124m", NODE, Plan(expandable_segments=True, param_dtype="bf16"), [], ""),
    ("gpt2-124m", NODE, Plan(api="fsdp1", sharding_strategy="HYBRID_SHARD"), [], ""),
])  # fmt: skip
def test_what_changes_nothing_is_named_with_the_reason(model, cluster, plan, names, why) -> None:
    found = simulate(model, cluster, plan).without_effect
    assert list(found) == names
    assert all(f".{name}=" in sentence and why in sentence for name, sentence in found.items())


def test_what_is_left_out_is_not_named() -> None:
    sim = simulate("llama3-8b", NODE)
    assert sim.notes == []
    assert str(sim) == repr(sim)
    noted = simulate("llama3-8b", replace(NODE, inter="IB NDR x8"))
    assert str(noted) == f"{noted!r}\n{noted.notes[0]}"


def test_a_request_names_no_setting_that_was_chosen_for_it() -> None:
    job = resolve(
        request_of_texts({"model": "gpt2-124m", "gpu": "A100", "gpus": "8", "torch": "2.15", "shard_size": "8"})
    )
    sim = job.simulate()
    assert {"reduce_dtype", "shard_size"} == set(sim.without_effect)
    notes = result_of(sim, notes=job.notes_of(sim), explained=False).notes
    assert any("shard_size=8" in note for note in notes)
    assert not any("reduce_dtype='fp32'" in note for note in notes)


def test_ranks_that_differ_change_nothing_of_the_notes() -> None:
    plan = Plan(requires_gradient_sync="last")
    sim = simulate("gpt2-124m", NODE, plan, skew=lambda seconds, ranks: jitter(seconds, ranks, sigma=0.1))
    assert sim.notes == simulate("gpt2-124m", NODE, plan).notes
