"""Bytes of a sharded checkpoint: the right ones, once each, for any number of ranks, and nothing that runs code."""

import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fsdp_sim.ranks import run
from labs.checkpoint import Checkpointer, storage
from labs.checkpoint.hashing import CHUNK_BYTES, write_file
from labs.checkpoint.index import INDEX, Index, Piece, SavedTensor, check_fits, read_index
from labs.checkpoint.storage import PieceWriter, bytes_of


def test_the_bytes_of_tensors_come_in_order_whatever_their_form(tmp_path):
    torch.manual_seed(0)
    tensors = [
        torch.tensor(3.0),
        torch.empty(0),
        torch.randn(7).bfloat16(),
        torch.randn(5, 4).t(),  # not contiguous
        torch.randn(CHUNK_BYTES // 4 + 5),
        torch.tensor([True, False]),
        torch.randn(3, requires_grad=True),
    ]
    expected = b"".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    write_file(tmp_path / "a", bytes_of(tensors))
    assert (tmp_path / "a").read_bytes() == expected


INDEX_OF_A = Index(["shard-0.bin"], {"a": SavedTensor("float32", (2, 3), [Piece(0, 0, (0, 0), (2, 3))])})


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"b": torch.zeros(1)}, "b is not in the checkpoint; use the model that was saved (and 1 more like it)"),
        ({"a": torch.zeros(3, 2)}, "a has shape (2, 3) in the checkpoint and (3, 2) here"),
        ({"a": torch.zeros(2, 3).half()}, "a is float32 in the checkpoint and float16 here"),
        ({"a": torch.zeros(2, 3, device="meta")}, "a is on the meta device; give it memory before loading"),
        ({}, "a is in the checkpoint and not here; use the model that was saved"),
    ],
)
def test_what_does_not_fit_is_named(state, told):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (compared below, whole)
        check_fits(INDEX_OF_A, state)
    assert str(refused.value) == told


def test_a_part_may_be_asked_for_when_it_is_said():
    check_fits(INDEX_OF_A, {}, strict=False)


def test_a_damaged_index_and_a_name_that_leads_elsewhere_are_refused(tmp_path):
    for text in ('{"files":["../x"],"tensors":{}}', '{"files":', '{"files":[],"tensors":{},"more":1}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ValueError, match="damaged"):
            read_index(tmp_path)


def state_on(mesh_shape, placements):
    """On a rank: tensors with shapes that do not divide, empty shards, every kind of dtype; and whole ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    whole = {
        "matrix": torch.randn(7, 5),
        "bias": torch.randn(3),
        "half": torch.randn(9, 2).bfloat16(),
        "ids": torch.arange(11),
        "cube": torch.randn(6, 4, 3),
        "large": torch.randn(1030, 1100),
    }
    state = dict(whole)
    if placements is not None:
        mesh = init_device_mesh("cpu", mesh_shape)
        for name, tensor in whole.items():
            fits = [Shard(min(p.dim, tensor.dim() - 1)) if isinstance(p, Shard) else p for p in placements]
            state[name] = distribute_tensor(tensor, mesh, fits)
    return state | {"step": torch.tensor(4.0)}, whole | {"step": torch.tensor(4.0)}


def save_on(folder, mesh_shape, placements):
    import torch.distributed as dist

    from labs.checkpoint import Checkpointer

    state, _ = state_on(mesh_shape, placements)
    Checkpointer(folder, group=dist.new_group(backend="gloo")).save(1, state, {}, {})


def load_on(folder, mesh_shape, placements):
    """Whether every rank got every bit."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from labs.checkpoint import Checkpointer

    state, whole = state_on(mesh_shape, placements)
    for tensor in state.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    checkpointer = Checkpointer(folder, group=dist.new_group(backend="gloo"))
    checkpointer.load(checkpointer.newest(), state)
    got = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    return [name for name in whole if not torch.equal(got[name], whole[name])]


def shards(*dims):
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if dim is None else Shard(dim) for dim in dims]


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four") / "checkpoints"
    run(save_on, 4, folder, (4,), shards(0), progress=False)
    return folder


