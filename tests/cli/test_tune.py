"""`fsdp-sim tune`: the best plan, its prices and its forms; exit statuses."""

import json

import pytest

from fsdp_sim import Cluster
from tests.cli.commands import call

ASKED = ("--model", "gpt2-124m", "--gpu", "A100", "--gpus", "8", "--global-batch", "64")
FEW = ("--vary", "micro_batch", "--vary", "compile=false,true")


def test_the_best_plan_is_one_that_simulate_predicts_the_same():
    found = json.loads(call("tune", *ASKED, *FEW, "--json").stdout)

    best = found["best"]
    pairs = [f"--plan={key}={str(value).lower()}" for key, value in best["set"].items()]
    start = ("--plan", "grad_accum=8") if "grad_accum" not in best["set"] else ()
    again = json.loads(call("simulate", *ASKED[:6], *pairs, *start, "--json", "--no-explain").stdout)
    assert again["step_time_s"] == best["step_time_s"]
    assert found["step_time_interval_s"][0] < best["step_time_s"] < found["step_time_interval_s"][1]
    assert set(found["forms"]) == {"python", "torch", "torchtitan", "accelerate"}
    words = " ".join(call("tune", *ASKED, *FEW).output.split())
    assert "What each change is worth" in words
    assert found["state"].split("micro_batch")[0] in words


def test_the_numbers_of_an_own_node_hold_for_every_plan(tmp_path):
    path = str(tmp_path / "node.toml")
    Cluster("A100", gpus=8).to_file(path)
    with open(path, "a") as file:
        file.write("\n[calibration]\nstep_s = 0.3\n")

    asked = ("--model", "gpt2-124m", "--cluster", path, "--vary", "compile=false,true")
    found = json.loads(call("tune", *asked, "--json").stdout)

    assert found["best"]["step_time_s"] > 0.3


def test_a_form_alone_can_be_printed():
    assert "fully_shard(model" in call("tune", *ASKED, *FEW, "--as", "torch").stdout


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (("--vary", "fp8"), "fp8 changes what is learnt", 2),
        (("--vary", "micro_batch=x"), "Plan.micro_batch is 'x'", 2),
        (("--vary", "nothing"), "a plan has no nothing to vary", 2),
        ((*FEW, "--memory-limit-gib", "0.1"), "no plan that was simulated fits", 1),
    ],
)
def test_what_is_asked_wrongly_and_what_does_not_fit(arguments, words, status):
    done = call("tune", *ASKED, *arguments)

    assert done.exit_code == status
    assert words in done.stderr


def test_what_is_unverified_of_the_plan_that_was_found_is_said_too():
    """The start keeps all on the GPU, the best offloads: how fast CPUs step was not measured."""
    asked = ("--model", "gpt2-1.5b", "--gpu", "4090", "--gpus", "1", "--vary", "cpu_offload=false,true", "--json")
    found = json.loads(call("tune", *asked).stdout)
    assert found["best"]["set"] == {"cpu_offload": True}
    assert any("Of the CPUs this is unverified" in note for note in found["notes"])
