"""`read_timeline`: a timeline from whatever file holds one, told apart by what is in it and not by its name."""

from __future__ import annotations

import gzip
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from fsdp_sim.timeline.chrome import FORMAT, read_chrome
from fsdp_sim.timeline.frame import from_parquet
from fsdp_sim.timeline.limits import GZIP_MAGIC, MAX_BYTES, Progress, refuse_beyond, unzipped
from fsdp_sim.timeline.timeline import Timeline

Reader = Callable[..., Timeline]
"""Called with a path and ``max_bytes``."""

READABLE = (
    "a torch profiler trace (prof.export_chrome_trace), Timeline.to_jsonl, write_chrome or to_parquet of fsdp_sim"
)
_HEAD_BYTES = 1 << 16
ENDINGS = (".json", ".jsonl", ".parquet")
# What people have at hand that is no timeline: how such a file begins, what it is, and what to do.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"SQLite format 3", "a database, as nsys export makes; record with torch.profiler and export_chrome_trace"),
    (b"PK\x03\x04", "a zip archive; unpack it and give the trace in it"),
    (b"\x80", "a pickle, as torch.cuda.memory snapshots are; record with torch.profiler and export_chrome_trace"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; unpack it first (zstd -d)"),
    (b"BZh", "compressed with bzip2; unpack it first (bunzip2)"),
    (b"\xfd7zXZ", "compressed with xz; unpack it first (unxz)"),
    (b"<", "a page or XML; give the trace itself"),
    (b"\x0a", "binary, perhaps a Perfetto protobuf; record with torch.profiler and export_chrome_trace"),
)


def read_timeline(
    path: str | Path | Sequence[str | Path], *, progress: Progress | None = None, max_bytes: int = MAX_BYTES
) -> Timeline:
    """Read a timeline: our JSON lines, Chrome trace or Parquet, or a trace of torch's profiler; each may be gzipped.

    Args:
        path: a file; or several of one run, each with other ranks; or the folder that has them.
        progress: called with bytes read and bytes in all, now and then.
        max_bytes: how much is read of a file at most, unpacked: ten megabytes may unpack to more than any machine has.

    Raises:
        ValueError: a file is empty, damaged, larger than ``max_bytes``, says what cannot be, or holds none of these
            (the message names what it is instead); files that do not belong together.
        OSError: it cannot be opened.

    Example:
        >>> import tempfile
        >>> from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
        >>> fwd = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.0", end_s=0.5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/anything"
        ...     Timeline(Header(producer="doc", clock="simulated", world_size=1), [fwd]).to_jsonl(path)
        ...     read_timeline(path)
        Timeline(doc, simulated: 1 events, 1 rank, 1 step, 500.0 ms)
    """
    sources = trace_files([path] if isinstance(path, (str, Path)) else path)
    if not sources:
        raise ValueError("no file was given; give the trace of at least one rank")
    found = [(source, *_reader_of(source)) for source in sources]
    if all(reader is _read_kineto for _, reader, _ in found):
        from fsdp_sim.timeline.kineto import read_kineto  # which few need

        return read_kineto(sources if len(sources) > 1 else sources[0], progress=progress, max_bytes=max_bytes)
    sizes = [source.stat().st_size for source in sources]
    timelines = []
    for number, (source, reader, zipped) in enumerate(found):
        if progress:
            progress(sum(sizes[:number]), sum(sizes))
        read = _unzipped_parquet if zipped and reader is from_parquet else reader
        timelines.append(read(source, max_bytes=max_bytes))
    if progress:
        progress(sum(sizes), sum(sizes))
    return timelines[0] if len(timelines) == 1 else _together(list(zip(sources, timelines, strict=True)))


