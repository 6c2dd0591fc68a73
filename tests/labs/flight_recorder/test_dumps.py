"""Dumps are read from JSON and from pickles, and nothing that a file names is called."""

from __future__ import annotations

import os
import pickle

import msgspec
import pytest

from labs.flight_recorder import Dump, Entry, read
from labs.flight_recorder.__main__ import main


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


def test_the_command(tmp_path, capsys):
    assert main(tmp_path) == 2
    assert "no file whose name ends with a rank" in capsys.readouterr().err
    for rank, dump in enumerate((all_gathers(2), all_gathers(1))):
        (tmp_path / f"rank{rank}.json").write_bytes(msgspec.json.encode(dump))
    assert main(tmp_path) == 1
    assert "group default_pg: rank 1 never came to all-gather #2; rank 0 waits in it" in capsys.readouterr().out
    (tmp_path / "rank1.json").write_bytes((tmp_path / "rank0.json").read_bytes())
    assert main(tmp_path) == 0
