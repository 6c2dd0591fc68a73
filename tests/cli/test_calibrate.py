"""`fsdp-sim calibrate`: measures this machine, writes a file that makes a cluster, and can be stopped."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time

import jsonschema
import psutil
import pytest
from click.testing import CliRunner

from fsdp_sim.cli.main import main
from fsdp_sim.cli.schema import schema_of
from fsdp_sim.cost.collectives import collective_s
from fsdp_sim.spec import Cluster

CALIBRATE = [sys.executable, "-m", "fsdp_sim.cli.main", "calibrate"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One quick run on two ranks: what it printed, and the file."""
    path = tmp_path_factory.mktemp("calibrate") / "here.toml"
    asked = [*CALIBRATE, "--device", "cpu", "--ranks", "2", "--quick", "--json", "-o", str(path)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), path


@pytest.mark.tail
def test_the_file_makes_the_cluster_that_was_measured(measured):
    found, path = measured
    cluster = Cluster.from_file(path)

    jsonschema.validate({"result": found}, schema_of("calibrate"))
    assert (cluster.kind, cluster.gpus) == ("cpu", 2)
    assert found["hardware"] == cluster.gpu.name
    assert cluster.gpu.supports_bf16
    for row in found["collectives"]:
        predicted = collective_s(row["op"], row["n_bytes"], row["group_size"], cluster)
        assert predicted == pytest.approx(row["fitted_s"], rel=1e-6)


@pytest.mark.tail
def test_the_fit_is_near_what_was_measured_and_says_how_near(measured):
    found, _ = measured
    rows = found["collectives"]

    assert {row["op"] for row in rows} == {"all_gather", "reduce_scatter", "all_reduce"}
    errors = [abs(row["fitted_s"] / row["seconds"] - 1) for row in rows]
    assert found["collective_error"]["n"] == len(rows)
    assert found["collective_error"]["median_abs"] == pytest.approx(statistics.median(errors))
    assert found["collective_error"]["median_abs"] < 1.0  # a factor of two, on a machine that does other things too


@pytest.mark.tail
def test_the_file_has_the_rates_that_training_reached(measured):
    found, path = measured
    part = Cluster.from_file(path).gpu
    alone = max(row["flops"] / row["seconds"] for row in found["kernels"] if row["name"] == "matmul")

    assert found["training_error"]["n"] == 2 * len(found["training"])
    assert found["training_error"]["median_abs"] < 0.5
    assert 0 < part.peak_flops("fp32") < 4 * alone
    assert part.launch_s > 0
    assert part.collective_s > 0
    assert found["sharded_error"]["n"] == len(found["sharded"]) > 1


@pytest.mark.tail
def test_nothing_of_this_very_machine_is_written(measured):
    _, path = measured
    text = path.read_text()

    assert socket.gethostname() not in text
    assert os.path.expanduser("~") not in text
    assert str(path.parent) not in text


def test_a_file_that_exists_is_kept_and_nothing_starts(tmp_path):
    kept = tmp_path / "kept.toml"
    kept.write_text("mine")
    done = CliRunner().invoke(main, ["calibrate", "-o", str(kept)])

    assert done.exit_code == 2
    assert "kept.toml exists; give another --output, or --overwrite" in " ".join(done.output.split())
    assert kept.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--device", "tpu"], "--device"),
        (["-o", "nowhere/at/all.toml"], "there is no folder"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["calibrate", *arguments])

    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.tail
def test_ctrl_c_leaves_no_rank_and_no_file(tmp_path):
    process = subprocess.Popen(
        [*CALIBRATE, "--device", "cpu", "--ranks", "2", "-o", "stopped.toml"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    me = psutil.Process(process.pid)
    started: set[psutil.Process] = set()
    deadline_s = time.monotonic() + 60
    while len(started) < 4 and time.monotonic() < deadline_s:  # the server they are forked from, its tracker, two ranks
        started |= set(me.children(recursive=True))
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)

    assert process.returncode == 130
    assert "Interrupted." in output
    assert "Traceback" not in output
    assert not (tmp_path / "stopped.toml").exists()
    assert psutil.wait_procs(started, timeout=10)[1] == []
