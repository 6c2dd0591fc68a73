"""`fsdp-sim simulate`: numbers for people and for programs, and one sentence for what is impossible."""

import json

import pytest

from fsdp_sim import Cluster, Plan, Timeline, simulate
from fsdp_sim.simulation import CONTEXT_BYTES, NCCL_BYTES, workspace_bytes
from fsdp_sim.timeline import read_timeline
from tests.cli.commands import EIGHT_B, SMALL, call

GIB = 2**30


def as_json(*arguments: str, status: int = 0) -> dict:
    done = call("simulate", *arguments, "--json")
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def test_json_is_what_the_library_says_of_the_same_request():
    result = as_json(*EIGHT_B, "--micro-batch", "1")

    plan = Plan(micro_batch=1, seq_len=8192, param_dtype="bf16", reduce_dtype="fp32")
    sim = simulate("llama3-8b", Cluster("H100-SXM-80GB", gpus=64), plan)
    assert result["step_time_s"] == sim.step_time_s
    assert result["tokens_per_s_per_gpu"] == sim.tokens_per_s_per_gpu
    assert result["peak_memory_bytes"] == sim.peak_memory_bytes == sum(result["peak"]["by_category"].values())
    assert result["explanation"] == sim.explain().sentences
    assert (result["gpus"], result["nodes"], result["fits"]) == (64, 8, True)
    assert result["tokens_per_step"] == 64 * 8192
    assert result["plan"]["micro_batch"] == 1


def test_people_get_the_numbers_the_memory_and_the_reasons():
    done = call("simulate", *EIGHT_B)

    result = as_json(*EIGHT_B)
    assert done.exit_code == 0
    words = " ".join(done.output.split())
    assert f"{result['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU" in words
    assert f"peak memory {result['peak_memory_bytes'] / GIB:.1f} GiB" in words
    assert "activations" in words
    assert "█" in words
    for sentence in result["explanation"]:
        assert " ".join(sentence.split()) in words


@pytest.mark.parametrize(("gpu", "told"), [("H100", True), ("cpu", False)])
def test_what_the_allocator_holds_is_told_of_gpus_alone(gpu: str, told: bool) -> None:
    done = call("simulate", "--model", "gpt2-124m", "--gpu", gpu, "--gpus", "2", "--seq-len", "128")

    assert done.exit_code == 0, done.output
    assert ("held by the allocator" in done.output) is told


@pytest.mark.parametrize(("gpu", "workspaces"), [("H100", "2 x 32.0 MiB"), ("A100-SXM-80GB", "2 x 8.12 MiB")])
def test_cublas_workspaces_are_in_what_the_allocator_holds_and_nccl_beside_it(gpu: str, workspaces: str) -> None:
    """8,519,680 bytes are torch's CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8; 4 MiB a channel NCCL's NCCL_BUFFSIZE."""
    done = call("simulate", "--model", "gpt2-124m", "--gpu", gpu, "--gpus", "2", "--seq-len", "128")
    assert f"with cuBLAS's workspaces, {workspaces}" in " ".join(done.output.split())
    assert workspace_bytes(Cluster("A100-SXM-80GB", gpus=2)) == 8_519_680
    assert CONTEXT_BYTES - NCCL_BYTES == 1.25 * 2**30


def test_a_request_without_a_dtype_computes_in_bf16_and_says_so():
    result = as_json(*SMALL)

    assert (result["plan"]["param_dtype"], result["plan"]["reduce_dtype"]) == ("bf16", "fp32")
    assert "bf16" in result["notes"][0]
    assert "bf16" in call("simulate", *SMALL).output


@pytest.mark.parametrize(
    ("arguments", "dtypes"),
    [
        (["--param-dtype", "none"], (None, None)),
        (["--plan", "reduce_dtype=fp32"], (None, "fp32")),
        (["--gpu", "V100"], (None, None)),
        (["--gpu", "cpu"], (None, None)),
        (["--param-dtype", "bfloat16"], ("bf16", None)),
    ],
)
def test_a_dtype_that_is_named_or_cannot_be_had_is_left_alone(arguments, dtypes):
    given = ("--model", "gpt2-124m", "--gpus", "8", *([] if "--gpu" in arguments else ["--gpu", "A100"]), *arguments)

    result = as_json(*given)

    assert (result["plan"]["param_dtype"], result["plan"]["reduce_dtype"]) == dtypes
    assert not any("the request names no dtype" in note for note in result["notes"])


