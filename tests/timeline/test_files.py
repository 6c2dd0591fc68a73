"""Reading whatever file holds a timeline, and a sentence for those that do not."""

import gzip
import json
import pickle
import shutil
import sqlite3

import pytest

from fsdp_sim import Cluster, Plan, Timeline, simulate
from fsdp_sim.timeline.chrome import write_chrome
from fsdp_sim.timeline.files import read_timeline
from fsdp_sim.timeline.frame import to_parquet
from tests.timeline.strategies import op, timeline_of

WRITERS = {"lines": Timeline.to_jsonl, "chrome": write_chrome, "parquet": to_parquet}


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=8), Plan(micro_batch=2)).timeline


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["step", "step.json", "step.parquet", "step.log.gz"])
def test_a_file_is_known_by_its_content_whatever_its_name(timeline, writer, zipped, name, tmp_path):
    plain = tmp_path / "plain"
    WRITERS[writer](timeline, plain)
    path = tmp_path / name
    if zipped:
        path.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        shutil.copy(plain, path)

    back = read_timeline(path)
    assert back.events == timeline.events
    assert back.header == timeline.header


def database(path):
    with sqlite3.connect(path) as found:
        found.execute("create table kernels (start int)")
    found.close()


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.write_bytes(b" \n\n"), "is empty"),
        (lambda p: p.write_bytes(gzip.compress(b"")), "is empty"),
        (lambda p: p.write_text("step,loss\n1,2.5\n"), "begins with 'step,loss'"),
        (lambda p: p.write_text("<!DOCTYPE html>"), "a page"),
        (lambda p: p.write_bytes(pickle.dumps({"segments": []})), "a pickle"),
        (database, "a database"),
        (lambda p: p.write_bytes(b"PK\x03\x04rest"), "a zip archive"),
        (lambda p: p.write_bytes(b"\x1f\x8bno gzip at all"), "is damaged"),
        (lambda p: p.write_bytes(b"\x7fELF\x02\x00\x00"), "binary: it begins with 7f 45 4c 46"),
        (lambda p: p.mkdir(), "is a folder without traces"),
    ],
)
def test_what_is_no_timeline_is_said(write, words, tmp_path):
    path = tmp_path / "given"
    write(path)

    with pytest.raises(ValueError, match=words) as refused:
        read_timeline(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_cut_short_is_said_and_named(timeline, writer, zipped, tmp_path):
    path = tmp_path / "cut"
    WRITERS[writer](timeline, path)
    data = path.read_bytes()
    path.write_bytes(gzip.compress(data)[:-100] if zipped else data[: len(data) - 40])

    with pytest.raises(ValueError, match="cut"):
        read_timeline(path)


def test_a_wrong_line_of_a_zipped_file_is_named_in_that_file(timeline, tmp_path):
    path = tmp_path / "lines.gz"
    timeline.to_jsonl(tmp_path / "plain")
    path.write_bytes(gzip.compress((tmp_path / "plain").read_bytes() + b'{"seq": "one"}\n'))

    with pytest.raises(ValueError, match=rf"lines\.gz, line {len(timeline) + 2}: "):
        read_timeline(path)


def test_a_missing_file_is_the_systems_to_report(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_timeline(tmp_path / "nothing")


@pytest.mark.parametrize("content", [{"schemaVersion": 1, "traceEvents": []}, {"loss": 2.5}, []])
def test_other_json_goes_to_the_reader_of_profiler_traces_which_says_what_is_missing(content, tmp_path):
    path = tmp_path / "given.json"
    path.write_text(json.dumps(content))

    with pytest.raises(ValueError, match=r"given\.json"):
        read_timeline(path)


def test_files_of_several_ranks_become_one_timeline(tmp_path):
    ranks = [timeline_of(*(op(float(k), k + 1.0, rank=rank, seq=k) for k in range(3))) for rank in range(2)]
    ranks[0].to_jsonl(tmp_path / "rank0.jsonl")
    write_chrome(ranks[1], tmp_path / "rank1.json.gz")
    seen = []

    together = read_timeline(sorted(tmp_path.iterdir()), progress=lambda *at: seen.append(at))
    assert together.ranks == (0, 1)
    assert together.events == (*ranks[0].events, *ranks[1].events)
    assert together.header.world_size == 2
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]


def test_files_that_do_not_belong_together_are_refused(timeline, tmp_path):
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for path in (one, two):
        timeline.to_jsonl(path)
    timeline_of(op(0.0, 1.0, rank=5)).to_jsonl(other)

    with pytest.raises(ValueError, match="both hold rank 0"):
        read_timeline([one, two])
    with pytest.raises(ValueError, match="both hold rank 0"):
        read_timeline([one, one])
    with pytest.raises(ValueError, match="give files of one run"):
        read_timeline([one, other])
    with pytest.raises(ValueError, match="at least one"):
        read_timeline([])
