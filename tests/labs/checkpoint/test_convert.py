"""A converted checkpoint has the same bits in another form, and says what it cannot be made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_sim.ranks import run
from labs.checkpoint import Checkpointer
from labs.checkpoint.convert import convert
from labs.checkpoint.full import load_weights
from labs.checkpoint.state import State, read_state, write_state
from labs.model import build
from labs.model.gpt import GPT, GPTConfig

MODEL = GPTConfig(n_layer=2, n_head=2, d_model=6, vocab_size=11, context=8)
PROGRESS = {"step": 7, "position": 56, "identity": {**dataclasses.asdict(MODEL), "tokenizer": "bytes"}}


def training(seed: int) -> tuple[GPT, torch.optim.AdamW]:
    model = build(MODEL, seed)
    assert isinstance(model, GPT)
    return model, torch.optim.AdamW(model.parameters())


def expected_state() -> State:
    """The same bits in every process: drawn, since sums depend on threads and vector units."""
    model, optimizer = training(0)
    tokens = torch.arange(8).view(1, 8)
    model(tokens, tokens).backward()
    optimizer.step()  # so that there is a state of the optimizer
    generator = torch.Generator().manual_seed(0)
    state = read_state(model, optimizer)
    return {name: torch.rand(t.shape, generator=generator) if t.ndim else t for name, t in state.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folders: sharded by 3 ranks, and full."""
    folder = tmp_path_factory.mktemp("runs")

    def save() -> None:
        model, optimizer = training(0)
        mesh = init_device_mesh("cpu", (3,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        state = read_state(model, optimizer)
        for name, tensor in expected_state().items():
            live = state[name]
            if live.ndim:
                start = live.__create_chunk_list__()[0].offsets[0]  # type: ignore[attr-defined]
                rows = live.to_local().shape[0]  # type: ignore[attr-defined]
                live.to_local().copy_(tensor[start : start + rows])  # type: ignore[attr-defined]
            else:
                live.copy_(tensor)
        group = dist.new_group(backend="gloo")
        own = {"cpu": torch.full((4,), dist.get_rank(), dtype=torch.uint8)}
        for format in ("sharded", "full"):
            Checkpointer(folder / format, format=format, group=group).save(7, state, PROGRESS, own)

    run(save, 3, progress=False, record=False, threads=1)
    return folder


def loaded(checkpoint: Path) -> tuple[State, dict[str, Any], int]:
    """What a run that goes on from a checkpoint gets."""
    model, optimizer = training(1)
    checkpointer = Checkpointer(checkpoint.parent)
    found = checkpointer.newest()
    assert found is not None, checkpointer.messages()
    assert found.path == checkpoint
    state = read_state(model, optimizer)
    checkpointer.load(found, state)
    write_state(model, optimizer, state)
    return read_state(model, optimizer), found.progress, found.world_size


@pytest.mark.parametrize("to", ["full", "sharded"])
@pytest.mark.parametrize("made", ["sharded", "full"])
def test_a_run_goes_on_from_what_was_converted(made: str, to: Any, runs: Path, tmp_path: Path) -> None:
    source, target = runs / made / "step-7", tmp_path / "step-7"
    convert(source, target, to)
    state, progress, world_size = loaded(target)
    expected = expected_state()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert (progress, world_size) == (PROGRESS, 3)
    for rank in range(3):
        name = f"rank-{rank}.safetensors"
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]  # nothing unfinished stays


def test_the_target_of_full_is_what_a_run_with_full_checkpoints_writes(runs: Path, tmp_path: Path) -> None:
    convert(runs / "sharded" / "step-7", tmp_path / "step-7", "full")
    for path in (runs / "full" / "step-7").iterdir():
        assert (tmp_path / "step-7" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("made", ["sharded", "full"])
def test_weights_for_transformers_and_back(made: str, runs: Path, tmp_path: Path) -> None:
    """The checkpoint knows its model."""
    convert(runs / made / "step-7", tmp_path / "hf", "hf")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"model.safetensors", "config.json"}
    convert(tmp_path / "hf", tmp_path / "weights", "full")
    convert(tmp_path / "weights", tmp_path / "again", "hf", model=MODEL)
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    expected = {name.removeprefix("model."): t for name, t in expected_state().items() if name.startswith("model.")}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


# ---- Files of other programs -----------------------------------------------------------------------------------------


def from_plain(at: Path) -> None:
    torch.save(build(MODEL).state_dict(), at)


def from_ddp_compiled(at: Path) -> None:
    torch.save({"model": DistributedDataParallel(torch.compile(build(MODEL))).state_dict(), "epoch": 3}, at)


def from_fsdp1(at: Path) -> None:
    model = FullyShardedDataParallel(build(MODEL), device_id=torch.device("cpu"))
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        torch.save({"state_dict": model.state_dict()}, at)


@pytest.mark.parametrize("save", [from_plain, from_ddp_compiled, from_fsdp1], ids=lambda save: save.__name__)
def test_a_file_of_weights_from_anywhere(save: Callable[[Path], None], tmp_path: Path) -> None:
    """Saved without a run of ours: prefixes go, and the tied head is there once."""
    run(lambda: save(tmp_path / "theirs.pt"), 1, progress=False, record=False, threads=1)
    convert(tmp_path / "theirs.pt", tmp_path / "weights", "full")
    model = build(MODEL, seed=1)
    load_weights(tmp_path / "weights", model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), build(MODEL).parameters(), strict=True))
    convert(tmp_path / "weights" / "model.safetensors", tmp_path / "copy", "full")
    assert load_file(tmp_path / "copy" / "model.safetensors").keys() == dict(model.named_parameters()).keys()


