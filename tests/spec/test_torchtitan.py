"""A run's TOML for torchtitan is read whole: what it says becomes the plan, and nothing in it is passed over unsaid."""

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim import Cluster, Plan
from fsdp_sim.forms import FormState, state_of, torchtitan_toml
from fsdp_sim.requests import request_of_texts, resolve
from tests.cli.commands import call

RUN = """
[job]
description = "Llama 3.1 8B"

[profiling]
enable_profiling = true

[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"
lr = 3e-4
implementation = "foreach"

[training]
local_batch_size = 2
global_batch_size = 256
seq_len = 8192
max_norm = 1.0

[parallelism]
data_parallel_replicate_degree = 4
data_parallel_shard_degree = 16
fsdp_reshard_after_forward = "never"
tensor_parallel_degree = 1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
components = ["model", "loss"]

[checkpoint]
enable = true
interval = 500
"""


@pytest.fixture
def train(tmp_path: Path) -> str:
    path = tmp_path / "train.toml"
    path.write_text(RUN)
    return str(path)


def test_a_run_of_torchtitan_is_simulated_from_its_file_alone(train: str) -> None:
    job = resolve(request_of_texts({"torchtitan": train, "gpu": "H100"}))

    assert job.model.name == "torchtitan llama3 8B"
    assert job.cluster == Cluster("H100", gpus=64)
    assert job.plan == Plan.from_torchtitan(train) == Plan(
        stack="torchtitan-compiled", compile=True, micro_batch=2, grad_accum=2, seq_len=8192, shard_size=16,
        reshard_after_forward=False, wrap="embed_block_head", param_dtype="bf16", reduce_dtype="fp32",
        activation_checkpointing="selective", optimizer_impl="foreach", clip_grad_norm=True,
    )  # fmt: skip
    done = call("simulate", "--torchtitan", train, "--gpu", "H100", "--json")
    assert json.loads(done.stdout)["tokens_per_step"] == 256 * 8192


def test_what_a_file_leaves_out_is_torchtitans_own_default() -> None:
    bare = Plan.from_torchtitan({"model": {"name": "llama3", "flavor": "8B"}}, gpus=8)
    assert bare == Plan(
        stack="torchtitan", micro_batch=8, seq_len=2048, param_dtype="bf16", reduce_dtype="fp32",
        activation_checkpointing=2, clip_grad_norm=True, wrap="embed_block_head",
    )  # fmt: skip


def test_the_float8_converter_is_the_plans_fp8_with_its_gathers_unless_nothing_is_sharded() -> None:
    def fp8_of(gpus: int, **section: object) -> tuple[object, ...]:
        plan = Plan.from_torchtitan({
            "model": {"name": "llama3", "flavor": "8B", "converters": ["quantize.linear.float8"]},
            "quantize": {"linear": {"float8": {"filter_fqns": ["output"], **section}}},
        }, gpus=gpus)  # fmt: skip
        return plan.fp8, plan.fp8_all_gather, plan.fp8_precompute_scale

    gathers = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
    assert fp8_of(8) == ("tensorwise", False, False)
    assert fp8_of(8, recipe_name="rowwise") == ("rowwise", False, False)
    assert fp8_of(8, **gathers) == ("tensorwise", True, True)
    assert fp8_of(1, **gathers) == ("tensorwise", False, False)
    with pytest.raises(ValueError, match="which torchtitan refuses; leave recipe_name out"):
        fp8_of(8, recipe_name="rowwise", **gathers)


def test_a_router_that_the_float8_converter_would_take_is_to_be_left_out() -> None:
    table = {"model": {"name": "llama4", "flavor": "17bx16e", "converters": ["quantize.linear.float8"]}}
    section = {"filter_fqns": ["output"]}
    with pytest.raises(ValueError, match=re.escape("it must be ['output', 'router.gate']")):
        Plan.from_torchtitan(table | {"quantize": {"linear": {"float8": section}}}, gpus=8)
    section["filter_fqns"].append("router.gate")
    assert Plan.from_torchtitan(table | {"quantize": {"linear": {"float8": section}}}, gpus=8).fp8 == "tensorwise"


