"""Open design questions: the plan is read from free text, asked for where it is missing, and judged by simulation."""

from __future__ import annotations

import pytest

from fsdp_sim.learn.drill import design
from fsdp_sim.learn.drill.design import Design, designs
from fsdp_sim.learn.drill.design.extract import extract

STRONG = (
    "I assume Adam with fp32 master weights and bf16 compute: 16 bytes a parameter, over 256 GPUs 4.4 GB of "
    "states per GPU. FSDP2 over all GPUs, full activation checkpointing, sequence length 8192, micro-batch 1. "
    "Peak about 33 GB per GPU. A step takes about 11.5 seconds, MFU 35%, so some 460 billion tokens in 30 "
    "days. Risks: the network between nodes, if the gathers are not hidden; failures, so checkpoint every 20 "
    "minutes; a straggler. First I measure the bandwidth with nccl-tests and profile a step on two nodes. "
)


def answered(name: str, *said: str) -> Design:
    asked = Design(designs()[name])
    for text in said:
        asked.say(text)
    return asked


def test_there_are_four_and_each_can_be_simulated_with_what_is_taken() -> None:
    assert len(designs()) >= 4
    for name, question in designs().items():
        assert question.patterns()
        step = answered(name, "FSDP").simulate()
        assert step.step_time_s > 0


def test_a_strong_answer_is_read_whole_and_convinces() -> None:
    asked = answered("dense_70b", STRONG)
    assert asked.asks == ""
    assert (asked.plan.micro_batch, asked.plan.seq_len, asked.plan.activation_checkpointing) == (1, 8192, "full")
    judged = asked.judgements(asked.simulate())
    assert {each.name for each in judged} == {"states_bytes", "peak_bytes", "step_s", "mfu", "tokens"}
    assert all(each.right for each in judged)
    assert asked.good
    assert "✗ Not named: The global batch" in "\n".join(asked.review())


def test_what_was_not_said_is_asked_for_and_a_bare_answer_is_to_that() -> None:
    asked = answered("dense_70b", "Sharded within a node, bf16.")
    assert "How many sequences" in asked.asks
    asked.say("2")
    assert "tokens in a sequence" in asked.asks
    asked.say("4k")
    assert "recompute" in asked.asks
    asked.say("no")
    plan = asked.plan
    assert (plan.micro_batch, plan.seq_len, plan.activation_checkpointing, plan.shard_size) == (2, 4096, None, 8)
    asked.say("140 GB")
    assert asked.said["states_bytes"].value == 140e9


def test_what_is_turned_down_or_taken_back_is_not_the_plan() -> None:
    asked = answered(
        "dense_70b",
        "70 billion times 16 bytes is 1120 GB, over 256 that's 4 gigs of states each. Sharding within a node doesn't "
        "fit, so fully sharded. Checkpointing on every block. Micro-batch 1, hmm, no, make that micro-batch 2 with 8k "
        "sequences.",
    )
    assert asked.said["states_bytes"].value == 4e9
    assert (asked.plan.shard_size, asked.plan.micro_batch, asked.plan.activation_checkpointing) == (None, 2, "full")
    assert asked.named()[0] == [], "checkpointing of activations is none against failures"


def test_risks_and_the_first_measurement_are_asked_for_where_none_was_named() -> None:
    asked = answered("dense_70b", STRONG.partition("Risks")[0])
    assert asked.asks == "What can go wrong?"
    asked.say("a straggler slows down everybody")
    assert asked.asks == "And what would you measure first?"
    asked.say("nccl-tests between nodes")
    assert asked.asks == ""


def test_a_number_is_read_once_and_letters_of_a_name_are_none() -> None:
    read = extract("2 sequences of 2048 each, 16 GB of states per GPU")
    assert (read["micro_batch"].value, read["seq_len"].value, read["states_bytes"].value) == (2, 2048, 16e9)
    assert "peak_bytes" not in read
    assert "step_s" not in extract("bf16", "step_s")


def test_a_number_that_is_off_says_by_how_much_and_a_plan_that_does_not_fit_is_refused() -> None:
    asked = answered(
        "dense_70b", STRONG.replace("11.5 seconds", "1 second").replace("over all GPUs", "sharded within a node")
    )
    review = "\n".join(asked.review())
    assert "times less than that" in review
    assert "✗ It does not fit" in review
    assert not asked.good


def test_what_cannot_be_is_said_in_a_sentence() -> None:
    asked = answered("dense_70b", "FSDP, micro-batch 0")
    assert "✗ It cannot be simulated" in "\n".join(asked.review())


@pytest.mark.parametrize(
    ("said", "name", "value"),
    [
        ("ZeRO-2 style", "sharding", "zero2"),
        ("HSDP", "sharding", "node"),
        ("plain DDP on everything", "sharding", "ddp"),
        ("shard over 64 GPUs", "sharding", 64),
        ("selective activation checkpointing", "activation_checkpointing", "selective"),
        ("without activation checkpointing", "activation_checkpointing", "none"),
        ("an 8k context", "seq_len", 8192),
        ("micro-batch 1 of 8,192 tokens", "seq_len", 8192),
        ("two rows of 2048 tokens", "seq_len", 2048),
        ("a step of 1,000,000 tokens", "seq_len", None),
        ("4 sequences per GPU", "micro_batch", 4),
        ("accumulate over 4 micro-batches", "grad_accum", 4),
        ("the MFU will be 0.4", "mfu", 0.4),
        ("about 1.2 trillion tokens", "tokens", 1.2e12),
        ("each step takes 800 ms", "step_s", 0.8),
    ],
)
def test_choices_and_numbers_are_read_as_people_say_them(said: str, name: str, value: object) -> None:
    found = extract(said).get(name)
    assert (found and found.value) == value


def test_in_a_notebook_it_is_asked_reviewed_and_drawn() -> None:
    shown = design("dense_70b")
    assert "256 H100" in shown._repr_html_()
    shown.answer(STRONG)
    assert "It fits" in str(shown)
    assert "ms" in shown.picture().finding
    with pytest.raises(ValueError, match="dense_70b"):
        design("dense_70")