def test_a_head_of_its_own_is_not_taken_for_a_tied_one(tmp_path: Path) -> None:
    own = torch.ones_like(build(MODEL).state_dict()["tok_emb.weight"])
    torch.save(build(MODEL).state_dict() | {"head.weight": own}, tmp_path / "theirs.pt")
    convert(tmp_path / "theirs.pt", tmp_path / "weights", "full")
    assert torch.equal(load_file(tmp_path / "weights" / "model.safetensors")["head.weight"], own)


class Harmful:
    """Unpickling it would make a file."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.at,)


def test_a_pickle_that_would_run_code_is_not_unpickled(tmp_path: Path) -> None:
    torch.save({"model": Harmful(tmp_path / "harm")}, tmp_path / "theirs.pt")
    with pytest.raises(ValueError, match=r"theirs.pt is not a file of tensors alone: .*save what model.state_dict"):
        convert(tmp_path / "theirs.pt", tmp_path / "weights", "full")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.pt"]


def test_parts_of_tensors_are_refused(tmp_path: Path) -> None:
    """FSDP1's flat parameter, and one rank's file of FSDP2, which torch.load opens as if it were whole."""

    def save() -> None:
        flat = FullyShardedDataParallel(build(MODEL), device_id=torch.device("cpu"), use_orig_params=False)
        torch.save({name: param.detach() for name, param in flat.named_parameters()}, tmp_path / "flat.pt")
        sharded = fully_shard(build(MODEL), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        if dist.get_rank() == 0:
            torch.save(sharded.state_dict(), tmp_path / "part.pt")

    run(save, 2, progress=False, record=False, threads=1)
    with pytest.raises(ValueError, match=r"_flat_param, .* save it again with .*FULL_STATE_DICT"):
        convert(tmp_path / "flat.pt", tmp_path / "weights", "full")
    with pytest.raises(ValueError, match=r"part.pt has one rank's part of tok_emb.weight; save what get_model"):
        convert(tmp_path / "part.pt", tmp_path / "weights", "full")


# ---- What cannot be --------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_not_converted(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "step-7"
    copy.mkdir()
    for path in (runs / "sharded" / "step-7").iterdir():
        data = bytearray(path.read_bytes())
        if path.name == "shard-1.bin":
            data[17] ^= 4
        (copy / path.name).write_bytes(data)
    with pytest.raises(ValueError, match=r"step-7 is damaged: shard-1.bin has not the SHA-256"):
        convert(copy, tmp_path / "target", "full")
    assert not (tmp_path / "target").exists()


def test_what_is_refused_is_said_and_nothing_is_left(runs: Path, tmp_path: Path) -> None:
    source = runs / "full" / "step-7"
    (tmp_path / "there").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(runs / "full")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / ".metadata").touch()
    convert(source, tmp_path / "hf", "hf")
    before = sorted(tmp_path.rglob("*"))
    other = dataclasses.replace(MODEL, n_layer=3)
    cases: list[tuple[Path, str, Any, type[Exception], str]] = [
        (source, "there", "full", FileExistsError, r"there is there already; choose another name"),
        (source, "no/target", "full", FileNotFoundError, r"there is no folder .*no to write target into"),
        (tmp_path / "missing", "new", "full", FileNotFoundError, r"there is no .*missing"),
        (tmp_path / "run", "new", "full", ValueError, r"is a folder of checkpoints; give one of them, as in .*step-7"),
        (runs / "full", "new", "full", ValueError, r"is a folder of checkpoints; give one of them, as in .*step-7"),
        (tmp_path / "torch", "new", "full", ValueError, r"index is a pickle: .* dcp_to_torch"),
        (tmp_path / "there", "new", "full", ValueError, r"has neither manifest.json nor model.safetensors"),
    ]
    for path, target, to, error, message in cases:
        with pytest.raises(error, match=message):
            convert(path, tmp_path / target, to)
    with pytest.raises(ValueError, match=r"the model has layers.2.* and the checkpoint does not"):
        convert(tmp_path / "hf", tmp_path / "new", "hf", model=other)
    assert sorted(tmp_path.rglob("*")) == before
