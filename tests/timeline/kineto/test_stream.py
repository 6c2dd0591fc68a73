"""Any JSON that is a trace is read; what is broken or foreign gets a sentence that names the file and the remedy."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_sim.diagnose import diagnose
from fsdp_sim.timeline import read_timeline
from fsdp_sim.timeline.kineto import read_kineto, stream
from fsdp_sim.timeline.kineto.repair import repaired
from fsdp_sim.timeline.kineto.stream import EventStream

RECORDED = Path(__file__).parent / "recorded"
TEXT = gzip.decompress((RECORDED / "fsdp2.rank0.json.gz").read_bytes())
DOCUMENT = json.loads(TEXT)


def written(tmp_path: Path, data: bytes | Any, name: str = "trace.json") -> Path:
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return path


def events(path: Path) -> list[tuple[object, ...]]:
    return [(e.ph, e.cat, e.name, e.ts, e.tid) for piece in EventStream(path) for e in piece]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every kind of cut occurs."""
    monkeypatch.setattr(stream, "CHUNK_BYTES", 700)


LAYOUTS = {
    "as Kineto writes it": lambda: TEXT,
    "without whitespace": lambda: json.dumps(DOCUMENT, separators=(",", ":")).encode(),
    "indented": lambda: json.dumps(DOCUMENT, indent=8).encode(),
    "keys in another order": lambda: json.dumps(dict(reversed(DOCUMENT.items()))).encode(),
    "a bare list": lambda: json.dumps(DOCUMENT["traceEvents"]).encode(),
    "with Windows line ends": lambda: json.dumps(DOCUMENT, indent=1).replace("\n", "\r\n").encode(),
    "with a byte order mark": lambda: b"\xef\xbb\xbf" + TEXT,
    "gzip": lambda: gzip.compress(TEXT),
    "gzip of two members": lambda: gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_the_file_does_not_matter(layout: str, tmp_path: Path, small_chunks: None) -> None:
    want = [(e.get("ph"), e.get("cat"), e.get("name"), e.get("ts"), e.get("tid")) for e in DOCUMENT["traceEvents"]]
    assert events(written(tmp_path, LAYOUTS[layout]())) == want


@pytest.mark.parametrize("lasts", [float("nan"), -1.0, 1e300, "long"])
def test_events_of_no_time_are_counted_and_said(lasts: Any, tmp_path: Path) -> None:
    given = json.loads(TEXT)
    of_one = next(e for e in given["traceEvents"] if e.get("cat") == "cpu_op")
    of_one["dur"] = lasts
    read = read_timeline(written(tmp_path, given))
    assert read.header.untimed == 1
    assert any(note.startswith("1 event has a time or a duration") for note in diagnose(read).notes)
    assert read_timeline(written(tmp_path, TEXT)).header.untimed == 0


def test_a_rank_of_any_number_is_read(tmp_path: Path) -> None:
    """Which ranks are not at hand is no list of as many."""
    given = json.loads(TEXT)
    given["distributedInfo"] = given.get("distributedInfo", {}) | {"rank": 10**12}
    assert diagnose(read_timeline(written(tmp_path, given))).rank == 10**12


def test_text_that_looks_like_the_end_of_an_event_ends_none(tmp_path: Path, small_chunks: None) -> None:
    tricks = ['"}, {"', "},{", '\\"},\n{', "]}", "}]", '"traceEvents": [', "{" * 50]
    rng = random.Random(0)
    names = ["".join(rng.choices(tricks, k=5)) for _ in range(300)]
    made = [
        {"ph": "X", "cat": "cpu_op", "name": n, "ts": 1, "args": {"of": [{"a": {}}, {"b": [{}, {}]}]}} for n in names
    ]
    document = {"before": names[0], "traceEvents": made, "after": {"traceEvents": [{"name": "no event"}, {}]}}
    reading = EventStream(written(tmp_path, document))
    assert [e.name for piece in reading for e in piece] == names
    assert reading.metadata == {"before": names[0], "after": document["after"]}


def test_metadata_before_and_after_the_events_is_kept(tmp_path: Path, small_chunks: None) -> None:
    reading = EventStream(written(tmp_path, TEXT))
    for _ in reading:
        pass
    assert reading.metadata == {key: value for key, value in DOCUMENT.items() if key != "traceEvents"}
    assert reading.count == len(DOCUMENT["traceEvents"])


NO_NUMBERS = re.sub(rb'"Ev Idx": \d+', b'"Ev Idx": -Infinity', re.sub(rb'"dur": [\d.]+', b'"dur": NaN', TEXT, count=4))
NO_UTF8 = TEXT.replace(b"aten::empty", b"aten::\xff\xfe").replace(b'"Ev Idx"', b'"x": "\xff", "Ev Idx"')
BENT = {  # what Kineto writes and JSON forbids
    "NaN and infinities": NO_NUMBERS,
    "bytes that are no UTF-8": NO_UTF8,
    "control characters": TEXT.replace(b"aten::empty", b"aten::\n\x01"),
    "stray backslashes": TEXT.replace(b"aten::empty", rb"C:\aten\u12\empty"),
}


@pytest.mark.parametrize("what", BENT)
def test_bent_json_is_read(what: str, tmp_path: Path, small_chunks: None) -> None:
    straight = read_kineto(written(tmp_path, TEXT, "straight.json"))
    bent = read_kineto(written(tmp_path, BENT[what]))
    assert [e.label for e in bent] == [e.label for e in straight]


def test_repair_leaves_valid_json_alone() -> None:
    valid = json.dumps({"NaN": ["Infinity", "a NaN b", -1.5e-7, None, "\\u12", 'x"Inf"y', "\u00e9"]}).encode()
    assert json.loads(repaired(valid)) == json.loads(valid)
    assert json.loads(repaired(b'[NaN, -Infinity, nan, -inf, {"a": "NaN"}]')) == [None, None, None, None, {"a": "NaN"}]


REPAIR = """
import resource
from fsdp_sim.timeline.kineto.repair import repaired
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, text = peak(), b'{"name": "' + b"a" * (4 << 20)
assert repaired(text) == text
print(peak() - before)
"""


def test_a_name_of_megabytes_without_an_end_is_repaired_in_a_few_times_its_size() -> None:
    done = subprocess.run([sys.executable, "-c", REPAIR], capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 20 * (4 << 20)


PLAIN = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "pid": 1, "tid": 1, "args": {}}
BROKEN = {  # the file, and what its sentence has to say
    "empty": (b"", "is empty"),
    "blank": (b" \n ", "is empty"),
    "no JSON": (b"hello", "is not JSON: it begins with 'hello'"),
    "a pickle": (b"\x80\x04\x95", "is not JSON"),
    "a number": (b"42", "is not JSON"),
    "cut in the events": (TEXT[:600_000], r"ends in the middle of its JSON, after 1,5\d\d whole events"),
    "cut in the metadata": (TEXT[:150], "ends in the middle of its JSON, after 0 whole events"),
    "cut at the end": (TEXT[:-9], f"after {len(DOCUMENT['traceEvents']):,} whole events"),
    "a cut list": (json.dumps(DOCUMENT["traceEvents"]).encode()[:90_000], "ends in the middle"),
    "a broken event": (TEXT.replace(b'"ph": "X"', b'"ph" "X"', 1), r"broken JSON at byte 2,\d+, after \d+ whole"),
    "a trailing comma": (TEXT.replace(b'"ph": "X"', b'"ph": {"a": [],}', 1), "broken JSON at byte"),
    "a bracket too many": (TEXT.replace(b'],"traceName"', b']],"traceName"'), "broken JSON after its"),
    "two documents": (TEXT + TEXT, "broken JSON after its"),
    "a list of numbers": ([1, 2], "entry 0 of its list is no object"),
    "a list with a string late": ([PLAIN] * 40 + ["x"], "entry 40 of its list is no object"),
    "no events": ({"traceEvents": []}, "has no events; the profiler was not active"),
    "another document": ({"a": 1, "b": [2]}, r"has no list 'traceEvents' \(its other keys: a, b\)"),
    "events that are no list": ({"traceEvents": {}}, "has no list 'traceEvents'"),
    "a memory snapshot": ({"segments": [], "device_traces": []}, "snapshot of CUDA memory"),
    "a browser's trace": ({"traceEvents": [{"ph": "X", "cat": "blink", "name": "x", "ts": 1}]},
    "torch.profiler did not write"),
    "one device": ({"traceEvents": [PLAIN]}, "without FSDP and without a collective"),
    "too deep": (b'{"traceEvents":[{"args":' + b"[" * 9999 + b"]" * 9999 + b"}]}", "nests deeper"),
    "too deep before": (b'{"a":' + b"[" * 9999 + b"]" * 9999 + b',"traceEvents":[]}', "has no list 'traceEvents'"),
    "broken gzip": (gzip.compress(TEXT)[:30_000], "broken gzip file"),
    "flipped bits": (bytes(b ^ (i == 40_000) for i, b in enumerate(gzip.compress(TEXT))), "broken gzip file"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_read_is_said(what: str, tmp_path: Path) -> None:
    data, sentence = BROKEN[what]
    path = written(tmp_path, data)
    with pytest.raises(ValueError, match=sentence) as raised:
        read_kineto(path)
    assert str(raised.value).startswith(str(path))
    assert re.search(r"export_chrome_trace|copy it again|record a step", str(raised.value))


def test_a_folder_is_answered_with_how_to_read_several_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; give the trace of one rank, or a list of files"):
        read_kineto(tmp_path)


def test_args_of_any_type_do_no_harm(tmp_path: Path) -> None:
    odd = [
        {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}
        for cat in ("cpu_op", "kernel", "cuda_runtime", "user_annotation", "python_function", "cuda_sync", 7, None)
        for name in ("FSDP::all_gather", "c10d::_allgather_base_", "ncclDevKernel_AllGather", "[memory]", None, 3)
        for ts, dur, tid in ((1, 2, 3), ("5.5", "1", "thread 9"), (None, None, None), (2**80, -1, 2**70), ([], {}, []))
        for args in (None, [], {}, {"correlation": "x", "stream": {}, "Input Dims": 5, "Out msg nelems": "many"})
    ]
    made = read_kineto(written(tmp_path, {"traceEvents": odd, "distributedInfo": 5, "deviceProperties": 1}))
    assert any(e.op == "ALL_GATHER" for e in made)


def test_progress_is_told_in_bytes_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(TEXT), "trace.json.gz")
    told: list[tuple[int, int]] = []
    read_kineto(path, progress=lambda done, of: told.append((done, of)))
    size = path.stat().st_size
    assert told[-1] == (size, size)
    assert told == sorted(told)
