"""What a rank's dump holds, and how it is read from a file that nobody vouches for.

Dumps come as JSON (`torch._C._distributed_c10d._dump_fr_trace_json`, which `recorded` writes) and, from NCCL's
watchdog, as pickles. A pickle can name any function to be called. Those of the recorder name none, so one that does is
refused, and nothing in it is called. A few bytes of a pickle can also ask for any amount of memory: a place in a table
of four thousand millions, a list of lists of lists, each there a thousand times. Or for hours: a dict of lists or long
numbers that all have one hash. So its steps are looked at before it is read, a dict has texts for keys, and what the
steps made is counted before it is used.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec

MAX_ELEMENTS = 2**63  # of a tensor
MAX_BYTES = 64 << 20
"""Of a file: torch's recorder keeps 2,000 collectives by default, some megabytes with their stacks."""

NOT_IN_DUMPS = ("EMPTY_SET", "ADDITEMS", "FROZENSET", "DICT", "BUILD")
"""Steps of a pickle."""

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


class _Plain(pickle._Unpickler):
    """Reads numbers, strings, lists, tuples and dicts, and nothing that would have to be called. It is Python's own in
    Python: the one in C puts into a dict what it is told to."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it names {module}.{name} to be called, as no flight recorder does; do not open it")

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("it refers to something outside of itself, as no flight recorder does; do not open it")

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_text(key)] = value

    def _set_items(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update(zip(map(_text, items[::2]), items[1::2], strict=True))

    dispatch[pickle.SETITEM[0]], dispatch[pickle.SETITEMS[0]] = _set_item, _set_items


def _text(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(f"a key of a dict is {key!r:.40}, and no text")
    return key


def _unpickled(data: bytes) -> Any:
    """What a pickle holds.

    Raises:
        ValueError, pickle.UnpicklingError: it is damaged, or would run code or take memory that a dump does not.
    """
    steps = 0
    for opcode, argument, _ in pickletools.genops(data):  # raises where a text is longer than the file
        steps += 1
        if opcode.name in NOT_IN_DUMPS:
            raise ValueError(f"it has a step {opcode.name}, as no flight recorder's has; do not open it")
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise ValueError(
                f"it keeps something under the number {argument:,} and has {len(data):,} bytes; do not open it"
            )
    content = _Plain(io.BytesIO(data)).load()
    rest, seen = [content], 0
    while rest:  # what stands in several places is counted in each
        one = rest.pop()
        seen += 1
        if seen + len(rest) > 2 * steps + 100:
            raise ValueError(
                "it repeats itself more often than its size allows, as no flight recorder does; do not open it"
            )
        if isinstance(one, dict):
            rest += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            rest += one
    return content


def _decoded(data: bytes) -> Dump:
    if data.lstrip()[:1] == b"{":
        dump = msgspec.json.decode(data, type=Dump, strict=False)
    else:
        dump = msgspec.convert(_unpickled(data), Dump, strict=False)
    for entry in dump.entries:
        for name in (*entry.process_group, entry.profiling_name):
            if not name.isprintable():
                raise ValueError(f"{name!r:.60} is no name")
        if entry.numel > MAX_ELEMENTS:
            raise ValueError(f"an input of number {entry.collective_seq_id:,} has more elements than a tensor can")
    for group in dump.pg_config.values():
        msgspec.json.decode(group.ranks, type=list[int])
    return dump


def read(folder: Path, *, max_bytes: int = MAX_BYTES) -> dict[int, Dump]:
    """The dumps in a folder, by rank: files whose names end with the rank, as in ``rank3.json`` or NCCL's ``fr_3``.

    Args:
        max_bytes: of a file; a larger one is refused.

    Raises:
        ValueError: a file is none, is damaged or too large, or is a pickle that would run code; says which. OSError.
    """
    dumps = {}
    for path in sorted(folder.iterdir()):
        found = re.search(r"(\d+)(\.json)?$", path.name)
        if not found or not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                data = file.read(max_bytes + 1)
            if len(data) > max_bytes:
                raise ValueError(f"it has more than {max_bytes:,} bytes; read(folder, max_bytes=...) takes more")
            dumps[int(found[1])] = _decoded(data)
        except RecursionError:
            raise ValueError(f"{path} is no flight recorder's dump: it nests too deep") from None
        except (
            ValueError,
            pickle.UnpicklingError,
            EOFError,
            LookupError,
            OverflowError,
            AttributeError,
            TypeError,
            MemoryError,
        ) as error:
            raise ValueError(f"{path} is no flight recorder's dump: {error or type(error).__name__}") from error
    if not dumps:
        raise ValueError(f"{folder} has no file whose name ends with a rank, such as rank0.json or fr_0")
    return dumps
