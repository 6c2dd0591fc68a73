"""Timelines as DataFrames and Parquet files, and back without a loss."""

import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.timeline import Lane, Op, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s
from fsdp_sim.timeline.frame import COLUMNS, HEADER, from_pandas, from_parquet, to_pandas, to_parquet
from tests.timeline.strategies import gather, op, timeline_of, timelines


def assert_same(one: Timeline, other: Timeline) -> None:
    assert one.events == other.events
    assert one.header == other.header


@given(timelines())
def test_any_timeline_comes_back_from_a_frame(timeline):
    assert_same(from_pandas(to_pandas(timeline)), timeline)


@given(timelines())
def test_any_timeline_comes_back_from_parquet(tmp_path_factory, timeline):
    path = tmp_path_factory.mktemp("frame") / "events.parquet"

    assert_same(from_parquet(to_parquet(timeline, path)), timeline)


def test_columns_are_those_of_events_and_typed():
    timeline = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=8), Plan(micro_batch=2)).timeline

    frame = to_pandas(timeline)
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == len(timeline)
    for name in ("op", "lane", "phase", "category", "unit", "dtype", "source"):
        assert isinstance(frame[name].dtype, pd.CategoricalDtype), name
    assert list(frame["lane"].cat.categories) == [str(lane) for lane in Lane]
    assert frame["bytes"].dtype == np.int64
    assert frame["start_s"].dtype == np.float64
    assert frame.attrs[HEADER]["producer"] == "simulate"


def test_a_frame_can_be_asked_what_a_timeline_is_asked():
    timeline = timeline_of(op(0.0, 2.0), gather(1.0, 4.0, unit="a", bytes=8), gather(4.0, 5.0, unit="b"))

    frame = to_pandas(timeline)
    seconds = (frame.end_s - frame.start_s).groupby(frame.op, observed=True).sum()
    assert seconds.to_dict() == {"FWD": 2.0, "ALL_GATHER": 4.0}
    kept = from_pandas(frame[frame.unit != "b"])
    assert exposed_comm_s(kept, 0) == 2.0


def test_rows_may_be_shuffled_and_columns_added_or_left_out():
    timeline = timeline_of(op(0.0, 2.0), gather(1.0, 4.0, unit="a"))
    frame = to_pandas(timeline).sample(frac=1.0, random_state=1).assign(note="x").drop(columns=["source", "dtype"])

    assert from_pandas(frame, timeline.header).events == timeline.events


def test_a_frame_without_its_header_says_so():
    timeline = timeline_of(op(0.0, 2.0))
    frame = to_pandas(timeline)
    frame.attrs = {}

    with pytest.raises(ValueError, match="pass header="):
        from_pandas(frame)
    assert_same(from_pandas(frame, timeline.header), timeline)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda frame: frame.drop(columns="lane"), "no column 'lane'"),
        (lambda frame: frame.assign(op="JUMP"), "JUMP"),
        (lambda frame: frame.assign(bytes="many"), "bytes"),
    ],
)
def test_what_is_no_event_is_named(change, words):
    timeline = timeline_of(op(0.0, 2.0, Op.FWD))

    with pytest.raises(ValueError, match=words):
        from_pandas(change(to_pandas(timeline)), timeline.header)


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"hello"])
def test_what_is_no_parquet_is_named(content, tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)

    with pytest.raises(ValueError, match=r"x\.parquet"):
        from_parquet(path)


def test_a_parquet_of_something_else_is_named(tmp_path):
    path = tmp_path / "prices.parquet"
    pd.DataFrame({"price": [1.0]}).to_parquet(path)

    with pytest.raises(ValueError, match="lost its header"):
        from_parquet(path)


@pytest.mark.parametrize(("package", "extra"), [("pandas", "explore"), ("pyarrow", "parquet")])
def test_a_missing_package_is_named_with_what_to_install(package, extra, tmp_path, monkeypatch):
    timeline = timeline_of(op(0.0, 2.0))
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(ValueError, match=rf"needs {package}.*pip install -e '\.\[{extra}\]'"):
        to_parquet(timeline, tmp_path / "x.parquet")
