"""Configurations of other trainers: what each gives, that nothing is passed over, and that nothing makes it stumble."""

import json
import random
import re
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from fsdp_sim import Cluster, Plan
from fsdp_sim.configurations import FORMATS, read, schema_of
from fsdp_sim.configurations.__main__ import table
from fsdp_sim.forms import FormState, accelerate_yaml, plan_texts
from fsdp_sim.forms.accelerate import SAID
from fsdp_sim.requests import request_of_texts, resolve
from fsdp_sim.timeline import Op

HERE = Path(__file__).parent
CASES = [
    # configurations of our own in the shapes that people use, and what each must give: of the plan the fields that are
    # compared, of the cluster all
    case
    for path in sorted((HERE / "cases").glob("*.toml"))
    for case in tomllib.loads(path.read_text())["case"]
]


def written(tmp_path: Path, case: dict) -> Path:
    path = tmp_path / case["file"]
    path.write_text(case["text"])
    return path


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_configuration_gives_what_it_says(case, tmp_path):
    found = read(written(tmp_path, case), gpus=case.get("gpus"))

    assert found.format == case["format"]
    of = Plan(**found.plan)
    plan = {name: list(value) if isinstance(value := getattr(of, name), tuple) else value for name in case["plan"]}
    assert plan == case["plan"]
    assert found.cluster == case["cluster"]
    assert (found.model, found.preset) == (case.get("model"), case.get("preset"))
    assert {**found.dims, **case.get("dims", {})} == found.dims
    assert case.get("remark", "") in " ".join(found.remarks)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_whatever_is_read_can_be_simulated_beside_the_options_it_needs(case, tmp_path):
    texts = {"config": str(written(tmp_path, case)), "model": "llama3.2-1b", "gpu": "H100", "gpus": "16"}
    texts |= {"gpus": str(case["gpus"])} if "gpus" in case else {}
    texts |= {"gpus": str(case["cluster"]["gpus"])} if "gpus" in case["cluster"] else {}

    job = resolve(request_of_texts(texts))

    assert job.simulate().step_time_s > 0
    assert any("is read as" in note for note in job.notes)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_each_key_is_understood_or_without_effect_and_each_default_is_said(case, tmp_path):
    found = read(written(tmp_path, case), gpus=case.get("gpus"))
    schema = schema_of(found.format)
    known = {f"{section}.{key}".removeprefix("top.") for section, keys in schema.sections.items() for key in keys}

    told = {*found.understood, *found.without_effect}
    assert {key for key in told if key.rpartition(".")[0] not in schema.open} <= known
    assert not set(found.understood) & set(found.without_effect)
    assert len(found.defaults) == len(found.filled)
    assert all(schema.package in sentence for sentence in found.defaults)


@pytest.mark.parametrize(("fsdp", "is_said"), [({}, True), ({"fsdp": True}, False)], ids=["ddp", "fsdp"])
def test_that_ddp_keeps_the_dtype_in_which_a_model_is_loaded_is_said(fsdp, is_said, tmp_path):
    """FSDP does not: Accelerate makes fp32 of what is trained."""
    (tmp_path / "a.json").write_text(json.dumps({"output_dir": "out", "bf16": True} | fsdp))

    assert ("unless model_dtype says another" in " ".join(read(tmp_path / "a.json").remarks)) == is_said


@pytest.mark.parametrize(("name", "section"), [("fsdp_config", {"fsdp": True}), ("deepspeed", {})])
def test_comments_of_json_are_remarked_in_the_file_that_another_names_too(name, section, tmp_path):
    (tmp_path / "named.json").write_text("{} // as people write")
    (tmp_path / "arguments.json").write_text(json.dumps({"output_dir": "out", name: "named.json"} | section))

    remarks = " ".join(read(tmp_path / "arguments.json").remarks)
    assert "named.json has comments" in remarks
    assert "arguments.json has comments" not in remarks


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_format_has_by_default_is_a_value_that_it_takes(format):
    from fsdp_sim.configurations.kinds import converted

    for keys in schema_of(format).sections.values():
        for name, key in keys.items():
            if key.default is not None:
                assert converted(key.takes, key.default) in (key.default, (key.default,)), name


