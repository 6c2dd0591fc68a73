"""A stack sets what belongs to the software; what a plan gives itself wins."""

from dataclasses import fields, replace

import pytest

from fsdp_sim.cost import fitted
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Plan, plan_fields, stack_names, stack_remark
from fsdp_sim.spec.catalogue import tables

CLUSTER = Cluster("H100", gpus=8)


def test_every_stack_names_its_source_and_sets_fields_of_a_plan() -> None:
    for name, stack in tables("stacks.toml").items():
        assert stack["source"]
        assert set(stack.get("plan", {})) <= {f.name for f in fields(Plan)}
        assert Plan(stack=name).stack == name


def test_the_plain_stack_is_the_default_and_sets_nothing() -> None:
    assert Plan(stack="plain") == Plan()


def test_a_field_that_is_given_wins_in_every_form_of_a_plan() -> None:
    texts = {"stack": "llm-foundry", "cross_entropy": "torch"}
    for plan in (Plan(**texts), Plan(**plan_fields(texts)), replace(Plan(**texts), micro_batch=2)):
        assert (plan.attention_impl, plan.cross_entropy, plan.loss_metrics) == ("flash1", "torch", 1)


def test_an_unknown_stack_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"Plan.stack is 'torchtitn'; .*did you mean 'torchtitan'"):
        Plan(stack="torchtitn")


def test_a_stack_has_seconds_between_steps_of_its_own() -> None:
    def between_s(stack: str) -> float:
        return simulate("gpt2-124m", CLUSTER, Plan(stack=stack)).between_steps_s

    assert {stack: between_s(stack) for stack in stack_names()} == {s: fitted(s).step_s for s in stack_names()}
    assert between_s("llm-foundry") != between_s("plain")


def test_norms_written_out_cost_time_and_compiling_takes_it_back() -> None:
    def step_s(**plan: object) -> float:
        given = {"micro_batch": 2, "seq_len": 4096, "param_dtype": "bf16", "activation_checkpointing": "full"}
        return simulate("llama2-7b", CLUSTER, Plan(**given | plan)).step_time_s

    assert step_s(stack="hf-trainer") > 1.02 * step_s(stack="torchtitan")
    assert step_s(stack="hf-trainer", compile=True) == pytest.approx(step_s(stack="torchtitan", compile=True))


def test_an_unverified_stack_says_so() -> None:
    unverified = [name for name in stack_names() if stack_remark(name)]

    assert "prime-rl" in unverified
    assert "torchtitan" not in unverified


def test_a_copy_with_another_stack_takes_its_settings_and_keeps_what_was_given() -> None:
    compiled = Plan(stack="torchtitan-compiled", micro_batch=2)

    assert replace(compiled, stack="hf-trainer") == Plan(stack="hf-trainer", micro_batch=2)
    assert replace(compiled, stack="hf-trainer", compile=True) == Plan(stack="hf-trainer", compile=True, micro_batch=2)
    assert replace(replace(compiled, compile=False), stack="torchtitan-compiled").compile is False
    assert replace(compiled, seq_len=2048).compile is True
