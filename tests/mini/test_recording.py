"""The timeline a training step leaves behind, held against what torch itself issues."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fsdp_sim.mini import fully_shard
from fsdp_sim.ranks import run
from fsdp_sim.timeline import RECORDER, Header, Lane, Memory, Op, Phase, Timeline
from tests.mini.models import Toy, Transformer, batches, my_part, shard, token_loss

RECORDINGS = Path(__file__).parents[1] / "schedule" / "recordings"  # torch's unmodified fully_shard
BUFFERS = {Memory.AG_OUTPUT, Memory.UNSHARDED, Memory.RS_INPUT, Memory.RS_OUTPUT}


def lines_of_torch(name):
    """Operations, allocs and frees of the first step: ``op ALL_GATHER(root)``, ``free rs_output(layers.0)``."""
    lines = []
    for line in (RECORDINGS / f"{name}.txt").read_text().splitlines():
        if line.startswith("--- step 1"):
            break
        kind, what = line[:12].strip(), line[28:]
        if kind in ("op", "alloc", "free"):
            lines.append(f"{kind} {what.split(' n=')[0]}")
    return lines


def lines_of(timeline, rank, step=0):
    """The same of a recorded timeline. Torch does not log shards, whole gradients and optimizer state."""
    lines = []
    for e in timeline.events:
        if e.rank == rank and e.step == step:
            if not e.is_memory:
                lines.append(f"op {e.label}")
            elif e.category in BUFFERS:
                lines.append(f"{e.op} {e.category}({e.unit})")
    return lines


def record(n_layers=3, steps=1, micro_batches=1, sync_last=False, prefetch=0, lr=0.01, **options):
    model = shard(Toy(n_layers), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for i, layer in enumerate(model.layers if prefetch else ()):
        layer.set_modules_to_forward_prefetch(list(model.layers[i + 1 : i + 1 + prefetch]))
    RECORDER.start(torch.distributed.get_rank())
    for _ in range(steps):
        for i in range(micro_batches):
            if sync_last:
                model.set_requires_gradient_sync(i == micro_batches - 1)
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return RECORDER.stop()


def timeline_of(ranks, world_size=2, **settings):
    events = [e for of_rank in ranks(world_size, lambda: record(**settings)) for e in of_rank]
    return Timeline(Header(producer="mini", clock="measured", world_size=world_size), events)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("default_raf_none", {}),
        ("raf_true_everywhere", {"reshard_after_forward": True}),
        ("raf_false", {"reshard_after_forward": False}),
        ("forward_prefetch_1", {"n_layers": 4, "prefetch": 1}),
        ("grad_acc_no_sync", {"n_layers": 2, "micro_batches": 2, "sync_last": True}),
    ],
)
def test_every_op_alloc_and_free_is_where_torch_has_it(ranks, name, settings):
    timeline = timeline_of(ranks, steps=2, **settings)
    expected = lines_of_torch(name)
    assert len(expected) > 60
    for rank in (0, 1):
        for step in (0, 1):
            assert lines_of(timeline, rank, step) == expected


def test_events_say_what_they_waited_for(ranks):
    by_seq = {e.seq: e for e in timeline_of(ranks).events if e.rank == 0}
    waits = {(e.phase, e.label): {by_seq[s].label for s in e.waits_on} for e in by_seq.values() if not e.is_memory}
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    assert waits[forward, "ALL_GATHER(layers.1)"] == {"ag_copy_in(layers.1)"}
    assert waits[forward, "ag_copy_in(layers.2)"] == {"ag_copy_out(layers.0)"}, "the copy-out before the last one"
    assert waits[forward, "ag_copy_out(layers.1)"] == {"ALL_GATHER(layers.1)"}
    assert waits[forward, "FWD layers.1"] == {"ag_copy_out(layers.1)"}
    assert waits[forward, "FWD head"] == waits[backward, "BWD embed"] == {"ag_copy_out(root)"}
    assert waits[backward, "BWD layers.1"] == {"ag_copy_out(layers.1)"}
    assert waits[backward, "rs_copy_in(layers.2)"] == set()
    assert waits[backward, "rs_copy_in(layers.1)"] == {"REDUCE_SCATTER(layers.2)"}
    assert waits[backward, "REDUCE_SCATTER(root)"] == {"rs_copy_in(root)"}
    assert waits[Phase.OPTIMIZER, "OPTIM"] == {"REDUCE_SCATTER(root)"}


def test_collectives_carry_their_size(ranks):
    gathers = timeline_of(ranks).select(op=(Op.ALL_GATHER, Op.REDUCE_SCATTER), unit="layers.0", rank=0).events
    assert {(e.bytes, e.group_size, e.dtype) for e in gathers} == {(64, 2, "fp32")}


def test_lanes_are_fifo_and_nothing_ends_before_it_starts(ranks):
    timeline = timeline_of(ranks, steps=2)
    for e in timeline.ops:
        assert e.issue_s <= e.start_s <= e.end_s, e
    for rank in (0, 1):
        for lane in (Lane.COMPUTE, Lane.AG_COPY_IN):
            on_lane = [e for e in timeline.ops if e.rank == rank and e.lane is lane]
            for before, after in pairwise(on_lane):
                assert before.end_s <= after.start_s, (before.label, after.label)


def test_steps_and_micro_batches_count_themselves(ranks):
    timeline = timeline_of(ranks, steps=2, micro_batches=2)
    seen = {(e.step, e.micro_batch, e.phase) for e in timeline.ops}
    both = [(m, p) for m in (0, 1) for p in (Phase.FORWARD, Phase.BACKWARD)] + [(1, Phase.OPTIMIZER)]
    assert seen == {(step, m, p) for step in (0, 1) for m, p in both}


def test_every_buffer_is_freed_and_shards_and_optimizer_state_stay(ranks):
    timeline = timeline_of(ranks, steps=2)
    _, live = timeline.live_bytes(0)
    shards = 5 * 2 * 4 * 4  # five 4 x 4 matrices, 2 rows each, fp32
    moments_and_steps = 2 * shards + 5 * 4
    left = {category: values[-1] for category, values in live.items()}
    assert left == {c: 0 for c in (*BUFFERS, Memory.UNSHARDED_GRAD)} | {
        Memory.SHARDED: shards,
        Memory.OPTIMIZER: moments_and_steps,
    }
    assert all((values >= 0).all() for values in live.values())
    assert live[Memory.RS_INPUT].max() == 128, "K = 1: the root's, never two units' at once"
    assert live[Memory.AG_OUTPUT].max() == 128 + 64, "in forward the previous unit's G lives one unit longer"


def test_the_optimizer_waits_for_the_reductions_that_backward_has_waited_for():
    """For the last one of all; for none after a backward that was said not to be the last."""

    def steps():
        model = shard(Toy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        RECORDER.start()
        for last in (True, False):
            model.set_is_last_backward(last)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        events = {e.seq: e for e in RECORDER.stop() if not e.is_memory}
        return [[(events[s].op, events[s].unit) for s in e.waits_on] for e in events.values() if e.op is Op.OPTIM]

    found = run(steps, 2, progress=False)  # new ranks: events are numbered from 0 in a process's first recording

    assert list(found) == [[[(Op.REDUCE_SCATTER, "root")], []]] * 2


def test_two_optimizers_make_one_step(ranks):
    def run():
        model = shard(Toy())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model.layers, model.head)]
        RECORDER.start()
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return sorted({(e.step, e.op) for e in RECORDER.stop() if e.op in (Op.OPTIM, Op.ALL_GATHER)})

    assert ranks(2, run) == [[(s, op) for s in range(3) for op in (Op.ALL_GATHER, Op.OPTIM)]] * 2


def test_one_rank_records_copies_and_compute_only(ranks):
    ops = {e.op for e in timeline_of(ranks, world_size=1).ops}
    assert ops == {Op.AG_COPY_OUT, Op.FWD, Op.BWD, Op.RS_COPY_IN, Op.OPTIM}


def test_a_model_whose_input_is_integers(ranks):
    def run():
        model = shard(Transformer())
        RECORDER.start()
        token_loss(model, my_part(batches(1)[0])).backward()
        return [e.label for e in RECORDER.stop() if e.op in (Op.FWD, Op.BWD, Op.REDUCE_SCATTER)]

    layers = [f"layers.{i}" for i in range(3)]
    backward = [label for name in reversed(layers) for label in (f"BWD {name}", f"REDUCE_SCATTER({name})")]
    expected = ["FWD embed", *(f"FWD {n}" for n in layers), "FWD head", "BWD head", *backward, "BWD embed"]
    assert ranks(2, run) == [[*expected, "REDUCE_SCATTER(root)"]] * 2


def test_the_whole_model_as_one_unit_and_units_in_units(ranks):
    def run():
        recorded = []
        for nested in (False, True):
            model = Toy(1)
            if nested:
                model.layers[0] = Toy(1)
                fully_shard(model.layers[0].layers[0])
                fully_shard(model.layers[0])
            fully_shard(model)
            RECORDER.start()
            model(torch.ones(2, 4)).sum().backward()
            recorded.append([e.label for e in RECORDER.stop() if e.op in (Op.FWD, Op.BWD)])
        return recorded

    inner = ["layers.0.embed", "layers.0.layers.0", "layers.0.head"]
    forward = ["embed", *inner, "head"]
    nested = [f"FWD {n}" for n in forward] + [f"BWD {n}" for n in reversed(forward)]
    assert ranks(2, run) == [[["FWD root", "BWD root"], nested]] * 2


def test_while_recording_is_off_not_a_line_of_it_runs(ranks):
    """Not before the first recording and not after one, in whose middle a model was made, trained and left undone."""

    def run():
        import sys

        files = [sys.modules[f"fsdp_sim.{name}"].__file__ for name in ("mini.observer", "mini.recording")]
        files.append(sys.modules["fsdp_sim.timeline.recorder"].__file__)
        called = []

        def trace(frame, event, arg):
            if frame.f_code.co_filename in files:
                called.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

        def train(model, optimizer, backward=True):
            loss = model(torch.ones(2, 4)).sum()
            if backward:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        model = shard(Toy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = shard(Toy())
        model._get_fsdp_state()
        sys.setprofile(trace)
        train(model, optimizer)
        sys.setprofile(None)
        RECORDER.start()
        train(model, optimizer)
        train(other, optimizer, backward=False)
        events = len(RECORDER.stop())
        sys.setprofile(trace)
        train(model, optimizer)
        sys.setprofile(None)
        return events > 100, called

    assert ranks(2, run) == [(True, [])] * 2


def test_a_recording_may_begin_between_forward_and_backward(ranks):
    def run():
        model = shard(Toy())
        model(torch.ones(2, 4)).sum().backward()
        loss = model(torch.ones(2, 4)).sum()
        RECORDER.start()
        loss.backward()
        return [e.label for e in RECORDER.stop() if e.op in (Op.BWD, Op.ALL_GATHER, Op.REDUCE_SCATTER)]

    layers = ("layers.2", "layers.1", "layers.0")
    backward = ["ALL_GATHER(layers.2)", "BWD head"]
    for i, name in enumerate(layers):
        ahead = [f"ALL_GATHER({layers[i + 1]})"] if i < 2 else []
        backward += [*ahead, f"BWD {name}", f"REDUCE_SCATTER({name})"]
    assert ranks(2, run) == [[*backward, "BWD embed", "REDUCE_SCATTER(root)"]] * 2


def test_an_all_gather_that_is_waited_for_in_a_later_recording_ends_no_event_of_that_one(ranks):
    def run():
        model = shard(Toy())
        RECORDER.start()
        handle = model.unshard(async_op=True)
        RECORDER.start()
        for _ in range(10):
            RECORDER.begin(Op.OTHER, "not over yet")
        handle.wait()
        return [e.label for e in RECORDER.stop() if not e.is_memory]

    assert ranks(2, run) == [["ag_copy_out(root)"]] * 2
