"""Chrome traces: the rules of the format, by a checker that knows them, and back again without a loss."""

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.engine import run
from fsdp_sim.timeline import Event, Header, Lane, Memory, Op, Phase, Timeline
from fsdp_sim.timeline.chrome import microseconds, read_chrome, tracks, write_chrome
from tests.engine.programs import anything
from tests.timeline.strategies import gather, op, timeline_of, timelines

KINDS = {"M", "X", "i", "s", "f", "C"}


def load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, parse_constant=pytest.fail)


def ns(us: float) -> int:
    """As the viewers count."""
    return int(us * 1000.0)


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Assert that a trace keeps the rules of the format that viewers rely on, and return its rows."""
    rows = trace["traceEvents"]
    last: dict[int, int] = defaultdict(int)
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    owner: dict[int, int] = {}
    named = Counter((row["name"], row["pid"], row["tid"]) for row in rows if row["ph"] == "M")
    assert set(named.values()) <= {1}
    for row in rows:
        assert row["ph"] in KINDS
        assert isinstance(row["name"], str)
        assert row["pid"] > 0, "process 0 is the idle one"
        if row["ph"] == "C":
            assert all(type(value) is int for value in row["args"].values()), "a counter counts"
        else:
            assert owner.setdefault(row["tid"], row["pid"]) == row["pid"], "a thread is of one process"
        if row["ph"] == "M":
            continue
        assert ns(row["ts"]) >= last[row["pid"]], "time runs forward"
        last[row["pid"]] = ns(row["ts"])
        if row["ph"] in "Xisf":
            assert ("thread_name", row["pid"], row["tid"]) in named
            assert ("thread_sort_index", row["pid"], row["tid"]) in named
        if row["ph"] == "X":
            slices[row["pid"], row["tid"]].append((ns(row["ts"]), ns(row["ts"]) + ns(row["dur"])))
            assert row["dur"] >= 0
        if row["ph"] == "i":
            assert row["s"] in ("g", "p", "t")
    for spans in slices.values():
        reached = 0
        for start, end in spans:
            assert start >= reached, "slices of a thread do not overlap"
            reached = end
    ends: dict[int, list[str]] = defaultdict(list)
    for row in rows:
        if row["ph"] in "sf":
            ends[row["id"]].append(row["ph"])
            at = ns(row["ts"])
            assert any(start <= at < end for start, end in slices[row["pid"], row["tid"]]), "an arrow has a slice"
            assert row["ph"] == "s" or row["bp"] == "e"
    assert all(found == ["s", "f"] for found in ends.values()), "an arrow begins, then ends"
    return rows


def written(timeline: Timeline, folder: Path, name: str = "trace.json") -> list[dict[str, Any]]:
    return check(load(write_chrome(timeline, folder / name)))


@pytest.fixture(scope="module")
def sim():
    return simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=8), Plan(micro_batch=2, param_dtype="bf16"))


@given(timelines())
def test_any_timeline_keeps_the_rules_and_comes_back_as_it_was(tmp_path_factory, timeline):
    path = tmp_path_factory.mktemp("chrome") / "trace.json"
    check(load(write_chrome(timeline, path)))
    back = read_chrome(path)

    assert back.events == timeline.events
    assert back.header == timeline.header


@given(anything)
def test_any_run_keeps_the_rules(tmp_path_factory, case):
    program, seconds, ranks = case
    timeline = run(program, seconds, ranks=ranks).timeline()

    rows = written(timeline, tmp_path_factory.mktemp("chrome"))
    assert sum(row.get("cat") == "operation" for row in rows) == len(timeline.ops)


def test_a_simulation_is_all_there(sim, tmp_path):
    rows = written(sim.timeline, tmp_path)

    names = [row["args"]["name"] for row in rows if row["name"] == "thread_name"]
    lanes = ["compute", "ag_copy_in", "all_gather", "reduce_scatter"]
    assert names == ["steps", "phases", "CPU issues", *lanes, "alloc and free"]
    assert [row["args"]["name"] for row in rows if row["name"] == "process_name"] == ["rank 0"]
    phases = [row["name"] for row in rows if row.get("cat") == "phase"]
    assert phases == ["forward", "backward", "optimizer"]
    gathers = [row for row in rows if row["name"].startswith("ALL_GATHER(") and row["ph"] == "X"]
    assert all(row["args"]["bytes"] and row["args"]["group_size"] == 8 for row in gathers)
    assert all(row["args"]["dtype"] == "bf16" for row in gathers)
    copied = next(row for row in rows if row["name"].startswith("ag_copy_out(") and row["ph"] == "X")
    assert any(label.startswith("ALL_GATHER(") for label in copied["args"]["waited_for"])
    arrows = Counter(row["ph"] for row in rows)
    assert arrows["s"] == arrows["f"] > 50


def test_the_counters_add_up_to_what_is_alive(sim, tmp_path):
    rows = written(sim.timeline, tmp_path)

    live: dict[str, int] = {}
    peak = 0
    for row in rows:
        if row["ph"] == "C" and "limit" not in row["name"]:
            live[row["name"].removeprefix("memory, ")] = row["args"]["bytes"]
            peak = max(peak, sum(live.values()))
    _, by_category = sim.timeline.live_bytes(0)
    assert live == {str(category): counts[-1] for category, counts in by_category.items()}
    assert peak == sum(by_category.values()).max()
    (limit,) = [row["args"]["bytes"] for row in rows if row["name"] == "memory, limit of the device"]
    assert limit == int(sim.memory_limit_bytes)


def test_a_name_that_ends_in_gz_is_compressed(sim, tmp_path):
    path = write_chrome(sim.timeline, tmp_path / "trace.json.gz")

    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert check(load(path))
    assert read_chrome(path).events == sim.timeline.events


def test_collectives_that_overlap_on_one_lane_get_threads_of_their_own(tmp_path):
    timeline = timeline_of(gather(0.0, 2.0, unit="a"), gather(1.0, 3.0, unit="b"), gather(2.0, 4.0, unit="c"))

    rows = written(timeline, tmp_path)
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    found = {row["args"]["unit"]: names[row["tid"]] for row in rows if row.get("cat") == "operation"}
    assert found == {"a": "all_gather", "b": "all_gather, another at once", "c": "all_gather"}


def test_an_arrow_leads_from_what_was_waited_for_to_what_waited(tmp_path):
    timeline = timeline_of(gather(0.0, 1e-3, unit="a", seq=0), op(1e-3, 2e-3, unit="a", seq=1, waits_on=(0,)))

    rows = written(timeline, tmp_path)
    start, end = [row for row in rows if row["ph"] in "sf"]
    slices = {row["name"]: row for row in rows if row.get("cat") == "operation"}
    assert start["tid"] == slices["ALL_GATHER(a)"]["tid"]
    assert end["tid"] == slices["FWD a"]["tid"]
    assert end["ts"] == slices["FWD a"]["ts"] == 1000.0


def test_what_is_issued_when_it_starts_needs_no_track_of_issues(tmp_path):
    rows = written(timeline_of(op(0.0, 1.0)), tmp_path)

    assert not [row for row in rows if row.get("cat") == "issue"]


def test_microbatches_are_told_apart(tmp_path):
    found = [op(float(k), k + 1.0, phase=Phase.FORWARD, micro_batch=k) for k in range(2)]

    rows = written(timeline_of(*found), tmp_path)
    assert [row["name"] for row in rows if row.get("cat") == "phase"] == [
        "forward, micro-batch 0",
        "forward, micro-batch 1",
    ]


def test_ranks_are_processes_and_steps_are_marked(tmp_path):
    found = [op(float(k), k + 1.0, rank=rank, step=k, seq=k) for rank in (0, 3) for k in range(3)]

    rows = written(timeline_of(*found), tmp_path)
    processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert list(processes.values()) == ["rank 0", "rank 3"]
    steps = [(processes[row["pid"]], row["name"]) for row in rows if row.get("cat") == "step"]
    assert steps == [(f"rank {rank}", f"step {k}") for rank in (0, 3) for k in range(3)]


@pytest.mark.parametrize("events", [[], [Event(seq=0, rank=0, op=Op.ALLOC, lane=Lane.COMPUTE, category=Memory.NONE)]])
def test_with_no_operation_there_is_still_a_trace(events, tmp_path):
    timeline = Timeline(Header(producer="", clock="measured", world_size=1), events)

    written(timeline, tmp_path)
    assert read_chrome(tmp_path / "trace.json").events == timeline.events


def test_texts_of_users_travel_as_they_are(tmp_path):
    unit = '<b>"\\n\u2028 blöcke\n😀'

    rows = written(timeline_of(op(0.0, 1.0, unit=unit)), tmp_path)
    assert f"FWD {unit}" in [row["name"] for row in rows]


@given(st.integers(0, 2**52))
def test_microseconds_hold_whole_nanoseconds(when):
    assert ns(microseconds(when)) == when
    assert microseconds(when) == pytest.approx(when / 1000)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)).map(lambda one: (one[0], sum(one), None))))
def test_tracks_never_overlap_and_are_as_few_as_run_at_once(spans):
    found = tracks(spans)

    assert sorted(span for track in found for span in track.spans) == sorted(spans)
    for track in found:
        assert all(a[1] <= b[0] for a, b in zip(track.spans, track.spans[1:], strict=False))
    real = [span for span in spans if span[1] > span[0]]
    at_once = max((sum(start <= cell < end for start, end, _ in spans) for cell in range(30)), default=0)
    assert len([t for t in found if any(s[1] > s[0] for s in t.spans)]) >= at_once
    if len(real) == len(spans):
        assert len(found) == at_once


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"[]", "was not written by write_chrome"),
        (b'{"traceEvents": []}', "was not written by write_chrome"),
        (b'{"otherData": {"format": "fsdp_sim timeline", "version": 9, "header": ' b'{"producer": "", "clock": "", '
         b'"world_size": 1}}, "traceEvents": []}', "version 9"),
    ],
)  # fmt: skip
def test_what_it_did_not_write_is_refused_in_a_sentence(content, words, tmp_path):
    path = tmp_path / "other.json"
    path.write_bytes(content)

    with pytest.raises(ValueError, match=words) as refused:
        read_chrome(path)
    assert "other.json" in str(refused.value)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_cut_short_is_refused(sim, name, tmp_path):
    path = write_chrome(sim.timeline, tmp_path / name)
    path.write_bytes(path.read_bytes()[:-2000])

    with pytest.raises(ValueError, match="cannot be read as a trace"):
        read_chrome(path)
