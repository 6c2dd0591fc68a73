"""Convert checkpoints: full and sharded, and weights to and from other programs.

    python -m labs.checkpoint.convert SOURCE TARGET --to=...

    runs/a/checkpoints/step-20 weights --to=full    whole tensors, as safetensors
    runs/a/checkpoints/step-20 mine --to=hf         for transformers: from_pretrained("mine")
    gpt2-medium/ weights --to=full                  from there; labs.train --init_from=weights
    theirs.pt weights --to=full                     a torch.save file, of DDP or anything else
    theirs.pt mine --to=hf --model=gpt2-medium

On one process, one tensor in memory at a time:

    from                                                    to
    sharded, full    a run's checkpoint                     sharded, full    with all there is: a run goes on from it
    hf               a Hugging Face GPT-2 or Llama          full             weights: a run starts from them
    a torch.save file or a safetensors file of weights      hf               weights: transformers loads them

A run goes on from a converted checkpoint when it lies in its folder, as runs/b/checkpoints/step-20. How the
writer was wrapped is nowhere in a checkpoint of this project, so from DDP to FSDP, or from FSDP1 to FSDP2, there is
nothing to convert. Files of other programs have traces of it in their names, which go.
Exit status: 0 converted; 2 asked wrongly, or what is there cannot be converted; 1 it could not be written.
"""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import torch
import tyro
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from labs.checkpoint import folder as folders
from labs.checkpoint import hugging_face_names
from labs.checkpoint.full import FILES, check
from labs.checkpoint.hashing import FileInfo, fsync_folder, write_file
from labs.checkpoint.index import INDEX, read_index, torch_dtype
from labs.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from labs.checkpoint.staging import Planner
from labs.checkpoint.storage import PieceWriter, Reader
from labs.checkpoint.tensors import Form, Index, Source, TensorFiles, read_whole, write_tensors
from labs.model import ModelConfig, empty, model_config
from labs.model.gpt import GPTConfig
from labs.model.llama import LlamaConfig
from labs.wrapping.base import original_name

Target = Literal["full", "sharded", "hf"]


# ---- What there is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenCheckpoint:
    """Something to convert.

    Attributes:
        source: its tensors, by the names of a state: ``model.`` and ``optim.`` stand before them.
        manifest: of a run's checkpoint; None for weights from elsewhere.
    """

    path: Path
    source: Source
    manifest: Manifest | None = None


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Find out what something is, and verify it if it is a run's checkpoint; no tensor is kept in memory.

    Raises:
        FileNotFoundError: it is not there. ValueError: it is damaged, or not what can be converted; says what to do.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    if path.is_file():
        weights: Source = TensorFiles(path.parent, path.stem) if path.suffix == ".safetensors" else TorchFile(path)
        return OpenCheckpoint(path, _JoinedSource({"model.": hugging_face_names.renamed(weights, {})}))
    if (path / MANIFEST).exists():
        manifest = read_manifest(path)
        if wrong := folders.damaged_files(path, manifest, list(manifest.files)) or folders.wrong_index(path, manifest):
            raise ValueError(f"{path} is damaged: {wrong[0]}; convert another checkpoint")
        if manifest.format == "sharded":
            return OpenCheckpoint(path, _Sharded(path), manifest)
        parts = {FILES[file]: TensorFiles(path, Path(file).stem) for file in FILES if file in manifest.files}
        return OpenCheckpoint(path, _JoinedSource(parts), manifest)
    if (path / ".metadata").exists():
        raise ValueError(
            f"{path} has torch's own sharded format, whose index is a pickle: reading it may run code. If you trust "
            "it, python -m torch.distributed.checkpoint.format_utils dcp_to_torch makes a file that can be converted"
        )
    for below in (path, path / "checkpoints"):
        if found := folders.candidates(below):
            raise ValueError(f"{path} is a folder of checkpoints; give one of them, as in {found[0]}")
    try:
        weights = TensorFiles(path)
    except FileNotFoundError:
        raise ValueError(
            f"{path} has neither {MANIFEST} nor model.safetensors: give a checkpoint, a folder of Hugging Face, or a "
            "file of weights"
        ) from None
    return OpenCheckpoint(
        path, _JoinedSource({"model.": hugging_face_names.renamed(weights, hugging_face_names.read_config(path))})
    )


