"""Starts rank processes in milliseconds and leaves none behind.

Ranks are forked from a *fork server*: a clean process without threads that has imported torch once. Forking the
kernel itself would be as fast, but hangs as soon as it has used OpenMP; spawning cannot see functions of a cell.

The server sees no GPU, and neither do the ranks that are forked from it. Ranks with a GPU are spawned, each a new
Python that imports torch: a driver does not survive a fork, and what was hidden from the server stays hidden there.
"""

from __future__ import annotations

import contextlib
import linecache
import multiprocessing as mp
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fsdp_sim.accelerators import environ_for, hidden
from fsdp_sim.ranks.board import BoardView, RankBoard
from fsdp_sim.ranks.interrupts import Interrupts
from fsdp_sim.ranks.limits import end_groups, end_marked, end_tree
from fsdp_sim.ranks.rank import Call, main
from fsdp_sim.ranks.watchdog import RankStatus

PRELOAD = [f"{__package__}.preload"]  # imported once by the fork server, so that no rank has to
IN_SERVER = "FSDP_SIM_IN_FORK_SERVER"  # set for the fork server, and for what the ranks start
INSIDE = IN_SERVER in os.environ  # this process is the fork server, a rank, or was started by one
SERVER_ENDS_S = (0.1, 0.4, 1.5)  # how long it is waited for, each time that ranks cannot be started from it
START_S = 20.0  # for a rank to be forked while the server computes nothing
INTERRUPTED_S = 2.0  # ... once somebody has pressed Ctrl-C
LOOK_S = 0.25
_context = mp.get_context("forkserver")
_fresh = mp.get_context("spawn")
_lock = threading.Lock()


def start_server() -> None:
    """Start the fork server (again, if it died). Returns at once; it imports torch in the background.

    The first `run` does it too. Called before a process imports torch itself, it saves the seconds that this takes.
    """
    if INSIDE:
        return
    with _environ(environ_for("cpu")):
        _context.set_forkserver_preload(PRELOAD)
        try:
            forkserver.ensure_running()
        except OSError as error:
            if "too long" not in str(error):
                raise
            raise OSError(
                f"TMPDIR={tempfile.gettempdir()} is too long for the sockets of ranks, whose paths may have some 107 "
                "characters: name a shorter folder, as in TMPDIR=/tmp"
            ) from error


def start_server_after_cell() -> None:
    """In a notebook, start the fork server when the cell that is running has ended: while the next one is read."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return

    def start_once(_: object) -> None:
        shell.events.unregister("post_run_cell", start_once)
        with contextlib.suppress(OSError):  # which the first `run` says
            start_server()

    shell.events.register("post_run_cell", start_once)


@contextlib.contextmanager
def _environ(changed: dict[str, str]) -> Iterator[None]:
    """Meanwhile processes start with this environment, and with the mark."""
    before = dict(os.environ)
    try:
        _set_environ(changed | {IN_SERVER: "1"})
        yield
    finally:
        _set_environ(before)


def _set_environ(environ: dict[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in each rank: functions travel by value."""
    main_module: Any = sys.modules["__main__"]
    kept = {name: main_module.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main_module.__dict__}
    main_module.__spec__ = None
    try:
        yield
    finally:
        main_module.__dict__.update(kept)


@dataclass
class Ranks:
    """The processes of one call."""

    job: Call
    board: BoardView
    processes: list[BaseProcess] = field(default_factory=list)
    controls: list[Connection] = field(default_factory=list)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill every rank and whatever it started, and wait until they are gone."""
        some_ended = not all(process.is_alive() for process in self.processes)
        end_groups([process.pid or 0 for process in self.processes])  # a rank leads its own session
        for process in self.processes:
            process.kill()  # it may not have come that far yet
        for process in self.processes:
            process.join(timeout=2)
        for control in self.controls:
            control.close()
        if self.job.user is not None:
            self.job.user.end()
        elif some_ended:
            end_marked(IN_SERVER, str(self.job.folder))
        self.board.close()
        shutil.rmtree(self.job.folder, ignore_errors=True)


class NoRoomError(OSError):
    """This machine cannot take the ranks' shared files: nothing has been started."""


