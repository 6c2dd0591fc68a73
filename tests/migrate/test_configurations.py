"""A configuration rewritten for FSDP2: what the new text says is read again, and is what was promised."""

import json
import tomllib
from pathlib import Path

import pytest

from fsdp_sim.configurations import read
from fsdp_sim.migrate import migration_of_configuration

CONFIGURATIONS = Path(__file__).parents[1] / "configurations"
EXAMPLES = {path.name: path.read_text() for path in sorted((CONFIGURATIONS / "shipped").iterdir())
            if path.suffix in (".yaml", ".json")}  # fmt: skip
CASES = {
    f"{case['name']}|{case['file']}": case["text"]
    for name in ("accelerate", "deepspeed")
    for case in tomllib.loads((CONFIGURATIONS / "cases" / f"{name}.toml").read_text())["case"]
}
KEEPS = {"SHARD_GRAD_OP": False, "_HYBRID_SHARD_ZERO2": False}
OURS = ("accelerate", "deepspeed")
OLD = """# our cluster
distributed_type: FSDP   # do not touch
mixed_precision: bf16
num_processes: 16
num_machines: 2
fsdp_config:
  # strategy
  fsdp_sharding_strategy: {strategy}   # since March
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_use_orig_params: false
  fsdp_offload_params: true
use_cpu: false
"""


def migrated(tmp_path, text, name="accelerate.yaml", gpus=None):
    path = tmp_path / name
    path.write_text(text)
    return migration_of_configuration(str(path), text, gpus)[0]


def read_again(tmp_path, found, gpus=None):
    new = tmp_path / "new" / (found.new_file or Path(found.file).name)
    new.parent.mkdir(exist_ok=True)
    new.write_text(found.new)
    return read(new, gpus=gpus)


@pytest.mark.parametrize("name", [*EXAMPLES, *CASES])
def test_every_committed_configuration_becomes_one_that_is_read_as_the_plan_with_fsdp2(name, tmp_path):
    text = (EXAMPLES | CASES)[name]
    file = tmp_path / name.rpartition("|")[2]
    file.write_text(text)
    old = read(file, gpus=8 if file.name == "ds2.json" else None)
    if old.format not in OURS:
        with pytest.raises(ValueError, match="which is not migrated yet"):
            migrated(tmp_path, text, file.name)
        return
    gpus = 8 if old.format == "deepspeed" else None
    found = migrated(tmp_path, text, file.name, gpus)
    if not found.changed:
        is_done = old.plan["api"] == "fsdp2" and old.given.get("distributed_type") == "FSDP"
        assert found.by_hand or is_done or old.given["distributed_type"] == "NO"
        return

    new = read_again(tmp_path, found, gpus)

    assert new.plan["api"] == "fsdp2"
    for field in ("param_dtype", "cpu_offload", "activation_checkpointing", "compile"):
        assert new.plan.get(field) == (old.plan.get(field) or new.plan.get(field)), field
    keeps = old.plan["api"] in ("zero1", "zero2") or not KEEPS.get(old.plan.get("sharding_strategy"), True)
    assert (new.plan["reshard_after_forward"] is False) == keeps
    assert new.plan.get("shard_size") == (old.plan.get("shard_size") if old.plan["api"] == "fsdp1" else None)
    if old.format == "accelerate":
        assert new.cluster == old.cluster
        again = migration_of_configuration(str(tmp_path / "new" / file.name), found.new)[0]
        assert "uses FSDP2 already" in again.notes[0]


def test_comments_order_and_what_is_not_fsdps_stay(tmp_path):
    found = migrated(tmp_path, OLD.format(strategy="SHARD_GRAD_OP"))

    assert (
        found.new
        == """# our cluster
distributed_type: FSDP   # do not touch
mixed_precision: bf16
num_processes: 16
num_machines: 2
fsdp_config:
  # strategy
  fsdp_reshard_after_forward: false   # since March
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_version: 2
  fsdp_state_dict_type: FULL_STATE_DICT
use_cpu: false
"""
    )
    assert any(one.what.startswith("fsdp_use_orig_params (False) has no equal") for one in found.differs)


def test_shards_within_a_node_become_a_mesh(tmp_path):
    found = migrated(tmp_path, OLD.format(strategy="HYBRID_SHARD"))

    assert found.new.endswith("_replicate_size: 2\n  parallelism_config_dp_shard_size: 8\n")
    assert read_again(tmp_path, found).plan["shard_size"] == 8


def test_json_stays_json(tmp_path):
    text = """{
  "distributed_type": "MULTI_GPU",
  "num_processes": 8,
  "mixed_precision": "no"
}
"""
    new = json.loads(migrated(tmp_path, text, "a.json").new)

    assert new["distributed_type"] == "FSDP"
    assert new["fsdp_config"]["fsdp_version"] == 2


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (OLD.format(strategy="NO_SHARD"), 8, "NO_SHARD is DDP"),
        (OLD.format(strategy="FULL_SHARD\n  fsdp_state_dict_type: LOCAL_STATE_DICT"), 9, "refuses LOCAL_STATE_DICT"),
    ],
)
def test_what_has_no_equal_is_left_to_a_person_by_its_line(text, line, reason, tmp_path):
    found = migrated(tmp_path, text)

    assert not found.changed
    assert [(one.line, reason in one.what) for one in found.by_hand] == [(line, True)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("distributed_type: FSDP\nfsdp_config: {fsdp_offload_parms: true}\n", "did you mean fsdp_offload_params"),
        ("distributed_type: MULTI_GPU\nnum_processes: &n 8\nmachine_rank: *n\n", "has an alias"),
        (
            "distributed_type: MULTI_GPU\nnum_processes: 8\nparallelism_config: {tp_size: 1}\n",
            r"accelerate.yaml cannot be migrated; with FSDP2, it: parallelism_config has 1 replicas of 1 shards",
        ),
    ],
)
def test_what_is_not_understood_is_refused(text, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        migrated(tmp_path, text)


def test_what_deepspeed_says_and_accelerate_leaves_to_the_script_is_named(tmp_path):
    found = migrated(tmp_path, CASES["accelerate: ZeRO stage 3 with both offloaded|zero3.yaml"])

    assert "deepspeed_config" not in found.new
    assert [(one.line, "grad_accum=4, clip_grad_norm=True" in one.what) for one in found.look] == [(2, True)]
