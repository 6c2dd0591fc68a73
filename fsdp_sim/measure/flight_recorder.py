"""A rank writes what torch's flight recorder holds when it hangs: its last collectives, as JSON.

NCCL's watchdog does so when a collective times out; gloo has none. `labs.cluster.flight_recorder` reads such files.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fsdp_sim.timeline import written


def write(path: Path) -> None:
    """Write this rank's dump, as JSON.

    Raises:
        RuntimeError: this torch cannot.
    """
    import torch._C._distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        raise RuntimeError("this torch has no _dump_fr_trace_json; use torch 2.13, or NCCL's own dumps")
    with written(path) as new:
        new.write_bytes(dump())


@contextmanager
def recorded(folder: Path, rank: int, *, idle_s: float) -> Iterator[None]:
    """Inside, this rank writes ``folder/rankN.json`` as soon as it has not issued a collective for ``idle_s``.

    All ranks write, also those that wait for no collective: they are the ones that are looked for.

    Raises:
        RuntimeError: as `write`.
    """
    over = threading.Event()
    path, look = folder / f"rank{rank}.json", folder / f"rank{rank}.look"
    write(look)  # where this cannot be had, it is said now

    def watch() -> None:
        while not over.wait(idle_s / 4):
            if _newest_s(look) + idle_s < time.time():
                look.replace(path)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        look.unlink(missing_ok=True)


class _Time(msgspec.Struct, frozen=True):
    time_created_ns: int


class _Times(msgspec.Struct, frozen=True):
    entries: tuple[_Time, ...] = ()


def _newest_s(path: Path) -> float:
    """Write a dump; returns when its newest collective was issued, seconds since 1970."""
    write(path)
    times = msgspec.json.decode(path.read_bytes(), type=_Times, strict=False).entries
    return max((time.time_created_ns for time in times), default=0) * 1e-9
