"""What a checkpoint brings back on real ranks, and what happens when it cannot be written or read."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fsdp_sim.ranks import run
from labs.checkpoint import CheckpointError
from labs.checkpoint.full import write_full
from labs.checkpoint.hashing import hash_file
from labs.checkpoint.manifest import read_manifest
from labs.checkpoint.state import local, read_state
from labs.config import TrainConfig
from labs.loop.optimizer import make_optimizer
from labs.loop.preflight import CHECKPOINTS, prepare
from labs.loop.run_state import RunState, checkpointer
from labs.loop.step import train_step
from labs.wrapping import wrap
from tests.labs.wrapping.training import QUIET, here

SHORT: dict[str, Any] = {
    "device": "cpu", "global_batch": 6, "seq_len": 16, "n_layer": 1, "dropout": 0.2, "steps": 10, "lr": 1e-2
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FSDP_SIM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def text(tmp_path) -> str:
    """19 rows of 16 tokens to train on: the fourth batch of 6 begins the second epoch."""
    path = tmp_path / "text.txt"
    path.write_text("to be, or not to be: that is the question. " * 8)
    return str(path)


def begin(out: Path | str | None = None, **changes: Any) -> RunState:
    """On a rank: a training as the command would make it, not yet resumed."""
    place = here()
    config = TrainConfig(**SHORT | {"out": str(out) if out else None} | changes)
    prepared = prepare(config, place)
    wrapped = wrap(config, prepared.model, place, prepared.device)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60)) if dist.is_initialized() else None
    if out:
        Path(out).mkdir(exist_ok=True)  # the command's lock does so
    return RunState(prepared, wrapped, make_optimizer(wrapped, config), checkpointer(prepared, group))


def steps(training: RunState, n: int) -> list[float]:
    """Train; the losses."""
    run_, losses = training.run, []
    for _ in range(n):
        batch = run_.loader().rows(training.position, run_.place.rank, run_.place.world_size)
        outcome = train_step(training.wrapped, training.optimizer, batch, training.step, run_.config)
        losses.append(outcome.loss)
        training.step, training.position = training.step + 1, batch.next
    return losses


def bits(training: RunState) -> dict[str, torch.Tensor]:
    state = read_state(training.wrapped.model, training.optimizer)
    return {name: local(tensor).clone() for name, tensor in state.items()} | {"rng": torch.get_rng_state()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class TestResume:
    @pytest.mark.parametrize(("ranks", "api"), [(1, "fsdp2"), (2, "fsdp1"), (3, "fsdp2")])
    def test_everything_of_every_rank_comes_back(self, tmp_path, text, ranks, api):
        def whole() -> Any:
            training = begin(tmp_path / "run", data=text, api=api)
            assert training.resume() == []
            first = bits(training)
            steps(training, 4)
            assert training.save()
            saved = bits(training)
            assert not same(first, saved)
            rest = steps(training, 3)

            other = begin(tmp_path / "run", data=text, api=api)
            torch.manual_seed(99)
            told = other.resume()
            assert same(bits(other), saved)
            assert (other.step, other.position, other.resumed_from) == (4, 6 + 6 + 6 + 1 + 0, 4)
            assert other.saved == 0
            own = torch.rand(1).item()
            other = begin(tmp_path / "run", data=text, api=api)
            other.resume()
            assert steps(other, 3) == rest
            assert same(bits(other), bits(training))
            return told, own

        told, own = zip(*run(whole, ranks, **QUIET), strict=True)
        assert told == ([f"goes on from step 4 ({tmp_path / 'run' / CHECKPOINTS / 'step-4'})"],) * ranks
        assert len(set(own)) == ranks  # each rank has a random state of its own

    def test_ranks_begin_with_streams_of_their_own_that_belong_to_the_seed(self):
        def drawn() -> list[float]:
            numbers = []
            for seed in (0, 0, 1):
                torch.manual_seed(5)
                begin(seed=seed).resume()
                numbers.append(torch.rand(1).item())
            return numbers

        (a, b), (again, _), (other, _) = zip(*run(drawn, 2, **QUIET), strict=True)
        assert len({a, b, other}) == 3
        assert a == again

    @pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
    def test_another_number_of_ranks_has_the_same_state_and_fresh_random_numbers(self, tmp_path, text, before, after):
        def write() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            training = begin(tmp_path / "run", data=text)
            training.resume()
            steps(training, 2)
            training.save()
            return whole(training), torch.get_rng_state()

        def whole(training: RunState) -> dict[str, torch.Tensor]:
            state = read_state(training.wrapped.model, training.optimizer)
            return {name: getattr(t, "full_tensor", lambda t=t: t)().clone() for name, t in state.items()}

        def read() -> Any:
            training = begin(tmp_path / "run", data=text)
            told = training.resume()
            once = torch.get_rng_state()
            state = whole(training)
            again = begin(tmp_path / "run", data=text)
            again.resume()
            assert torch.equal(once, torch.get_rng_state())  # the same resume, done twice, draws the same numbers
            begin(data=text).resume()
            assert not torch.equal(once, torch.get_rng_state())  # but not those of the first steps again
            return state, told, (training.step, training.position), once

        written = list(run(write, before, **QUIET))
        results = list(run(read, after, **QUIET))
        for state, told, reached, _ in results:
            assert same(state, written[0][0])
            assert reached == (2, 12)
            plural = {1: "1 rank", 2: "2 ranks", 3: "3 ranks"}
            assert told[1] == (
                f"it was written by {plural[before]} with api=fsdp2, and is read by {plural[after]} with api=fsdp2: "
                "the same parameters, optimizer and rows"
            )
        states = [bytes(rng.tolist()) for *_, rng in results] + [bytes(rng.tolist()) for _, rng in written]
        assert len(set(states)) == after + before  # nobody's is another's

    def test_the_scale_of_fp16_comes_back(self, tmp_path):
        training = begin(tmp_path / "run", api="single")
        training.wrapped.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
        training.wrapped.scaler.load_state_dict(training.wrapped.scaler.state_dict() | {"_growth_tracker": 5})
        training.save()
        other = begin(tmp_path / "run", api="single")
        other.wrapped.scaler = torch.amp.GradScaler("cpu")
        other.resume()
        state = other.wrapped.scaler.state_dict()
        assert (state["scale"], state["_growth_tracker"]) == (2.0**7, 5)

    def test_one_without_a_scale_can_be_gone_on_with_in_fp16(self, tmp_path):
        begin(tmp_path / "run", api="single").save()
        other = begin(tmp_path / "run", api="single")
        other.wrapped.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
        other.resume()
        assert other.wrapped.scaler.get_scale() == 2.0**9

    def test_what_is_written_down_says_where_it_comes_from(self, tmp_path):
        training = begin(tmp_path / "run", api="single")
        steps(training, 1)
        training.save()
        progress = json.loads((tmp_path / "run" / CHECKPOINTS / "step-1" / "progress.json").read_text())
        assert (progress["step"], progress["position"], progress["world_size"]) == (1, 6, 1)
        assert (progress["api"], progress["device"]) == ("single", "cpu")
        assert progress["config"] == training.run.config.by_key()
        assert progress["versions"]["torch"] == torch.__version__
        assert progress["identity"]["data"] == training.run.corpus.sha256


class TestSaving:
    def test_a_failed_save_is_counted_and_training_goes_on(self, tmp_path, text):
        def failing() -> Any:
            training = begin(tmp_path / "run", data=text)
            training.resume()
            steps(training, 1)
            assert training.save()
            steps(training, 1)
            folder = tmp_path / "run" / CHECKPOINTS
            if dist.get_rank() == 0:
                folder.rename(folder.with_name("elsewhere"))
            dist.barrier()
            assert not training.save()
            before, counted = bits(training), (training.saved, list(training.failed_saves))
            if dist.get_rank() == 0:
                folder.with_name("elsewhere").rename(folder)
            dist.barrier()
            assert training.save()  # of the same step: the one that failed does not stand for it
            assert same(bits(training), before)
            return counted, training.saved, steps(training, 1)

        (first, second) = run(failing, 2, **QUIET)
        assert first == second
        (saved, failed), saved_at_last, _ = first
        assert (saved, saved_at_last) == (1, 2)
        assert len(failed) == 1
        assert failed[0].startswith("the checkpoint of step 2 was not written: rank 0: ")
        assert sorted(path.name for path in (tmp_path / "run" / CHECKPOINTS).glob("step-*")) == ["step-1", "step-2"]

    def test_a_failure_in_the_background_is_found_and_the_step_saved_again(self, tmp_path, text):
        def failing() -> Any:
            training = begin(tmp_path / "run", data=text)
            steps(training, 1)
            folder = tmp_path / "run" / CHECKPOINTS
            if dist.get_rank() == 0:
                folder.rename(folder.with_name("elsewhere"))
            dist.barrier()
            assert training.save(asynchronous=True)  # it cannot know yet
            assert not training.look_after_saves(wait=True)
            counted = training.saved, len(training.failed_saves)
            assert training.look_after_saves(wait=True)  # told once
            if dist.get_rank() == 0:
                folder.with_name("elsewhere").rename(folder)
            dist.barrier()
            assert training.save()
            return counted, training.saved

        assert list(run(failing, 2, **QUIET)) == [((0, 1), 1)] * 2
        assert (tmp_path / "run" / CHECKPOINTS / "step-1").is_dir()

    def test_a_step_is_saved_once(self, tmp_path):
        training = begin(tmp_path / "run", api="single")
        steps(training, 1)
        assert training.save()
        assert training.save()
        assert (training.saved, training.failed_saves) == (1, [])
        other = begin(tmp_path / "run", api="single")
        other.resume()
        assert other.save()  # what it went on from is there already
        assert other.saved == 0

    def test_without_a_folder_nothing_is_kept_and_nothing_is_wrong(self):
        training = begin(api="single")
        assert training.resume() == []
        assert training.save()
        assert training.look_after_saves(wait=True)
        assert (training.saved, training.failed_saves) == (0, [])


def damage(path: Path) -> None:
    largest = max(path.iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def reseal(checkpoint: Path, name: str, content: object) -> None:
    """Write another content into a file, and a manifest that fits it."""
    (checkpoint / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    manifest = read_manifest(checkpoint)
    files = manifest.files | {name: hash_file(checkpoint / name)}
    (checkpoint / "manifest.json").write_bytes(msgspec.structs.replace(manifest, files=files).encode())


class TestDamaged:
    @pytest.fixture
    def two(self, tmp_path) -> Path:
        """A folder with checkpoints of the steps 1 and 2."""
        training = begin(tmp_path / "run", api="single")
        for _ in range(2):
            steps(training, 1)
            training.save()
        return tmp_path / "run"

    def test_the_one_before_is_gone_on_from_and_that_is_said(self, two):
        damage(two / CHECKPOINTS / "step-2")
        training = begin(two, api="single")
        passed_over, goes_on = training.resume()
        assert passed_over.startswith(f"{two / CHECKPOINTS / 'step-2'} is damaged and was passed over: ")
        assert goes_on.startswith("goes on from step 1 ")
        assert training.step == 1
        steps(training, 1)
        assert training.save()  # in the place of the damaged one
        again = begin(two, api="single")
        again.resume()
        assert again.step == 2

    def test_a_folder_with_nothing_good_is_refused_on_all_ranks_and_left_alone(self, two):
        for step in (1, 2):
            damage(two / CHECKPOINTS / f"step-{step}")
        there = sorted(path.name for path in (two / CHECKPOINTS).iterdir())

        def refused() -> str:
            with pytest.raises(CheckpointError) as error:
                begin(two).resume()
            return str(error.value)

        first, second = run(refused, 2, **QUIET)
        assert first == second
        assert "step-1 is damaged" in first
        assert "step-2 is damaged" in first
        assert first.endswith("repair it from a copy, or begin anew in another folder")
        assert sorted(path.name for path in (two / CHECKPOINTS).iterdir()) == there

    def test_what_is_not_finite_on_one_rank_is_saved_on_none(self, tmp_path, text):
        def saving() -> Any:
            training = begin(tmp_path / "run", data=text)
            steps(training, 1)
            training.save(asynchronous=True)
            steps(training, 1)
            if dist.get_rank() == 1:
                with torch.no_grad():
                    local(training.wrapped.model.get_parameter("head.weight")).view(-1)[-1] = torch.inf
            return training.save(asynchronous=True), training.failed_saves

        first, second = run(saving, 2, **QUIET)
        assert first == second
        assert first[0] is False
        assert "step 2 was not written: rank 1: model.tok_emb.weight holds NaN or infinity" in first[1][0]
        assert (tmp_path / "run" / CHECKPOINTS / "latest").read_text() == "step-1\n"

    def test_one_that_is_not_finite_is_passed_over(self, two, monkeypatch):
        training = begin(two, api="single")
        training.resume()
        steps(training, 1)
        with torch.no_grad():
            training.wrapped.model.get_parameter("norm.weight")[0] = torch.nan
        with monkeypatch.context() as patch:
            patch.setattr("labs.checkpoint.checkpointer.not_finite", lambda state: [])  # as one was saved once
            assert training.save()
        again = begin(two, api="single", keep=2)
        said = again.resume()
        assert "step-3 is damaged and was passed over: rank 0: model.norm.weight holds NaN or infinity" in said[0]
        assert again.step == 2
        steps(again, 1)
        assert again.save()  # in its place
        assert begin(two, api="single").resume()[0].startswith("goes on from step 3 ")

    @pytest.mark.parametrize(
        ("key", "value"),
        [("step", 1), ("position", 1.5), ("world_size", 0)],
    )
    def test_one_that_was_edited_and_sealed_again_is_passed_over(self, two, key, value):
        newest = two / CHECKPOINTS / "step-2"
        reseal(newest, "progress.json", json.loads((newest / "progress.json").read_text()) | {key: value})
        training = begin(two, api="single")
        assert "step-2 is damaged and was passed over: progress.json is not what a run writes: " in training.resume()[0]
        assert training.step == 1

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"cut", "rank-0.safetensors is not a whole safetensors file: "),
            (safetensors.torch.save({"gpu": torch.ones(1)}), "cpu is not there, and has to be uint8"),
            (safetensors.torch.save({"cpu": torch.ones(1)}), "cpu is float32 of shape (1,), and has to be uint8"),
        ],
        ids=["cut", "another name", "other numbers"],
    )
    def test_one_whose_random_state_was_edited_and_sealed_again_is_passed_over(self, two, content, says):
        newest = two / CHECKPOINTS / "step-2"
        reseal(newest, "rank-0.safetensors", content)
        training = begin(two, api="single")
        assert "step-2 is damaged and was passed over: " in (said := training.resume()[0])
        assert says in said
        assert training.step == 1

    @pytest.mark.parametrize(
        ("pieces", "says"),
        [
            ([], "its pieces have 0 numbers, and shape (128,) has 128"),
            ([[0, 0, [0], [64]], [0, 0, [63], [64]]], "two pieces overlap at (63,)"),
            ([[0, 10**15, [0], [128]]], "shard-0.bin ends before byte 1000000000000512"),
            ([[7, 0, [0], [128]]], "a piece from byte 0 of file 7, of 1 files"),
            ([[0, -8, [0], [128]]], "a piece from byte -8 of file 0"),
            ([[0, 0, [1], [128]]], "a piece of shape (128,) at (1,) lies outside of shape (128,)"),
            ([[0, 0, [], []]], "a piece of shape () at () lies outside of shape (128,)"),
        ],
    )
    def test_one_whose_tensors_are_said_to_lie_elsewhere_is_passed_over(self, two, pieces, says):
        newest = two / CHECKPOINTS / "step-2"
        index = json.loads((newest / "tensors.json").read_text())
        index["tensors"]["model.norm.weight"]["pieces"] = pieces
        reseal(newest, "tensors.json", index)
        training = begin(two, api="single")
        assert "step-2 is damaged and was passed over: " in (said := training.resume()[0])
        assert f"model.norm.weight: {says}" in said
        assert training.step == 1


class TestInitFrom:
    @pytest.fixture
    def weights(self, tmp_path) -> Path:
        """Weights of a model trained a little."""
        training = begin(api="single", seed=7)
        steps(training, 2)
        folder = tmp_path / "weights"
        folder.mkdir()
        state = {k: v for k, v in read_state(training.wrapped.model).items() if k.startswith("model.")}
        write_full(folder, state)
        return folder

    def test_it_is_where_a_training_begins(self, weights):
        training = begin(api="single", init_from=str(weights))
        assert training.resume() == [f"weights from {weights}"]
        assert training.step == 0
        written = load_file(weights / "model.safetensors")
        state = read_state(training.wrapped.model)
        assert {f"model.{name}" for name in written} == set(state)
        assert all(torch.equal(tensor, state[f"model.{name}"]) for name, tensor in written.items())
        assert not same(state, read_state(begin(api="single").wrapped.model))

    def test_what_was_trained_since_is_not_thrown_away(self, tmp_path, weights):
        first = begin(tmp_path / "run", api="single", init_from=str(weights))
        first.resume()
        steps(first, 2)
        first.save()
        again = begin(tmp_path / "run", api="single", init_from=str(weights))
        (told,) = again.resume()
        assert told.startswith("goes on from step 2 ")
        assert same(bits(again), bits(first))

    def test_weights_that_have_gone_are_not_missed_by_a_run_that_goes_on(self, tmp_path, weights):
        first = begin(tmp_path / "run", api="single", init_from=str(weights))
        first.resume()
        steps(first, 1)
        first.save()
        shutil.rmtree(weights)
        again = begin(tmp_path / "run", api="single", init_from=str(weights))
        again.resume()
        assert again.step == 1
