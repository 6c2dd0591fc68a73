"""What a rank's dump holds, and how it is read from a file that nobody vouches for.

Dumps come as JSON (`torch._C._distributed_c10d._dump_fr_trace_json`, which `recorded` writes) and, from NCCL's
watchdog, as pickles. A pickle can name any function to be called. Those of the recorder name none, so one that does is
refused, and nothing in it is called.
"""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path
from typing import Any

import msgspec

KINDS = {
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "allreduce": "all-reduce",
}
"""By what torch's name of an operation begins with; others keep their name."""


class Entry(msgspec.Struct, frozen=True):
    """One collective that a rank has issued; of torch's fields those that are used here.

    Attributes:
        process_group: its name, and what it is for.
        collective_seq_id: its number in its group, from 1.
        profiling_name: backend and operation, as in ``gloo:all_gather``. gloo's name for a reduce-scatter is
            ``gloo:all_reduce``, because that is how it does one.
        input_sizes: shapes of this rank's inputs.
        retired: it has ended.
    """

    process_group: tuple[str, str]
    collective_seq_id: int
    profiling_name: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    retired: bool = True
    is_p2p: bool = False

    @property
    def kind(self) -> str:
        name = self.profiling_name.partition(":")[2].strip("_")
        return next((kind for start, kind in KINDS.items() if name.startswith(start)), name)

    @property
    def numel(self) -> int:
        """Elements of the first input."""
        return math.prod(self.input_sizes[0]) if self.input_sizes else 0

    @property
    def signature(self) -> tuple[str, int]:
        """What has to be the same on all ranks."""
        return (self.kind, self.numel)


class Group(msgspec.Struct, frozen=True):
    """A process group, as a dump tells of it. gloo's leave ``ranks`` empty."""

    ranks: str = "[]"


class Dump(msgspec.Struct, frozen=True):
    """What one rank's recorder held."""

    entries: tuple[Entry, ...] = ()
    pg_config: dict[str, Group] = {}


class _Plain(pickle.Unpickler):
    """Reads numbers, strings, lists, tuples and dicts, and nothing that would have to be called."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {module}.{name} to be called, as no flight recorder does; do not open it")

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("it refers to something outside of itself, as no flight recorder does; do not open it")


def read(folder: Path) -> dict[int, Dump]:
    """The dumps in a folder, by rank: files whose names end with the rank, as in ``rank3.json`` or NCCL's ``fr_3``.

    Raises:
        ValueError: a file is none, is damaged, or is a pickle that would run code; says which. OSError.
    """
    dumps = {}
    for path in sorted(folder.iterdir()):
        found = re.search(r"(\d+)(\.json)?$", path.name)
        if not found or not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                is_json = file.peek(1).lstrip()[:1] == b"{"
                content = msgspec.json.decode(file.read()) if is_json else _Plain(file).load()
            dumps[int(found[1])] = msgspec.convert(content, Dump, strict=False)
        except (ValueError, pickle.UnpicklingError, EOFError, IndexError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} is no flight recorder's dump: {error}") from error
    if not dumps:
        raise ValueError(f"{folder} has no file whose name ends with a rank, such as rank0.json or fr_0")
    return dumps
