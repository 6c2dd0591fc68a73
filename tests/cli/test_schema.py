"""The JSON schemas: files that are up to date, and that real requests and results satisfy."""

import dataclasses
import json
from pathlib import Path

import click
import jsonschema
import pytest

import fsdp_sim
from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.cli import schema
from fsdp_sim.cli.main import COMMANDS as MAIN
from fsdp_sim.cli.main import main
from fsdp_sim.validate.published import MEASURED
from tests.cli.commands import EIGHT_B, SMALL, call

FOLDER = Path(fsdp_sim.__file__).parent / "schemas"
CALLS: dict[str, list[tuple[str, ...]]] = {
    "simulate": [(*SMALL,), (*EIGHT_B, "--micro-batch", "4"), (*SMALL, "--no-explain", "--plan", "wrap=root")],
    "program": [("--layers", "2"), ("--layers", "2", "--diff", "{recording}")],
    "sweep": [(*SMALL, "--vary", "micro_batch=1,5000,x")],
    "fit": [(*EIGHT_B,), ("--largest", "model", *SMALL[2:]), ("--largest", "seq-len", *SMALL)],
    "diagnose": [("{trace}",), ("{trace}", "--bandwidth-gbps", "100")],
}


ELSEWHERE = {"teach grade"}  # a list for nbgrader's cells
OF_OPTIONS = ["coverage", "exercises --chapter unit", "drill list", "doctor", "ladder --rungs mini-ddp --steps 1"]


def validator(command: str) -> jsonschema.Draft202012Validator:
    loaded = json.loads(schema.file_of(command).read_text())
    jsonschema.Draft202012Validator.check_schema(loaded)
    return jsonschema.Draft202012Validator(loaded)


def test_there_is_a_file_for_each_command_and_no_other():
    assert set(FOLDER.glob("*.json")) == set(map(schema.file_of, schema.COMMANDS))


def test_every_command_that_prints_json_has_one():
    def of(command, *path):
        for name, one in getattr(command, "commands", {}).items():
            yield from of(command.get_command(click.Context(command), name) or one, *path, name)
        if any("--json" in option.opts for option in command.params):
            yield " ".join(path)

    found = {one for name in MAIN for one in of(main.get_command(click.Context(main), name), name)}
    assert found - ELSEWHERE == set(schema.COMMANDS)


@pytest.mark.parametrize("command", schema.COMMANDS)
def test_files_are_what_the_structs_give(command):
    assert schema.file_of(command).read_text() == schema.text_of(command), "python -m fsdp_sim.cli.schema"


@pytest.mark.parametrize("command", CALLS)
def test_the_option_prints_the_file(command):
    done = call(command, "--schema")

    assert done.exit_code == 0
    assert done.stdout == (FOLDER / f"{command}.json").read_text()


@pytest.mark.parametrize(("command", "arguments"), [(c, a) for c, calls in CALLS.items() for a in calls])
def test_real_results_satisfy_it_and_with_a_piece_missing_they_do_not(command, arguments, tmp_path):
    recording, trace = tmp_path / "recording.txt", tmp_path / "trace.jsonl"
    recording.write_text("\n".join(call("program", "--layers", "3").stdout.splitlines()))
    slow = Cluster("A100-SXM-40GB", gpus=64, bandwidth_gbps=25)
    simulate("gpt2-124m", slow, Plan(param_dtype="bf16")).timeline.to_jsonl(trace)
    done = call(command, *(one.format(recording=recording, trace=trace) for one in arguments), "--json")
    result = json.loads(done.stdout)
    check = validator(command)

    check.validate({"result": result})
    for key in list(result):
        less = {k: v for k, v in result.items() if k != key}
        optional = key not in json.loads((FOLDER / f"{command}.json").read_text())["$defs"][_name(command)]["required"]
        assert check.is_valid({"result": less}) == optional


def _name(command: str) -> str:
    return schema.COMMANDS[command][1].__name__


@pytest.mark.parametrize("words", OF_OPTIONS)
def test_results_of_what_has_options_alone_satisfy_it(words):
    command = next(name for name in schema.COMMANDS if words.startswith(name))
    result = json.loads(call(*words.split(), "--json").stdout)
    check = validator(command)

    check.validate({"result": result})
    assert json.loads(call(*command.split(), "--schema").stdout) == check.schema
    for key in result:
        assert not check.is_valid({"result": {k: v for k, v in result.items() if k != key}})


@pytest.mark.parametrize("command", CALLS)
def test_errors_satisfy_it(command):
    done = call(command, "--plan", "micro_bach=1", "--json")

    assert done.exit_code == 2
    validator(command).validate({"failure": json.loads(done.stdout)})


def test_what_validate_prints_satisfies_it(tmp_path):
    rows = MEASURED.read_text().splitlines()
    path = tmp_path / "measured.csv"
    path.write_text("\n".join([*rows[:3], rows[-1]]))
    done = call("validate", str(path), "--json")

    result = json.loads(done.stdout)
    assert len(result["rows"]) == 3
    validator("validate").validate({"result": result})
    assert not validator("validate").is_valid({"result": {"rows": []}})


def test_lists_of_requests_and_of_results_satisfy_it():
    plan = dataclasses.asdict(Plan(param_dtype="bf16"))
    good = {"id": 1, "model": {"preset": "gpt2-124m", "n_layer": 2}, "gpu": "A100", "gpus": 8, "plan": plan}
    wrong = {"model": "gpt2-124m", "gpu": "A100", "gpus": 12}
    requests = [good, wrong]
    done = call("simulate", "--from", "-", "--json", input=json.dumps(requests).encode())
    check = validator("simulate")

    check.validate({"requests": requests, "results": json.loads(done.stdout)})
    assert not check.is_valid({"request": good | {"gpuz": 8}})
    assert not check.is_valid({"request": good | {"gpus": "8"}})
    assert not check.is_valid({"request": good | {"plan": {"micro_batch": "2"}}})


def test_a_request_may_name_every_field_of_a_plan_and_says_what_it_takes():
    fields = json.loads((FOLDER / "simulate.json").read_text())["$defs"]["PlanFields"]["properties"]

    assert set(fields) == {f.name for f in dataclasses.fields(Plan)}
    assert all(one["description"] for one in fields.values())
