"""torchtitan's TOML and Accelerate's YAML say what the plan says, and what they cannot say is told."""

import tomllib

import pytest
import yaml

from fsdp_sim.forms import FormState, accelerate_yaml, torch_code, torchtitan_toml

STATE = FormState.read(
    "model=llama3-8b gpu=H100 gpus=64 seq_len=8192 micro_batch=2 grad_accum=4 param_dtype=bf16 reduce_dtype=fp32 "
    "shard_size=8 activation_checkpointing=full reshard_after_forward=false compile=true forward_prefetch=2"
)


def test_torchtitan_reads_the_plan():
    text = torchtitan_toml(STATE)
    job = tomllib.loads(text)

    assert job["training"]["local_batch_size"] == 2
    assert job["training"]["global_batch_size"] == 2 * 4 * 64
    assert job["parallelism"] == {
        "data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 8, "fsdp_reshard_after_forward": "never",
    }  # fmt: skip
    assert job["activation_checkpoint"]["mode"] == "full"
    assert job["compile"]["enable"]
    assert "torchtitan has no key for forward_prefetch = 2" in text
    assert job["model"] == {"name": "llama3", "flavor": "8B"}


def test_experts_that_ranks_share_out_are_told_to_torchtitan_and_left_to_whoever_uses_accelerate():
    state = FormState.read(
        "model=qwen3-30b-a3b gpu=H100 gpus=64 expert_parallel=8 forward_prefetch=1 backward_prefetch=1"
    )
    text = torchtitan_toml(state)
    assert tomllib.loads(text)["parallelism"]["expert_parallel_degree"] == 8
    assert "prefetch" not in text
    assert "no key for expert_parallel = 8" in accelerate_yaml(state)
    assert "TODO expert_parallel = 8" in torch_code(state)


def test_accelerate_reads_the_plan(tmp_path):
    config = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "accelerate.yaml"
    path.write_text(accelerate_yaml(STATE))

    read = config.load_config_from_file(str(path))  # refuses keys that it does not know

    assert (read.num_processes, read.num_machines, read.mixed_precision) == (64, 8, "bf16")
    assert read.fsdp_config["fsdp_version"] == 2
    assert read.fsdp_config["fsdp_reshard_after_forward"] is False
    assert read.fsdp_config["fsdp_activation_checkpointing"] is True
    assert read.parallelism_config["parallelism_config_dp_shard_size"] == 8
    assert yaml.safe_load(path.read_text())["dynamo_config"]["dynamo_use_regional_compilation"] is True
    assert "no key for forward_prefetch = 2" in path.read_text()


def test_that_accelerate_puts_reductions_off_is_told_where_the_plan_does_not():
    line = "model=gpt2-124m gpu=A100 gpus=8 grad_accum=4"

    assert "num_steps=4, sync_each_batch=True" in accelerate_yaml(FormState.read(line))
    assert "gradient_sync" not in (said := accelerate_yaml(FormState.read(f"{line} requires_gradient_sync=last")))
    assert "sync_each_batch" not in said


@pytest.mark.parametrize("write", [torchtitan_toml, accelerate_yaml])
def test_what_they_do_not_have_is_refused(write):
    with pytest.raises(ValueError, match="api is 'zero2'"):
        write(FormState.read("model=gpt2-124m gpu=A100 gpus=8 api=zero2"))
