"""Training under torchrun: as many ranks as you like, the losses of one plain process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labs.data import load_corpus
from labs.model import build, model_config
from labs.train import main
from tests.warm import ADDRESS, CLIENT

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-c", CLIENT, sys.executable]


@pytest.fixture(scope="module", autouse=True)
def _environment(tmp_path_factory, warm_server):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(ADDRESS, warm_server)
        yield


def start(command, **options):
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    )


@pytest.fixture(scope="module")
def plain_losses():
    """20 steps of one process on the whole batch, without FSDP, a process group or the trainer."""
    corpus, model = load_corpus(), build(model_config("teaching"), seed=0)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = model(*corpus.batch(step, 8, 128, seed=0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class TestTorchrun:
    @pytest.mark.tail
    def test_two_ranks_have_the_losses_of_one_process(self, tmp_path, plain_losses):
        metrics = tmp_path / "losses.jsonl"
        config = ["--config", "labs/configs/teaching.toml", "--steps=6", f"--metrics={metrics}", "--device=cpu"]
        torchrun = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        run = start([*torchrun, "-m", "labs.train", *config])
        out, err = run.communicate(timeout=120)
        assert run.returncode == 0, err
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert all(line["step_s"] > 0 and line["grad_norm"] > 0 and line["lr"] == 1e-3 for line in lines)
        assert [line["step"] for line in lines] == list(range(6))
        torch.testing.assert_close([line["loss"] for line in lines], plain_losses[:6], rtol=1e-5, atol=0)
        printed = out.splitlines()
        assert printed[0].startswith("teaching: 1,040,768 parameters; fsdp2: shared by 2 ranks, 6 units, fp32; gloo")
        assert printed[2] == f"step   0  loss {plain_losses[0]:.4f}"
        assert "2 ranks on cpu, gloo, torch 2." in printed[8]  # by one rank: 6 steps, then the report


class TestOneProcess:
    def test_without_torchrun_is_one_rank(self, plain_losses):
        run = start([sys.executable, "-m", "labs.train", "--steps=2", "--device=cpu"])
        out, err = run.communicate(timeout=120)
        assert run.returncode == 0, err
        assert out.splitlines()[2:4] == [f"step {step:3d}  loss {plain_losses[step]:.4f}" for step in range(2)]
        assert "1 rank on cpu, gloo" in out

    def test_loss_falls(self, plain_losses):
        assert plain_losses[0] == pytest.approx(5.5, abs=0.2)  # log(256) is 5.545
        assert sum(plain_losses[-5:]) / 5 < plain_losses[0] - 1.5

    def test_main_says_what_is_wrong_in_a_sentence(self, capsys):
        assert main(["--data=/nowhere.txt"]) == 2
        assert (
            capsys.readouterr().err
            == "labs.train: no corpus at /nowhere.txt: give a text file or a folder of text files\n"
        )

    def test_a_text_that_is_read_many_times_over_is_warned_of(self, tmp_path, capsys):
        (tmp_path / "text.txt").write_text("To be, or not to be. " * 20)
        small = ("--device=cpu", "--n_layer=1", "--seq_len=16", "--global_batch=16", f"--data={tmp_path / 'text.txt'}")
        assert main([*small, "--steps=10"]) == 0
        _, corpus, warning, step, *_ = capsys.readouterr().out.splitlines()
        assert ", 2 steps an epoch; 16 rows" in corpus
        assert warning.startswith("WARNING: 10 steps read this text 5 times, ")
        assert warning.endswith("give more text with data=PATH, or ask for fewer steps")
        assert step.startswith("step   0 ")
