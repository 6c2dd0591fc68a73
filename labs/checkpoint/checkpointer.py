"""Checkpoints of a run: written by all ranks together, whole or not at all, and read by any number of ranks.

A save goes: rank 0 makes a folder that has not the checkpoint's name yet; every rank writes its files there, hashes
them meanwhile, and fsyncs them; all tell each other what they wrote; rank 0 writes the manifest and gives the folder
its name. Until that rename nothing has happened to what is there (but on a full disk, see `Checkpointer._made_room`). A
rank that fails says so in the next exchange, and then all ranks raise `CheckpointError`; a rank that is gone ends the
exchange after the group's time.

[Note: saving in the background]  The tensors are copied to buffers in host memory, and a thread does the rest while
training goes on. It is our thread and not `torch.distributed.checkpoint.async_save`: the rename has to come after the
writing, in the same order of collectives, so the thread has to go on after DCP's part; and async_save (experimental, as
its documentation says) copies the state anew in each save. The thread's collectives are in the checkpoints' own group,
and every method here first waits for the thread: no group is ever used by two threads.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from labs.checkpoint import folder as folders
from labs.checkpoint.agree import CheckpointError, describe, listed, together
from labs.checkpoint.full import read_full, write_full
from labs.checkpoint.hashing import FileInfo, write_file
from labs.checkpoint.index import check_fits, read_index
from labs.checkpoint.manifest import MANIFEST, Manifest
from labs.checkpoint.staging import Buffers, Planner, shared_out
from labs.checkpoint.state import State, local, not_finite
from labs.checkpoint.storage import PieceWriter, Reader
from labs.checkpoint.tensors import Form
from labs.loop.failpoints import failpoint

FORMATS = ("sharded", "full")
DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint all of whose bytes were found to be as they were written.

    Attributes:
        progress: what `Checkpointer.save` was given.
        world_size: ranks that wrote it.
    """

    path: Path
    step: int
    progress: dict[str, Any]
    format: str
    world_size: int


