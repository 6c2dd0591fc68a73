"""`fsdp-sim program`: the toy model's program in torch's line format, and its first difference from a recording."""

import json
import re

import pytest

from fsdp_sim.schedule import build, toy
from fsdp_sim.spec import Plan
from tests.cli.commands import call


def lines_of(*arguments: str) -> list[str]:
    done = call("program", *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_it_prints_the_lines_of_the_program():
    assert lines_of() == build(toy(4), Plan(), 8).lines()
    plan = Plan(forward_prefetch=2, param_dtype="bf16", grad_accum=2, requires_gradient_sync="last")
    pairs = ["forward_prefetch=2", "param_dtype=bf16", "grad_accum=2", "requires_gradient_sync=last"]
    options = [word for pair in pairs for word in ("--plan", pair)]

    shown = lines_of("--layers", "3", "--world-size", "4", "--steps", "2", *options)

    assert shown == build(toy(3), plan, 4, 2).lines()


def test_json_holds_the_same_lines():
    done = call("program", "--layers", "2", "--json")

    assert json.loads(done.stdout)["lines"] == lines_of("--layers", "2")


def test_every_op_adds_what_the_recorded_format_leaves_out():
    offload = ("--plan", "cpu_offload=true")

    assert not any(" h2d" in line for line in lines_of(*offload))
    assert any(" h2d" in line for line in lines_of(*offload, "--every-op"))


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "recording.txt"
    lines = [re.sub(r"\be(\d+)@", r"e9\1@", line) for line in lines_of()]
    path.write_text("# torch, a remark\n" + "\n".join(lines) + "\n")
    return path


def test_a_recording_with_other_numbers_of_events_is_equal(recording):
    recording.write_text(recording.read_text().replace("@compute", "@compute  "))
    done = call("program", "--diff", str(recording))

    assert (done.exit_code, done.stdout) == (0, f"The {len(lines_of())} lines are equal.\n")
    assert json.loads(call("program", "--diff", str(recording), "--json").stdout)["equal"] is True


def test_the_first_difference_is_shown_and_the_status_is_1(recording):
    done = call("program", "--diff", str(recording), "--plan", "reshard_after_forward=false")

    ours, theirs = lines_of("--plan", "reshard_after_forward=false"), lines_of()
    place = next(n for n, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    assert done.exit_code == 1
    assert f"The first difference is line {place + 1}, in step 0 microbatch 0: forward" in done.stdout
    assert f"-{theirs[place]}" in done.stdout
    assert f"has {len(ours)} lines, the recording {len(theirs)}" in done.stdout
    in_json = json.loads(
        call("program", "--diff", str(recording), "--plan", "reshard_after_forward=false", "--json").stdout
    )
    assert (in_json["equal"], in_json["first_difference"]) == (False, place)


def test_a_wait_for_another_event_is_a_difference(recording):
    text = recording.read_text()
    waits = [line for line in text.splitlines() if line.startswith("wait ") and "@compute" in line]
    other = next(
        line
        for line in waits
        if line.split("@")[0] != waits[0].split("@")[0] and line.split()[1] == waits[0].split()[1]
    )
    recording.write_text(text.replace(waits[0], other, 1))

    assert call("program", "--diff", str(recording)).exit_code == 1


def test_a_recording_that_stops_early_is_a_difference(recording):
    lines = recording.read_text().splitlines()
    recording.write_text("\n".join(lines[:-3]))

    done = call("program", "--diff", str(recording))

    assert done.exit_code == 1
    assert f"line {len(lines) - 3}" in done.stdout


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("2.14", "torch 2.14 issues what torch 2.13 issues."),
        ("2.15", "its reduce-scatters are given 512 bytes, those of 2.13 256"),
    ],
)
def test_what_a_version_of_torch_does_otherwise_is_shown(version, words):
    done = call("program", "--layers", "2", "--plan", "param_dtype=bf16", "--torch", version)

    assert done.exit_code == 0
    assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "0"], "--layers"),
        (["--world-size", "0"], "--world-size"),
        (["--plan", "forward_prefech=1"], "did you mean forward_prefetch?"),
        (["--plan", "forward_prefetch=1", "--plan", "forward_prefetch=2"], "given twice"),
        (["--plan", "shard_size=3"], "shard_size is 3"),
        (["--diff", "nowhere.txt"], "nowhere.txt cannot be read"),
    ],
)
def test_what_is_impossible_is_one_sentence_and_status_2(arguments, words):
    done = call("program", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert words in json.loads(call("program", *arguments, "--json").stdout)["error"]


def test_a_program_that_nobody_waits_for_is_refused():
    for arguments in (["--layers", "100000"], ["--steps", "5000"], ["--plan", "grad_accum=5000"]):
        done = call("program", *arguments)

        assert done.exit_code == 2
        assert "units to run (layers, steps and micro-batches); a program has up to 10,000" in done.stderr
