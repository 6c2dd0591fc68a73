"""A configuration rewritten for FSDP2: what the new text says is read again, and is what was promised."""

import json
import tomllib
from pathlib import Path

import pytest

from fsdp_sim.configurations import read
from fsdp_sim.lint import Costs, lint
from fsdp_sim.migrate import migration_of_configuration, torch_script
from fsdp_sim.migrate.formats import table_of
from tests.some import tail

CONFIGURATIONS = Path(__file__).parents[1] / "configurations"
SHIPPED = {
    path.name: (path.read_text(), None if path.name.startswith("accelerate") else 8)
    for path in sorted((CONFIGURATIONS / "shipped").iterdir()) if path.suffix in (".yaml", ".json")
}  # fmt: skip
OF_CASES = [
    case for path in sorted((CONFIGURATIONS / "cases").glob("*.toml"))
    for case in tomllib.loads(path.read_text())["case"]
]  # fmt: skip
CASES = {
    f"{case['name']}|{case['file']}": (case["text"], None if "gpus" in case["cluster"] else case.get("gpus", 16))
    for case in OF_CASES
}
"""Texts, and how many GPUs are given beside them."""
OF_THE_WAY = ("api", "wrap", "reshard_after_forward", "reduce_dtype", "forward_prefetch", "backward_prefetch")
OF_FSDP1 = ("sharding_strategy", "limit_all_gathers", "bucket_cap_mb", "use_reentrant")
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
    path.write_text(text, newline="")
    return migration_of_configuration(str(path), text, gpus)[0]


def written(tmp_path, found):
    new = tmp_path / "new" / (found.new_file or Path(found.file).name)
    new.parent.mkdir(exist_ok=True)
    new.write_text(found.new, newline="")
    return new


def keeps_parameters(old):
    strategy = old.plan.get("sharding_strategy", "")
    return old.plan["api"] in ("zero1", "zero2") or "GRAD_OP" in strategy or "ZERO2" in strategy


@pytest.mark.parametrize(
    "name",
    [*SHIPPED, *(name if table_of(case["format"]) else tail(name) for name, case in zip(CASES, OF_CASES, strict=True))],
)
def test_every_committed_configuration_becomes_one_that_is_read_as_the_plan_with_fsdp2(name, tmp_path):
    text, gpus = (SHIPPED | CASES)[name]
    file = tmp_path / name.rpartition("|")[2]
    file.write_text(text)
    old = read(file, gpus=gpus)
    if (table_of(old.format) or {"refuse": old.format != "deepspeed"}).get("refuse") and old.plan["api"] != "fsdp2":
        with pytest.raises(ValueError, match="which is not migrated: "):
            migrated(tmp_path, text, file.name, gpus)
        return
    found = migrated(tmp_path, text, file.name, gpus)
    if not found.changed:
        assert found.by_hand or old.plan["api"] == "fsdp2" or old.given["distributed_type"] == "NO"
        return

    new_file = written(tmp_path, found)
    new = read(new_file, gpus=gpus)

    assert new.plan["api"] == "fsdp2"
    if found.source == ["fsdp2"]:
        assert new.plan == old.plan
    else:
        assert (new.plan["reshard_after_forward"] is False) == keeps_parameters(old)
        silent = table_of(new.format)["silent"]
        halved = old.plan.get("optimizer") == "adamw_master_weights"  # those of FSDP2 are fp32, unless somebody says
        of_zero = ("optimizer", "optimizer_impl") if halved else ()
        for field in old.plan.keys() - {*OF_THE_WAY, *OF_FSDP1, *silent, *of_zero}:
            assert new.plan.get(field, old.plan[field]) == old.plan[field], field
        assert new.model == old.model
        assert new.dims.get("dtype") in ("fp32", None if halved else old.dims.get("dtype"))
    if not found.new_file:
        assert new.cluster == old.cluster
    assert "uses FSDP2 already" in migration_of_configuration(str(new_file), found.new, gpus)[0].notes[0]
    of_cluster = Costs({"gpus": str(gpus)} if gpus else {})
    traps = [{one.rule for one in lint(str(path), costs=of_cluster)[0].findings} for path in (file, new_file)]
    told = {one.rule for one in found.differs}
    assert traps[1] <= traps[0] | told, "a migration makes no trap without a word"


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