class TestAnyNumberOfRanks:
    @pytest.mark.parametrize(
        ("ranks", "mesh", "placements"),
        [
            (1, None, None),
            (3, (3,), shards(0)),
            (2, (2,), shards(1)),
        ],
        ids=["one", "three", "cut on columns"],
    )
    def test_four_ranks_wrote_it(self, of_four, ranks, mesh, placements):
        assert list(run(load_on, ranks, of_four, mesh, placements, progress=False)) == [[]] * ranks

    def test_nothing_in_it_is_a_pickle(self, of_four):
        checkpoint = of_four / "step-1"
        json.loads((checkpoint / INDEX).read_bytes())
        json.loads((checkpoint / "manifest.json").read_bytes())
        index = read_index(checkpoint)
        # The shards hold the tensors' bytes and not one byte more.
        n_bytes = sum(
            torch.Size(p.shape).numel() * getattr(torch, s.dtype).itemsize
            for s in index.tensors.values()
            for p in s.pieces
        )
        assert sum(path.stat().st_size for path in checkpoint.glob("shard-*.bin")) == n_bytes
        assert sorted(path.name for path in checkpoint.iterdir()) == sorted(
            [INDEX, "manifest.json", "progress.json", *(f"rank-{r}.safetensors" for r in range(4)), *index.files]
        )


@pytest.mark.parametrize(("mesh", "placements"), [((2, 2), shards(None, 0)), (None, None)], ids=["HSDP", "DDP"])
def test_replicas_are_written_once(tmp_path, mesh, placements):
    run(save_on, 4, tmp_path, mesh, placements, progress=False)
    written = sum(path.stat().st_size for path in (tmp_path / "step-1").glob("shard-*.bin"))
    _, whole = state_on(None, None)
    assert written == sum(tensor.numel() * tensor.itemsize for tensor in whole.values())
    assert list(run(load_on, 2, tmp_path, (2,), shards(0), progress=False)) == [[], []]


def test_much_is_written_to_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FILE_BYTES", 1000)
    sizes = [0, 10, 200, 40, 300, 251, 250, 0, 1, 3]
    state = {f"t{i}": torch.randn(n) for i, n in enumerate(sizes)}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, {}, {})
    files = sorted(tmp_path.glob("step-1/shard-*.bin"))
    assert [path.name for path in files] == [
        "shard-0.1.bin",
        "shard-0.2.bin",
        "shard-0.3.bin",
        "shard-0.4.bin",
        "shard-0.bin",
    ]
    assert [path.stat().st_size for path in files] == [1200, 1004, 1000, 16, 1000]
    for tensor in state.values():
        tensor.zero_()
    checkpointer.load(checkpointer.newest(), state)
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    files[1].write_bytes(bytes(1004))
    assert checkpointer.newest() is None
    assert list(checkpointer.damaged.values()) == [
        f"{files[1].name} has not the SHA-256 that manifest.json says: its bytes have changed"
    ]


def test_rows_that_are_cut_or_copied_are_read_some_at_a_time(tmp_path, monkeypatch):
    read, sizes = storage._read_into, []
    monkeypatch.setattr(storage, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(storage, "_read_into", lambda *args: (sizes.append(args[1].nbytes), read(*args)))
    kept, target = torch.randn(100, 10), torch.zeros(10, 100).t()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"t": kept}, {}, {})
    checkpointer.load(checkpointer.newest(), {"t": target})
    assert torch.equal(target, kept)
    assert sizes == [1000] * 4


def test_a_file_that_came_out_shorter_than_planned_is_no_checkpoint(tmp_path, monkeypatch):
    def refused(*args, **options):
        raise PermissionError

    monkeypatch.setattr(storage, "bytes_of", lambda tensors: (part[:-4] for part in bytes_of(tensors)))
    monkeypatch.setattr(os, "rmdir", refused)  # that what was written stays is not what is told
    with pytest.raises(BaseException, match=r"shard-0\.bin has 36 bytes where 40 were planned"):
        Checkpointer(tmp_path).save(1, {"t": torch.randn(10)}, {}, {})
    assert Checkpointer(tmp_path).newest() is None


def test_what_is_no_tensor_is_refused(tmp_path):
    with pytest.raises(BaseException, match="epoch is no tensor; what is not belongs into the progress, as JSON"):
        dcp.save({"a": torch.zeros(2), "epoch": 3}, storage_writer=PieceWriter(tmp_path), no_dist=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_tensors_of_a_gpu_come_through_pinned_buffers(tmp_path):
    from labs.checkpoint import Checkpointer

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    state = {"large": torch.randn(3000, 1000, device="cuda"), "small": torch.randn(7, device="cuda")}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    checkpointer = Checkpointer(tmp_path)
    for step, asynchronous in enumerate([False, True]):
        checkpointer.save(step, state, {}, {}, asynchronous=asynchronous)
        for tensor in state.values():
            tensor.zero_()
        checkpointer.load(checkpointer.newest(), state)
        assert all(torch.equal(state[name], kept[name]) for name in kept)