def test_options_replace_what_the_file_says_and_the_global_batch_is_kept(train: str) -> None:
    job = resolve(request_of_texts({"torchtitan": train, "gpu": "H100", "micro_batch": "1", "compile": "false"}))
    assert (job.plan.micro_batch, job.plan.grad_accum, job.plan.compile) == (1, 4, False)
    other = resolve(request_of_texts({"torchtitan": train, "gpu": "H100", "model": "qwen3-8b", "layers": "2"}))
    assert other.model.name == "qwen3-8b with n_layer=2"
    line = FormState.read(f"torchtitan={train} gpu=H100 activation_checkpointing=none").line
    assert "activation_checkpointing=none" in line
    assert "shard_size=16" in line


@pytest.mark.parametrize(("old", "new", "said"), [
    ("tensor_parallel_degree = 1", "tensor_parallel_degree = 8",
     "train.toml: parallelism.tensor_parallel_degree is 8; it must be 1 (anything else is not simulated)"),
    ("tensor_parallel_degree = 1", "context_parallel_degree = 2", "context_parallel_degree is 2; it must be 1"),
    ("tensor_parallel_degree = 1", "tensor_paralel_degree = 1",
     "parallelism has no key tensor_paralel_degree; did you mean tensor_parallel_degree?"),
    ("[profiling]", "[profilling]", "torchtitan has no section profilling; did you mean profiling?"),
    ('"never"', '"sometimes"', "fsdp_reshard_after_forward is 'sometimes'; it must be 'default', 'always' or 'never'"),
    ('mode = "selective"', 'mode = "memory_budget"', "activation_checkpoint.mode is 'memory_budget'; it must be"),
    ('selective_ac_option = "op"', "selective_ac_option = 2", "selective_ac_option is 2; it must be 'op' or a whole"),
    ("local_batch_size = 2", "local_batch_size = true", "training.local_batch_size is True; it must be a whole number"),
    ("global_batch_size = 256", "global_batch_size = 200", "global_batch_size is 200, no multiple of 128: micro"),
    ('name = "AdamW"', 'name = "Lion"', "optimizer.name is 'Lion'; it must be 'Adam' or 'AdamW'"),
    ('flavor = "8B"', 'flavor = "8B"\nconverters = ["quantize.linear.mx"]',
     "model.converters is ['quantize.linear.mx']; it must be [] or ['quantize.linear.float8']"),
    ('flavor = "8B"', 'flavor = "8B"\nconverters = ["quantize.linear.float8"]',
     "quantize.linear.float8.filter_fqns is []; it must be ['output'] (fp8 is simulated in all linear layers of the "),
    ("[profiling]", "[quantize.linear.float8]\nemulate = true\n[profiling]",
     "quantize.linear.float8.emulate is True; it must be False"),
    ("[profiling]", '[quantize.linear.float8]\nrecipe = "rowwise"\n[profiling]',
     "quantize.linear.float8 has no key recipe; did you mean recipe_name?"),
    ("data_parallel_shard_degree = 16", "data_parallel_shard_degree = -1", "is -1, all GPUs; say how many there are"),
])  # fmt: skip
def test_what_is_not_simulated_is_refused_by_its_name(train: str, old: str, new: str, said: str) -> None:
    assert old in RUN
    Path(train).write_text(RUN.replace(old, new, 1))
    done = call("simulate", "--torchtitan", train, "--gpu", "H100")
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr


def test_gpus_that_the_degrees_do_not_make_up_are_refused(train: str) -> None:
    done = call("simulate", "--torchtitan", train, "--gpu", "H100", "--gpus", "32")
    assert "replicate_degree is 4 and data_parallel_shard_degree 16, and there are 32 GPUs" in done.stderr


