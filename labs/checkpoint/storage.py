"""The files of a sharded checkpoint: torch plans who writes and reads what, these classes move the bytes.

    shard-<rank>.bin        the bytes of the tensors (or pieces of them) that a rank wrote, one after the other
    shard-<rank>.<n>.bin    more of them: one file has `FILE_BYTES` at most, unless one piece is larger
    tensors.json            for each tensor its dtype, its shape, and where its pieces are

One SHA-256 takes one core and is slower than a good disk, so a rank writes, and checks, several files at a time.

`torch.distributed.checkpoint` (DCP) finds out which rank has which piece of which tensor, writes what several ranks
have once, and on reading, which bytes of which file a rank needs, whatever the number of ranks was. Its own files are
not used: their index is a pickle, which runs code when it is read, and they have no sums.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from labs.checkpoint.hashing import CHUNK_BYTES, FILES_AT_ONCE, FileInfo, write_file
from labs.checkpoint.index import INDEX, Index, Piece, SavedTensor, torch_dtype
from labs.checkpoint.state import State
from labs.loop.failpoints import failpoint

FILE_BYTES = 256 << 20
READERS = 4
"""Pieces that a rank reads at a time."""


@contextmanager
def _alone_or_with(group: dist.ProcessGroup | None) -> Iterator[dict[str, Any]]:
    """DCP's arguments for a group, or for this process alone, of which DCP warns then.

    The filters of warnings are those of all threads, and a save may be in the background: with a group, of which DCP
    does not warn, they are left alone.
    """
    if group is not None:
        yield {"process_group": group}
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield {"no_dist": True}


# ---- Writing ---------------------------------------------------------------------------------------------------------


class PieceWriter(StorageWriter):
    """Writes a rank's pieces to one file, and on the coordinator the index.

    Source: `torch.distributed.checkpoint.StorageWriter`.

    Attributes:
        files: what this rank wrote.
    """

    def __init__(self, folder: Path, step: int | None = None) -> None:
        self.folder, self.step = folder, step
        self.files: dict[str, FileInfo] = {}

    def save(self, planner: SavePlanner, group: dist.ProcessGroup | None = None) -> None:
        """Write what the planners of all ranks of the group plan; without one, what this one plans."""
        with _alone_or_with(group) as ranks:
            dcp.save({}, storage_writer=self, planner=planner, **ranks)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A Writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """Nothing is left to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise ValueError(f"{item.index.fqn} is no tensor; what is not belongs into the progress, as JSON")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=f"shard-{rank}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        groups = _in_files(plan.items)
        names = [f"{plan.storage_data}.{n}.bin" if n else f"{plan.storage_data}.bin" for n in range(len(groups))]
        results = []
        for name, items in zip(names, groups, strict=True):
            end_bytes = 0
            for item in items:
                begin_bytes, end_bytes = end_bytes, end_bytes + _size_bytes(item)
                where = (name, begin_bytes)
                results.append(WriteResult(item.index, size_in_bytes=end_bytes - begin_bytes, storage_data=where))

        def write(name: str, items: list[WriteItem]) -> FileInfo:
            tensors = (cast(torch.Tensor, planner.resolve_data(item)) for item in items)
            return write_file(self.folder / name, self._parts(tensors))

        failpoint("before-shard-write", self.step)
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            at_once = pool.map if len(groups) > 1 else map
            self.files.update(zip(names, at_once(write, names, groups), strict=True))
        for name, items in zip(names, groups, strict=True):
            planned_bytes = sum(map(_size_bytes, items))
            if self.files[name].size_bytes != planned_bytes:
                raise RuntimeError(f"{name} has {self.files[name].size_bytes} bytes where {planned_bytes} were planned")
        failpoint("after-shard-write", self.step)
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def _parts(self, tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
        failpoint("shard-write", self.step)  # the file is there, and empty
        yield from bytes_of(tensors)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        where = {result.index: result.storage_data for of_rank in results for result in of_rank}
        files = sorted({name for name, _ in where.values()})
        number = {name: i for i, name in enumerate(files)}
        tensors = {}
        for fqn, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)  # prepare_local_plan let nothing else through
            pieces = []
            for chunk in saved.chunks:
                name, begin_bytes = where[MetadataIndex(fqn, chunk.offsets)]
                pieces.append(Piece(number[name], begin_bytes, tuple(chunk.offsets), tuple(chunk.sizes)))
            tensors[fqn] = SavedTensor(str(saved.properties.dtype).removeprefix("torch."), tuple(saved.size), pieces)
        self.files[INDEX] = write_file(self.folder / INDEX, [msgspec.json.encode(Index(files, tensors))])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, Path)


