"""`fsdp-sim sweep`: every combination is a row, in order, whatever happens on the way."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_sim.explore import front_of
from fsdp_sim.explore.sweep import FEW
from tests.cli.commands import EIGHT_B, SMALL, call

VARY = ("--vary", "micro_batch=1,8,5000", "--vary", "shard_size=none,4,3")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_combination_is_a_row_in_order_with_what_simulate_says(tmp_path):
    out = tmp_path / "sweep.csv"
    done = call("sweep", *SMALL, *VARY, "--out", str(out))

    rows = rows_of(out)
    assert done.exit_code == 0, done.output
    asked = [(row["micro_batch"], row["shard_size"]) for row in rows]
    assert asked == [(m, s) for m in ("1", "8", "5000") for s in ("none", "4", "3")]
    one = json.loads(call("simulate", *SMALL, "--micro-batch", "8", "--shard-size", "4", "--json").stdout)
    assert float(rows[4]["step_time_s"]) == pytest.approx(one["step_time_s"], rel=1e-8)
    assert int(rows[4]["peak_memory_bytes"]) == one["peak_memory_bytes"]
    assert {row["model"] for row in rows} == {"gpt2-124m"}
    assert [row["fit"] for row in rows[:9:3]] == ["fits", "fits", "does not fit"]
    for row in rows[2::3]:
        assert "shard_size is 3, which does not divide" in row["error"]
        assert row["step_time_s"] == ""
    assert "9 combinations: 4 fit, 2 do not, 3 are impossible." in done.stdout
    assert "Impossible, 3 of them: Plan.shard_size is 3, which does not divide" in " ".join(done.stdout.split())


def test_the_pareto_front_is_printed_and_in_the_json():
    varied = ("--vary", "micro_batch=1,2", "--vary", "activation_checkpointing=none,selective,full")
    result = json.loads(call("sweep", *EIGHT_B, *varied, "--json").stdout)

    rows, front = result["rows"], result["pareto"]
    points = [(1 / row["tokens_per_s_per_gpu"], row["peak_memory_bytes"]) for row in rows]
    fitting = [n for n, row in enumerate(rows) if row["fit"] != "does not fit"]
    assert 0 < len(front) < len(rows)
    for n in fitting:
        beaten = any(
            all(a <= b for a, b in zip(points[m], points[n], strict=True)) and points[m] != points[n] for m in fitting
        )
        assert beaten == (n not in front)
    text = call("sweep", *EIGHT_B, *varied).stdout
    for n in front:
        assert f"{rows[n]['tokens_per_s_per_gpu']:,.0f}" in text


def test_each_row_has_the_same_one_of_three_answers_as_simulate(tmp_path):
    """And where one on the edge is on the front, its row says so."""
    out = tmp_path / "sweep.csv"
    asked = ("--model", "llama3-8b", "--gpu", "H100", "--gpus", "8")
    done = call("sweep", *asked, "--vary", "seq_len=4096,8192,16384", "--out", str(out))

    rows = rows_of(out)
    assert [row["fit"] for row in rows] == [
        json.loads(call("simulate", *asked, "--seq-len", row["seq_len"], "--json").stdout)["fit"] for row in rows
    ]
    assert [row["fit"] for row in rows] == ["fits", "on the edge", "does not fit"]
    assert "3 combinations: 1 fit, 1 do not, 1 on the edge of memory." in done.stdout
    assert front_of(rows) == [1, 0]
    edge = next(line for line in done.stdout.splitlines() if line.startswith("8192 "))
    assert edge.rstrip().endswith("66.5 GiB, on the edge")


def test_settings_that_change_nothing_are_told_under_the_table_as_simulate_tells_them():
    plan = ("--plan", "requires_all_reduce=last", "--param-dtype", "bf16")
    varied = ("--vary", "shard_size=none,4", "--vary", "reduce_scatter_max_input_buffers=1,2")
    said = call("simulate", *SMALL, *plan, "--plan", "reduce_scatter_max_input_buffers=2").stdout.split("\n")
    note = next(line for line in said if line.startswith("Plan.requires_all_reduce='last' changes nothing here"))

    text = call("sweep", *SMALL, *plan, *varied).stdout
    notes = json.loads(call("sweep", *SMALL, *plan, *varied, "--json").stdout)["notes"]

    assert text.index("Pareto front") < text.index(note)
    assert note in "\n".join(notes)


def test_models_gpus_and_dimensions_vary_too():
    fixed = ("--seq-len", "512", "--gpus", "8")
    varied = ("--vary", "model=gpt2-124m,bert-base", "--vary", "gpu=A100,V100", "--vary", "layers=2,4")
    result = json.loads(call("sweep", *fixed, *varied, "--json").stdout)

    rows = result["rows"]
    assert len(rows) == 8
    assert all(row["error"] is None for row in rows)
    assert len({row["step_time_s"] for row in rows}) == 8
    assert rows[0]["step_time_s"] < rows[1]["step_time_s"]  # fewer layers
    assert {
        (rows[n]["model"], rows[n]["n_layer"] if "n_layer" in rows[n] else rows[n]["layers"]) for n in result["pareto"]
    } == {(model, layers) for model in ("gpt2-124m", "bert-base") for layers in ("2", "4")}


def test_two_processes_write_the_same_file_as_one(tmp_path):
    vary = ("--vary", f"micro_batch={','.join(map(str, range(1, FEW + 9)))}")
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    assert call("sweep", *SMALL, *vary, "--out", str(one), "--processes", "1").exit_code == 0
    assert call("sweep", *SMALL, *vary, "--out", str(two), "--processes", "2").exit_code == 0

    assert len(rows_of(one)) == FEW + 8
    assert one.read_bytes() == two.read_bytes()


def test_a_broken_file_is_resumed_after_its_last_whole_row(tmp_path):
    whole, broken = tmp_path / "whole.csv", tmp_path / "broken.csv"
    call("sweep", *SMALL, *VARY, "--out", str(whole))
    data = whole.read_bytes()
    for end in (data.index(b"\n5000") + 8, data.index(b"\n8,") + 1, 5, 0):
        broken.write_bytes(data[:end])
        done = call("sweep", *SMALL, *VARY, "--out", str(broken), "--resume")
        assert done.exit_code == 0, done.output
        assert broken.read_bytes() == data
    before = broken.stat().st_mtime_ns
    assert call("sweep", *SMALL, *VARY, "--out", str(broken), "--resume").exit_code == 0
    assert broken.read_bytes() == data
    assert broken.stat().st_mtime_ns >= before


def test_rows_that_are_done_are_not_simulated_again(tmp_path):
    out = tmp_path / "sweep.csv"
    call("sweep", *SMALL, *VARY, "--out", str(out))
    marked = out.read_text().replace("\n1,4,gpt2-124m,A100,8,0.", "\n1,4,gpt2-124m,A100,8,7.")
    assert marked != out.read_text()
    out.write_text(marked)

    call("sweep", *SMALL, *VARY, "--out", str(out), "--resume")

    assert out.read_text() == marked


def test_of_a_large_sweep_the_file_too_says_how_the_front_fits(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdp_sim.explore.sweep.MOST_PLAYED", 1)
    out = tmp_path / "sweep.csv"
    asked = ("--model", "llama3-8b", "--gpu", "H100", "--gpus", "8", "--vary", "forward_prefetch=none,2")
    done = call("sweep", *asked, "--vary", "seq_len=4096,8192", "--out", str(out))

    rows = rows_of(out)
    assert front_of(rows) == [1, 0]
    assert [row["fit"] for row in rows] == ["fits", "on the edge", "may fit", "may fit"]
    assert ", on the edge" in done.stdout


def test_ctrl_c_keeps_what_is_done_and_resume_completes_it(tmp_path):
    out, whole = tmp_path / "sweep.csv", tmp_path / "whole.csv"
    count = 12 * FEW
    vary = ["--vary", f"micro_batch={','.join(map(str, range(1, count + 1)))}", *EIGHT_B]
    command = [sys.executable, "-m", "fsdp_sim.cli.main", "sweep", *vary, "--processes", "2", "--out", str(out)]
    running = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 60
        while not (out.exists() and out.read_text().count("\n") > 2) and running.poll() is None:
            assert time.monotonic() < until, "no row came"
            time.sleep(0.01)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to all its processes
        _, stderr = running.communicate(timeout=60)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()

    done = rows_of(out)
    assert running.returncode == 130, stderr
    assert f"Interrupted after {len(done)} of {count} combinations; go on with --out {out} --resume" in stderr
    assert "Traceback" not in stderr
    assert 0 < len(done) < count
    assert [row["micro_batch"] for row in done] == [str(n) for n in range(1, len(done) + 1)]

    short = vary[1].split(",")[: len(done) + 2]  # the same sweep, cut short, for a test that does not last
    text = out.read_text()
    resumed = call("sweep", "--vary", ",".join(short), *EIGHT_B, "--out", str(out), "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert out.read_text().startswith(text)
    assert len(rows_of(out)) == len(done) + 2
    assert not whole.exists()


def test_pictures_are_written(tmp_path):
    page = tmp_path / "front.html"
    done = call("sweep", *SMALL, *VARY, "--figure", str(page))

    assert done.exit_code == 0, done.output
    assert "GPU time per token" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing varies; give --vary"),
        (["--vary", "micro_bach=1,2"], "did you mean micro_batch?"),
        (["--vary", "micro_batch"], "is no list; write key=a,b"),
        (["--vary", "micro_batch="], "is no list; write key=a,b"),
        (["--vary", "micro_batch=1,1"], "has a value twice, or an empty one; give each once"),
        (["--vary", "micro_batch=1", "--vary", "micro_batch=2"], "micro_batch is given twice"),
        (["--vary", "gpus=8,16"], "gpus is both fixed (8) and varied"),
        (["--vary", "n_layer=2", "--layers", "3"], "n_layer is given under two names"),
        (["--vary", "micro_batch=1,2", "--resume"], "--resume goes on with a file"),
        (["--vary", "micro_batch=1,2", "--out", "nowhere/x.csv"], "there is no folder"),
        (["--vary", "micro_batch=1,2", "--figure", "x.pdf"], "a picture is .html or .png"),
        (["--vary", "micro_batch=1,2", "--processes", "0"], "--processes"),
    ],
)
def test_what_is_impossible_is_one_sentence_and_status_2(arguments, words):
    done = call("sweep", *SMALL, *arguments, "--json")

    assert done.exit_code == 2
    assert words in done.stderr
    assert words in json.loads(done.stdout)["error"]


def test_a_file_of_another_sweep_is_left_alone(tmp_path):
    out = tmp_path / "sweep.csv"
    call("sweep", *SMALL, *VARY, "--out", str(out))
    before = out.read_bytes()

    for arguments, words in (
        (["--vary", "micro_batch=1,2", "--resume"], "is of another sweep: its columns"),
        (
            ["--vary", "micro_batch=2,8,5000", "--vary", "shard_size=none,4,3", "--resume"],
            "micro_batch is 1 there and 2 here",
        ),
        (["--vary", "micro_batch=1", "--vary", "shard_size=none,4,3", "--resume"], "has 9 rows, more than the 3"),
        (list(VARY), "has rows already; go on with --resume"),
    ):
        done = call("sweep", *SMALL, *arguments, "--out", str(out))
        assert (done.exit_code, words in done.stderr) == (2, True), done.stderr
    assert out.read_bytes() == before