def trace_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files that are meant: those given, and of each folder the traces in it, or in the folders in it if each of
    them has one.

    Raises:
        ValueError: a folder has no trace, or its folders have several each.
    """
    return [file for path in paths for file in (_in_folder(Path(path)) if Path(path).is_dir() else [Path(path)])]


def _in_folder(folder: Path) -> list[Path]:
    found = _traces(folder)
    if found:
        return found
    inside = {one: traces for one in sorted(folder.iterdir()) if one.is_dir() and (traces := _traces(one))}
    if inside and all(len(traces) == 1 for traces in inside.values()):
        return [traces[0] for traces in inside.values()]
    if inside:
        raise ValueError(
            f"{folder} has no traces, but folders that have several each ({', '.join(one.name for one in inside)}); "
            f"give one of them: {next(iter(inside))}"
        )
    raise ValueError(f"{folder} is a folder without traces; they end in {', '.join(ENDINGS)}, or with .gz after that")


def _traces(folder: Path) -> list[Path]:
    files = (one for one in folder.iterdir() if one.is_file() and one.name.removesuffix(".gz").endswith(ENDINGS))
    return sorted(files, key=lambda file: [part.zfill(20) for part in re.split(r"(\d+)", file.name)])


def _together(timelines: list[tuple[Path, Timeline]]) -> Timeline:
    """The timelines of several ranks as one."""
    owner: dict[int, Path] = {}
    (first, one), *_ = timelines
    for path, timeline in timelines:
        if (timeline.header.producer, timeline.header.clock) != (one.header.producer, one.header.clock):
            raise ValueError(
                f"{first} was made by {one.header.producer!r} ({one.header.clock}) and {path} by "
                f"{timeline.header.producer!r} ({timeline.header.clock}); give files of one run"
            )
        for rank in timeline.ranks:
            if rank in owner:
                raise ValueError(f"{owner[rank]} and {path} both hold rank {rank}; give one file per rank of one run")
            owner[rank] = path
    world_size = max(timeline.header.world_size for _, timeline in timelines)
    header = msgspec.structs.replace(one.header, world_size=max(world_size, max(owner, default=0) + 1))
    return Timeline(header, [event for _, timeline in timelines for event in timeline.events])


def _reader_of(source: Path) -> tuple[Reader, bool]:
    """Who reads a file, and whether it is zipped."""
    if source.exists() and not source.is_file():
        raise ValueError(f"{source} is a pipe or a device; a trace is read more than once: write it to a file first")
    head, zipped = _head(source)
    if not head.strip():
        raise ValueError(f"{source} is empty; the profiler has not written it, or was killed: record it again")
    reader = _reader(head)
    if reader is None:
        raise ValueError(f"{source} {_what(head)}. Readable are: {READABLE}.")
    return reader, zipped


def _head(source: Path) -> tuple[bytes, bool]:
    """The first bytes, unzipped, and whether the file is zipped."""
    with source.open("rb") as file:
        start = file.read(_HEAD_BYTES)
    if not start.startswith(GZIP_MAGIC):
        return start, False
    try:
        return zlib.decompressobj(wbits=31).decompress(start, _HEAD_BYTES), True
    except zlib.error as error:
        raise ValueError(f"{source} is damaged: it begins as gzip does, and then {error}; copy it again") from error


def _reader(head: bytes) -> Reader | None:
    if head.startswith(b"PAR1"):
        return from_parquet
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{") and f'"format":"{FORMAT}"'.encode() in text[:1024]:
        return read_chrome
    if text.startswith(b"{") and _is_header(text.split(b"\n", 1)[0]):
        return Timeline.from_jsonl
    if re.match(rb"\{|\[\s*[{\]]", text) and b"\0" not in text:
        return _read_kineto
    return None


def _is_header(line: bytes) -> bool:
    try:
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return {"producer", "clock", "world_size"} <= set(found)


def _read_kineto(source: Path, *, max_bytes: int) -> Timeline:
    from fsdp_sim.timeline.kineto import read_kineto

    return read_kineto(source, max_bytes=max_bytes)


def _unzipped_parquet(source: Path, *, max_bytes: int) -> Timeline:
    """Parquet is read from its end, so it has to lie there plain."""
    with tempfile.TemporaryDirectory(prefix="fsdp-sim-") as folder:
        plain = Path(folder) / "plain"
        try:
            with unzipped(source) as file, plain.open("wb") as out:
                while piece := file.read(1 << 20):
                    out.write(piece)
                    refuse_beyond(source, out.tell(), max_bytes)
            return from_parquet(plain, max_bytes=max_bytes)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{source} is damaged: {error}; copy it again") from error
        except ValueError as error:
            raise ValueError(str(error).replace(str(plain), str(source))) from error


def _what(head: bytes) -> str:
    """What a file that is no timeline is, as far as its beginning tells."""
    for start, what in _OTHERS:
        if head.startswith(start):
            return f"is {what}"
    if b"\0" in head:
        return f"is binary: it begins with {head[:8].hex(' ')}"
    line = head.decode(errors="replace").strip().splitlines()[0]
    return f"is no trace: it begins with {line[:60]!r}"
