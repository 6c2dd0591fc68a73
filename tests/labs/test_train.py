"""Training under torchrun: as many ranks as you like, the losses of one plain process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labs.config import TrainConfig
from labs.data import load_corpus
from labs.gpt import GPTConfig
from labs.train import Place, Run, build, main, make_optimizer, shard, train_step

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def start(command, **options):
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options
    )


@pytest.fixture(scope="module")
def plain_losses():
    """20 steps of one process on the whole batch, without FSDP and without a process group."""
    corpus = load_corpus()
    model = build(GPTConfig.preset("teaching"), seed=0)
    optimizer = make_optimizer(model, 1e-3)
    return [train_step(model, optimizer, *corpus.batch(step, 8, 128, seed=0)).item() for step in range(20)]


class TestTorchrun:
    def test_two_ranks_have_the_losses_of_one_process(self, tmp_path, plain_losses):
        metrics = tmp_path / "losses.jsonl"
        config = ["--config", "labs/configs/teaching.toml", f"--metrics={metrics}", "--device=cpu"]
        run = start([*TORCHRUN, "--nproc_per_node=2", "-m", "labs.train", *config])
        out, err = run.communicate(timeout=120)
        assert run.returncode == 0, err
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(20))
        torch.testing.assert_close([line["loss"] for line in lines], plain_losses, rtol=1e-5, atol=0)
        printed = out.splitlines()
        assert printed[0] == f"step   0  loss {plain_losses[0]:.4f}"
        assert len(printed) == 21  # by one rank: 20 steps and a summary
        assert "2 ranks on cpu, gloo, torch 2." in printed[-1]

    def test_what_was_asked_wrongly_is_said_once(self):
        run = start([*TORCHRUN, "--nproc_per_node=3", "-m", "labs.train"])
        _, err = run.communicate(timeout=120)
        assert run.returncode != 0
        said = [line for line in err.splitlines() if line.startswith("labs.train:")]
        assert said == [
            "labs.train: a batch of 8 rows does not divide into 3 ranks; use a batch of 6 or 9, or 2 or 4 ranks"
        ]

    def test_ctrl_c_stops_all_ranks_after_the_same_step(self):
        run = start([*TORCHRUN, "--nproc_per_node=2", "-m", "labs.train", "--steps=100000", "--device=cpu"])
        assert run.stdout.readline().startswith("step   0")
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=60)
        assert out.splitlines()[-1].startswith("stopped by Ctrl-C after ")
        assert "labs/train.py" not in err  # no traceback from a rank


class TestOneProcess:
    def test_without_torchrun_is_one_rank(self, plain_losses):
        run = start([sys.executable, "-m", "labs.train", "--steps=2", "--device=cpu"])
        out, err = run.communicate(timeout=120)
        assert run.returncode == 0, err
        assert out.splitlines()[:2] == [f"step {step:3d}  loss {plain_losses[step]:.4f}" for step in range(2)]
        assert "1 rank on cpu, gloo" in out

    def test_loss_falls(self, plain_losses):
        assert plain_losses[0] == pytest.approx(5.5, abs=0.2)  # log(256) is 5.545
        assert sum(plain_losses[-5:]) / 5 < plain_losses[0] - 1.5

    def test_shard_makes_units_of_the_blocks_and_then_of_the_root(self):
        model, units = build(GPTConfig.preset("teaching", n_layer=3)), []
        shard(model, lambda module, **options: units.append((module, options)), reshard_after_forward=False)
        assert [module for module, _ in units] == [*model.layers, model]
        assert all(options == {"reshard_after_forward": False} for _, options in units)


class TestPrepare:
    @pytest.mark.parametrize(
        ("config", "place", "says"),
        [
            (TrainConfig(global_batch=6), Place(0, 4, 0, 4), "a batch of 6 rows does not divide into 4 ranks"),
            (TrainConfig(seq_len=129), Place(), "seq_len=129: teaching has a context of 128"),
            (TrainConfig(metrics="/nowhere/m.jsonl"), Place(), "metrics=/nowhere/m.jsonl: there is no folder /nowhere"),
            (TrainConfig(device="cuda"), Place(0, 8, 0, 512), "NCCL needs a GPU for each of the 512 ranks here"),
        ],
    )
    def test_refuses_what_cannot_be_done_here(self, config, place, says):
        with pytest.raises(ValueError, match=says):
            Run.prepare(config, place)

    def test_main_says_it_in_a_sentence(self, capsys):
        assert main(["--data=/nowhere.txt"]) == 2
        assert (
            capsys.readouterr().err
            == "labs.train: no corpus at /nowhere.txt: give a text file or a folder of text files\n"
        )

    def test_gloo_on_cpus(self):
        run = Run.prepare(TrainConfig(device="cpu"), Place())
        assert (run.device.type, run.backend) == ("cpu", "gloo")