def _in_files(items: Iterable[WriteItem]) -> list[list[WriteItem]]:
    """What comes into one file each, in order."""
    files: list[list[WriteItem]] = []
    room_bytes = 0
    for item in items:
        if not files or _size_bytes(item) > room_bytes:
            files.append([])
            room_bytes = FILE_BYTES
        files[-1].append(item)
        room_bytes -= _size_bytes(item)
    return files


def _size_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def bytes_of(tensors: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors, one after the other, for `write_file`; one tensor is asked for at a time.

    Those in host memory as they lie there (or a copy of one, if it is not contiguous); those of a GPU piece by piece,
    through a pinned buffer.
    """
    buffer: torch.Tensor | None = None
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.device.type == "cpu":
            yield flat.numpy().data
            continue
        if buffer is None:
            buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=flat.device.type == "cuda")
        for piece in flat.split(CHUNK_BYTES):
            yield buffer[: len(piece)].copy_(piece).numpy().data


# ---- Reading ---------------------------------------------------------------------------------------------------------


class Reader(StorageReader):
    """Reads what a rank needs, piece by piece, straight into its tensors where they lie in one stretch of host memory.

    Source: `torch.distributed.checkpoint.StorageReader`.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self.pieces = {
            MetadataIndex(fqn, torch.Size(piece.offsets)): piece
            for fqn, saved in index.tensors.items()
            for piece in saved.pieces
        }

    def load(self, state: State, group: dist.ProcessGroup | None = None) -> None:
        """Fill the tensors of a state in place, on all ranks of the group; without one, on this process alone."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _alone_or_with(group) as ranks:
            dcp.load(dict(state), storage_reader=self, planner=planner, **ranks)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A Reader is for one checkpoint."""

    # DCP would go on without the other ranks if this failed and took an argument named kwargs.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        return Metadata(
            {
                fqn: TensorStorageMetadata(
                    TensorProperties(dtype=torch_dtype(saved.dtype)),
                    torch.Size(saved.shape),
                    [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape)) for p in saved.pieces],
                )
                for fqn, saved in self.index.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """The constructor did."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        numbers = sorted({self.pieces[item.storage_index].file for item in plan.items})
        files = {number: os.open(self.folder / self.index.files[number], os.O_RDONLY) for number in numbers}
        try:
            with ThreadPoolExecutor(READERS) as pool:
                reads = []
                for item in plan.items:
                    piece, target = self.pieces[item.storage_index], planner.resolve_tensor(item).detach()
                    reads.append(pool.submit(_read, files[piece.file], piece, item, target))
                for read in reads:
                    read.result()
        finally:
            for descriptor in files.values():
                os.close(descriptor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, Path)


def _read(file: int, piece: Piece, item: ReadItem, target: torch.Tensor) -> None:
    """Read a block of a piece into a tensor of the block's shape.

    The rows of the block (slices on dim 0) lie one after the other in the file, and all of it does when its rows are
    whole, as they are where FSDP cuts. Else whole rows are read and the block is cut out of them.
    """
    shape, start, block = tuple(piece.shape), tuple(item.storage_offsets), tuple(item.lengths)
    if not shape:  # a scalar is one row
        shape, start, block, target = (1,), (0,), (1,), target.view(1)
    if not math.prod(block):
        return
    row_bytes = math.prod(shape[1:]) * target.itemsize
    begin_bytes = piece.begin_bytes + start[0] * row_bytes
    if block[1:] == shape[1:] and target.is_contiguous() and target.device.type == "cpu":
        _read_into(file, target, begin_bytes)
        return
    n_rows = max(1, CHUNK_BYTES // row_bytes)
    for row in range(0, block[0], n_rows):
        n = min(n_rows, block[0] - row)
        rows = torch.empty((n, *shape[1:]), dtype=target.dtype, pin_memory=target.device.type == "cuda")
        _read_into(file, rows, begin_bytes + row * row_bytes)
        for dim in range(1, len(shape)):
            rows = rows.narrow(dim, start[dim], block[dim])
        target[row : row + n].copy_(rows)


def _read_into(file: int, tensor: torch.Tensor, begin_bytes: int) -> None:
    """Fill a contiguous tensor in host memory with bytes of a file."""
    rest = tensor.view(-1).view(torch.uint8).numpy().data
    while rest:
        n = os.preadv(file, [rest], begin_bytes)
        if not n:
            raise EOFError(f"the file of a shard ends at byte {begin_bytes}, and {len(rest)} more bytes are needed")
        rest, begin_bytes = rest[n:], begin_bytes + n
