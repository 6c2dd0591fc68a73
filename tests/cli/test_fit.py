"""`fsdp-sim fit`: the largest that fits, verified; the next larger one, which does not; and what would help."""

import json

import pytest

from fsdp_sim import Cluster
from tests.cli.commands import call

LLAMA = ("--model", "llama3-8b", "--gpu", "H100", "--gpus", "8", "--seq-len", "4096")


def fit(*arguments: str, status: int = 0) -> dict:
    done = call("fit", *arguments, "--json")
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def simulated(*arguments: str) -> dict:
    return json.loads(call("simulate", *arguments, "--json", "--no-explain").stdout)


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    found = fit("--largest", "micro-batch", *LLAMA)

    assert found["next"] == found["value"] + 1
    at, beyond = (simulated(*LLAMA, "--micro-batch", str(found[key])) for key in ("value", "next"))
    assert (at["fit"], beyond["fit"]) == ("fits", "on the edge")  # nor is there a margin
    assert found["fits"]["peak_memory_bytes"] == at["peak_memory_bytes"]
    assert found["too_large"]["peak_memory_bytes"] == beyond["peak_memory_bytes"]
    assert found["too_large"]["would_fit"] == beyond["would_fit"] != []
    assert "activations" in found["limit"]
    words = " ".join(call("fit", "--largest", "micro-batch", *LLAMA).output.split())
    assert found["answer"] in words
    assert found["limit"] in words


def test_the_largest_sequence_is_a_multiple():
    arguments = ("--model", "llama3-8b", "--gpu", "H100", "--gpus", "8")
    found = fit("--largest", "seq-len", "--multiple-of", "1000", *arguments)

    assert (found["value"] % 1000, found["next"]) == (0, found["value"] + 1000)
    assert simulated(*arguments, "--seq-len", str(found["value"]))["fit"] == "fits"
    assert simulated(*arguments, "--seq-len", str(found["next"]))["fit"] != "fits"


def test_learned_positions_end_the_search_and_memory_is_not_blamed():
    found = fit("--largest", "seq-len", "--model", "gpt2-124m", "--gpu", "H100", "--gpus", "8")

    assert found["value"] == 1024
    assert "next" not in found
    assert found["limit"] == "Memory does not limit it: gpt2-124m has learned positions for 1,024 tokens."


def test_the_largest_number_of_layers():
    found = fit("--largest", "layers", "--model", "llama3-8b", "--gpu", "H100", "--gpus", "8", "--seq-len", "4096")

    assert simulated(*LLAMA, "--layers", str(found["value"]))["fit"] == "fits"
    assert simulated(*LLAMA, "--layers", str(found["next"]))["fit"] != "fits"
    assert found["answer"].startswith("The largest number of layers of llama3-8b")


def test_the_largest_published_model_fits_and_the_next_larger_one_does_not():
    arguments = ("--gpu", "A100-SXM-80GB", "--gpus", "16", "--seq-len", "2048")
    found = fit("--largest", "model", "--family", "llama", *arguments)

    assert found["value"].startswith("llama")
    assert simulated("--model", found["value"], *arguments)["fit"] == "fits"
    assert simulated("--model", found["next"], *arguments)["fit"] != "fits"
    assert found["fits"]["parameters"] < found["too_large"]["parameters"]


@pytest.mark.parametrize(
    ("request_", "of"), [(("--model", "llama3-70b", *LLAMA[2:]), "Of 1:"), (LLAMA, "The next larger one, ")]
)
def test_the_smallest_is_no_larger_one(request_, of):
    shown = call("fit", *request_).output

    assert [line for line in shown.splitlines() if line.startswith(of)]
    assert ("The next larger one" in shown) == (request_ is LLAMA)


def test_where_none_fits_the_status_is_1_and_changes_are_given():
    found = fit("--model", "llama2-70b", "--gpu", "A100-SXM-40GB", "--gpus", "8", status=1)

    assert found["value"] is None
    assert found["answer"].startswith("No micro-batch fits")
    changes = found["too_large"]["would_fit"]
    assert changes
    assert all(change["peak_memory_bytes"] <= found["too_large"]["memory_limit_bytes"] for change in changes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--largest", "batch"], "'batch' is not one of"),
        (["--micro-batch", "3", *LLAMA], "--micro-batch is what is searched for"),
        (["--largest", "seq-len", *LLAMA], "--seq-len is what is searched for"),
        (["--largest", "model", *LLAMA], "--model is what is searched for"),
        (["--largest", "model", "--family", "gtp", *LLAMA[2:]], "no model's name begins with 'gtp'"),
        (["--largest", "seq-len", "--multiple-of", "2048", "--model", "gpt2-124m", *LLAMA[2:6]], "no multiple of 2048"),
        (["--gpu", "H100", "--gpus", "8"], "no model is named"),
        (["--multiple-of", "0", *LLAMA], "--multiple-of"),
        (["--largest", "model", "--param-dtype", "bf16", "--gpu", "V100", "--gpus", "8"], "V100-SXM2-32GB has no bf16"),
    ],
)
def test_what_is_impossible_is_one_sentence_and_status_2(arguments, words):
    done = call("fit", *arguments, "--json")

    assert done.exit_code == 2
    assert words in done.stderr
    assert words in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("asked", [("simulate", "--micro-batch", "4"), ("fit",)])
def test_what_is_advised_holds_on_the_own_node_too(asked, tmp_path):
    path = tmp_path / "node.toml"
    Cluster("H100", gpus=8).to_file(path)
    path.write_text(path.read_text() + "\n[calibration]\nstep_s = 0.3\n")
    command, *options = asked

    found = json.loads(call(command, "--model", "gpt2-1.5b", "--cluster", str(path), *options, "--json").stdout)

    changes = found["would_help"] if command == "simulate" else found["too_large"]["would_fit"]
    assert changes
    assert all(change["step_time_s"] > 0.3 for change in changes)
