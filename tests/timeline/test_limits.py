"""Files of strangers: no more is read of one than was agreed, and what cannot have been is refused in a sentence."""

import gzip
import json
import tempfile

import msgspec
import pytest

from fsdp_sim.timeline import Header, Timeline, read_timeline, to_parquet, write_chrome
from tests.timeline.strategies import op

EVENTS = 5_000  # of 256 bytes at least: 1.3 MB
TIMELINE = Timeline(
    Header(producer="p", clock="simulated", world_size=1), [op(seq, seq + 1, seq=seq) for seq in range(EVENTS)]
)
KINETO = {
    "distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 1},
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "gloo:all_reduce", "ts": 10 * i, "dur": 5, "pid": 1, "tid": 1,
         "args": {"Collective name": "allreduce"}} for i in range(EVENTS)
    ],
}  # fmt: skip


def written(kind, folder):
    """A gzipped file, and the bytes in it."""
    plain = folder / kind
    if kind == "kineto":
        plain.write_text(json.dumps(KINETO))
    else:
        {
            "jsonl": TIMELINE.to_jsonl,
            "chrome": lambda p: write_chrome(TIMELINE, p),
            "parquet": lambda p: to_parquet(TIMELINE, p),
        }[kind](plain)
    zipped = folder / f"{kind}.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    return zipped


@pytest.mark.parametrize("kind", ["jsonl", "chrome", "parquet", "kineto"])
def test_a_file_that_unpacks_to_more_than_was_agreed_is_refused_and_the_limit_can_be_raised(
    kind, tmp_path, monkeypatch
):
    temporary = tmp_path / "temporary"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if kind == "parquet":  # it is read from its end; of the others nothing is unpacked to a disk, so none is needed
        temporary.mkdir()
    zipped = written(kind, tmp_path)
    assert zipped.stat().st_size < 200_000
    with pytest.raises(ValueError, match=rf"{zipped} holds more than the 0.0005 GB .* max_bytes=.* --max-gb"):
        read_timeline(zipped, max_bytes=500_000)
    if kind != "kineto":
        assert len(read_timeline(zipped, max_bytes=5_000_000)) == EVENTS
        assert not list(temporary.glob("*"))
        return
    with pytest.raises(ValueError, match="0 kernels and 5,000 CPU operations"):  # that is what is in it
        read_timeline(zipped, max_bytes=5_000_000)


@pytest.mark.parametrize("start", [b'{"producer":"p","clock":"c","world_size":1}\n', b'{"traceEvents":[', b"[{"])
def test_what_has_no_end_is_refused_too(start, tmp_path):
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(start)
        for _ in range(30):
            file.write(bytes([32]) * (1 << 20))
    with pytest.raises(ValueError, match=r"holds more than the 0\.02 GB"):
        read_timeline(path, max_bytes=20_000_000)


@pytest.mark.parametrize(
    "text",
    [
        '{"producer":"p","clock":"c","world_size":1,"x":DEEP}\n',
        '{"producer":"p","clock":"c","world_size":1}\n{"seq":0,"x":DEEP}\n',
        '{"otherData":{"format":"fsdp_sim timeline","x":DEEP},"traceEvents":[]}',
        '{"otherData":{"format":"fsdp_sim timeline","version":1,"header":{"producer":"p","clock":"c","world_size":1}},'
        '"traceEvents":[{"cat":"operation","args":DEEP}]}',
        '{"traceEvents":[{"args":DEEP}]}',
        "DEEP",
    ],
)
def test_what_nests_too_deep_is_refused_in_a_sentence(text, tmp_path):
    path = tmp_path / "deep.json"
    path.write_text(text.replace("DEEP", "[" * 20_000 + "]" * 20_000))
    with pytest.raises(ValueError, match=r"deep\.json"):
        read_timeline(path)


@pytest.mark.parametrize("writer", [Timeline.to_jsonl, write_chrome, to_parquet])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"start_s": 2.0, "end_s": -2.0}, r"event 3 of rank 0 .* ends at -2 s, before it starts at 2 s"),
        ({"start_s": 1e11, "end_s": 1e11}, r"event 3 of rank 0 .* has a time beyond"),
        ({"bytes": -1}, r"event 3 of rank 0 .* has -1 bytes"),
    ],
)
def test_an_event_that_cannot_have_been_is_named(writer, wrong, says, tmp_path):
    path = tmp_path / "stranger"
    writer(Timeline(TIMELINE.header, [msgspec.structs.replace(op(0, 1, seq=3), **wrong)]), path)
    with pytest.raises(ValueError, match=says) as refused:
        read_timeline(path)
    assert str(path) in str(refused.value)
