"""``fsdp-sim migrate``, as somebody calls it."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import call, examples

CONFIGURATION = Path(__file__).parents[1] / "configurations" / "shipped" / "accelerate-fsdp1.yaml"
SCRIPT = """import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TransformerBlock(nn.Module): ...


model = nn.Sequential(*[TransformerBlock() for _ in range(4)])
model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters())
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    (tmp_path / "accelerate.yaml").write_text(CONFIGURATION.read_text())
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    return path


def test_its_examples_work(script):
    for example in examples("migrate"):
        script.write_text(SCRIPT)
        assert call(*example).exit_code == 0, example

    assert "after (fsdp2)" in (script.parent / "both.html").read_text()


def test_nothing_is_written_that_was_not_asked_for(script):
    done = call("migrate", "train.py")

    assert done.exit_code == 0
    assert done.stdout.startswith("--- a/train.py\n+++ b/train.py\n")
    assert script.read_text() == SCRIPT
    assert sorted(path.name for path in script.parent.iterdir()) == ["accelerate.yaml", "ds.json", "train.py"]


def test_written_in_place_it_keeps_what_it_was_and_then_has_nothing_to_do(script):
    assert call("migrate", "train.py", "--write").exit_code == 0

    assert "fully_shard(model)" in script.read_text()
    assert (script.parent / "train.py.orig").read_text() == SCRIPT
    assert "nothing to do" in call("migrate", "train.py").stdout


def test_lines_end_as_they_did_and_the_diff_says_so(script):
    script.write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    diff = call("migrate", "train.py", "--write").stdout_bytes

    assert b"-model = DDP(model)\r\n" in diff
    assert script.read_bytes().count(b"\n") == script.read_bytes().count(b"\r\n")


def test_it_writes_in_place_only_what_runs(script):
    script.write_text(SCRIPT + "if rank == 0:\n    model(x)\n")
    done = call("migrate", "train.py", "--write")

    assert done.exit_code == 2
    assert "a person has to see to line 13 first" in done.stderr
    assert not (script.parent / "train.py.orig").exists()


def test_both_steps_in_numbers_of_the_same_dtype(script):
    done = call("migrate", "train.py", "--model", "gpt2-1.5b", "--gpu", "A100", "--gpus", "8", "--json")
    found = json.loads(done.stdout)

    before, after = found["before"], found["after"]
    assert (before["api"], after["api"]) == ("ddp", "fsdp2")
    assert before["peak_memory_bytes"] > 2 * after["peak_memory_bytes"]
    assert after["wire_bytes"] == pytest.approx(1.5 * before["wire_bytes"], rel=0.05)
    assert set(after["collectives"]) >= {"all_gather", "reduce_scatter"}


def test_a_configuration_is_written_in_place_and_both_steps_are_simulated(script):
    done = call("migrate", "accelerate.yaml", "--model", "llama3-8b", "--gpu", "H100", "--write", "--json")
    found = json.loads(done.stdout)

    assert (found["before"]["api"], found["after"]["api"]) == ("fsdp1", "fsdp2")
    assert "fsdp_version: 2" in (script.parent / "accelerate.yaml").read_text()
    assert (script.parent / "accelerate.yaml.orig").read_text() == CONFIGURATION.read_text()


def test_a_configuration_that_has_no_equal_is_not_written(script):
    (script.parent / "old.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}\n")

    assert "a person has to see to line 2 first" in call("migrate", "old.yaml", "--write").stderr
    assert call("migrate", "old.yaml").exit_code == 0


def test_a_deepspeed_json_becomes_another_file(script):
    assert "write it with -o ds.accelerate.yaml" in call("migrate", "ds.json", "--write").stderr
    assert call("migrate", "ds.json", "-o", "new.yaml").exit_code == 0
    assert "nothing to do" in call("migrate", "new.yaml").stdout


def test_the_arguments_of_a_trainer_in_a_script_are_a_configuration(script):
    script.write_text("from transformers import TrainingArguments\nargs = TrainingArguments('out', bf16=True)\n")
    done = call("migrate", "train.py", "--model", "gpt2-124m", "--gpu", "A100", "--gpus", "8", "--write")

    assert "after (fsdp2)" in done.stdout
    assert 'fsdp_config={"version": 2, "reshard_after_forward": True})' in script.read_text()


def test_a_script_of_torch_is_all_that_as_torch_makes(script):
    asked = ["migrate", "ds.json", "--as", "torch", "--model", "gpt2-124m", "--gpu", "A100", "--gpus", "8"]

    assert "fully_shard(unit, **fsdp)" in call(*asked).stdout
    assert "leave out --write, and write it with -o" in call(*asked, "--write").stderr


def test_a_file_that_is_not_there_is_one_sentence():
    done = call("migrate", "nowhere.py")

    assert done.exit_code == 2
    assert done.stderr == "Error: nowhere.py cannot be read: No such file or directory\n"
