"""`fsdp-sim diagnose`: what people and programs read, pages and traces, and one sentence for what it cannot do."""

import gzip
import json
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import msgspec
import psutil
import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.diagnose import Diagnosis, diagnose
from fsdp_sim.engine import straggler
from fsdp_sim.timeline.chrome import read_chrome, write_chrome
from fsdp_sim.timeline.files import read_timeline
from fsdp_sim.words import human_ms
from tests.cli.commands import call, examples
from tests.timeline.kineto.gpu_trace import kineto_trace
from tests.timeline.snapshot.snapshots import step
from tests.timeline.strategies import op, timeline_of


@pytest.fixture(scope="module")
def timeline():
    plan = Plan(micro_batch=1, param_dtype="bf16")
    return simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=64, bandwidth_gbps=12), plan).timeline


@pytest.fixture
def trace(timeline, tmp_path):
    path = tmp_path / "step.jsonl"
    timeline.to_jsonl(path)
    return str(path)


def test_people_get_the_headline_the_culprits_and_what_to_try(timeline, trace):
    done = call("diagnose", trace)

    found = diagnose(timeline)
    assert done.exit_code == 0
    words = " ".join(done.output.split())
    assert " ".join(found.headline.split()) in words
    assert found.culprits[0].sentence in words
    assert found.culprits[0].advice[0] in words
    assert "overlap" in words
    assert "ALL_GATHER(root) forward" in words


def test_json_is_what_the_library_says(timeline, trace):
    done = call("diagnose", trace, "--json", "--bandwidth-gbps", "100", "--max-gb", "0.001")

    assert done.exit_code == 0
    assert msgspec.json.decode(done.stdout, type=Diagnosis) == diagnose(timeline, bandwidth_gbps=100)
    schema = json.loads(call("diagnose", "--schema").stdout)
    jsonschema.Draft202012Validator(schema).validate({"result": json.loads(done.stdout)})
    assert not jsonschema.Draft202012Validator(schema).is_valid({"result": {"headline": "x"}})


def test_it_reads_traces_of_the_profiler_and_everything_else_that_holds_a_timeline(timeline, tmp_path):
    profiled, ours = tmp_path / "profiled.json.gz", tmp_path / "ours.json"
    profiled.write_bytes(gzip.compress(json.dumps(kineto_trace(timeline)).encode(), 1))
    write_chrome(timeline, ours)

    said = [json.loads(call("diagnose", str(path), "--json").stdout) for path in (profiled, ours)]
    assert [one["culprits"][0]["culprit"] for one in said] == [diagnose(timeline).culprits[0].culprit] * 2


def test_rank_and_step_are_chosen(tmp_path):
    found = [op(10.0 * k, 10.0 * k + 1, rank=rank, step=k, seq=k) for rank in range(2) for k in range(3)]
    for rank in range(2):
        timeline_of(*(e for e in found if e.rank == rank)).to_jsonl(tmp_path / f"{rank}.jsonl")
    files = [str(tmp_path / "0.jsonl"), str(tmp_path / "1.jsonl")]

    said = json.loads(call("diagnose", *files, "--rank", "1", "--step", "2", "--json").stdout)
    assert (said["rank"], said["step"], said["ranks"]) == (1, 2, [0, 1])


def test_a_page_and_a_trace_are_written(trace, tmp_path):
    page, chrome = tmp_path / "why.html", tmp_path / "perfetto.json.gz"

    done = call("diagnose", trace, "--html", str(page), "--chrome", str(chrome))
    assert done.exit_code == 0
    assert f"Wrote the page to {page}." in done.output
    text = page.read_text()
    assert "Why is my communication not overlapped?" in text
    assert diagnose(read_timeline(trace)).headline.split(";")[0] in text
    assert read_chrome(chrome).events == read_timeline(trace).events


def test_a_page_of_several_ranks_has_each_with_its_times_and_says_who_straggles(tmp_path):
    plan = Plan(param_dtype="bf16", seq_len=512)
    slow = simulate("gpt2-124m", Cluster("H100", gpus=4), plan, skew=lambda s, n: straggler(s, n, rank=2, factor=1.5))
    slow.timeline.to_jsonl(tmp_path / "slow.jsonl")

    said = json.loads(
        call("diagnose", str(tmp_path / "slow.jsonl"), "--html", str(tmp_path / "p.html"), "--json").stdout
    )
    table = (tmp_path / "p.html").read_text().partition("Ranks in the step")[2].partition("</table>")[0]

    cells = [re.findall(r">([^<]+)</t[hd]>", row) for row in table.split("<tr>")[2:]]
    assert [one[0] for one in cells] == ["0", "1", "2, the straggler", "3"]
    assert [one[1] for one in cells] == [human_ms(row["compute_s"]) for row in said["rank_times"]]
    assert [one[5] for one in cells] == [human_ms(row["made_wait_s"]) for row in said["rank_times"]]


