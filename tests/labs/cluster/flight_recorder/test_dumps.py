"""Dumps are read from JSON and from pickles, and nothing that a file names is called."""

from __future__ import annotations

import functools
import os
import pickle

import msgspec
import pytest

from labs.cluster.flight_recorder import Dump, Entry, read
from labs.cluster.flight_recorder.__main__ import main


def all_gathers(n: int) -> Dump:
    """Of a rank that has issued so many."""
    return Dump(tuple(Entry(("0", "default_pg"), i + 1, "gloo:all_gather", ((8,),)) for i in range(n)))


def test_json_and_pickled_dumps_are_read_alike(tmp_path):
    content = {
        "version": "2.10",
        "entries": [msgspec.to_builtins(all_gathers(1).entries[0]) | {"frames": [], "state": "scheduled"}],
    }
    (tmp_path / "rank0.json").write_bytes(msgspec.json.encode(content))
    (tmp_path / "fr_1").write_bytes(pickle.dumps(content, protocol=2))
    (tmp_path / "notes.txt").write_text("not a dump")
    dumps = read(tmp_path)
    assert sorted(dumps) == [0, 1]
    assert dumps[0] == dumps[1] == all_gathers(1)


def test_a_pickle_that_calls_something_is_refused_and_does_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "done"),))

    (tmp_path / "fr_0").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"fr_0 is no flight recorder's dump: it names \w+\.mkdir to be called"):
        read(tmp_path)
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"entries": 3}', b"\x80\x04garbage", b"[]"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "rank0.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"rank0\.json is no flight recorder's dump"):
        read(tmp_path)


ITSELF = pickle.dumps([0], 2).replace(b"K\x00a", b"h\x00a")  # a list that holds itself
LISTS = functools.reduce(lambda inner, _: [inner] * 10, range(30), [0])  # ten times ten times ten ...


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x80\x02]r\xff\xff\xff\xff.", "it keeps something under the number 4,294,967,295 and has 9 bytes"),
        (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x0fx.", "bytes"),  # a text of 2**60 bytes
        (b"\x80\x05\x96" + b"\xff" * 7 + b"\x0fx.", "bytes"),  # a bytearray
        (pickle.dumps({"entries": LISTS}, 2), "it repeats itself"),
        (ITSELF, "it repeats itself"),
        (b"\x80\x02" + b"(" * 1000 + b"t" * 1000 + b".", "Expected"),
        (b'{"x":' + b"[" * 100_000, "it nests too deep"),
        (b'{"pg_config": {"0": {"ranks": "[x]"}}}', "JSON is malformed"),
        (pickle.dumps({(-1, -2): 1}, 2), r"a key of a dict is \(-1, -2\), and no text"),  # hash((-2, -1)), too
        (pickle.dumps({2**70: 1, 2**80: 2}, 2), "a key of a dict is 1180591620717411303424, and no text"),
        (pickle.dumps({1}, 4), "it has a step EMPTY_SET"),
        (b"\x80\x04\x95" + b"\xff" * 8 + b".", "frame size"),
        (b"F1e400\n.", "Expected"),
        (
            msgspec.json.encode(Dump((Entry(("0", "x"), 1, "a", ((2**62,) * 1000,)),))),
            "more elements than a tensor can",
        ),
        (msgspec.json.encode(Dump((Entry(("0", "x"), 1, "gloo:\x1b[2J"),))), r"'gloo:\\x1b\[2J' is no name"),
    ],
)
def test_a_file_that_asks_for_more_than_a_dump_does_is_named(tmp_path, content, says):
    (tmp_path / "rank0").write_bytes(content)
    with pytest.raises(ValueError, match=rf"rank0 is no flight recorder's dump: .*{says}"):
        read(tmp_path)


def test_a_large_file_is_read_when_that_is_asked_for(tmp_path):
    (tmp_path / "rank0.json").write_bytes(msgspec.json.encode(all_gathers(100)))
    with pytest.raises(ValueError, match=r"rank0\.json .* it has more than 1,000 bytes; read\(folder, max_bytes=...\)"):
        read(tmp_path, max_bytes=1000)
    assert read(tmp_path, max_bytes=100_000)[0] == all_gathers(100)


def test_the_command(tmp_path, capsys):
    assert main(tmp_path) == 2
    assert "no file whose name ends with a rank" in capsys.readouterr().err
    for rank, dump in enumerate((all_gathers(2), all_gathers(1))):
        (tmp_path / f"rank{rank}.json").write_bytes(msgspec.json.encode(dump))
    assert main(tmp_path) == 1
    assert "group default_pg: rank 1 never came to all-gather #2; rank 0 waits in it" in capsys.readouterr().out
    (tmp_path / "rank1.json").write_bytes((tmp_path / "rank0.json").read_bytes())
    assert main(tmp_path) == 0
