"""What one way of wrapping writes, any other way on any number of ranks reads, bit for bit, and trains on alike."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from fsdp_sim.ranks import run
from labs.checkpoint import Checkpointer
from labs.checkpoint.full import check_weights, fill, load_weights, read_full, write_full
from labs.checkpoint.state import State, local, read_state, whole, write_state
from labs.checkpoint.tensors import Index, TensorFiles
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.loop.optimizer import make_optimizer
from labs.model import build
from labs.model.gpt import GPTConfig
from labs.wrapping import wrap
from tests.some import tail

# Odd sizes: on 4 ranks some have fewer rows than others, and of biases (6 rows) one has none.
MODEL = GPTConfig(n_layer=1, n_head=2, d_model=6, vocab_size=11, context=8)
ROWS, SAVED_AFTER = 4, 2

WAYS: dict[str, dict[str, Any]] = {
    "single": {"api": "single"},
    "ddp": {"api": "ddp"},
    "fsdp2": {"api": "fsdp2"},
    "recomputed": {"api": "fsdp2", "activation_checkpointing": "full", "wrap": "Attention,MLP"},
    "offloaded": {"api": "fsdp2", "cpu_offload": True, "wrap": "root"},
    "hsdp": {"api": "hsdp"},
    "mini": {"api": "mini"},
    "fsdp1": {"api": "fsdp1"},
    "fsdp1-flat": {"api": "fsdp1", "use_orig_params": False},
    "fsdp1-grad-op": {"api": "fsdp1", "sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": "full"},
    "fsdp1-hybrid": {"api": "fsdp1", "sharding_strategy": "HYBRID_SHARD"},
    "fsdp1-none": {"api": "fsdp1", "sharding_strategy": "NO_SHARD"},
}
ON_RANKS = {
    1: ["single", "ddp", "fsdp2", "mini", "fsdp1"],
    2: ["ddp", "recomputed", "offloaded", "mini", "fsdp1-flat", "fsdp1-grad-op", "fsdp1-none"],
    4: ["fsdp2", "hsdp", "fsdp1-hybrid"],
}
WRITERS = [(way, ranks) for ranks, ways in ON_RANKS.items() for way in ways]


class Training:
    """A model wrapped in one of the ways, and its AdamW."""

    def __init__(self, way: str, seed: int = 0) -> None:
        config = TrainConfig(**WAYS[way], seed=seed, weight_decay=0.0, lr=1e-3)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        place = RankPlace(rank, ranks, rank, ranks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 on one rank, and that it is deprecated
            self.wrapped = wrap(config, MODEL, place, torch.device("cpu"))
        self.optimizer = make_optimizer(self.wrapped, config)

    def losses(self, steps: range) -> list[float]:
        """Train; step by step the mean loss over all rows, which belong to the step."""
        found = []
        for step in steps:
            rows = torch.randint(MODEL.vocab_size, (ROWS, 9), generator=torch.Generator().manual_seed(step))
            own = rows.chunk(dist.get_world_size())[dist.get_rank()]
            self.optimizer.zero_grad()
            with self.wrapped.micro_batch(is_last=True):
                loss = self.wrapped.model(own[:, :-1], own[:, 1:])
                loss.backward()
            self.optimizer.step()
            dist.all_reduce(mean := loss.detach().clone())
            found.append(mean.item() / dist.get_world_size())
        return found

    def state(self) -> State:
        return read_state(self.wrapped.model, self.optimizer)

    def whole_state(self) -> State:
        return {name: whole(tensor).clone() for name, tensor in self.state().items()}

    def load(self, fill: Callable[[State], None]) -> None:
        state = self.state()
        for tensor in state.values():
            local(tensor).fill_(torch.nan)  # what nobody fills is seen
        fill(state)
        write_state(self.wrapped.model, self.optimizer, state)


def differing(state: State, expected: State) -> list[str]:
    """Names of tensors of which this rank's part has other bits."""
    wrong = [] if state.keys() == expected.keys() else ["set of names"]
    for name in state.keys() & expected.keys():
        own = expected[name]
        if isinstance(tensor := state[name], DTensor):
            (chunk,) = tensor.__create_chunk_list__()
            own = own[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
        if not torch.equal(local(state[name]), own):
            wrong.append(name)
    return wrong


@dataclass
class Written:
    """What a writer had when it wrote, and how it went on."""

    state: State
    losses: list[float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[tuple[str, int], Written]:
    """Each way trains on each number of ranks, writes in both formats, and trains on."""

    def write(way: str) -> Written:
        training = Training(way)
        training.losses(range(SAVED_AFTER))
        at = folder / f"{way}-{dist.get_world_size()}"
        at.mkdir(exist_ok=True)
        write_full(at, training.state())
        dcp.save(training.state(), checkpoint_id=at / "sharded")
        return Written(training.whole_state(), training.losses(range(SAVED_AFTER, SAVED_AFTER + 2)))

    found: dict[tuple[str, int], Written] = {}
    for ranks, ways in ON_RANKS.items():
        results = run(lambda ways=ways: [write(way) for way in ways], ranks, progress=False, record=False, threads=1)
        found |= {(way, ranks): result for way, result in zip(ways, results[0], strict=True)}
    return found


@pytest.mark.parametrize("ranks", [tail(n) if n > 1 else n for n in ON_RANKS])
def test_every_way_reads_what_others_wrote(ranks: int, written: dict[tuple[str, int], Written], folder: Path) -> None:
    """Each reads every sixth of the writers' checkpoints; together they read all, from every kind of writer."""

    def read() -> None:
        for reader in ON_RANKS[ranks]:
            training = Training(reader, seed=1)
            for writer in WRITERS[WRITERS.index((reader, ranks)) % 6 :: 6]:
                at = folder / f"{writer[0]}-{writer[1]}"
                for load in (partial(read_full, at), partial(dcp.load, checkpoint_id=at / "sharded")):
                    training.load(load)
                    wrong = differing(training.state(), written[writer].state)
                    assert not wrong, f"{reader} on {ranks} has another {wrong[0]} than {writer}, from {load}"

    run(read, ranks, progress=False, record=False, threads=1, timeout_s=60)


@pytest.mark.parametrize("ranks", [tail(n) if n == 4 else n for n in ON_RANKS])
def test_training_goes_on_as_it_would_have(ranks: int, written: dict[tuple[str, int], Written], folder: Path) -> None:
    def go_on() -> None:
        for reader in ON_RANKS[ranks]:
            for writer in [(reader, ranks), ("ddp", 2)]:
                training = Training(reader, seed=1)
                training.load(partial(read_full, folder / f"{writer[0]}-{writer[1]}"))
                losses = training.losses(range(SAVED_AFTER, SAVED_AFTER + 2))
                if writer == (reader, ranks):
                    assert losses == written[writer].losses, (reader, writer)
                else:
                    assert losses == pytest.approx(written[writer].losses, rel=1e-5, abs=0), (reader, writer)

    run(go_on, ranks, progress=False, record=False, threads=1, timeout_s=60)


def plain(**changes: Any) -> torch.nn.Module:
    return build(dataclasses.replace(MODEL, **changes))


def written_by(model: torch.nn.Module, at: Path) -> Path:
    at.mkdir()
    write_full(at, read_state(model))
    return at


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_start_a_model_of_any_way(ranks: int, tmp_path: Path) -> None:
    model = plain()
    at = written_by(model, tmp_path / "weights")
    bfloat16 = tmp_path / "bfloat16"
    bfloat16.mkdir()
    rounded = {name: param.detach().bfloat16() for name, param in model.named_parameters()}
    save_file(rounded, bfloat16 / "model.safetensors")
    expected = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    converted = {f"model.{name}": tensor.float() for name, tensor in rounded.items()}

    def start() -> None:
        for way in ON_RANKS[ranks]:
            started = Training(way, seed=1).wrapped.model
            load_weights(at, started)
            assert not differing(read_state(started), expected), way
            load_weights(bfloat16, started)
            assert not differing(read_state(started), converted), way

    run(start, ranks, progress=False, record=False, threads=1)


def test_a_rank_reads_its_slices_and_no_more(written: dict[tuple[str, int], Written], folder: Path) -> None:
    class Counted(TensorFiles):
        read_bytes = 0

        def read(self, name: str, index: Index) -> torch.Tensor:
            found = super().read(name, index)
            self.read_bytes += found.nbytes
            return found

    def read() -> tuple[int, int]:
        source = Counted(folder / "single-1")
        state = {name.removeprefix("model."): t for name, t in read_state(Training("fsdp2").wrapped.model).items()}
        fill(state, source)
        return source.read_bytes, sum(local(tensor).nbytes for tensor in state.values())

    found = list(run(read, 4, progress=False, record=False, threads=1))
    assert all(read_bytes == own_bytes for read_bytes, own_bytes in found)
    assert sum(read_bytes for read_bytes, _ in found) == sum(p.nbytes for p in plain().parameters())


def test_when_rank_0_cannot_write_the_others_are_not_left_in_a_collective(tmp_path: Path) -> None:
    def write() -> str:
        said = "written"
        try:
            write_full(tmp_path / "not there", Training("fsdp2").state())
        except OSError as error:
            said = type(error).__name__
        dist.barrier()  # all come here: none waits for another in a gather
        return said

    results = run(write, 2, progress=False, record=False, threads=1)
    assert list(results) == ["FileNotFoundError", "written"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 256, "d_model": 8},
            r"tok_emb.weight is \(256, 8\) in the checkpoint and \(11, 6\) in the model: another vocabulary; "
            r"use tokenizer=bytes \(and 1\d more\)",
        ),
        (
            {"context": 16},
            r"pos_emb.weight is \(16, 6\) in the checkpoint and \(8, 6\) in the model; use the model and n_layer",
        ),
        ({"n_layer": 2}, r"the checkpoint has layers.1.attn.proj.bias and the model does not; .* \(and 11 more\)"),
        ({"tied": False}, r"the checkpoint has head.weight and the model does not; use the model"),
        ({"bias": False}, r"the model has layers.0.attn_norm.bias and the checkpoint does not; .* \(and 6 more\)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_and_nothing_is_filled(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    at = written_by(plain(**changes), tmp_path / "weights")
    model = plain()
    before = {name: tensor.clone() for name, tensor in read_state(model).items()}
    for read in (
        lambda: read_full(at, read_state(model)),
        lambda: load_weights(at, model),
        lambda: check_weights(at, MODEL),
    ):
        with pytest.raises(ValueError, match=message):
            read()
    assert not differing(read_state(model), before)


def test_another_dtype_is_for_starting_and_not_for_going_on(tmp_path: Path) -> None:
    at = written_by(plain().bfloat16(), tmp_path / "weights")
    with pytest.raises(ValueError, match=r"is torch.bfloat16 in the checkpoint and torch.float32 in the model"):
        read_full(at, read_state(plain()))


def test_weights_alone_do_not_resume(tmp_path: Path) -> None:
    model = plain()
    at = written_by(model, tmp_path / "weights")
    with pytest.raises(FileNotFoundError, match=r"there is no optim.safetensors in .*weights"):
        read_full(at, read_state(model, torch.optim.AdamW(model.parameters())))


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors in .*; a sharded checkpoint becomes a full one"):
        load_weights(tmp_path, plain())


def test_weights_of_a_checkpoint_are_checked_against_its_manifest(tmp_path: Path) -> None:
    Checkpointer(tmp_path / "checkpoints", format="full").save(3, read_state(plain()), {}, {})
    at = tmp_path / "checkpoints" / "step-3"
    check_weights(at, MODEL)
    damaged = bytearray((at / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (at / "model.safetensors").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"step-3 is damaged: model.safetensors has not the SHA-256"):
        check_weights(at, MODEL)
