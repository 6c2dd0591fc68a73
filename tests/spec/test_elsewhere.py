"""What other software calls things, and numbers as people write them, end in the name and the number that are meant."""

import re
import tomllib
from importlib.resources import files

import pytest
from click.testing import CliRunner

from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.cli.main import main
from fsdp_sim.spec import plan_fields


@pytest.mark.parametrize(("field", "value", "meant"), [
    ("api", "zero3", "is 'fsdp2' (torch's fully_shard) with reshard_after_forward=True"),
    ("api", "DeepSpeed", "name ZeRO's stage"),
    ("api", "fsdp", "torch's fully_shard is 'fsdp2', FullyShardedDataParallel 'fsdp1'"),
    ("activation_checkpointing", "true", "every block is 'full'"),
    ("fp8", "true", "default recipe is 'tensorwise'"),
    ("optimizer", "adamw_torch_fused", "'adamw', with optimizer_impl"),
    ("attention_impl", "flash_attention_2", "what 'sdpa' stands for"),
    ("param_dtype", "fp64", "the most is fp32"),
    ("torch", "2.5", "programs of older torch are not known"),
    ("seq_len", "8k", "k is 1,000 or 1,024: write 8000 or 8192"),
    ("seq_len", "8Ki", "write 8192"),
    ("seq_len", "8,192", "write 8192"),
    ("seq_len", "096", "write 96, and 4,096 without its comma"),
    ("micro_batch", "1e1", "write 10"),
    ("micro_batch", "8x8", "write 64"),
    ("shard_size", "0", "it must be None or a whole number >= 1"),
])  # fmt: skip
def test_a_value_that_others_use_is_refused_with_ours(field, value, meant) -> None:
    with pytest.raises(ValueError, match=f"Plan.{field} is .*{re.escape(meant)}") as refused:
        Plan(**plan_fields({field: value}))
    assert "did you mean" not in str(refused.value)  # no other name that is spelled alike


def test_what_is_offered_is_taken() -> None:
    table = tomllib.loads(files("fsdp_sim.spec").joinpath("elsewhere.toml").read_text())
    machines = " ".join(table.pop("gpu").values())
    fields = Model.__dataclass_fields__ | Plan.__dataclass_fields__
    names = {f: of.metadata["allowed"].names for f, of in fields.items() if "allowed" in of.metadata}
    for field, said in table.items():
        offered = re.findall(r"'(\w+)'", " ".join(said.values()))
        assert [name for name in offered if name not in (*names[field], *names["optimizer_impl"])] == [], field
    for name, inter in re.findall(r"has (\S+), with inter='(.+?)'", machines):
        assert Cluster(name, gpus=16, inter=inter).inter_link.kind == "inter"


@pytest.mark.parametrize(("value", "meant"), [("yes", "True"), ("on", "True"), (1, "True"), ("off", "False")])
def test_a_yes_is_true(value, meant) -> None:
    with pytest.raises(ValueError, match=rf"must be True or False; did you mean {meant}\?"):
        Plan(compile=value)


@pytest.mark.parametrize(("name", "meant"), [
    ("p5.48xlarge", "AWS's p5 has H100-SXM-80GB, with inter='AWS EFA v2'"),
    ("TPU v5p", "torch's FSDP on GPUs"),
    ("M3 Max", "'cpu' is processes on CPU cores"),
    ("H1000", "the nearest names are H100-SXM-80GB"),
])  # fmt: skip
def test_a_machine_or_what_is_no_gpu_is_answered_with_the_part(name, meant) -> None:
    with pytest.raises(ValueError, match=re.escape(meant)):
        Cluster(name, gpus=8)


@pytest.mark.parametrize(("option", "meant"), [
    ("--batch-size", "--micro-batch, the sequences of one rank"),
    ("--world-size", "--gpus, those of all nodes"),
    ("--hidden-size", "--d-model"),
    ("--num-experts", "--dim n_expert=VALUE"),
    ("--optim", "--plan optimizer=VALUE"),
    ("--lr", "it changes neither time nor memory; leave it out"),
])  # fmt: skip
def test_an_option_that_others_have_is_answered_with_ours(option, meant) -> None:
    said = CliRunner().invoke(main, ["simulate", option, "4"]).output
    assert f"there is no option {option}; " in said
    assert meant in said


@pytest.mark.parametrize(("field", "meant"), [
    ("gradient_accumulation_steps", "did you mean grad_accum?"), ("batch_size", "did you mean micro_batch"),
    ("world_size", "did you mean Cluster.gpus"), ("zero_stage", "did you mean api"),
])  # fmt: skip
def test_a_field_that_others_have_is_answered_with_ours(field, meant) -> None:
    with pytest.raises(TypeError, match=re.escape(meant)):
        Plan(**{field: 2})


def test_a_link_where_its_hardware_joins_nothing_is_remarked_on() -> None:
    said = simulate("gpt2-124m", Cluster("H100", gpus=16, inter="NVLink4", intra="PCIe5")).notes
    [note] = [note for note in said if note.startswith("Cluster.")]
    assert note.startswith("Cluster.inter='NVLink4' joins the GPUs of a node; here it is taken to join nodes")
