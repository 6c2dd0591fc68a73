"""The curve of a snapshot of memory: the peak, what was reserved, what was predicted, and what did not fit."""

import pickle

import pytest

from fsdp_sim.diagnose import beside_prediction, memory_found
from fsdp_sim.timeline import Memory, load_snapshot
from fsdp_sim.viz import memory_curve
from tests.timeline.snapshot.snapshots import MiB, step


@pytest.fixture
def found(tmp_path, request):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(step(oom=getattr(request, "param", False))))
    return memory_found(load_snapshot(path))


def test_its_highest_points_are_the_peak_and_what_was_reserved(found):
    reserved, allocated, peak = memory_curve(found).figure.data

    assert max(reserved.y) == found.most_reserved_bytes / MiB
    assert max(allocated.y) == peak.y[0] == found.peak_bytes / MiB
    assert max(zip(allocated.y, allocated.x, strict=True))[1] == pytest.approx(peak.x[0])


def test_a_prediction_is_a_line_at_its_peak(found):
    picture = memory_curve(beside_prediction(found, {Memory.ACTIVATION: 300 * MiB}, 310 * MiB, "it"))

    assert picture.figure.layout.shapes[0].y0 == 300
    assert "predicted peak 300 MiB" in [note.text for note in picture.figure.layout.annotations]
    assert picture.figure.layout.yaxis.range[1] > 300


@pytest.mark.parametrize("found", [True], indirect=True)
def test_what_did_not_fit_is_a_cross_and_the_title(found):
    figure = memory_curve(found).figure

    assert [trace.marker.symbol for trace in figure.data if trace.mode == "markers+text"] == ["circle", "x"]
    assert "did not fit" in figure.layout.title.text
