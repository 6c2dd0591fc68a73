"""What a lab found says where it comes from, in every form, and comes back from its file as it was."""

import gzip
import io
import subprocess
import sys

import pytest
from rich.console import Console

from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
from labs.experiments.result import MOST_BYTES, LabResult, ResultRow

ROWS = (
    ResultRow("reshard", "step time", 110.0, 100.0, "ms"),
    ResultRow("reshard", "exposed", 5.0, 0.0, "ms"),
    ResultRow("<b>kept</b>", "peak memory", None, 12.3456, "MiB"),
)
TIMELINE = Timeline(
    Header(producer="mini", clock="measured", world_size=2),
    [Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.0", end_s=0.5)],
)


def result(kind="measured", **changes):
    of = {"lab": "memory", "rows": ROWS, "hardware": "2 CPU cores", "timelines": {"one": TIMELINE}, "notes": ("a < b",)}
    return LabResult(kind=kind, **of | changes)


def test_an_error_is_there_where_something_was_predicted_and_measured():
    assert result().errors() == {("reshard", "step time"): pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("kind", "says"),
    [("measured", "measured here"), ("recorded", "not measured here"), ("pretended", "the loss means nothing")],
)
def test_every_form_says_where_the_numbers_come_from(kind, says):
    made, printed = result(kind), io.StringIO()
    Console(file=printed, width=200).print(made.table())
    for shown in (printed.getvalue(), made._repr_html_()):
        assert says in shown
        assert "2 CPU cores" in shown
        assert made.date in shown
        assert "+10%" in shown


def test_text_is_not_taken_for_html():
    shown = result()._repr_html_()
    assert "<b>" not in shown
    assert "a &lt; b" in shown


def test_a_pretended_cluster_stays_pretended(tmp_path):
    result("pretended").save(tmp_path / "a.json.gz")
    assert LabResult.load(tmp_path / "a.json.gz").kind == "pretended"


def test_a_file_that_is_too_large_is_not_written(tmp_path):
    import random

    notes = (random.Random(0).randbytes(2 * MOST_BYTES).hex(),)
    with pytest.raises(ValueError, match=r"a\.json\.gz would have \d+ bytes, more than 1048576; record fewer steps"):
        result(notes=notes).save(tmp_path / "a.json.gz")
    assert not (tmp_path / "a.json.gz").exists()


TRUNCATED = gzip.compress(b"[", mtime=0)[:-4]


@pytest.mark.parametrize(
    "content", [b"", b"no gzip", gzip.compress(b"{}", mtime=0), TRUNCATED], ids=["empty", "no gzip", "no result", "cut"]
)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "a.json.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json\.gz is no recorded result: .*; record it again"):
        LabResult.load(tmp_path / "a.json.gz")


RANKS_IMPORT = ("memory", "nodes.hang", "numerics", "overlap", "resume", "units")


@pytest.mark.tail
def test_ranks_import_no_plotting():
    imports = ", ".join(f"labs.experiments.{name}" for name in RANKS_IMPORT)
    question = f"import sys, {imports}; print(sorted({{'plotly', 'fsdp_sim.viz'}} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
