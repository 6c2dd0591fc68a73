"""What cannot work is refused before any process group exists: one message, from one rank, exit status 2."""

import os
import socket
import subprocess
import sys

import pytest

from tests.faults.agents import ROOT
from tests.warm import ADDRESS, CLIENT

pytestmark = pytest.mark.tail  # see make test-all


def main(capsys, *arguments):
    """The command in this process: it ends before it starts anything."""
    from labs.train import main

    status = main(list(arguments))
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stepz=3"], "unknown argument '--stepz=3'; did you mean '--steps'?"),
        (["--config=nowhere.toml"], "no config file at nowhere.toml"),
        (["--model=gpt3"], "there is no preset 'gpt3'; did you mean 'gpt2'?"),
        (["--global_batch=8", "--micro_batch=3"], "micro_batch=3 does not divide the 8 rows"),
        (["--seq_len=4096"], "seq_len=4096: teaching has a context of 128"),
        (["--param_dtype=fp16", "--device=cpu"], "param_dtype=fp16"),
        (["--tokenizer=gpt2"], "tokenizer=gpt2"),
        (["--device=cuda"], "device=cuda"),
        (["--save_every=5"], "save_every=5 keeps something; say where with out=FOLDER"),
        (["--keep=1", "--out=x"], "TrainConfig.keep is 1; it must be a whole number >= 2"),
        (["--resume=must", "--out=x"], "there is no checkpoint in out=x"),
        (["--api=fsdp2", "--sharding_strategy=NO_SHARD"], "sharding_strategy"),
        (["--api=fsdp1", "--use_orig_params=false"], "weight_decay"),
        (["--data=/nowhere"], "no corpus at /nowhere"),
    ],
)
def test_config(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    status, said = main(capsys, *arguments)
    assert status == 2
    assert says in said
    assert len(said.strip().splitlines()) == 1
    assert "Traceback" not in said


def test_two_runs_in_one_folder(start):
    first = start("--timeout_s=600", faults="hang:step@1@0")
    first.until("step   0")
    second = start()
    assert second.wait() == 1
    assert "is in use by" in second.printed
    assert first.agent.is_running()


def test_torchrun_itself_with_a_taken_port(warm_server):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        torchrun = [
            sys.executable,
            "-c",
            CLIENT,
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
        ]
        command = [*torchrun, "-m", "labs.train", "--steps=1", "--device=cpu"]
        env = os.environ | {"OMP_NUM_THREADS": "1", ADDRESS: warm_server, "MASTER_PORT": str(taken.getsockname()[1])}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
