"""The recorder: what is issued is written in that order, and nothing at all while it is off."""

import pickle
import time

import cloudpickle
import pytest

from fsdp_sim.timeline import RECORDER, Event, Lane, Memory, Op, Phase, Recorder


@pytest.fixture
def recorder() -> Recorder:
    recorder = Recorder()
    recorder.start(rank=3)
    return recorder


def test_events_have_the_rank_step_micro_batch_and_phase_of_when_they_were_issued(recorder: Recorder) -> None:
    recorder.step, recorder.micro_batch, recorder.phase = 5, 2, Phase.BACKWARD
    seq = recorder.begin(Op.REDUCE_SCATTER, "layers.0", bytes=64)
    recorder.step, recorder.phase = 6, Phase.FORWARD
    recorder.end(seq)
    (event,) = recorder.stop()
    assert (event.seq, event.rank, event.unit, event.bytes) == (0, 3, "layers.0", 64)
    assert (event.step, event.micro_batch, event.phase) == (5, 2, Phase.BACKWARD)
    assert event.lane is Lane.REDUCE_SCATTER


def test_time_runs_from_begin_to_end(recorder: Recorder) -> None:
    before_s = time.monotonic()
    recorder.end(recorder.begin(Op.FWD, "a"))
    (event,) = recorder.stop()
    assert before_s <= event.issue_s == event.start_s <= event.end_s <= time.monotonic()


def test_whoever_learns_when_it_ran_may_say_so(recorder: Recorder) -> None:
    seq = recorder.begin(Op.ALL_GATHER, "a", issue_s=1.0, start_s=1.0)
    recorder.end(seq, start_s=2.0, end_s=3.0)
    (event,) = recorder.stop()
    assert (event.issue_s, event.start_s, event.end_s) == (1.0, 2.0, 3.0)


def test_events_are_in_order_of_issue_and_what_never_ended_is_left_out(recorder: Recorder) -> None:
    first, second, third = (recorder.begin(Op.ALL_GATHER, unit) for unit in "abc")
    recorder.end(third)
    recorder.end(first)
    assert [(e.seq, e.unit) for e in recorder.stop()] == [(first, "a"), (third, "c")]
    assert second == 1


def test_waits_on_leaves_out_what_was_not_recorded(recorder: Recorder) -> None:
    first = recorder.begin(Op.ALL_GATHER, "a")
    recorder.end(first)
    recorder.end(recorder.begin(Op.FWD, "a", waits_on=(first, -1)))
    assert recorder.stop()[1].waits_on == (first,)


def test_a_span_ends_with_its_block_even_if_that_raises(recorder: Recorder) -> None:
    with pytest.raises(ZeroDivisionError), recorder.span(Op.OPTIM, "") as seq:
        raise ZeroDivisionError
    assert [e.seq for e in recorder.stop()] == [seq]


def test_allocs_and_frees_take_no_time_and_take_effect_when_issued(recorder: Recorder) -> None:
    recorder.memory(Op.ALLOC, Memory.AG_OUTPUT, "a", 128, Lane.AG_COPY_IN)
    (event,) = recorder.stop()
    assert event.issue_s == event.start_s == event.end_s
    assert (event.op, event.category, event.bytes, event.lane) == (Op.ALLOC, Memory.AG_OUTPUT, 128, Lane.AG_COPY_IN)
    assert event.is_memory


def test_a_label_names_units_inside_its_block_and_labels_nest(recorder: Recorder) -> None:
    with recorder.label("outer"):
        with recorder.label("inner"):
            assert recorder.unit == "inner"
        with pytest.raises(ZeroDivisionError), recorder.label("inner"):
            raise ZeroDivisionError
        assert recorder.unit == "outer"
    assert recorder.unit == ""


def test_a_label_hands_over_the_event_that_its_caller_has_opened(recorder: Recorder) -> None:
    with recorder.label("outer", recorder.begin(Op.ALL_GATHER, "outer")):
        with recorder.label("inner"):
            assert recorder.opened == -1
        assert recorder.opened == 0
    assert recorder.opened == -1


# ---------------------------------------------------------------------- off, and on again


def everything(recorder: Recorder) -> None:
    recorder.end(recorder.begin(Op.FWD, "a"))
    with recorder.span(Op.OPTIM, ""):
        recorder.memory(Op.ALLOC, Memory.SHARDED, "a", 1)


def test_off_records_nothing_and_keeps_nothing_behind_the_scenes() -> None:
    recorder = Recorder()
    before = pickle.dumps(vars(recorder))
    for _ in range(100):
        everything(recorder)
    assert (recorder.on, recorder.begin(Op.FWD, "a"), recorder.events()) == (False, -1, [])
    assert pickle.dumps(vars(recorder)) == before


def test_stop_keeps_what_there_is_and_start_forgets_it(recorder: Recorder) -> None:
    everything(recorder)
    kept = recorder.stop()
    everything(recorder)
    assert recorder.events() == kept
    assert len(kept) == 3
    recorder.step, recorder.micro_batch, recorder.phase = 7, 7, Phase.BACKWARD
    recorder.start()
    assert recorder.events() == []
    assert (recorder.rank, recorder.step, recorder.micro_batch, recorder.phase) == (3, 0, 0, Phase.NONE)


def test_a_session_is_a_call_of_start() -> None:
    recorder = Recorder()
    sessions = [recorder.session]
    for _ in range(2):
        recorder.start()
        recorder.stop()
        sessions.append(recorder.session)
    assert sessions == [0, 1, 2]


def test_what_another_recording_began_is_no_event_of_this_one(recorder: Recorder) -> None:
    seq = [recorder.begin(Op.ALL_GATHER, "a") for _ in range(3)][-1]
    recorder.start()
    recorder.end(seq)
    *_, last = (recorder.begin(Op.FWD, "a", waits_on=(seq,)) for _ in range(3))
    recorder.end(seq)
    assert recorder.stop() == []
    recorder.end(last)
    assert [(e.seq, e.waits_on) for e in recorder.events()] == [(2, ())]


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_a_recorder_that_travels_stands_for_the_recorder_of_where_it_arrives(pickler) -> None:
    copy, event = pickler.loads(pickler.dumps((RECORDER, Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE))))
    assert copy is RECORDER
    assert event.op is Op.FWD
    assert pickler.loads(pickler.dumps(RECORDER.label)).__self__ is RECORDER