ACCELERATE = "distributed_type: FSDP\nnum_processes: 8\n"
LORA = "base_model: x\nadapter: lora\nlora_r: 8\nlora_target_modules: "
PLUGIN = "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin("
WRONG = [
    ("a.yaml", ACCELERATE + "mixed_precison: bf16\n", "has no key mixed_precison; did you mean mixed_precision?"),
    ("a.yaml", ACCELERATE + "fsdp_config: {fsdp_offload_parms: true}\n", "did you mean fsdp_offload_params?"),
    ("a.yaml", ACCELERATE + "mixed_precision: fp8\n", "mixed_precision is 'fp8'; it must be 'no', 'fp16' or 'bf16'"),
    ("a.yaml", ACCELERATE + "fsdp_config: {version: 3}\n", "fsdp_config.version is 3; it must be 1 or 2"),
    ("a.yaml", ACCELERATE + "fsdp_config: {version: 2}\nparallelism_config: {tp_size: 4}\n", "tensor parallelism"),
    (
        "a.yaml",
        ACCELERATE + "fsdp_config: {version: 2}\nparallelism_config: {dp_replicate_size: 2, dp_shard_size: 2}\n",
        "their product must be 8",
    ),
    ("a.yaml", "distributed_type: MEGATRON_LM\n", "what else Accelerate starts is not simulated"),
    ("a.yaml", "distributed_type: FSDP\ndistributed_type: NO\n", "distributed_type is given twice, in lines 1 and 2"),
    ("a.yaml", "fsdp_config: 3\ndistributed_type: FSDP\n", "fsdp_config is 3; it must be a table"),
    ("a.yaml", "- 1\n", "holds a list, and no keys"),
    ("a.yaml", "a: [\n", "is not YAML"),
    ("a.yaml", "hello: world\n", "is in no format that is known by its keys (hello)"),
    ("a.json", "{", "is not JSON"),
    ("a.json", '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}', "ZeRO stage 2, which"),
    ("a.json", '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}', "NVMe is not simulated"),
    ("a.json", '{"train_batch_size": 256, "zero_optimization": {"stage": 3}}', "follows from the number of GPUs"),
    ("a.json", '{"zero_optimization": {"stag": 3}}', "did you mean stage?"),
    ("a.json", '{"fsdp": "hybrid_shard", "bf16": true}', "others need fsdp_config.version 1"),
    ("a.json", '{"fsdp": true, "fsdp_config": "none.json"}', "none.json cannot be read"),
    ("a.json", '{"fsdp": true, "optim": "adafactor"}', "optim is 'adafactor'"),
    ("a.json", '{"output_dir": "o", "per_device_train_batchsize": 1}', "did you mean per_device_train_batch_size?"),
    ("a.py", "TrainingArguments(bf16=flags.bf16)", "line 1: bf16 is flags.bf16"),
    ("a.py", "print(1)", "calls nothing that is read"),
    ("a.py", "x = (", "is not Python"),
    ("a.yaml", "trainer: {strategy: fsdp, gradient_clip_val: 1.0}", "Lightning refuses to clip by norm with FSDP"),
    ("a.yaml", "trainer: {strategy: {class_path: my.Strategy}}", "there is no strategy my.Strategy that is read"),
    ("a.py", "Trainer(strategy=ModelParallelStrategy())", "auto is all GPUs of a node"),
    ("a.yaml", "base_model: x\nmicro_batch_size: 1\ntensor_parallel_size: 2", "tensor parallelism is not simulated"),
    ("a.yaml", "base_model: x\nsequence_length: 1", "did you mean sequence_len?"),
    ("a.yaml", LORA + "[q_proj, '.*v_proj']", "in a list peft has no pattern"),
    ("a.yaml", LORA + "'.*(q_proj|lm_head)'", "it matches lm_head too, whose adapters are not simulated"),
    ("a.yaml", LORA + "'.*layers.[02].*q_proj'", "here each block has the same"),
    ("a.yaml", LORA + "'q_proj$'", "it matches no linear layer, such as model.layers.0.self_attn.q_proj"),
    ("a.yaml", LORA + "'(.*)*q_proj'", "this expression is not read"),
    ("a.py", "TrainingArguments()\nLoraConfig(target_module=[])", "did you mean target_modules?"),
    ("a.py", "LoraConfig(r=8)", "calls nothing that is read"),
    ("a.py", PLUGIN + "reshard_after_forward=True))", "with fsdp_version 1; write sharding_strategy"),
    ("a.py", PLUGIN + "fsdp_version=2, forward_prefetch=True))", "Accelerate refuses it with fsdp_version 2"),
    ("a.py", "Accelerator(fsdp_plugin=make())", "it must be a FullyShardedDataParallelPlugin that this file calls"),
    ("a.py", "Accelerator()\nFullyShardedDataParallelPlugin()", "does not give it to Accelerator; write fsdp_plugin="),
    ("a.py", "TrainingArguments(bf16=int(env('B')))", "line 1: bf16 is int(env('B')), which only running the program"),
    ("a.yaml", "distributed_type: FSDP\nnum_processes: ${WORLD_SIZE}", "which only running the program would tell"),
    ("a.yaml", "a: 1\n---\nb: 2", "it holds 2 documents"),
    ("a.yaml", "# nothing", "holds nothing, and no keys"),
    (
        "a.yaml",
        "trainer: {devices: 8}\nmodel: {tensor_model_parallel_size: 2, fsdp: true}",
        "model.tensor_model_parallel_size is NeMo's, which trains with Megatron",
    ),
    ("a.yaml", "global_batch: 8\nprecision: amp\nfsdp_config: {}", "in no format that is known: transformers 5"),
    ("a.yaml", "stage: ppo\nfinetuning_type: lora", "stage is 'ppo'"),
    ("a.yaml", "stage: sft\ncutoff_length: 8", "did you mean cutoff_len?"),
    ("a.yaml", "metric_logger: x\nbatch_size: ${oc.env:B}", "batch_size is ${oc.env:B}, which only running"),
    ("a.yaml", "metric_logger: x\nbatch_size: ${batch_size}", "batch_size is ${batch_size}, which only running"),
    ("a.yaml", "metric_logger: x\nprompt: hello", "it generates, and does not train"),
    ("a.yaml", "engine: {strategy: megatron}", "other engines are not FSDP's"),
    ("a.yaml", "engine: {ulysses_sequence_parallel_size: 2}", "sequence parallelism is not simulated"),
    ("a.yaml", "actor_rollout_ref: {actor: {fsdp_config: {fsdp_sise: 8}}}", "did you mean fsdp_size?"),
    ("a.yaml", "engine: {strategy: fsdp2}\ntrainer: {n_gpus_per_node: 7}", "are not 7 GPUs times micro-batches"),
    ("a.toml", "[parallelism]\ntensor_parallel_degree = 2", "parallelism.tensor_parallel_degree is 2"),
    ("a.toml", "[training]\nseqlen = 2", "did you mean seq_len?"),
    ("a.py", "TrainingArguments(fsdp=True)\nTrainingArguments(fsdp=True)", "two calls for the same, in lines 1 and 2"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "text", "sentence"), WRONG)
