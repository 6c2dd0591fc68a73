"""What is refused before anything is started."""

import dataclasses
import json
import os

import pytest

from labs.checkpoint.hashing import hash_file
from labs.checkpoint.manifest import Manifest
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.loop.preflight import identity, prepare


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FSDP_SIM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize(
    ("config", "place", "says"),
    [
        ({"global_batch": 6}, RankPlace(0, 4, 0, 4), "a batch of 6 rows does not divide into 4 ranks"),
        ({"micro_batch": 3}, RankPlace(0, 4, 0, 4), "micro_batch=3 does not divide the 2 rows .* use micro_batch=2"),
        ({"metrics": "/nowhere/m.jsonl"}, RankPlace(), "metrics=/nowhere/m.jsonl: there is no folder /nowhere"),
        ({"device": "cuda"}, RankPlace(0, 8, 0, 512), "NCCL needs a GPU for each of the 512 ranks here"),
        ({"device": "cpu", "param_dtype": "fp16"}, RankPlace(), "param_dtype=fp16 .* use bf16 or fp32"),
        ({"api": "single"}, RankPlace(0, 2, 0, 2), "single"),
    ],
)
def test_what_cannot_be_done_here(config, place, says):
    with pytest.raises(ValueError, match=says):
        prepare(TrainConfig(**config), place)


def test_the_folder_of_the_run_is_made_with_those_above_it(tmp_path):
    out = tmp_path / "runs" / "a"
    prepare(TrainConfig(out=str(out), metrics=str(out / "m.jsonl"), device="cpu"), RankPlace())
    assert out.is_dir()


@pytest.mark.parametrize("text", ["dear diary\n", '{"a": %s\n' % ("[" * 100_000)], ids=["prose", "deep"])
def test_a_file_of_something_else_is_not_taken_for_metrics(tmp_path, text):
    path = tmp_path / "diary.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"metrics={path} holds something else than metrics"):
        prepare(TrainConfig(metrics=str(path), device="cpu"), RankPlace())
    assert path.read_text() == text


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_metrics_are_not_written_where_no_file_is(tmp_path, make):
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is a folder or a pipe"):
        prepare(TrainConfig(out=str(tmp_path), device="cpu"), RankPlace())


@pytest.mark.parametrize("out", ["a_file", "a_file/run", "run"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, out):
    (tmp_path / "a_file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    with pytest.raises(OSError, match=rf"out={tmp_path / out}: the folder cannot be made \(.*\); name another one"):
        prepare(TrainConfig(out=str(tmp_path / out), device="cpu"), RankPlace())


def test_gloo_on_cpus():
    run = prepare(TrainConfig(device="cpu"), RankPlace())
    assert (run.device.type, run.backend) == ("cpu", "gloo")


def test_the_global_batch_is_kept_by_accumulating():
    for ranks, micro_batches in ((1, 4), (2, 2), (4, 1)):
        run = prepare(TrainConfig(global_batch=8, micro_batch=2, device="cpu"), RankPlace(0, ranks, 0, ranks))
        assert (run.micro_batches, run.micro_rows) == (micro_batches, 2)


class TestCheckpoints:
    @pytest.fixture
    def config(self, tmp_path):
        """Of a folder with a checkpoint of step 4, of the same model and text."""
        config = TrainConfig(out=str(tmp_path), device="cpu")
        folder = tmp_path / "checkpoints" / "step-4"
        folder.mkdir(parents=True)
        progress = {
            "step": 4, "position": 32, "identity": identity(prepare(TrainConfig(device="cpu"), RankPlace())),
            "scaler": None, "config": {}, "world_size": 1, "api": "single", "device": "cpu", "versions": {},
        }  # fmt: skip
        (folder / "progress.json").write_text(json.dumps(progress))
        files = {"progress.json": hash_file(folder / "progress.json")}
        manifest = Manifest(step=4, format="sharded", world_size=1, files=files)
        (folder / "manifest.json").write_bytes(manifest.encode())
        return config

    def test_of_the_same_model_are_gone_on_with(self, config):
        for changes in ({}, {"resume": "must"}, {"api": "ddp"}, {"lr": 1e-4}, {"param_dtype": "bf16"}, {"steps": 99}):
            prepare(dataclasses.replace(config, **changes), RankPlace(0, 2, 0, 2))

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"n_layer": 3}, "n_layer is 3, and 5 in the checkpoint of step 4"),
            ({"seq_len": 64}, "seq_len is 64, and 128 in the checkpoint"),
            ({"seed": 3}, "seed is 3, and 0 in the checkpoint"),
            ({"model": "gpt2", "seq_len": 128}, "n_layer is 12, and 5"),
            ({"resume": "never"}, "resume=never, and .* has a checkpoint of step 4; choose another folder"),
        ],
    )
    def test_of_another_are_not(self, config, changes, says):
        with pytest.raises(ValueError, match=says):
            prepare(dataclasses.replace(config, **changes), RankPlace())
