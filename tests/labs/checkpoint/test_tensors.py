"""Files that the safetensors library reads, written one tensor at a time, and read one slice at a time."""

from __future__ import annotations

import hashlib
import json
import math
import re
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from labs.checkpoint.tensors import DTYPES, Form, TensorFiles, in_order, read_whole, write_tensors

SHAPES = [(2, 3), (7,), (), (0, 4)]
TENSORS = {
    f"{name}.{i}": torch.arange(math.prod(shape)).to(dtype).view(shape)
    for name, dtype in DTYPES.items()
    for i, shape in enumerate(SHAPES)
}
FORMS = {name: Form.of(tensor) for name, tensor in TENSORS.items()}


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    info = write_tensors(tmp_path / "model.safetensors", FORMS, TENSORS.__getitem__)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    data = (tmp_path / "model.safetensors").read_bytes()
    assert (info.size_bytes, info.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_we_read_what_the_library_writes_and_any_slice_of_it(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = TensorFiles(tmp_path)
    assert source.forms == FORMS
    for name, tensor in TENSORS.items():
        assert torch.equal(read_whole(source, name), tensor), name
    assert torch.equal(source.read("F32.0", (slice(1, 2), slice(0, 2))), TENSORS["F32.0"][1:2, :2])


def test_every_tensor_begins_where_its_dtype_may(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", FORMS, TENSORS.__getitem__)
    data = (tmp_path / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    assert header.pop("__metadata__") == {"format": "pt"}  # without it transformers refuses the file
    assert header_bytes % 8 == 0
    for entry in header.values():
        assert entry["data_offsets"][0] % DTYPES[entry["dtype"]].itemsize == 0


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Large ones, which are written as they lie there, and small ones, which are collected in a buffer."""
    forms = {f"{i:02}": Form(torch.float32, (3 << 20,)) for i in range(6)} | {"small": Form(torch.float32, (5,))}
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def read(name: str) -> torch.Tensor:
        nonlocal most
        tensor = torch.zeros(forms[name].shape)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(it() is not None for it in alive))
        return tensor

    write_tensors(tmp_path / "model.safetensors", forms, read)
    assert most <= 2  # the next one comes while the last is let go
    assert TensorFiles(tmp_path).forms == in_order(forms)


def test_an_index_names_several_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert TensorFiles(tmp_path).forms == {"a": Form(torch.float32, (2,)), "b": Form(torch.float32, (3,))}
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no model-2.safetensors in "):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 1}', '{"weight_map": %s}' % ("[" * 100_000)])
def test_what_is_no_index_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json is no index of safetensors files"):
        TensorFiles(tmp_path)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=re.escape("a was to be Form(dtype=torch.float32, shape=(3,))")):
        write_tensors(path, {"a": Form(torch.float32, (3,))}, lambda _: torch.zeros(4))
    with pytest.raises(FileExistsError):
        write_tensors(path, {"a": Form(torch.float32, (3,))}, lambda _: torch.zeros(3))
    path.write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors is not a whole safetensors file: .*; copy or save it"):
        TensorFiles(tmp_path)
    save_file({"a": torch.zeros(2).to(torch.float8_e5m2)}, path)
    with pytest.raises(ValueError, match=r"a has dtype F8_E5M2; save it as F32 or BF16"):
        TensorFiles(tmp_path)
