"""A full checkpoint: whole tensors in safetensors files, written by rank 0, read by every rank in slices of its own.

    model.safetensors   the parameters, by the names of the plain model: other programs can use it
    optim.safetensors   AdamW's tensors for them: <name>.exp_avg, <name>.exp_avg_sq, <name>.step

No rank holds more than one whole tensor at a time, not even rank 0: tensors are gathered one after the other, and each
goes into the file before the next one comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from labs.checkpoint import hugging_face_names
from labs.checkpoint.folder import damaged_files
from labs.checkpoint.hashing import FileInfo
from labs.checkpoint.manifest import MANIFEST, read_manifest
from labs.checkpoint.state import State, local, read_state, whole, write_state
from labs.checkpoint.tensors import Form, Source, TensorFiles, in_order, read_whole, write_tensors
from labs.model import ModelConfig, empty

FILES = {"model.safetensors": "model.", "optim.safetensors": "optim."}
"""The files of a full checkpoint, and with what the names in a state begin that belong into each."""


def write_full(folder: Path, state: State, group: dist.ProcessGroup | None = None) -> dict[str, FileInfo]:
    """Write whole tensors into a folder, on rank 0. A collective call: all ranks take part.

    Args:
        group: of the checkpoints. In it the others wait for rank 0's disk; the training's groups, in which tensors are
            gathered, have less patience.

    Returns:
        size and SHA-256 of each file, on rank 0; nothing on the others.

    Raises:
        OSError: on rank 0 only, after the last collective: a file could not be written. The others do not know.
    """
    parts = {file: in_order(forms_of(state, prefix)) for file, prefix in FILES.items()}
    rest = iter([FILES[file] + name for file, forms in parts.items() for name in forms])

    def gathered(name: str) -> torch.Tensor:
        if group is not None:
            dist.barrier(group)
        return whole(state[name])

    written = {}
    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            for file, forms in parts.items():
                if forms:
                    written[file] = write_tensors(folder / file, forms, lambda _: gathered(next(rest)))
    finally:
        for name in rest:  # whatever became of the file on rank 0: the other ranks are in these collectives
            gathered(name)
    return written


def forms_of(state: State, prefix: str) -> dict[str, Form]:
    """The forms of those tensors of a state whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): Form.of(state[name]) for name in state if name.startswith(prefix)}


def read_full(folder: Path, state: State) -> None:
    """Fill a state in place from what `write_full` wrote, by any way of wrapping on any number of ranks.

    Each rank reads what it holds and no more; nothing is communicated.

    Args:
        state: from `labs.checkpoint.state.read_state`; give it to `write_state` afterwards. Without ``optim.`` in it
            only the model's file is read.

    Raises:
        FileNotFoundError: a file is missing. ValueError: it does not fit the model; says where. Nothing was filled.
    """
    sources: list[tuple[State, Source]] = []
    for file, prefix in FILES.items():
        part = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        if part:
            sources.append((part, TensorFiles(folder, Path(file).stem)))
            check(*sources[-1], folder)
    for part, source in sources:
        fill(part, source)


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Start a model from weights: slices of them go into it, however it is wrapped. Collective where FSDP1 shards.

    Args:
        path: see `open_weights`. Another floating dtype than the model's is converted.

    Raises:
        FileNotFoundError, ValueError: as `open_weights`, and for weights that do not fit the model.
    """
    state = {name.removeprefix("model."): tensor for name, tensor in read_state(model).items()}
    source = open_weights(path)
    check(state, source, Path(path), any_float=True)
    fill(state, source)
    write_state(model, None, {f"model.{name}": tensor for name, tensor in state.items()})


def check_weights(path: str | Path, config: ModelConfig) -> None:
    """That `load_weights` will do for such a model; before any rank has one, on one rank.

    Weights that are part of a checkpoint are read whole and compared with its manifest.

    Raises:
        FileNotFoundError, ValueError: as `load_weights`, and for damaged weights.
    """
    check(dict(empty(config).named_parameters()), open_weights(path), Path(path), any_float=True)
    if (Path(path) / MANIFEST).exists():
        manifest = read_manifest(Path(path))
        if wrong := damaged_files(Path(path), manifest, manifest.files.keys() & {"model.safetensors"}):
            raise ValueError(f"{path} is damaged: {wrong[0]}; use another checkpoint")


def open_weights(path: str | Path) -> Source:
    """The weights in a folder with ``model.safetensors``: a full checkpoint, or a Hugging Face GPT-2 or Llama.

    Raises:
        FileNotFoundError: no such folder, or no weights in it. ValueError: a file that is not whole, or another model.
    """
    folder = Path(path)
    try:
        return hugging_face_names.renamed(TensorFiles(folder), hugging_face_names.read_config(folder))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; a sharded checkpoint becomes a full one with: "
            f"python -m labs.checkpoint.convert {folder} FOLDER --to=full"
        ) from None


@torch.no_grad()
def fill(state: State, source: Source) -> None:
    """Read into each tensor of a state, in place, the slice of it that this rank holds."""
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            tensor.copy_(read_whole(source, name))
            continue
        for chunk in tensor.__create_chunk_list__():  # none where a rank holds nothing
            if chunk.sizes.numel():
                index = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
                local(tensor).copy_(source.read(name, index))


REMEDY = "use the model and n_layer it was saved with"
TOKENIZERS = {256: "tokenizer=bytes", 50257: "tokenizer=gpt2"}


def check(state: State, source: Source, where: Path, *, any_float: bool = False) -> None:
    """That a source has each tensor of a state, in its shape and dtype, and no others.

    Args:
        any_float: a floating dtype will do where the state has another one.

    Raises:
        ValueError: names the first that does not fit, and how many more there are.
    """
    found = list(_misfits(state, source.forms, any_float))
    if found:
        more = f" (and {len(found) - 1} more)" * (len(found) > 1)
        raise ValueError(f"{where} does not fit the model: {found[0]}{more}")


def _misfits(state: State, forms: Mapping[str, Form], any_float: bool) -> Iterator[str]:
    for name, tensor in state.items():
        if name not in forms:
            yield f"the model has {name} and the checkpoint does not; {REMEDY}"
            continue
        (dtype, shape), model = forms[name], Form.of(tensor)
        if shape != model.shape:
            remedy = f"; {REMEDY}"
            if name.startswith("tok_emb.weight") and shape[0] != model.shape[0]:
                remedy = f": another vocabulary; use {TOKENIZERS.get(shape[0], 'the tokenizer it was trained with')}"
            yield f"{name} is {shape} in the checkpoint and {model.shape} in the model{remedy}"
        elif dtype != model.dtype and not (any_float and dtype.is_floating_point):
            yield f"{name} is {dtype} in the checkpoint and {model.dtype} in the model; start from it with init_from"
    for name in forms:
        if name not in state:
            yield f"the checkpoint has {name} and the model does not; {REMEDY}"