def test_lines_end_as_they_did(tmp_path):
    new = migrated(tmp_path, OLD.format(strategy="FULL_SHARD").replace("\n", "\r\n")).new

    assert new.count("\n") == new.count("\r\n") == 13


def test_shards_within_a_node_become_a_mesh(tmp_path):
    found = migrated(tmp_path, OLD.format(strategy="HYBRID_SHARD"))

    assert found.new.endswith("_replicate_size: 2\n  parallelism_config_dp_shard_size: 8\n")
    assert read(written(tmp_path, found)).plan["shard_size"] == 8


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


TRAINER = """\
output_dir: out
bf16: true  # H100
fsdp:  # as in our first run
  - full_shard
  - offload
fsdp_config:
  version: 1
  backward_prefetch: backward_pre
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
learning_rate: 1e-5
"""


def test_the_words_of_transformers_4_become_keys(tmp_path):
    found = migrated(tmp_path, TRAINER, "args.yaml")

    assert (
        found.new
        == """\
output_dir: out
bf16: true  # H100
fsdp: true  # as in our first run
fsdp_config:
  version: 2
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: true
  cpu_offload: true
learning_rate: 1e-5
"""
    )


CALL = """\
import sys
from transformers import TrainingArguments
FSDP = dict(version=1, use_orig_params=True)  # since March
args = TrainingArguments(
    sys.argv[1],  # µ
    bf16=True,
    fsdp="full_shard offload",  # words
    fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer",
    fsdp_config=FSDP,
)
"""


def test_a_call_in_python_is_changed_where_it_stands(tmp_path):
    assert (
        migrated(tmp_path, CALL, "args.py").new
        == """\
import sys
from transformers import TrainingArguments
FSDP = dict(version=2, reshard_after_forward=True, transformer_layer_cls_to_wrap=["LlamaDecoderLayer"], cpu_offload=True)  # since March
args = TrainingArguments(
    sys.argv[1],  # µ
    bf16=True,
    fsdp=True,  # words
    fsdp_config=FSDP,
)
"""  # noqa: E501
    )


def test_keys_that_a_call_takes_from_tables_are_changed_in_these(tmp_path):
    """Beside them they would be given twice, which Python refuses."""
    text = """\
common = dict(output_dir="o", bf16=True)
more = {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"version": 1}, "seed": 1}
args = TrainingArguments(**common, **more, **{"fsdp_min_num_params": 1000}, save_steps=2)
"""
    new = migrated(tmp_path, text, "args.py").new

    assert 'common = dict(output_dir="o", bf16=True)\nmore = {"fsdp": True, "fsdp_config": {"version": 2, ' in new
    assert '"seed": 1}\nargs = TrainingArguments(**common, **more, **{' in new
    assert new.endswith("save_steps=2)\n")


def test_adapters_beside_the_arguments_stay_as_they_are(tmp_path):
    lora = "adapters = LoraConfig(r=4)\n"

    assert migrated(tmp_path, f"{lora}{CALL}", "args.py").new == lora + migrated(tmp_path, CALL, "args.py").new


