"""What a snapshot of CUDA's memory says: the peak, what stands there, and where trace and prediction come in."""

import pytest

from fsdp_sim.diagnose import beside_prediction, memory_found
from fsdp_sim.timeline import Event, Header, Lane, Memory, Op, Phase, Snapshot, Timeline
from tests.timeline.snapshot.snapshots import BEGAN_US, PEAK, MiB, step


def trace(began_unix_s):
    ops = [(Op.FWD, "layers.0", Phase.FORWARD, 0.0, 0.0055), (Op.BWD, "layers.0", Phase.BACKWARD, 0.0055, 0.03)]
    events = [
        Event(seq=n, rank=0, op=op, lane=Lane.COMPUTE, unit=unit, phase=phase, step=3, issue_s=a, start_s=a, end_s=b)
        for n, (op, unit, phase, a, b) in enumerate(ops)
    ]
    return Timeline(Header(producer="t", clock="measured", world_size=1, began_unix_s=began_unix_s), events)


def test_what_stands_at_the_peak_by_purpose_and_by_line():
    found = memory_found(Snapshot.of(step()))

    assert found.kinds == PEAK
    assert (found.peak_bytes, found.phase) == (sum(PEAK.values()), Phase.BACKWARD)
    assert {(one.kind, one.where): one.bytes for one in found.groups} == {
        ("", "before the recording"): PEAK[""],
        ("activation", "model.py:31 forward"): PEAK["activation"],
        ("unsharded", "_fsdp_collectives.py:210 foreach_all_gather_copy_out"): PEAK["unsharded"],
        ("rs_input", "_fsdp_collectives.py:430 foreach_reduce"): PEAK["rs_input"],
        ("unsharded_grad", "train.py:7 main"): PEAK["unsharded_grad"],
    }
    assert "in backward; torch has reserved 216 MiB of the device, 1.00 MiB (0.5%) of it unused" in found.sentences[0]
    assert "100 MiB were there before the recording began" in found.notes[0]
    assert max(point.allocated_bytes for point in found.curve) == found.peak_bytes


def test_out_of_memory_says_what_was_asked_and_what_was_left():
    (one,) = memory_found(Snapshot.of(step(oom=True))).out_of_memory
    assert (one.asked_bytes, one.device_free_bytes, one.where) == (500 * MiB, 3 * MiB, "model.py:31 forward")
    assert one.reserved_bytes - one.allocated_bytes == 116 * MiB


def test_beside_a_trace_the_peak_has_a_step_and_an_operation():
    found = memory_found(Snapshot.of(step()), trace(BEGAN_US * 1e-6))
    assert "step 3, when the CPU of rank 0 had just issued BWD layers.0 in backward" in found.sentences[-1]
    assert [(one.step, one.allocated_bytes) for one in found.steps] == [(3, found.peak_bytes)]


@pytest.mark.parametrize(
    ("began_unix_s", "said"),
    [(0.0, "The trace does not say when"), (BEGAN_US * 1e-6 + 60, "before it begins"), (1.0, "after its end")],
)
def test_a_trace_of_another_time_is_said_to_be_one(began_unix_s, said):
    found = memory_found(Snapshot.of(step()), trace(began_unix_s))
    assert said in found.sentences[-1]
    assert found.steps == []


def test_where_measured_and_predicted_differ_is_named():
    predicted = {Memory.SHARDED: 40 * MiB, Memory.OPTIMIZER: 60 * MiB, Memory.UNSHARDED: 40 * MiB}
    predicted |= {Memory.ACTIVATION: 48 * MiB, Memory.RS_INPUT: 50 * MiB}
    beside = beside_prediction(memory_found(Snapshot.of(step())), predicted, 300 * MiB, "it").predicted

    assert [one.kind for one in beside.kinds if one.differs] == ["reduce-scatter buffers"]
    assert beside.sentences[1:] == ["Reduce-scatter buffers: 25.0 MiB measured, 50.0 MiB predicted, 50% less."]


def test_what_a_snapshot_lacks_is_said():
    bare = step() | {"device_traces": []}
    assert "has no history" in memory_found(Snapshot.of(bare)).notes[0]
    without_calls = step()
    for entry in without_calls["device_traces"][0]:
        entry["frames"] = []
    assert "came without calls" in memory_found(Snapshot.of(without_calls)).notes[0]
    lost = step()
    lost["device_traces"][0] = [e for e in lost["device_traces"][0] if e["action"] != "free_requested"]
    assert "allocations are missing" in memory_found(Snapshot.of(lost)).notes[-1]
