"""On a machine with one GPU two ranks train on CPU cores: NCCL needs a GPU for each. The GPU is faked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from fsdp_sim.measure import train_probe
from labs.cluster.process_group import RankPlace, process_group
from labs.config import TrainConfig
from labs.wrapping import wrap
from tests.faked_gpus import ROOT, environ

CPU = torch.device("cpu")


def wrapped(api: str) -> None:
    config = TrainConfig(api=api, n_layer=1)  # type: ignore[arg-type]
    wrap(config, config.model_config, RankPlace(), CPU)


def hugging_face(through: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers: make dev")
    from labs.experiments.hugging_face.batches import Task
    from labs.experiments.hugging_face.run_hugging_face import WAYS

    with mock.patch.dict(os.environ):  # Fabric is told its rank there
        WAYS[through](Task("t5"), CPU)


def pitfall() -> None:
    pytest.importorskip("transformers", reason="needs transformers: make dev")
    from labs.experiments.hugging_face.pitfalls import tied_in_two_units

    tied_in_two_units("fully_shard")


SHARDING: dict[str, Callable[[], object]] = {
    "the trainer's fsdp1": lambda: wrapped("fsdp1"),
    "the trainer's fsdp2": lambda: wrapped("fsdp2"),
    "the trainer's mini": lambda: wrapped("mini"),
    "calibrate's probe": lambda: train_probe.time_sharded([train_probe.ProbeShape(1, 16, 32, 64)], budget_s=0.0),
    "hugging_face by hand": lambda: hugging_face("fully_shard"),
    "hugging_face through Fabric": lambda: hugging_face("fabric"),
    "hugging_face's pitfall": pitfall,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.tail) if "hug" in n else n for n in SHARDING])
def test_no_sharding_leaves_it_to_torch_which_device(monkeypatch, name):
    """Without a mesh (of FSDP1 a ``device_id``) torch takes its accelerator, which this torch cannot use."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda check=None: torch.device("cuda"))
    monkeypatch.setattr(train_probe, "ROUNDS", 1)
    with process_group(RankPlace(), CPU, timeout_s=60):
        SHARDING[name]()


BY_HAND = {
    "labs/experiments/scripts/train_ddp.py": "step 5  loss ",
    "labs/experiments/scripts/train_fsdp2.py": "step 5  loss ",
    "-m labs.experiments.hugging_face --family=t5 --steps=1 --through=accelerate": "2 ranks on ",
}
TORCHRUN = """
import sys
import accelerate, torch._dynamo, torch.distributed.fsdp, torch.distributed.run as torchrun
import labs.experiments.hugging_face.run_hugging_face
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from tests.warm import ForkedRank
subprocess_handler.Popen = ForkedRank  # the ranks need not import it all again
for command in sys.argv[1:]:
    print("$", command, flush=True)
    torchrun.main(["--standalone", "--nproc_per_node=2", *command.split()])
"""


@pytest.mark.tail
def test_what_is_started_by_hand_trains(tmp_path):
    """Nothing hides the GPU from it: torchrun is the learner's own."""
    pytest.importorskip("transformers", reason="needs transformers: make dev")
    log = tmp_path / "log"
    env = environ(1, log, OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", TORCHRUN, *BY_HAND]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    printed = dict(said.split("\n", 1) for said in done.stdout.split("$ ")[1:])
    assert list(printed) == list(BY_HAND)
    for one, promise in BY_HAND.items():
        assert promise in printed[one]
    assert set(log.read_text().split("\n")) == {"saw 1", ""}, "a rank took the GPU"
