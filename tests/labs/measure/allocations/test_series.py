"""Blocks as the bytes alive over time, and what is alive at the peak."""

from __future__ import annotations

import pytest

from fsdp_sim.timeline import Event, Header, Lane, Memory, Op, Phase, Timeline
from fsdp_sim.timeline.snapshot import AllocationMoment, Block, Frame
from labs.measure.allocations import at_peak, timeline_of

HEADER = Header(producer="a test", clock="measured", world_size=4)
FORWARD = (Frame("/lib/torch/nn/modules/module.py", 1776, "_call_impl"),)
BACKWARD = (Frame("/lib/torch/autograd/graph.py", 824, "_engine_run_backward"),)


def moment(number, frames=FORWARD):
    return AllocationMoment(number, 100.0 + number, frames)


STEP = [
    Block(40, AllocationMoment(0, 3.0), None, Memory.SHARDED),
    Block(7, AllocationMoment(0, 3.0), moment(1), Memory.RS_OUTPUT),
    Block(10, moment(2), moment(5, BACKWARD)),
    Block(0, moment(3), moment(4)),
    Block(20, moment(4, BACKWARD), moment(6, BACKWARD)),
]


def test_bytes_by_category_in_order():
    """A block without bytes changes nothing; seconds count from the first moment of the recording."""
    times_s, live = timeline_of(STEP, HEADER, rank=2).live_bytes(2)
    assert times_s.tolist() == [0, 0, 0, 1, 3, 4, 5]
    assert {category: n_bytes.tolist() for category, n_bytes in live.items()} == {
        Memory.SHARDED: [40] * 7,
        Memory.RS_OUTPUT: [0, 7, 0, 0, 0, 0, 0],
        Memory.ACTIVATION: [0, 0, 0, 10, 10, 0, 0],
        Memory.TEMPORARY: [0, 0, 0, 0, 20, 20, 0],
    }


def test_phases_are_operations():
    ops = timeline_of(STEP, HEADER).ops
    assert [(op.op, op.phase, op.start_s, op.end_s) for op in ops] == [
        (Op.FWD, Phase.FORWARD, 1, 3),
        (Op.BWD, Phase.BACKWARD, 3, 5),
    ]


def test_at_the_peak():
    assert at_peak(timeline_of(STEP, HEADER)) == {Memory.SHARDED: 40, Memory.TEMPORARY: 20, Memory.ACTIVATION: 10}


def test_without_memory_there_is_no_peak():
    timeline = Timeline(HEADER, [Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE)])
    with pytest.raises(ValueError, match=r"no memory of rank 0.*labs\.measure\.allocations"):
        at_peak(timeline)


def test_nothing_recorded_is_an_empty_timeline():
    assert len(timeline_of([], HEADER)) == 0
