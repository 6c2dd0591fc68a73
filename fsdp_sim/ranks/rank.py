"""What runs inside a rank: set up, the learner's function, the result on its way back.

The process is forked from a server that has already imported torch, so it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import linecache
import multiprocessing as mp
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec
import numpy as np

from fsdp_sim.ranks.board import RankBoard
from fsdp_sim.ranks.inbox import ErrorMessage, ResultMessage, send
from fsdp_sim.ranks.limits import Limits, confine, die_first, keep_children
from fsdp_sim.ranks.network import Network
from fsdp_sim.ranks.other_user import OtherUser, needed_folders
from fsdp_sim.ranks.pickling import pack, unpack
from fsdp_sim.timeline import RECORDER
from fsdp_sim.words import harmless, shortened

T = TypeVar("T")

MAX_NAME, MAX_TEXT, MAX_TRACEBACK = 200, 4_000, 40_000  # characters of an exception
GUARD_S = 0.25  # between looks at whether a debugger holds this rank

# gloo must outlast the watchdog, which knows better when a wait is a hang
GLOO_TIMEOUT = timedelta(days=7)
NCCL_TIMEOUT_S = 120.0  # the least: NCCL's clock runs while another rank still computes or compiles


@dataclass(frozen=True)
class Call:
    """What every rank of one call is told."""

    folder: Path
    world_size: int
    device: str  # cpu, or cuda: rank N has GPU N
    network: Network | None
    serial: bool
    record: bool
    threads: int
    timeout_s: float
    plain: bool  # send the result as data that cannot execute
    limits: Limits | None
    environ: dict[str, str]
    cells: dict[str, Any]  # of linecache: source text that is in no file

    @property
    def user(self) -> OtherUser | None:
        return self.limits.user if self.limits else None


class _ThisRank:
    """This process's place on the board, when it is a rank."""

    board: RankBoard | None = None
    rank: int = 0


def is_rank() -> bool:
    """Whether this process is a rank of `fsdp_sim.ranks.run`, whoever started the server that it was forked from."""
    return _ThisRank.board is not None


def track(items: Iterable[T], total: int | None = None) -> Iterator[T]:
    """Go through ``items`` and show how far rank 0 is on the progress bar of `fsdp_sim.ranks.run`.

    Outside a rank it is a plain loop.
    """
    count = total if total is not None else len(items) if isinstance(items, Sized) else 0
    for done, item in enumerate(items):
        if _ThisRank.board is not None:
            _ThisRank.board.status["total"][_ThisRank.rank] = count
            _ThisRank.board.status["progress"][_ThisRank.rank] = done
        yield item
    if _ThisRank.board is not None:
        _ThisRank.board.status["progress"][_ThisRank.rank] = count


def _stand_guard(control: Connection, folder: Path, board: RankBoard, rank: int) -> None:
    """Say on the board while a debugger holds this rank, and end at once, with all it started, when the parent is gone.

    A rank must never outlive its cell.
    """
    main_thread = threading.main_thread().ident
    with contextlib.suppress(EOFError, OSError):
        while not control.poll(GUARD_S):
            board.status["debugged"][rank] = _in_debugger(sys._current_frames().get(main_thread or 0))
        control.recv_bytes()
    shutil.rmtree(folder, ignore_errors=True)  # the parent cannot do it any more
    os.killpg(0, signal.SIGKILL)


def _in_debugger(frame: FrameType | None) -> bool:
    """Whether one of a thread's frames is pdb's or debugpy's."""
    while frame is not None:
        if Path(frame.f_code.co_filename).name in ("bdb.py", "pdb.py") or "pydevd" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _own_output(path: Path) -> None:
    """Everything this process prints, from C++ too, goes to a file of its own."""
    sys.stdout.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)


