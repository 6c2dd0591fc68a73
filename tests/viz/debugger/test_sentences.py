"""Every event has a sentence that names its unit and its bytes and, where the record tells, why it comes now."""

import pytest

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.timeline import Event, Lane, Memory, Op, Phase, Timeline
from fsdp_sim.viz.debugger import moment
from fsdp_sim.viz.debugger.sentences import ALLOC, FREE, WHAT, name, sentence
from tests.timeline.strategies import gather, op, timeline_of


def say(*events: Event, seq: int = 0) -> str:
    return sentence(moment(timeline_of(*events), 0, seq))


def test_every_operation_and_every_category_has_words() -> None:
    assert set(WHAT) == set(Op) - {Op.ALLOC, Op.FREE}
    assert set(ALLOC) == set(FREE) == set(Memory)


@pytest.mark.parametrize("kind", list(Op))
@pytest.mark.parametrize("unit", ["", "layers.3", "{bytes}<b>"])
def test_any_event_can_be_told(kind: Op, unit: str) -> None:
    for category in Memory:
        told = say(op(0.0, 1.0, kind, unit=unit, category=category, bytes=2048))
        assert told.endswith(".")
        assert "{" not in told.replace(unit, "") if unit else "{" not in told


def test_every_sentence_of_a_run_and_of_a_prediction_is_whole(run: Timeline, predicted: Timeline) -> None:
    for timeline in (run, predicted):
        told = [sentence(moment(timeline, 0, e.seq)) for e in timeline.select(rank=0)]
        assert all(text[0].isupper() or text[0].isdigit() for text in told)
        assert all(20 < len(text) < 330 for text in told)


def test_an_exposed_collective_says_so_and_a_hidden_one_says_what_hides_it() -> None:
    wait = gather(0.0, 0.004, unit="a", bytes=2**20, group_size=4)
    assert "The all-gather of a (1.00 MiB over 4 ranks)" in say(wait)
    assert say(wait).endswith("Nothing computes meanwhile: all of its 4.00 ms are exposed.")
    assert "the backward of b computes meanwhile and hides its 4.00 ms" in say(wait, op(0.0, 1.0, Op.BWD, unit="b"))
    partly = say(wait, op(0.0, 0.001, Op.FWD, unit="b"))
    assert "It lasts 4.00 ms; the forward of b hides 1.00 ms of it, the rest is exposed." in partly


def test_the_peak_is_named_once_it_is_reached() -> None:
    events = [op(0, 0, Op.ALLOC, bytes=n, category=Memory.ACTIVATION, unit="a", seq=i) for i, n in enumerate((1, 5, 2))]
    events.append(op(0, 0, Op.FREE, bytes=8, category=Memory.ACTIVATION, unit="a", seq=3))
    told = [say(*events, seq=i) for i in range(4)]
    assert [("at its peak: 8 B" in text) for text in told] == [False, False, True, False]


def test_copies_say_which_buffer_they_had_to_wait_for(run: Timeline) -> None:
    copy_in = run.select(rank=0, op=Op.RS_COPY_IN, unit="layers.1", step=0).events[0]
    assert "wait for the reduce-scatter of layers.2" in sentence(moment(run, 0, copy_in.seq))
    gathers = run.select(rank=0, op=Op.AG_COPY_IN, unit="layers.2", step=0, phase=Phase.FORWARD).events[0]
    assert "Not before the copy-out of layers.0" in sentence(moment(run, 0, gathers.seq))


def test_the_optimizer_waits_for_the_last_reduce_scatter(run: Timeline) -> None:
    optimizer = run.select(rank=0, op=Op.OPTIM, step=1).events[0]
    assert "waits for the last of them: the reduce-scatter of" in sentence(moment(run, 0, optimizer.seq))


def test_a_slice_that_is_kept_between_the_passes_is_not_a_shard() -> None:
    shard = op(0, 0, Op.ALLOC, category=Memory.SHARDED, unit="a", bytes=8)
    whole = op(0, 0, Op.ALLOC, category=Memory.UNSHARDED, unit="a", bytes=8, seq=2)
    kept = op(1, 1, Op.ALLOC, category=Memory.SHARDED, unit="a", bytes=16, phase=Phase.FORWARD, seq=1)
    assert say(shard, kept, whole).startswith("This rank's shard of a, 8 B")
    assert say(shard, kept, whole, seq=1).startswith("A slice of a, 16 B, is kept until backward.")


@pytest.mark.parametrize(
    ("plan", "op", "category", "said"),
    [
        ({"api": "fsdp1"}, Op.ALLOC, Memory.UNSHARDED, "the all-gather writes into them"),
        ({"api": "fsdp2"}, Op.ALLOC, Memory.UNSHARDED, "the copy-out fills them next"),
        ({"api": "ddp"}, Op.ALLOC, Memory.SHARDED, "The parameters of root, "),
        ({"api": "ddp"}, Op.ALLOC, Memory.UNSHARDED_GRAD, "kept all the time"),
        ({"api": "ddp"}, Op.RS_COPY_IN, Memory.NONE, "one collective reduces them all"),
        ({"api": "ddp"}, Op.OPTIM, Memory.NONE, "The optimizer updates the parameters with their gradients."),
        ({"api": "zero2"}, Op.OPTIM, Memory.NONE, "no rank touches another's rows"),
        ({"reshard_after_forward": 4}, Op.ALLOC, Memory.SHARDED, "This rank's shard"),
    ],
)
def test_a_sentence_is_true_of_other_ways_to_train_too(plan: dict, op: Op, category: Memory, said: str) -> None:
    timeline = simulate(
        "gpt2-124m", Cluster("H100-SXM-80GB", gpus=16), Plan(micro_batch=2, seq_len=512, **plan)
    ).timeline
    event = timeline.select(op=op, category=category).events[0]
    assert said in sentence(moment(timeline, 0, event.seq))


def test_only_an_all_gather_is_issued_ahead_of_its_need() -> None:
    compute = op(0.0, 1.0, Op.BWD, unit="b")
    assert "ahead of its need" in say(gather(0.1, 0.2, unit="a"), compute)
    reduce = op(0.1, 0.2, Op.REDUCE_SCATTER, Lane.REDUCE_SCATTER, unit="a")
    assert say(reduce, compute).endswith("The backward of b computes meanwhile and hides its 100 ms.")


def test_names_are_what_a_reader_calls_them() -> None:
    assert name(gather(0, 1, unit="layers.0")) == "all-gather of layers.0"
    assert name(op(0, 0, Op.OPTIM)) == "optimizer"
    assert name(op(0, 0, Op.FREE, category=Memory.RS_INPUT, unit="a")) == "free reduce-scatter buffer of a"