class NotStartedError(OSError):
    """The fork server, or a rank as it is forked, does nothing. Both have been ended."""


@contextlib.contextmanager
def _watched(name: str, interrupts: Interrupts) -> Iterator[None]:
    """Where a process cannot be started because the fork server stands still, or the new process does before it has
    read what it is told, end both: starting waits for them in the kernel, where nothing else reaches it.

    Raises:
        NotStartedError: that was so. What an interrupt raises, if there was one meanwhile.
    """
    started, ended = threading.Event(), threading.Event()
    server_pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]

    def watch() -> None:
        idle_s, view = 0.0, RankStatus(-1, server_pid)
        while not started.wait(LOOK_S):
            computes = view.computing(time.monotonic())  # it imports torch
            idle_s = 0.0 if computes else idle_s + LOOK_S
            if idle_s > (INTERRUPTED_S if interrupts.pending else START_S):
                ended.set()
                end_tree(server_pid)
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except (EOFError, OSError):
        if not ended.is_set():
            raise
    finally:
        started.set()
        watcher.join()
    if ended.is_set():
        interrupts.check()
        raise NotStartedError(
            f"{name} did not start within {START_S:g} s, in which the process that ranks are forked from computed "
            "nothing (a signal had stopped it, or a disk or the memory of this machine does not answer); it has been "
            "ended, as was the one before, and the next call starts another: see what ails this machine, and call again"
        )


def start(works: list[bytes], interrupts: Interrupts, **settings: Any) -> Ranks:
    """Start the ranks of a job, each with its work; ``settings`` are `Call`'s fields but folder, environ and cells.

    Raises:
        NoRoomError: there is no room for their shared files. NotStartedError: the fork server stands still, and so does
            the one that took its place.
    """
    with contextlib.suppress(NotStartedError):
        return _started(works, interrupts, settings)
    return _started(works, interrupts, settings)


def _started(works: list[bytes], interrupts: Interrupts, settings: dict[str, Any]) -> Ranks:
    for wait_s in SERVER_ENDS_S:
        try:
            return _start(works, interrupts, settings)
        except (EOFError, ConnectionError):  # the server was killed a moment ago, and has not ended yet
            time.sleep(wait_s)
    return _start(works, interrupts, settings)


def _start(works: list[bytes], interrupts: Interrupts, settings: dict[str, Any]) -> Ranks:
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="fsdp_sim-"))
        ranks = _prepare(folder, settings)
    except BaseException as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise NoRoomError(
            f"no room for the ranks' shared files in {tempfile.gettempdir()} ({error.strerror}); "
            "free some space or set TMPDIR to a folder with a few MB"
        ) from error
    job = ranks.job
    context: Any = _fresh if job.device == "cuda" else _context
    try:
        with _lock, _without_main():
            start_server()
            import torch  # noqa: F401  (the results need it, and the server imports it meanwhile)

            for rank in range(job.world_size):
                ours, theirs = context.Pipe()
                args = (job, rank, works[rank], theirs)
                process = context.Process(target=main, args=args, name=f"rank{rank}", daemon=True)
                alone = job.device == "cuda"  # from no server
                with _environ(job.environ) if alone else _watched(f"rank {rank} of {job.world_size}", interrupts):
                    process.start()
                theirs.close()
                ranks.processes.append(process)
                ranks.controls.append(ours)
                interrupts.check()
    except BaseException:
        ranks.stop()
        raise
    return ranks


def _prepare(folder: Path, settings: dict[str, Any]) -> Ranks:
    """A job with its files, before any process."""
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    mark = {IN_SERVER: str(folder)}  # what a rank starts can be found by it
    job = Call(folder=folder, environ=environ_for(settings["device"]) | mark, cells=cells, **settings)
    RankBoard.create(folder / "board", job.world_size)
    if job.user is not None:
        files = ["board", "store", *(f"rank{rank}.out" for rank in range(job.world_size))]
        job = replace(job, environ=hidden(job.user.give_files(folder, files)) | mark)
    return Ranks(job, BoardView(folder / "board", job.world_size, sources=job.user is None))