def test_what_is_not_understood_is_refused_by_its_name(file, text, sentence, tmp_path):
    (tmp_path / file).write_text(text)

    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        read(tmp_path / file)
    assert file in str(error.value)


@pytest.mark.parametrize("format", FORMATS)
def test_in_every_section_of_every_format_an_unknown_key_is_named(format, tmp_path):
    for section in schema_of(format).sections.keys() - schema_of(format).open:
        tree: object = {"no_such_key_of_anything": 1}
        for name in reversed(section.split(".") if section != "top" else []):
            tree = {name: tree}
        path = tmp_path / "a.json"
        path.write_text(json.dumps(tree))

        with pytest.raises(ValueError, match="has no key no_such_key_of_anything"):
            read(path, format)


BOM = "\ufeff"
ODD = [  # legal, and read as it stands
    ("a.yaml", BOM + "distributed_type: FSDP\r\nfsdp_config:\r\n  fsdp_version: '2'\r\n", "api", "fsdp2"),
    ("a.yaml", ACCELERATE + "fsdp_config:\n  <<: {version: 2, offload_params: 'true'}\n", "cpu_offload", True),
    ("a.yaml", "base_model: a\nmicro_batch_size: '2'\nfsdp: full_shard auto_wrap\n", "micro_batch", 2),
    ("a.yaml", "base_model: a\nfsdp:\nfsdp_config:\ndeepspeed:\nadapter:\n", "api", "ddp"),
    ("a.yaml", "stage: sft\nlora_rank: ${r}\nr: 4\n", "lora_rank", 4),
    ("a.yaml", "trainer: {strategy: {class_path: FSDPStrategy, init_args: null}}\n", "wrap", "root"),
    ("a.py", "kw = dict(forward_prefetch=True)\nTrainer(strategy=FSDPStrategy(**kw))", "forward_prefetch", True),
    ("a.py", "Trainer(model, TrainingArguments('o', bf16=True), train_dataset=data)", "param_dtype", "bf16"),
    ("a.yaml", "engine: {strategy: '???', fsdp_size: '${oc.select:a.b,4}'}\ntrainer: {nnodes: 1}", "shard_size", 4),
    ("a.toml", BOM + 'model.name = "llama3"\nmodel.flavor = "8B"\ntraining.seq_len = 4_096', "seq_len", 4096),
    ("a.json", '{"zero_optimization": {"stage": "3"}, "train_batch_size": 1.6e1}', "micro_batch", 2),
    ("a.json", '{// three\n"zero_optimization": {"stage": 3,}, /* a // b */ "train_batch_size": 16}', "micro_batch", 2),
    ("a.yaml", ACCELERATE + "fsdp_config: {fsdp_backward_prefetch_policy: NO_PREFETCH}", "backward_prefetch", "none"),
    ("a.yaml", "use_peft: true\nmax_seq_length: 512\ntorch_dtype: bfloat16\n", "seq_len", 512),
    ("a.yaml", "use_peft: true\n", "lora_targets", ("q_proj", "v_proj")),
    ("a.yaml", LORA + r"'.*layers[.][\d]+.(mlp|self_attn).(up|k)_proj'", "lora_targets", ("k_proj", "up_proj")),
    ("a.py", "Fabric(strategy=ModelParallelStrategy(tensor_parallel_size=1))", "param_dtype", None),
    ("a.yaml", "trainer: {strategy: ddp, accumulate_grad_batches: 4}", "requires_gradient_sync", "last"),
    ("a.py", "SFTConfig('o')\nLoraConfig(r=4, target_modules='all-linear')", "lora_targets", "all-linear"),
    ("a.py", "TrainingArguments('o')\nLoraConfig()\nBitsAndBytesConfig(load_in_4bit=True)", "base_quantization", "fp4"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "text", "field", "value"), ODD, ids=range(len(ODD)))
