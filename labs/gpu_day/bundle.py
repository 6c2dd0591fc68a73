"""What a GPU day left, as one file that can be given away, and into a checkout.

Only files that the parts are known to leave are taken; in each the names of the home folder, of the checkout, of the
user's folders and of the machine are replaced, and what is to be written can be listed first.
"""

from __future__ import annotations

import gzip
import re
import socket
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from fsdp_sim.timeline import written
from labs.experiments.gpu_results import RECORDED, SUFFIX, names, on_gpus
from labs.experiments.result import MOST_BYTES, LabResult
from labs.gpu_day.day import STATE, GpuDay

CHECKOUT = Path(__file__).parents[2]
LEAVES = {  # path within the day's folder: what it is
    STATE: "which parts were done, on what",
    "checks/doctor.json": "what fsdp-sim doctor found",
    "calibration/cluster.toml": "rates, latencies and links, for the simulator",
    "calibration/calibration.json": "the measurements behind them",
    "accuracy/one_gpu.jsonl": "steps on one GPU, to compare predictions with",
    "training/report.json": "a training, and what was predicted of it",
    "training/metrics.jsonl": "its steps",
    "training/timeline.jsonl.gz": "four steps of all ranks, recorded",
    "tests/tests.xml": "which tests of GPUs passed",
    **{f"lab_{name}/{name}{SUFFIX}": f"what the lab {name} found" for name in names()},
}
MOST_UNPACKED = 64 * 2**20  # bytes of a file
ONE_GPU = "tests/bench/one_{}.jsonl"
HOSTS = re.compile(r'"hosts":(\{[^{}]*\})')  # in the header of a recorded step


class Bundled(NamedTuple):
    """A file of a bundle.

    Attributes:
        name: its path in the bundle.
        what: in words.
        data: its bytes, without what is private.
        replaced: how many private names were replaced.
    """

    name: str
    what: str
    data: bytes
    replaced: int


def private(folder: Path) -> dict[str, str]:
    """Texts that say whose machine it was, and what takes their place, the longest first."""
    host = socket.gethostname()
    found = {str(folder.resolve()): "DAY", str(CHECKOUT): "CHECKOUT", sys.prefix: "PYTHON", str(Path.home()): "HOME"}
    if len(host) > 5 or re.search(r"[\d.-]", host):  # not a word such as "cuda", which would be found everywhere
        found |= {host: "HOST", host.partition(".")[0]: "HOST"}
    return {name: found[name] for name in sorted(found, key=len, reverse=True) if len(name) > 1}


def files(folder: Path) -> Iterator[Bundled]:
    """What a day's folder has for others. Paths of other folders become their last part."""
    hidden = private(folder)
    secret = re.compile("|".join(rf"(?<![\w/.-]){re.escape(name)}(?![\w-])" for name in hidden))
    elsewhere = re.compile(r"/(?:home|Users|root|mnt|scratch|data|tmp|var)/[^\"<>\n]*/")  # spaces too: names have them
    for name, what in LEAVES.items():
        path = folder / name
        if not path.is_file():
            continue
        packed = name.endswith(".gz")
        text = (gzip.decompress(path.read_bytes()) if packed else path.read_bytes()).decode(errors="replace")
        text, known = secret.subn(lambda match: hidden[match[0]], text)
        text, machines = HOSTS.subn(_numbered, text)
        text, others = elsewhere.subn("", text)
        data = text.encode()
        yield Bundled(name, what, gzip.compress(data, mtime=0) if packed else data, known + machines + others)


def _numbered(hosts: re.Match[str]) -> str:
    """The machines of a recorded step by number, however short their names are."""
    named = msgspec.json.decode(hosts[1])
    numbers = {name: f"HOST{number}" for number, name in enumerate(dict.fromkeys(named.values()))}
    return '"hosts":' + msgspec.json.encode({rank: numbers[name] for rank, name in named.items()}).decode()


def name_of(day: GpuDay) -> str:
    """Of the file: hardware and date.

    Example:
        >>> name_of(GpuDay("cuda", "8 x NVIDIA H100 80GB HBM3, 80 GiB each", "2026-12-01", {}))
        'gpu-day-8-x-nvidia-h100-80gb-hbm3-2026-12-01.zip'
    """
    hardware = re.sub(r"[^a-z0-9]+", "-", day.hardware.partition(",")[0].lower()).strip("-")
    return f"gpu-day-{hardware}-{day.date}.zip"


def write(bundled: list[Bundled], path: Path) -> None:
    with written(path) as new, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as file:
        for one in bundled:
            file.writestr(zipfile.ZipInfo(one.name, (1980, 1, 1, 0, 0, 0)), one.data)


def add(path: Path, checkout: Path = CHECKOUT) -> list[str]:
    """Put a bundle's recordings where labs and benchmarks look for them; returns what was written, in words.

    Raises:
        ValueError: it is no bundle, has a file that no day leaves, one that is too large or damaged, or is of a
            rehearsal. Nothing is written.
    """
    try:
        with zipfile.ZipFile(path) as file:
            data = {info.filename: _read(file, info) for info in file.infolist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no bundle of a GPU day: {error}") from None
    try:
        day = msgspec.json.decode(data.get(STATE, b""), type=GpuDay)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no bundle of a GPU day: its {STATE}: {error}") from None
    if day.device != "cuda":
        raise ValueError(f"{path} is of a rehearsal on CPU cores; what runs there runs everywhere, and is not kept")
    recorded = {f"lab_{name}/{name}{SUFFIX}": RECORDED.relative_to(CHECKOUT) / f"{name}{SUFFIX}" for name in on_gpus()}
    gpu = re.sub(r"^\d+ x (nvidia |amd )?", "", day.hardware.partition(",")[0].lower())
    recorded["accuracy/one_gpu.jsonl"] = Path(ONE_GPU.format(re.sub(r"[^a-z0-9]+", "_", gpu).strip("_")))
    writes = {checkout / where: data[name] for name, where in recorded.items() if name in data}
    for to, packed in writes.items():
        if to.name.endswith(SUFFIX):
            _check_result(to.name, packed)
        else:
            _check_rows(packed)
    for to, packed in writes.items():
        to.parent.mkdir(parents=True, exist_ok=True)
        with written(to) as new:
            new.write_bytes(packed)
    return [f"{to.relative_to(checkout)}, {len(packed):,} bytes" for to, packed in writes.items()]


def _read(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.filename not in LEAVES:
        raise ValueError(f"{info.filename!r} is no file that a GPU day leaves; nothing was added")
    if info.file_size > MOST_UNPACKED:
        raise ValueError(
            f"{info.filename} has {info.file_size:,} bytes, more than {MOST_UNPACKED:,}; nothing was added"
        )
    return file.read(info)


def _check_result(name: str, packed: bytes) -> None:
    if len(packed) > MOST_BYTES:
        raise ValueError(f"{name} has {len(packed):,} bytes, more than {MOST_BYTES:,}; nothing was added")
    LabResult.decode(packed, name)


def _check_rows(data: bytes) -> None:
    try:
        for line in data.splitlines():
            row = msgspec.json.decode(line, type=dict[str, str | float | bool | None])
            _ = row["model"], row["step_s"], row["gpu"]
    except (msgspec.DecodeError, KeyError) as error:
        raise ValueError(f"accuracy/one_gpu.jsonl has a row that cannot be read ({error}); nothing was added") from None
