"""Predicted over measured: the same colours, the same height, the peaks of both in words and numbers."""

from __future__ import annotations

import numpy as np
import pytest

from fsdp_sim.timeline import Memory
from fsdp_sim.viz.theme import MEMORY
from fsdp_sim.words import human_bytes
from labs.measure.allocations import at_peak
from labs.measure.allocations.strips import memory_picture
from tests.labs.measure.allocations.steps import on_ranks

FSDP2, ACCUMULATING = "fsdp2", "fsdp2, accumulating"


@pytest.fixture(scope="module")
def found():
    return on_ranks([FSDP2, ACCUMULATING])


@pytest.fixture(scope="module")
def picture(found, predicted):
    return memory_picture(predicted[FSDP2].timeline, found[FSDP2].of("timeline"))


def areas(picture, row):
    axis = "y" if row == 1 else f"y{row}"
    return {trace.name: trace for trace in picture.figure.data if (trace.yaxis or "y") == axis}


def test_a_category_has_the_same_look_in_both(picture):
    above, below = areas(picture, 1), areas(picture, 2)
    kinds = {kind.name: kind for kind in MEMORY.values()}
    assert len(set(above) & set(below)) >= 6
    for name in set(above) & set(below):
        assert above[name].fillcolor == below[name].fillcolor == kinds[name].color
        assert bool(above[name].showlegend) != bool(below[name].showlegend)


def test_the_areas_stack_to_what_is_alive(picture, found):
    stacked = np.sum([trace.y for trace in areas(picture, 2).values()], axis=0)
    assert stacked.max() * 2**20 == pytest.approx(found[FSDP2].of("timeline").peak_bytes(0))
    for trace in areas(picture, 2).values():
        assert list(trace.x) == sorted(trace.x)
        assert trace.x[-1] == 2  # a forward and a backward


def test_both_peaks_are_told(picture, found, predicted):
    measured, expected = found[FSDP2].of("timeline").peak_bytes(0), predicted[FSDP2].memory.peak_bytes
    assert picture.finding == f"At its peak a step holds {human_bytes(measured)}, as predicted."
    titles = [note.text for note in picture.figure.layout.annotations]
    assert titles == [f"predicted: peak {human_bytes(expected)}", f"measured: peak {human_bytes(measured)}"]
    (table,) = picture.tables
    rows = {row[0]: row[1:] for row in table.rows}
    parts = at_peak(found[FSDP2].of("timeline"))
    assert rows[MEMORY[Memory.OPTIMIZER].name][1] == human_bytes(parts[Memory.OPTIMIZER])


def test_the_difference_is_told(found, predicted):
    picture = memory_picture(predicted[ACCUMULATING].timeline, found[ACCUMULATING].of("timeline"))
    off = predicted[ACCUMULATING].memory.peak_bytes / found[ACCUMULATING].of("timeline").peak_bytes(0) - 1
    assert -0.1 < off < -0.005
    assert picture.finding.endswith(f", {-off:.1%} more than predicted.")


def test_different_steps_are_refused(found, predicted):
    with pytest.raises(ValueError, match=r"measured forward, backward, forward, backward; .* micro-batches"):
        memory_picture(predicted[FSDP2].timeline, found[ACCUMULATING].of("timeline"))