def test_what_is_odd_and_legal_is_read_as_it_stands(file, text, field, value, tmp_path):
    (tmp_path / file).write_bytes(text.encode())

    assert read(tmp_path / file, gpus=8).plan[field] == value


def test_an_option_stands_in_for_what_only_running_the_script_would_tell(tmp_path):
    (tmp_path / "a.py").write_text("TrainingArguments('o', per_device_train_batch_size=args.batch)")

    with pytest.raises(ValueError, match="write its value: a whole number >= 1, or give --micro-batch"):
        read(tmp_path / "a.py")
    assert "micro_batch" in read(tmp_path / "a.py", given={"micro_batch": 4}).plan


def test_a_python_file_is_never_run(tmp_path):
    (tmp_path / "a.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nTrainer(strategy='fsdp')")

    read(tmp_path / "a.py")

    assert not (tmp_path / "ran").exists()


VALUES = [None, True, -1, 0, 10**30, 1.5, float("nan"), "", "x", "none", "a,b", [], [1], [[]], {}, {"a": {}}, "Ω\u202e"]


@pytest.mark.parametrize("format", FORMATS)
def test_whatever_a_key_is_given_it_is_read_or_refused_in_a_sentence(format, tmp_path):
    path, chance = tmp_path / "a.json", random.Random(0)
    start = {
        "accelerate": {"distributed_type": "FSDP"},
        "lightning": {"trainer": {"strategy": "fsdp"}},
        "trainer": {"fsdp": True},
        "trl": {"use_peft": True},
    }
    for section, keys in schema_of(format).sections.items():
        for name in keys:
            tree = inner = dict(start.get(format, {}))
            for part in section.split(".") if section != "top" else []:
                inner[part] = inner = {}
            inner[name] = chance.choice(VALUES)
            path.write_text(json.dumps(tree))
            with suppress(ValueError):  # nothing else
                read(path, format, gpus=8)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\n"
        + "".join(f"b{n}: &b{n} [*b{n - 1 or ''}, *b{n - 1 or ''}]\n" for n in range(1, 20)),
        "a: &a [*a]",
        "a: " + "[" * 5000,
        "? [1, 2]\n: 3",
        "a: !!python/object/apply:os.system [true]",
        "\t- x",
        "a: 2026-99-99",
        "{" * 100,
    ],
    ids=range(8),
)
def test_what_is_meant_to_hurt_is_refused(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)

    with pytest.raises(ValueError, match=r"a\.yaml"):
        read(tmp_path / "a.yaml")