def test_every_field_of_a_plan_can_be_given():
    values = {
        "reshard_after_forward": "false", "forward_prefetch": "2", "activation_checkpointing": "3", "grad_accum": "2",
        "requires_gradient_sync": "last", "optimizer": "sgd", "separate_reduce_scatter_group": "true",
        "shard_size": "4",
    }  # fmt: skip
    pairs = [word for key, value in values.items() for word in ("--plan", f"{key}={value}")]

    plan = as_json(*SMALL, *pairs)["plan"]

    found = {key: str(plan[key]).lower() for key in values}
    assert found == values


def test_dimensions_replace_those_of_a_named_model_and_may_stand_alone(tmp_path):
    whole = as_json(*SMALL)
    half = as_json(*SMALL, "--layers", "6")
    dims = ["--layers", "12", "--d-model", "768", "--heads", "12", "--d-ffn", "3072", "--vocab", "50257"]
    alone = as_json(*dims, "--max-seq-len", "1024", "--gpu", "A100", "--gpus", "8")
    (tmp_path / "model.toml").write_text('preset = "gpt2-124m"\nn_layer = 6\n')
    of_file = as_json("--model-file", str(tmp_path / "model.toml"), "--gpu", "A100", "--gpus", "8")

    assert half["parameters"] == of_file["parameters"] < whole["parameters"] == alone["parameters"]
    assert half["step_time_s"] == of_file["step_time_s"] < whole["step_time_s"] == alone["step_time_s"]


def test_a_cluster_file_is_a_cluster_and_options_replace_its_fields(tmp_path):
    path = str(tmp_path / "cluster.toml")
    Cluster("A100", gpus=8).to_file(path)

    assert as_json("--model", "gpt2-124m", "--cluster", path)["step_time_s"] == as_json(*SMALL)["step_time_s"]
    assert as_json("--model", "gpt2-124m", "--cluster", path, "--gpus", "16")["gpus"] == 16


def test_links_are_heard():
    fast = as_json(*EIGHT_B)
    slow = as_json(*EIGHT_B, "--inter", "100 Gb/s per node")

    assert slow["exposed_comm_s"] > fast["exposed_comm_s"]
    assert slow["step_time_s"] > fast["step_time_s"]


def test_a_plan_that_does_not_fit_ends_with_1_its_memory_and_changes_that_do_fit():
    arguments = [*EIGHT_B, "--micro-batch", "4"]
    result = as_json(*arguments, status=1)

    assert result["fits"] is False
    assert "llama3-8b does not fit 64 x H100-SXM-80GB" in result["error"]
    assert result["peak"]["by_category"]["activation"] > 50 * GIB
    assert result["would_fit"]
    for change in result["would_fit"]:
        pairs = [
            word
            for key, value in change["set"].items()
            if key != "micro_batch"
            for word in ("--plan", f"{key}={value}")
        ]
        micro = change["set"].get("micro_batch", 4)
        changed = as_json(*EIGHT_B, "--micro-batch", str(micro), *pairs)
        assert changed["peak_memory_bytes"] == change["peak_memory_bytes"] <= changed["memory_limit_bytes"]
        assert changed["step_time_s"] == change["step_time_s"]

    done = call("simulate", *arguments)
    assert done.exit_code == 1
    assert "What would make it fit" in done.stdout
    assert done.stderr.startswith("Error: llama3-8b does not fit")


def test_timeline_and_page_are_written(tmp_path):
    events, trace, page = tmp_path / "step.jsonl", tmp_path / "step.json.gz", tmp_path / "step.html"
    result = as_json(*SMALL, "--timeline", str(events), "--chrome", str(trace), "--html", str(page))

    assert read_timeline(trace).events == Timeline.from_jsonl(events).events
    assert Timeline.from_jsonl(events).end_s == pytest.approx(result["step_time_s"] - result["between_steps_s"])
    assert "gpt2-124m" in page.read_text()