def _join_group(job: Call, rank: int, board: RankBoard) -> None:
    """Initialise gloo or NCCL over a file in the job's folder (no port to clash) and meet the other ranks once."""
    import torch
    import torch.distributed as dist

    from fsdp_sim.ranks import group

    torch.set_num_threads(job.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size))
    store = dist.FileStore(str(job.folder / "store"), job.world_size)
    place: dict[str, Any] = {"store": store, "rank": rank, "world_size": job.world_size}
    if job.device == "cuda":  # torch's own groups: a wait for NCCL is a stream's, so the board would see none
        torch.cuda.set_device(rank)
        timeout = timedelta(seconds=max(job.timeout_s, NCCL_TIMEOUT_S))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, **place)
        dist.barrier(device_ids=[rank])
    else:
        group.install(board, rank, job.network, job.serial)
        dist.init_process_group("gloo", timeout=GLOO_TIMEOUT, **place)
        dist.all_reduce(torch.ones(1))
    board.status["ready_s"][rank] = time.monotonic()


def main(job: Call, rank: int, work: bytes, control: Connection) -> None:
    """The rank process. Sends one message."""
    os.setsid()  # the terminal's Ctrl-C goes to the parent, which stops the ranks
    keep_children()
    if job.limits is not None:
        die_first()
    if job.user is not None:
        paths = needed_folders()
        job.user.become(paths, job.folder, control.fileno())
    gc.freeze()  # what the server has imported is no garbage: to look through it copies its pages, up to a second
    board = RankBoard(job.folder / "board", job.world_size)
    board.status["began_s"][rank] = time.monotonic()
    threading.Thread(target=_stand_guard, args=(control, job.folder, board, rank), daemon=True).start()
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a DataLoader may have workers
    _own_output(job.folder / f"rank{rank}.out")
    os.environ.clear()  # a fork inherits the server's variables and random states
    os.environ.update(job.environ)
    linecache.cache.update(job.cells)  # tracebacks quote the lines of a cell
    random.seed()
    np.random.seed()
    _ThisRank.board, _ThisRank.rank = board, rank
    try:
        if job.user is not None:
            job.user.check_access(paths)
        _join_group(job, rank, board)
        from fsdp_sim.ranks import plain  # it imports torch

        fn, args = unpack(work)
        if job.record:
            RECORDER.start(rank)
        if job.limits is not None:
            confine(job.limits, job.world_size)
        own_pid = os.getpid()
        result = fn(*args)
        if os.getpid() != own_pid:
            os._exit(0)  # a child that the function forked has come back too: it is not the rank
        packed = plain.encode(result) if job.plain else _pickled(result)
        message: ResultMessage | ErrorMessage = ResultMessage(packed, msgspec.msgpack.encode(RECORDER.stop()))
    except SystemExit:
        raise
    except BaseException as error:
        message = ErrorMessage(_short(type(error).__name__, MAX_NAME), _text(error), _learners_traceback(error))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed it, or put something else in its place
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C and C++ have printed
    send(control, message)
    threading.Event().wait()  # stay until the parent has heard from all: leaving now would break the others' sockets


def _pickled(result: Any) -> bytes:
    try:
        return pack(result)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(result).__name__}, which cannot be sent back to the notebook ({error}); "
            "return numbers, strings, lists, dicts or tensors"
        ) from error


def _text(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:  # torch's CheckpointException, whose own text is all ranks' tracebacks
        first = next(iter(failures.values()))
        error = first[0] if isinstance(first, tuple) else first
        return f"{_short(type(error).__name__, MAX_NAME)}: {_text(error)}"
    try:
        return _short(str(error), MAX_TEXT)
    except Exception as second:
        return f"(its __str__ raised {type(second).__name__})"


def _learners_traceback(error: BaseException) -> str:
    """The traceback from the learner's function down, without the launcher's own frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return _short("".join(traceback.format_exception(type(error), error, frames)), MAX_TRACEBACK)


def _short(text: str, most: int) -> str:
    """A text that can travel (a lone surrogate cannot) and drives no terminal, without the middle of a long one."""
    return harmless(shortened(text, most)).encode("utf-8", "replace").decode()