SHIPPED = sorted((HERE / "shipped").glob("*.yaml")) + sorted((HERE / "shipped").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=[path.name for path in SHIPPED])
def test_the_examples_that_the_packages_ship_are_read_whole(path):
    found = read(path)

    assert found.format == path.name.partition("-")[0]
    assert {
        "zero0": "ddp",
        "zero1": "zero1",
        "zero2": "zero2",
        "zero3": "fsdp2",
        "fsdp1": "fsdp1",
        "fsdp2": "fsdp2",
    }.get(path.stem.split("-")[1], "ddp") == found.plan["api"]


def test_the_page_has_the_table_that_the_command_prints():
    assert table() in (HERE.parents[1] / "docs" / "configurations.md").read_text()


@pytest.mark.parametrize(("beside", "reduced"), [({}, "fp32"), ({"model_dtype": "bf16"}, "bf16")])
def test_under_autocast_ddp_reduces_gradients_in_the_dtype_of_the_parameters(beside, reduced, tmp_path):
    case = next(case for case in CASES if case["name"] == "accelerate: DDP, compiled")
    texts = {"config": str(written(tmp_path, case)), "model": "gpt2-124m", "gpu": "A100"}

    job = resolve(request_of_texts(texts | beside))

    sent = {i.dtype for i in job.simulate().program.ops if i.op is Op.ALL_REDUCE}
    assert (job.plan.param_dtype, sent) == ("bf16", {reduced})


def test_options_beside_the_file_replace_what_it_says(tmp_path):
    case = next(case for case in CASES if case["name"].startswith("deepspeed: stage 2"))
    texts = {"config": str(written(tmp_path, case)), "model": "gpt2-124m", "gpu": "A100"}

    job = resolve(request_of_texts(texts | {"gpus": "16", "micro_batch": "2", "seq_len": "512"}))

    assert (job.plan.micro_batch, job.plan.grad_accum, job.plan.seq_len) == (2, 8, 512)
    assert job.cluster == Cluster("A100", 16)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(api="fsdp1", sharding_strategy="SHARD_GRAD_OP", backward_prefetch="BACKWARD_POST", param_dtype="bf16"),
        Plan(api="fsdp1", sharding_strategy="FULL_SHARD", forward_prefetch=True, cpu_offload=True),
        Plan(wrap="embed_block_head", param_dtype="bf16", reduce_dtype="bf16", activation_checkpointing="full"),
        Plan(wrap="embed_block_head", reshard_after_forward=False, shard_size=4, compile=True),
        Plan(api="ddp", param_dtype="bf16", reduce_dtype="fp32"),
    ],
    ids=range(5),
)
def test_what_is_written_for_accelerate_is_read_as_the_same_plan(plan, tmp_path):
    texts = plan_texts(plan, Cluster("H100", 8)) | {"model": "llama3-8b", "gpu": "H100", "gpus": "8"}
    (tmp_path / "a.yaml").write_text(accelerate_yaml(FormState(texts)))

    found = Plan(**read(tmp_path / "a.yaml").plan)

    for name in SAID:
        assert getattr(found, name) == getattr(plan, name) or (found.api, name) in AS_TORCH, name


AS_TORCH = {  # None is torch's own value, which a configuration says
    ("fsdp1", "reduce_dtype"), ("fsdp1", "backward_prefetch"), ("fsdp1", "forward_prefetch")
}  # fmt: skip