IMPOSSIBLE = [
    (["--gpu", "H1000", "--gpus", "8"], "no GPU is called 'H1000'; the nearest names are H100-SXM-80GB"),
    (["--model", "lama3-8b", *SMALL[2:]], "no model is called 'lama3-8b'; the nearest names are llama3-8b"),
    (["--gpu", "V100", "--gpus", "8", "--param-dtype", "bf16"], "V100-SXM2-32GB has no bf16"),
    (["--shard-size", "3"], "shard_size is 3, which does not divide"),
    (["--gpus", "12"], "does not fill nodes of 8 GPUs; take 8 or 16"),
    (["--gpus", "-8"], "gpus is -8; it must be a whole number >= 1"),
    (["--gpus", "eight"], "gpus is 'eight'; it must be a whole number >= 1"),
    (["--gpus", "80000000"], "gpus is 80,000,000; the simulator goes up to"),
    (["--layers", "2000000"], "n_layer is 2,000,000; the simulator goes up to"),
    (["--micro-batch", "0"], "Plan.micro_batch is 0; it must be a whole number >= 1"),
    (["--seq-len", "4096"], "gpt2-124m has learned positions for 1024 tokens"),
    (["--inter", "carrier pigeon"], "no link is called 'carrier pigeon'"),
    (["--bandwidth-gbps", "0"], "bandwidth_gbps is 0"),
    (["--plan", "forward_prefech=1"], "did you mean forward_prefetch?"),
    (["--plan", "forward_prefetch"], "is no pair; write key=value"),
    (["--plan", "forward_prefetch=maybe"], "Plan.forward_prefetch is 'maybe'; it must be None"),
    (["--plan", "limit_all_gathers=false"], "a setting of fsdp1; api is 'fsdp2'"),
    (["--micro-batch", "2", "--plan", "micro_batch=2"], "micro_batch is given twice"),
    (["--heads", "5"], "n_head is 5, which does not divide d_model 768"),
    (["--cluster", "nowhere.toml"], "there is no cluster file nowhere.toml"),
    (["--model-file", "nowhere.toml"], "there is no file nowhere.toml"),
    (["--from", "nowhere.json"], "--from reads whole requests"),
    (["--html", "nowhere/page.html"], "there is no folder"),
    (["--chrome", "nowhere/step.json"], "there is no folder"),
    (["--layer", "3"], "No such option '--layer'"),
]


@pytest.mark.parametrize(("arguments", "words"), IMPOSSIBLE, ids=[" ".join(arguments) for arguments, _ in IMPOSSIBLE])
def test_what_is_impossible_is_one_sentence_and_status_2(arguments, words):
    given = {SMALL[n]: SMALL[n + 1] for n in range(0, len(SMALL), 2)}
    options = {key: value for key, value in given.items() if key not in arguments}
    arguments = [*(word for pair in options.items() for word in pair), *arguments]

    done = call("simulate", *arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert done.stdout == ""

    in_json = call("simulate", *arguments, "--json")
    assert in_json.exit_code == 2
    assert words in json.loads(in_json.stdout)["error"]


@pytest.mark.parametrize(("missing", "words"), [("--model", "no model is named"), ("--gpu", "no gpu is given")])
def test_what_is_missing_is_named(missing, words):
    at = SMALL.index(missing)
    done = call("simulate", *SMALL[:at], *SMALL[at + 2 :])

    assert (done.exit_code, words in done.stderr) == (2, True)


def test_a_list_of_requests_gives_a_list_of_results_in_order():
    requests = [
        {"id": "first", "model": "gpt2-124m", "gpu": "A100", "gpus": 8, "plan": {"micro_batch": 8}},
        {"model": {"preset": "gpt2-124m", "n_layer": 6}, "gpu": "A100", "gpus": 8, "micro_batch": 8},
    ]
    done = call("simulate", "--from", "-", "--json", input=json.dumps(requests).encode())

    first, second = json.loads(done.stdout)
    assert done.exit_code == 0
    assert first["id"] == "first"
    assert first["step_time_s"] == as_json(*SMALL, "--micro-batch", "8")["step_time_s"] > second["step_time_s"]
    assert "gpt2-124m" in call("simulate", "--from", "-", input=json.dumps(requests).encode()).stdout


def test_an_impossible_request_of_a_list_has_its_error_in_its_place(tmp_path):
    good = {"model": "gpt2-124m", "gpu": "A100", "gpus": 8}
    wrong = [
        (good | {"gpu": "A1000000"}, "no GPU is called 'A1000000'"),
        (good | {"modle": "x"}, "[2] has no field modle; did you mean model?"),
        (good | {"plan": {"micro_bach": 2}}, "[3].plan has no field micro_bach; did you mean micro_batch?"),
        (good | {"gpus": "8"}, "[4]: Cluster.gpus is '8'; it must be a whole number >= 1"),
        (good | {"plan": {"shard_size": 3}}, "does not divide"),
        (good | {"micro_batch": 2, "plan": {"micro_batch": 2}}, "micro_batch is given twice"),
        (7, "[7] is 7; it must be an object"),
        ({"model": "llama2-7b", "gpu": "A100-SXM-40GB", "gpus": 2}, "does not fit"),
        (good | {"plan": {"grad_accum": 1000}}, "12,000 blocks in a step"),
        (good | {"model": {"preset": "gpt2-124m", "head_dim": 2**63}}, "head_dim is 9,223,372,036,854,775,808"),
    ]
    path = tmp_path / "requests.json"
    path.write_text(json.dumps([good, *(request for request, _ in wrong), good]))

    done = call("simulate", "--from", str(path), "--json", "--no-explain")

    results = json.loads(done.stdout)
    assert done.exit_code == 2
    assert results[0] == results[-1]
    assert results[0]["fits"] is True
    for result, (_, words) in zip(results[1:-1], wrong, strict=True):
        assert words in result["error"]
    assert f"{len(wrong)} of {len(results)} requests cannot be carried out, the first is 1" in done.stderr


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'[\n  {"model": "gpt2-124m",\n   gpu: 3}]', "line 3, column 4"),
        (b"[", "is not JSON: Input data was truncated (line 1)"),
        (b"", "it is empty"),
        (b"3", "holds 3; it must hold a list of requests"),
        (b'"\xff"', "is not"),
    ],
)
def test_a_file_that_is_not_json_says_where(data, words):
    done = call("simulate", "--from", "-", "--json", input=data)

    assert done.exit_code == 2
    assert words in json.loads(done.stdout)["error"]
    assert "Traceback" not in done.output


