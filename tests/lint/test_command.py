"""`fsdp-sim lint` as people and CI jobs use it."""

import json

import jsonschema
import pytest

from fsdp_sim.cli.schema import schema_of
from tests.cli.commands import call

TRAP = """import torch
from torch.distributed.fsdp import fully_shard
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
fully_shard(model)
"""


MODEL = """import torch
def build():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(3))
def broken():
    raise RuntimeError("no")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAP)
    return path


def test_a_finding_names_its_line_its_cost_the_fix_and_the_source_and_ends_with_1(script):
    done = call("lint", str(script))

    assert done.exit_code == 1
    said = " ".join(done.output.split())
    assert "optimizer-before-sharding line 4" in said
    assert "optimizer = torch.optim.AdamW(model.parameters())" in said
    assert all(word in said for word in ("costs", "fix", "source", "1 error in"))


def test_a_clean_script_ends_with_0_and_an_unreadable_one_with_2(script):
    script.write_text("import torch\n")
    assert call("lint", str(script)).exit_code == 0

    script.write_text("import (\n")
    done = call("lint", str(script))
    assert (done.exit_code, "line 1" in done.output) == (2, True)


def test_a_comment_ignores_a_finding_of_its_line_and_an_option_one_everywhere(script):
    script.write_text(TRAP.replace("parameters())", "parameters())  # fsdp-sim: ignore[optimizer-before-sharding]"))
    done = call("lint", str(script))
    assert (done.exit_code, "1 ignored by comments" in " ".join(done.output.split())) == (0, True)

    script.write_text(TRAP.replace("parameters())", "parameters())  # fsdp-sim: ignore[clip-per-rank]"))
    assert call("lint", str(script)).exit_code == 1
    assert call("lint", str(script), "--ignore", "optimizer-before-sharding").exit_code == 0
    assert call("lint", str(script), "--rule", "clip-per-rank").exit_code == 0


def test_json_and_sarif_say_the_same(script):
    result = json.loads(call("lint", str(script), "--json").output)
    jsonschema.validate({"result": result}, schema_of("lint"))
    [file] = result["files"]
    log = json.loads(call("lint", str(script), "--format", "sarif").output)

    [finding], [result] = file["findings"], log["runs"][0]["results"]
    region = result["locations"][0]["physicalLocation"]["region"]
    assert (finding["rule"], finding["line"], finding["column"]) == (
        result["ruleId"],
        region["startLine"],
        region["startColumn"],
    )
    assert log["version"] == "2.1.0"
    assert log["runs"][0]["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]


def test_sarif_names_a_file_from_where_one_stands_as_github_has_it_and_others_by_their_whole_address(
    script, monkeypatch
):
    script = script.rename(script.parent / "a b%c.py")
    uris = []
    for folder in script.parent, script.parents[1], script.parent / "elsewhere":
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        [result] = json.loads(call("lint", str(script), "--format", "sarif").output)["runs"][0]["results"]
        uris.append(result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"])
    assert uris == ["a%20b%25c.py", f"{script.parent.name}/a%20b%25c.py", script.as_uri()]


def test_a_model_and_gpus_give_what_a_trap_costs(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
        "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: NO_WRAP}\n"
    )
    done = call("lint", str(path), "--model", "llama3-8b", "--gpu", "H100", "--json")

    [finding] = json.loads(done.output)["files"][0]["findings"]
    assert finding["rule"] == "one-unit"
    assert "ms and" in finding["simulated"]


def test_a_rule_that_there_is_not_is_named_with_the_nearest():
    done = call("lint", "x.py", "--rule", "clip-per-ranks")

    assert (done.exit_code, "clip-per-rank" in done.output) == (2, True)


@pytest.mark.slow
def test_a_model_is_made_in_a_process_of_its_own_and_what_it_says_wrong_is_one_sentence(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    done = call("lint", f"{path}:build", f"{path}:broken")

    assert done.exit_code == 2
    assert "batch-norm-statistics" in done.output
    assert "cannot be made: RuntimeError: no" in " ".join(done.output.split())


@pytest.mark.parametrize(("arguments", "why"), [
    ("fsdp=flags.fsdp", "line 2: fsdp is flags.fsdp, which only running the program would tell"),
    ("deepspeed='none.json'", "none.json cannot be read: No such file"),
])  # fmt: skip
def test_what_a_trainer_is_given_and_cannot_be_read_is_a_note_and_no_silence(arguments, why, script):
    script.write_text(f"from transformers import TrainingArguments\nTrainingArguments('out', {arguments})\n")
    done = call("lint", str(script), "--json")

    [report] = json.loads(done.stdout)["files"]
    assert done.exit_code == 0
    assert [note.startswith("what it gives a trainer was not looked at") for note in report["notes"]] == [True]
    assert why in report["notes"][0]


def test_a_script_that_gives_a_trainer_nothing_needs_no_note(script):
    script.write_text("from transformers import AutoModel\n")
    assert json.loads(call("lint", str(script), "--json").stdout)["files"][0]["notes"] == []