class _JoinedSource:
    """Several sources as one; the key stands before their names."""

    def __init__(self, parts: Mapping[str, Source]) -> None:
        self.forms = {prefix + name: form for prefix, part in parts.items() for name, form in part.forms.items()}
        self.parts = parts

    def read(self, name: str, index: Index) -> torch.Tensor:
        prefix = next(prefix for prefix in self.parts if name.startswith(prefix))
        return self.parts[prefix].read(name.removeprefix(prefix), index)


class _Sharded:
    """The tensors of a sharded checkpoint, each put together when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.index = path, read_index(path)
        self.forms = {name: Form(torch_dtype(it.dtype), it.shape) for name, it in self.index.tensors.items()}

    def read(self, name: str, index: Index) -> torch.Tensor:
        dtype, shape = self.forms[name]
        state = {name: torch.empty(shape, dtype=dtype)}
        reader = Reader(self.path, msgspec.structs.replace(self.index, tensors={name: self.index.tensors[name]}))
        reader.load(state)
        return state[name][index]


class TorchFile:
    """Weights in a file of `torch.save`, read with ``weights_only`` and mapped into memory, not copied.

    What DDP, FSDP1 or torch.compile put before names goes, and a tied head, which is the token embedding once more. The
    weights may be the file's dict, or in it as "model", "state_dict" or "model_state_dict".

    Raises:
        ValueError: it holds more than tensors, or parts of tensors; says what to do.
    """

    def __init__(self, path: Path) -> None:
        try:
            loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, AssertionError) as error:
            raise ValueError(
                f"{path} is not a file of tensors alone: {str(error).splitlines()[0]} Load it where you trust it, and "
                "save what model.state_dict() returns"
            ) from error
        for key in ("model", "state_dict", "model_state_dict"):
            if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
                loaded = loaded[key]
        if not isinstance(loaded, dict) or not all(isinstance(it, torch.Tensor) for it in loaded.values()):
            raise ValueError(f"{path} has other things than tensors by name; save what model.state_dict() returns")
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensor in loaded.items():
            if "_flat_param" in name:
                raise ValueError(
                    f"{path} has {name}, FSDP1's flat parameter, of which only the model knows the parts; save it "
                    "again with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT)"
                )
            if isinstance(tensor, DTensor):
                raise ValueError(
                    f"{path} has one rank's part of {name}; save what get_model_state_dict(model, "
                    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) returns on rank 0"
                )
            self.tensors[original_name(name)] = tensor
        head, embedding = self.tensors.get("head.weight"), self.tensors.get("tok_emb.weight")
        if head is not None and embedding is not None and torch.equal(head, embedding):
            del self.tensors["head.weight"]
        self.forms = {name: Form.of(tensor) for name, tensor in self.tensors.items()}

    def read(self, name: str, index: Index) -> torch.Tensor:
        return self.tensors[name][index]


# ---- What is wanted --------------------------------------------------------------------------------------------------


def convert(path: Path, target: Path, to: Target, *, model: ModelConfig | None = None) -> None:
    """Convert a checkpoint or weights, with a bar. The target has its name only when it is complete.

    Args:
        to: see the table at the top.
        model: what the weights are of, for ``hf``; a run's checkpoint knows it.

    Raises:
        FileNotFoundError, FileExistsError, OSError: ``path`` is not there; ``target`` is; it cannot be written.
        ValueError: what is there cannot become what is wanted; says why.
    """
    if target.exists():
        raise FileExistsError(f"{target} is there already; choose another name")
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.absolute().parent} to write {target.name} into")
    opened = open_checkpoint(path)
    if to == "sharded" and opened.manifest is None:
        raise ValueError(f"{path} has weights alone, and a sharded checkpoint is for going on; use --to=full")
    unfinished = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:8]}")
    unfinished.mkdir()
    try:
        with tqdm(unit="B", unit_scale=True, desc=target.name, disable=None) as bar:
            if to == "hf":
                weights = _Part(opened.source, "model.", bar)
                model = model or _model_of(opened)
                check(dict(empty(model).named_parameters()), weights, path, any_float=True)
                hugging_face_names.write_model(unfinished, weights, model)
            elif opened.manifest is None:
                _write_full(unfinished, opened.source, bar)
            else:
                files = (_write_full if to == "full" else _write_sharded)(unfinished, opened.source, bar)
                _write_rest(unfinished, opened.path, msgspec.structs.replace(opened.manifest, format=to), files)
        fsync_folder(unfinished)
        unfinished.rename(target)
        fsync_folder(target.absolute().parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


class _Part:
    """The tensors whose names begin so, by the rest of their names; what is read moves a bar."""

    def __init__(self, source: Source, prefix: str, bar: tqdm) -> None:
        self.source, self.prefix, self.bar = source, prefix, bar
        self.forms = {name.removeprefix(prefix): form for name, form in source.forms.items() if name.startswith(prefix)}
        bar.total = (bar.total or 0) + sum(
            torch.Size(shape).numel() * dtype.itemsize for dtype, shape in self.forms.values()
        )

    def read(self, name: str, index: Index) -> torch.Tensor:
        tensor = self.source.read(self.prefix + name, index)
        self.bar.update(tensor.nbytes)
        return tensor


def _write_full(folder: Path, source: Source, bar: tqdm) -> dict[str, FileInfo]:
    parts = {file: _Part(source, prefix, bar) for file, prefix in FILES.items()}
    return {
        file: write_tensors(folder / file, part.forms, partial(read_whole, part))
        for file, part in parts.items()
        if part.forms
    }


def _write_sharded(folder: Path, source: Source, bar: tqdm) -> dict[str, FileInfo]:
    part, writer = _Part(source, "", bar), PieceWriter(folder)
    plan = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in part.forms.items()}
    writer.save(Planner(plan, _LazyTensors(part)))
    return writer.files


class _LazyTensors(dict[str, torch.Tensor]):
    """Tensors that are read when they are asked for."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __missing__(self, name: str) -> torch.Tensor:
        return read_whole(self.source, name)