def test_a_number_that_json_cannot_hold_is_said_to_be_where_it_is():
    done = call("simulate", "--from", "-", "--json", input=b'[{"gpus": 1e999},\n 1]')

    assert json.loads(done.stdout)["error"] == "stdin is not JSON: Number out of range - at `$[0][...]`"


def test_help_stands_under_headings_and_says_the_exit_status():
    text = call("simulate", "--help").output

    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert [line.split(" ")[0].rstrip(":") for line in headings] == ["Model", "Cluster", "Plan", "Output"]
    assert "Exit status: 0 if it fits; 1 if it does not" in text


def test_what_would_help_is_said_with_what_it_would_bring():
    slow = [*EIGHT_B, "--inter", "100 Gb/s per node"]
    best = as_json(*slow)["would_help"][0]

    out = call("simulate", *slow).output
    assert "What would help (each simulated, the best first):" in out
    assert f"{best['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU" in out
    assert "would_help" not in as_json(*slow, "--no-explain")


@pytest.mark.parametrize(("plan", "said"), [
    (("fp8=tensorwise", "fp8_all_gather=true"),
     ("bf16, linear layers of blocks in fp8 (tensorwise)", "Gathers and compute beside fp8 in bf16",
      "of the peak in bf16")),
    (("lora_rank=16", "base_quantization=nf4"),
     ("bf16 beside weights in nf4, LoRA of rank 16", "Gathers and compute beside quantised weights in bf16")),
])  # fmt: skip
def test_what_is_not_in_bf16_is_not_said_to_be(plan, said):
    pairs = [word for pair in plan for word in ("--plan", pair)]
    text = call("simulate", "--model", "llama3-8b", "--gpu", "H100", "--gpus", "8", *pairs).stdout
    assert all(sentence in " ".join(text.split()) for sentence in said)


def test_ddp_is_not_said_to_have_shards_nor_torch_2_15_to_reduce_in_bf16():
    text = call("simulate", *SMALL, "--api", "ddp", "--param-dtype", "bf16").stdout
    bars = text.split("Memory at the peak")[1].split("Why")[0]
    assert "parameters cast for compute" in bars
    assert "shard" not in bars
    assert (
        "bf16, reductions in fp32" in call("simulate", *SMALL, "--plan", "torch=2.15", "--param-dtype", "bf16").stdout
    )
    assert "bf16, reductions in bf16" in call("simulate", *SMALL, "--param-dtype", "bf16").stdout