class Checkpointer:
    """Saves and finds a run's checkpoints. All methods but `poll` and `said` are collective.

    Args:
        folder: where the checkpoints are; all ranks see the same one. It is made if its parent is there, and what runs
            that were killed left unfinished is removed: rank 0 holds a `labs.checkpoint.lock.RunLock` meanwhile.
        keep: checkpoints kept, at least 2: the newest may turn out to be damaged.
        format: ``sharded``: every rank writes its part. ``full``: rank 0 writes whole tensors as safetensors.
        group: a gloo group that nothing else uses; None: this process alone. Ranks wait for the slowest writer within
            the group's timeout.
        schema: the type of the progress, as msgspec knows types; a checkpoint with another is damaged.

    Raises:
        ValueError: keep or format is wrong. CheckpointError: the folder cannot be made or read.
    """

    def __init__(
        self, folder: Path, *, keep: int = 2, format: str = "sharded", group: dist.ProcessGroup | None = None,
        schema: Any = dict[str, Any],
    ) -> None:  # fmt: skip
        if keep < 2:
            raise ValueError(f"keep={keep}: a damaged checkpoint needs one before it to go back to; keep at least 2")
        if format not in FORMATS:
            raise ValueError(f"format={format!r}: it is {' or '.join(FORMATS)}")
        self.folder, self.keep, self.format, self.group = folder, keep, format, group
        self.schema = schema
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.damaged: dict[Path, str] = {}
        self._messages: list[str] = []
        self._buffers = Buffers()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._messages += self._on_rank_0(lambda: folders.prepare(folder))

    def messages(self) -> list[str]:
        """What there is to tell and has not been told: partial checkpoints removed, damaged ones passed over."""
        lines, self._messages = self._messages, []
        return lines

    # ---- Saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: State,
        progress: dict[str, Any],
        rank_tensors: dict[str, torch.Tensor],
        *,
        asynchronous: bool = False,
    ) -> None:
        """Write a checkpoint of a step; afterwards older ones are deleted but for ``keep``.

        A save under way in the background is waited for. If it failed its error is raised here, after this save has
        been done (or begun): each error is raised once, and never costs the next save.

        Args:
            state: the same names on every rank, and plain tensors the same on every rank; replicas are written once.
            progress: JSON's types; rank 0's is written.
            rank_tensors: what each rank has of its own, such as the state of its random numbers.
            asynchronous: return when the state is copied, and write in the background (sharded only).

        Raises:
            CheckpointError: on all ranks: a rank could not write (says which, and why), a tensor is not finite (who
                went on from it would never get away from that), or this step's checkpoint is there already. The other
                checkpoints are as they were.
            ValueError: asynchronous and full.
        """
        if asynchronous and self.format == "full":
            raise ValueError("a full checkpoint gathers tensors over the training's groups; save it synchronously")
        before = self._finished()
        if wrong := self._not_finite(state):
            raise CheckpointError(f"the checkpoint of step {step} was not written: {wrong}")
        own = {name: tensor.cpu().clone() for name, tensor in rank_tensors.items()}
        noted = msgspec.json.format(msgspec.json.encode(progress))
        if self.format == "full":
            self._save(step, lambda partial: self._write_full(partial, state), own, noted)
        else:
            state = shared_out(state, self.rank, self.world_size)
            tensors = {name: local(tensor).detach() for name, tensor in state.items()}
            planner = Planner(state, self._buffers.copy(tensors) if asynchronous else tensors)

            def write(partial: Path) -> dict[str, FileInfo]:
                return self._write_shards(partial, step, planner)

            if asynchronous:
                self._saving = self._thread.submit(self._save, step, write, own, noted)
            else:
                self._save(step, write, own, noted)
        if before:
            raise before

    def wait(self) -> None:
        """Wait until no save is under way.

        Raises:
            CheckpointError: the one in the background failed, on all ranks.
        """
        if error := self._finished():
            raise error

    def poll(self) -> None:
        """Look, without waiting, whether the save in the background has failed. Ranks may learn it at different times.

        Raises:
            CheckpointError: it has.
        """
        if self._saving and self._saving.done():
            self.wait()

    def _finished(self) -> CheckpointError | None:
        """Wait for the thread. What only this rank knows (a lost connection, a bug) is raised as it is."""
        saving, self._saving = self._saving, None
        try:
            if saving:
                saving.result()
        except CheckpointError as error:
            return error
        return None

    def _save(
        self, step: int, write: Callable[[Path], dict[str, FileInfo]], own: dict[str, torch.Tensor], progress: bytes
    ) -> None:
        try:
            self._refuse_good(self.folder / folders.name_of(step))
            try:
                self._write(step, write, own, progress)
            except CheckpointError as error:
                if not self._made_room(error):
                    raise
                self._write(step, write, own, progress)
        except CheckpointError as error:
            raise CheckpointError(f"the checkpoint of step {step} was not written: {error}") from error

    def _write(
        self, step: int, write: Callable[[Path], dict[str, FileInfo]], own: dict[str, torch.Tensor], progress: bytes
    ) -> None:
        partial = self._on_rank_0(lambda: folders.begin(self.folder, step))
        try:
            written = self._from_torch(lambda: write(partial))
            own_files = together(lambda: self._write_own(partial, own), self.group)
            self._on_rank_0(lambda: self._commit(partial, step, written | _merged(own_files), progress))
        except CheckpointError:  # on all ranks: nobody writes there any more
            # What cannot be removed goes when the next run begins.
            self._on_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise

    def _made_room(self, error: CheckpointError) -> bool:
        """Where the disk is full: delete all but the newest good checkpoint, each byte of which is looked at first.

        A disk that has room for ``keep`` checkpoints and not for one more would else never take another one.
        """
        if not any(full in str(error) for full in DISK_FULL):
            return False
        newest = self._newest()
        gone = self._on_rank_0(lambda: folders.older_than(newest.path) if newest else [])
        if newest and gone:
            names = ", ".join(path.name for path in gone)
            self._messages.append(
                f"the disk is full: {names} was deleted for the next one, and {newest.path.name} is kept"
            )
            self._messages += self._on_rank_0(lambda: folders.prune(self.folder, 1, self.damaged))
        return bool(gone)

    def _refuse_good(self, path: Path) -> None:
        """A good checkpoint is not written again; a damaged one will be put aside."""
        if path not in self.damaged and self._on_rank_0(path.exists) and not self._verify(path)[1]:
            raise CheckpointError(f"{path} is there already and is good; a checkpoint is never overwritten")

    def _write_shards(self, partial: Path, step: int, planner: Planner) -> dict[str, FileInfo]:
        writer = PieceWriter(partial, step)
        writer.save(planner, self.group)
        return _merged(together(lambda: writer.files, self.group))

    def _write_full(self, partial: Path, state: State) -> dict[str, FileInfo]:
        return _merged(together(lambda: write_full(partial, state, self.group), self.group))

    def _write_own(self, partial: Path, tensors: dict[str, torch.Tensor]) -> dict[str, FileInfo]:
        name = _own_file(self.rank)
        return {name: write_file(partial / name, [safetensors.torch.save(tensors)])}

    def _commit(self, partial: Path, step: int, files: dict[str, FileInfo], progress: bytes) -> None:
        """Rank 0's part. Once the checkpoint has its name it is good, so what fails later is only said."""
        failpoint("before-manifest", step)
        files[folders.PROGRESS] = write_file(partial / folders.PROGRESS, [progress])
        manifest = Manifest(
            step=step, format=cast(Literal["sharded", "full"], self.format), world_size=self.world_size, files=files
        )
        write_file(partial / MANIFEST, [manifest.encode()])
        failpoint("before-rename", step)
        final = folders.commit(partial, step)
        failpoint("after-rename", step)
        self.damaged.pop(final, None)
        try:
            failpoint("before-latest", step)
            folders.set_latest(final)
        except OSError as error:
            self._messages.append(f"{final} is complete, but {folders.LATEST} could not be set: {describe(error)}")
        failpoint("before-prune", step)
        try:
            self._messages += folders.prune(self.folder, self.keep, self.damaged)
        except OSError as error:
            self._messages.append(f"{self.folder} could not be searched for old checkpoints: {describe(error)}")

    # ---- Finding and loading ----------------------------------------------------------------------------------------

    def newest(self) -> FoundCheckpoint | None:
        """The newest checkpoint that is whole, every byte of it, or None. What is damaged is passed over and told.

        `damaged` has those afterwards, with what is wrong; `said` the same in sentences.
        """
        self.wait()
        return self._newest()

    def _not_finite(self, state: State) -> str:
        """Which tensors hold NaN or infinity on any rank, in words; empty if none does."""
        of_ranks = together(lambda: not_finite(state), self.group)
        names = {rank: f"{names[0]} holds NaN or infinity" for rank, names in enumerate(of_ranks) if names}
        others = {name for names in of_ranks for name in names}
        return listed(names) + f" (and {len(others) - 1} other tensors)" * (len(others) > 1) if names else ""

    def _newest(self) -> FoundCheckpoint | None:
        for path in self._on_rank_0(lambda: folders.candidates(self.folder)):
            if path in self.damaged:
                continue
            manifest, wrong = self._verify(path)
            if manifest and not wrong:
                progress, why = self._on_rank_0(functools.partial(self._progress, path))
                found = FoundCheckpoint(path, manifest.step, progress, manifest.format, manifest.world_size)
                if not why:
                    return found
                wrong = [why]
            self.pass_over(path, "; ".join(wrong))
        return None

    def pass_over(self, path: Path, why: str) -> None:
        """Look at this checkpoint no more. On all ranks."""
        self.damaged[path] = why
        self._messages.append(f"{path} is damaged and was passed over: {why}")

    def _progress(self, path: Path) -> tuple[dict[str, Any], str]:
        """The progress, or what is wrong with it."""
        try:
            return folders.read_progress(path, self.schema), ""
        except (OSError, ValueError) as error:
            return {}, str(error)

    def _verify(self, path: Path) -> tuple[Manifest | None, list[str]]:
        """A checkpoint's manifest and what is wrong with it; the ranks share the reading."""
        manifest, wrong = self._on_rank_0(lambda: folders.survey(path))
        if manifest is None or wrong:
            return manifest, wrong
        mine = folders.shares(manifest, self.world_size)[self.rank]
        wrong_on_ranks = together(lambda: folders.damaged_files(path, manifest, mine), self.group)
        wrong = [why for wrong in wrong_on_ranks for why in wrong]
        return manifest, wrong or self._on_rank_0(lambda: folders.wrong_index(path, manifest))

    def load(self, found: FoundCheckpoint, state: State, *, strict: bool = True) -> bool:
        """Fill the state's tensors in place, whatever the number of ranks or the way of wrapping was.

        Returns:
            whether they are finite; else the checkpoint is damaged, and `newest` finds the one before it.

        Args:
            state: the same names on every rank.
            strict: the checkpoint must have no other names than the state (sharded).

        Raises:
            CheckpointError: it does not fit, and nothing was changed; or it cannot be read. Names the tensor.
        """
        self.wait()
        try:
            if found.format == "full":
                together(lambda: read_full(found.path, state), self.group)
            else:
                self._read_shards(found.path, state, strict)
        except CheckpointError as error:
            raise CheckpointError(f"{found.path} was not loaded: {error}") from error
        if wrong := self._not_finite(state):
            self.pass_over(found.path, wrong)
        return not wrong

    def _read_shards(self, path: Path, state: State, strict: bool) -> None:
        together(lambda: check_fits(read_index(path), state, strict=strict), self.group)
        reader = Reader(path, read_index(path))
        self._from_torch(lambda: reader.load(state, self.group))

    def rank_tensors(self, found: FoundCheckpoint, like: State | None = None) -> dict[str, torch.Tensor] | None:
        """What this rank saved of its own; None if another number of ranks wrote the checkpoint.

        Args:
            like: what has to be there, in the same dtypes and shapes.

        Raises:
            CheckpointError: a rank cannot read its own, or something of it is not there.
        """
        if found.world_size != self.world_size:
            return None
        path = found.path / _own_file(self.rank)
        return together(lambda: _own_tensors(path, like or {}), self.group)[self.rank]

    # ---- All ranks --------------------------------------------------------------------------------------------------

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on rank 0, on all ranks; if it fails there, all fail."""
        return together(lambda: work() if self.rank == 0 else None, self.group)[0]  # type: ignore[return-value]

    def _from_torch(self, work: Callable[[], T]) -> T:
        """DCP has all ranks fail together too, with an exception of its own."""
        try:
            return work()
        except CheckpointException as failure:
            why = {rank: describe(error) for rank, (error, _) in failure.failures.items()}
            raise CheckpointError(listed(why)) from failure


def _own_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _own_tensors(path: Path, like: State) -> dict[str, torch.Tensor]:
    try:
        tensors = safetensors.torch.load(path.read_bytes())
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is not a whole safetensors file: {error}") from error
    for name, tensor in like.items():
        if name not in tensors or Form.of(tensors[name]) != Form.of(tensor):
            found = _described(tensors[name]) if name in tensors else "not there"
            raise CheckpointError(f"{path.name}: {name} is {found}, and has to be {_described(tensor)}")
    return tensors


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _merged(of_ranks: list[dict[str, FileInfo]]) -> dict[str, FileInfo]:
    return {name: info for files in of_ranks for name, info in files.items()}