def test_names_of_units_are_text_in_a_page(tmp_path):
    unit = "<script>alert(1)</script>"
    timeline_of(op(0.0, 1.0, unit=unit), op(3.0, 4.0, unit=unit)).to_jsonl(tmp_path / "t.jsonl")

    call("diagnose", str(tmp_path / "t.jsonl"), "--html", str(tmp_path / "t.html"))
    assert "<script>alert(1)" not in (tmp_path / "t.html").read_text()


def test_names_of_units_drive_no_terminal(trace, tmp_path):
    path = tmp_path / "strange.jsonl"
    path.write_text(Path(trace).read_text().replace('"layers.11"', '"layers.11\\u001b[2J\\u202e"'))

    done = call("diagnose", str(path))

    assert "layers.11\\x1b[2J\\u202e" in done.output
    assert not {"\x1b", "\u202e"} & set(done.output)


def test_top_says_how_many_are_left_out(trace):
    assert "and 36 more; --top 38 lists all" in call("diagnose", trace, "--top", "2").output
    assert "more; --top" not in call("diagnose", trace, "--top", "1000").output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{trace}", "--rank", "7"], "no rank 7"),
        (["{trace}", "--step", "7"], "no step 7"),
        (["{trace}", "--bandwidth-gbps", "-1"], "bandwidth_gbps is -1.0"),
        (["{trace}", "--max-gb", "1e-6"], "holds more than the 1e-06 GB (unpacked) that are read of a file"),
        (["{trace}", "{trace}"], "both hold rank 0"),
        (["nothing.json"], "nothing.json cannot be read: No such file"),
        (["{trace}", "--html", "no/such/folder/x.html"], "there is no folder"),
        (["{trace}", "--chrome", "no/such/folder/x.json"], "there is no folder"),
        ([], "Missing argument"),
        (["{trace}", "--predict", "gpus=8"], "no --memory is given"),
        (["--memory", "{trace}"], "is no snapshot of CUDA's memory"),
        (["--memory", "{trace}", "--rank", "0"], "--rank 0 takes a trace"),
        (["{trace}", "--memory", "no.pickle"], "no.pickle"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_status_2(arguments, words, trace):
    done = call("diagnose", *(argument.format(trace=trace) for argument in arguments), "--json")

    assert done.exit_code == 2
    assert words in json.loads(done.stdout)["error"]
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


def test_the_examples_of_its_help_run(timeline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [f"{folder}/rank{rank}.json.gz" for folder in ("traces", "after", "before") for rank in (0, 1)]
    for name in ("trace.json", "rank0.json.gz", "rank1.json.gz", "step.jsonl", *folders):
        rank = int("rank1" in name)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        moved = [msgspec.structs.replace(e, rank=rank, step=e.step + 3) for e in timeline.events]
        made = type(timeline)(timeline.header, moved)
        made.to_jsonl(tmp_path / name) if name.endswith("l") else write_chrome(made, tmp_path / name)

    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(step()))
    for example in examples("diagnose"):
        done = call(*example)
        assert done.exit_code == 0, (shlex.join(example), done.output)


@pytest.mark.parametrize("option", [(), ("--memory",)], ids=["trace", "snapshot"])
def test_in_a_terminal_a_bar_shows_how_much_is_read(option, trace, tmp_path, monkeypatch):
    path = tmp_path / "memory.pickle"
    path.write_bytes(pickle.dumps(step()))
    assert "Reading" not in call("diagnose", *option, str(path) if option else trace).stderr

    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes rich take any stream for a terminal
    assert "Reading" in call("diagnose", *option, str(path) if option else trace).stderr


def test_a_snapshot_of_memory_alone_and_beside_a_trace(trace, tmp_path):
    path, page = tmp_path / "snapshot.pickle", tmp_path / "why.html"
    path.write_bytes(pickle.dumps(step()))
    predict = ("--predict", "layers=4 d-model=512 heads=8 d_ffn=2048 vocab=8192 gpu=A100 gpus=8")
    alone = call("diagnose", "--memory", str(path), *predict, "--json")
    both = call("diagnose", trace, "--memory", str(path), "--json")
    schema = json.loads(call("diagnose", "--schema").stdout)

    for done in (alone, both):
        jsonschema.Draft202012Validator(schema).validate({"result": json.loads(done.stdout)})
    assert json.loads(alone.stdout)["memory"]["predicted"]["kinds"]
    assert (
        "reduce-scatter buffers  25.0 MiB" in call("diagnose", trace, "--memory", str(path), "--html", str(page)).output
    )
    assert "Largest, by the line that asked" in page.read_text()
    call("diagnose", "--memory", str(path), "--html", str(page))
    assert "What stands in my GPU&#x27;s memory?" in page.read_text()


def test_ctrl_c_ends_it_without_a_traceback(timeline, tmp_path):
    """While it reads: it has the file open, which takes seconds to read."""
    path = tmp_path / "long.jsonl"
    timeline.to_jsonl(path)
    header, *events = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + b"".join(events) * 500)
    command = [sys.executable, "-m", "fsdp_sim.cli.main", "diagnose", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and str(path) not in [file.path for file in psutil.Process(process.pid).open_files()]:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert "Traceback" not in said
    assert process.returncode == 130
