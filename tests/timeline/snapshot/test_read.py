"""Snapshots of CUDA's memory are read without running a pickle, and say what torch's own viewer accepts."""

import gzip
import json
import os
import pickle
import subprocess
from functools import reduce

import pytest

from fsdp_sim.timeline import load_snapshot
from fsdp_sim.timeline.snapshot import Totals, read_plain_pickle
from tests.timeline.snapshot.snapshots import BEGAN_US, PEAK, MiB, step


def test_what_is_written_here_is_what_torch_reads():
    from torch.cuda import _memory_viz

    taken = step(oom=True)
    assert "raise OutOfMemoryError # 500.0MiB requested, 3.0MiB free" in _memory_viz.trace(taken)
    assert "total_allocated: 100.0MiB" in _memory_viz.segsum(taken)
    assert "active_allocated" in _memory_viz.memory(taken, format_flamegraph=lambda lines: lines)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_of_plain_data_is_read_as_python_reads_it(protocol):
    plain = {"a": [1, -5, 300, 70_000, 2**40, -(2**62), 1.5, True, False, None], "b": ((), (1,), (1, 2, 3, 4)), "c": {}}
    plain["again"] = plain["a"]
    for data in (plain, step(), ["x" * 300, "é"], list(range(3000))):
        assert read_plain_pickle(pickle.dumps(data, protocol)) == data


class _Calls:
    def __reduce__(self):
        return os.system, ("touch hit",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "hostile",
    [_Calls(), subprocess.Popen, {1, 2}, bytearray(b"x"), 1 << 1000],
    ids=["call", "class", "set", "bytearray", "number"],
)
def test_a_pickle_that_does_anything_else_is_refused_and_does_nothing(protocol, hostile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(step() | {"segments": [hostile]}, protocol))
    with pytest.raises(ValueError, match=r"does more than hold data \(|a number of 126 bytes"):
        load_snapshot(path)
    assert [one.name for one in tmp_path.iterdir()] == ["snapshot.pickle"]


def test_what_it_would_have_called_is_named(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(_Calls(), 2))
    with pytest.raises(ValueError, match=r"GLOBAL \w+.system"):
        load_snapshot(path)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04r\xff\xff\xff\xff.",  # a memo of four billion
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a text longer than any memory
        b"\x80\x04]]}su.",
        b"\x80\x04e.",
        b"\x80\x04\x85.",
        b"\x80\x04(.",
        pickle.dumps(step())[:-500],
        pickle.dumps([step()]),
        pickle.dumps({"segments": 5}),
        pickle.dumps({"segments": reduce(lambda inner, _: (inner, inner), range(60), ())}),  # 2**60 in words
        pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": "x"}]]}),
        b'{"segments": {}}',
        b"[" * 100_000,
        b"{" + b'"a":{' * 100_000,
        b"hello",
        b"",
    ],
)
def test_a_file_that_is_none_is_refused_in_one_sentence(data, tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"snapshot\.pickle (is|has) "):
        load_snapshot(path)


def test_more_than_is_allowed_is_not_unpacked(tmp_path):
    path = tmp_path / "snapshot.pickle.gz"
    path.write_bytes(gzip.compress(b"\x80" * 10**6))
    with pytest.raises(ValueError, match="holds more than"):
        load_snapshot(path, max_bytes=10**5)


@pytest.mark.parametrize("form", ["pickle", "json", "gz"])
def test_allocated_and_reserved_over_time(form, tmp_path):
    """Of a recording that began when parameters were there: what was there follows from what is there at the end."""
    taken, path = step(), tmp_path / "snapshot"
    plain = json.dumps(taken).encode() if form == "json" else pickle.dumps(taken)
    path.write_bytes(gzip.compress(plain) if form == "gz" else plain)
    found = load_snapshot(path)
    totals = Totals.of(found, found.blocks())

    assert (totals.allocated_bytes[0], totals.reserved_bytes[0]) == (100 * MiB, 100 * MiB)
    assert max(totals.allocated_bytes) == totals.allocated_bytes[totals.peak] == sum(PEAK.values())
    assert totals.allocated_bytes[-1] == 100 * MiB
    assert max(totals.reserved_bytes) == totals.reserved_bytes[-1] == found.reserved_bytes == 216 * MiB
    assert totals.at_s[1] == pytest.approx(BEGAN_US / 1e6 + 0.002, abs=0.01)