def _write_rest(folder: Path, path: Path, manifest: Manifest, files: dict[str, FileInfo]) -> None:
    """What a checkpoint has besides the tensors of its state, as it is, and the manifest of all."""
    data = {INDEX, *FILES, *(read_index(path).files if (path / INDEX).exists() else ())}
    for name in manifest.files.keys() - data:
        files[name] = write_file(folder / name, [(path / name).read_bytes()])
    write_file(folder / MANIFEST, [msgspec.structs.replace(manifest, files=files).encode()])


class _Shaped(TypedDict):
    identity: dict[str, Any]


def _model_of(opened: OpenCheckpoint) -> ModelConfig:
    """The model of a run's checkpoint, of which its progress says the shape."""
    if opened.manifest is None:
        raise ValueError(f"{opened.path} does not say what its weights are of; say it, as in --model=gpt2")
    shape = folders.read_progress(opened.path, _Shaped)["identity"]
    kind = LlamaConfig if "n_kv_head" in shape else GPTConfig
    try:
        return kind(**{field.name: shape[field.name] for field in dataclasses.fields(kind) if field.name in shape})
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{opened.path} does not say of what shape its model is ({error}); say it with --model"
        ) from error


# ---- The command ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert, to what."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """A checkpoint (step-N), a Hugging Face GPT-2's or Llama's folder, or a file of weights (.pt, .safetensors)."""
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TARGET")]
    """A folder that is not there yet."""
    to: Target
    """full: whole tensors in safetensors files. sharded: as a run writes by default. hf: for transformers."""
    model: str | None = None
    """The preset of weights that do not come from a run's checkpoint (hf)."""
    n_layer: int | None = None
    """Another number of layers than the preset's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = tyro.cli(
        ConvertOptions,
        prog="python -m labs.checkpoint.convert",
        description=__doc__,
        args=arguments,
        use_underscores=True,
    )
    try:
        model = None
        if options.model:
            model = model_config(options.model, **({"n_layer": options.n_layer} if options.n_layer else {}))
        convert(options.source, options.target, options.to, model=model)
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        print(f"labs.checkpoint.convert: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"labs.checkpoint.convert: {options.target} could not be written: {error}", file=sys.stderr)
        return 1
    print(f"{options.target} is {options.source} as {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