def test_a_tuned_plan_takes_nothing_more_from_the_file_it_began_with(train: str) -> None:
    """What the search has switched off is not switched on again by the file."""
    Path(train).write_text(RUN.replace('mode = "selective"', 'mode = "full"'))
    found = call(
        "tune", "--torchtitan", train, "--gpu", "H200", "--vary", "activation_checkpointing=none,full", "--json"
    )
    best = json.loads(found.stdout)
    assert best["best"]["set"] == {"activation_checkpointing": None}
    assert FormState.read(best["state"]).plan.activation_checkpointing is None
    assert tomllib.loads(best["forms"]["torchtitan"])["activation_checkpoint"]["mode"] == "none"


# ---------------------------------------------------------------------- what is written is read back

in_torchtitan = st.fixed_dictionaries(
    {
        "stack": st.sampled_from(["torchtitan", "torchtitan-compiled"]),
        "compile": st.booleans(),
        "micro_batch": st.integers(1, 8),
        "grad_accum": st.integers(1, 5),
        "seq_len": st.sampled_from([512, 2048]),
        "param_dtype": st.sampled_from(["bf16", "fp32"]),
        "reduce_dtype": st.just("fp32"),
        "cpu_offload": st.booleans(),
        "shard_size": st.sampled_from([None, 2, 8]),
        "reshard_after_forward": st.sampled_from([None, True, False]),
        "activation_checkpointing": st.sampled_from([None, "full", "selective", 1, 2, 3]),
        "optimizer_impl": st.sampled_from(["fused", "foreach"]),
        "clip_grad_norm": st.just(True),
        "wrap": st.just("embed_block_head"),
        "fp8": st.sampled_from([None, "tensorwise", "rowwise"]),
    }
)
in_fp8 = st.sampled_from([{}, {"fp8_all_gather": True}, {"fp8_all_gather": True, "fp8_precompute_scale": True}])
not_in_torchtitan = st.fixed_dictionaries(
    {},
    optional={
        "forward_prefetch": st.sampled_from([1, 2]),
        "reduce_dtype": st.sampled_from([None, "bf16"]),
        "param_dtype": st.sampled_from([None, "fp16"]),
        "reshard_after_forward": st.just(2),
        "activation_checkpointing": st.just(("mm",)),
        "clip_grad_norm": st.just(False),
        "stack": st.sampled_from(["plain", "hf-trainer"]),
        "loss_chunks": st.just(2),
        "requires_gradient_sync": st.just("last"),
        "wrap": st.sampled_from(["block", "root"]),
        "fp8": st.just("mxfp8"),
    },
)


def written(plan: Plan) -> tuple[str, dict[str, Any]]:
    text = torchtitan_toml(state_of("llama3.1-8b", Cluster("H100", gpus=16), plan))
    return text, tomllib.loads(text)


@given(in_torchtitan, in_fp8)
def test_a_plan_that_torchtitan_can_say_comes_back_as_it_was(settings: dict[str, Any], fp8: dict[str, Any]) -> None:
    plan = Plan(**settings | (fp8 if settings["fp8"] == "tensorwise" else {}))
    text, job = written(plan)
    assert Plan.from_torchtitan(job) == plan
    assert (job["model"]["name"], job["model"]["flavor"]) == ("llama3", "8B")
    assert "no key for" not in text


@given(in_torchtitan, not_in_torchtitan)
def test_of_any_other_plan_the_file_names_what_comes_back_different(
    settings: dict[str, Any], more: dict[str, Any]
) -> None:
    plan = Plan(**settings | more)
    text, job = written(plan)
    there = Plan.from_torchtitan(job)
    for f in fields(Plan):
        before, after = getattr(plan, f.name), getattr(there, f.name)
        if f.name.endswith("_dtype") and before is None:  # that of the model, or of what is reduced
            before = plan.param_dtype or "fp32"
        assert before == after or f"{f.name} = {before!r} (there {after!r})" in text