def test_a_version_that_only_the_latest_package_takes_to_be_2_is_written_out(tmp_path):
    found = migrated(tmp_path, '{"output_dir": "o", "fsdp": "shard_grad_op auto_wrap"}', "args.json")

    assert json.loads(found.new)["fsdp_config"] == {"version": 2, "reshard_after_forward": False}
    assert any("4.57.1" in one.what for one in found.differs)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (OLD.format(strategy="NO_SHARD"), 8, "NO_SHARD is DDP"),
        (OLD.format(strategy="FULL_SHARD\n  fsdp_state_dict_type: LOCAL_STATE_DICT"), 9, "refuses LOCAL_STATE_DICT"),
        ("base_model: a\nfsdp_config: {version: 1}\nload_in_4bit: true\nadapter: qlora\nlora_r: 8\nrl: dpo\n", 3,
         "axolotl refuses four-bit weights"),
        ("output_dir: o\nfsdp: true\nfsdp_config: fsdp.json\n", 3, "What FSDP is told stands in fsdp.json"),
    ],
)  # fmt: skip
def test_what_has_no_equal_is_left_to_a_person_by_its_line(text, line, reason, tmp_path):
    (tmp_path / "fsdp.json").write_text('{"version": 1}')
    found = migrated(tmp_path, text)

    assert not found.changed
    assert [(one.line, reason in one.what) for one in found.by_hand] == [(line, True)]


@pytest.mark.parametrize(
    ("text", "key", "becomes", "line", "reason"),
    [
        (
            "optimizer: adamw_bnb_8bit\n",
            "optimizer",
            "adamw_torch_8bit",
            1,
            "axolotl refuses bitsandbytes' 8-bit AdamW",
        ),
        ("load_in_4bit: true\nadapter: qlora\nlora_r: 8\n", "cpu_ram_efficient_loading", "false", 7, "rank 0 alone"),
    ],
)
def test_what_a_package_refuses_with_fsdp2_is_written_otherwise_and_named(text, key, becomes, line, reason, tmp_path):
    text += "base_model: a\nfsdp_version: 1\nfsdp_config:\n  cpu_ram_efficient_loading: true\n"
    found = migrated(tmp_path, text)

    assert f"{key}: {becomes}\n" in found.new
    assert [one.line for one in found.look if reason in one.what] == [line]


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
    found = migrated(tmp_path, CASES["accelerate: ZeRO stage 3 with both offloaded|zero3.yaml"][0])

    assert "deepspeed_config" not in found.new
    assert [(one.line, "grad_accum=4, clip_grad_norm=True" in one.what) for one in found.look] == [(2, True)]


def test_deepspeed_becomes_a_script_of_torch_that_says_all_of_it(tmp_path):
    (tmp_path / "ds.json").write_text(
        json.dumps({
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
            "bf16": {"enabled": True}, "communication_data_type": "fp32", "optimizer": {"type": "SGD"},
            "zero_optimization": {"stage": 2},
        })
    )  # fmt: skip
    code = torch_script(str(tmp_path / "ds.json"), {"model": "gpt2-124m", "gpu": "A100", "gpus": "8", "seq_len": "256"})

    compile(code, "train.py", "exec")
    for line in (
        "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        "reshard_after_forward=False", "fully_shard(unit, **fsdp)", "torch.optim.SGD(", "for micro_batch in range(4)",
        "torch.randint(VOCAB, (2, 256 + 1)", "clip_grad_norm_",
    ):  # fmt: skip
        assert line in code


def test_a_script_of_torch_takes_a_model(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')

    with pytest.raises(ValueError, match="name it and the GPUs"):
        torch_script(str(tmp_path / "ds.json"), {"model": "gpt2-124m"})


def test_verl_changes_each_strategy_and_keeps_off_what_did_nothing(tmp_path):
    text = """data: {train_batch_size: 64, max_length: 1024, micro_batch_size_per_gpu: 8, use_dynamic_bsz: false}
engine:
  strategy: fsdp  # as in May
  offload_policy: true
critic: {strategy: fsdp}
trainer: {n_gpus_per_node: 8}
"""
    found = migrated(tmp_path, text, "verl.yaml")

    assert "  strategy: fsdp2  # as in May\n  offload_policy: false\ncritic: {strategy: fsdp2}\n" in found.new
    assert [(one.line, "did nothing with strategy fsdp" in one.what) for one in found.look] == [(4, True)]
