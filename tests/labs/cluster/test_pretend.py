"""The pretend cluster is torch's FSDP2 as rank 0 of many: bytes, order and memory; the wire is modelled."""

import dataclasses
import statistics

import pytest
import torch
import torch.distributed as dist

from fsdp_sim.engine import exposure
from fsdp_sim.spec import Cluster
from fsdp_sim.timeline import COLLECTIVES, Op
from labs.cluster.pretend import Setup, compare, network, predict, predicted_timeline, session, timed
from labs.cluster.pretend.__main__ import main
from labs.cluster.pretend.hooks import AllGather, ReduceScatter, check_hooks
from labs.cluster.pretend.network import ClockWire, Message, seconds_on
from labs.cluster.pretend.recorder import PretendedTape, ThreadClock
from labs.cluster.pretend.streams import Clocks
from labs.config import TrainConfig
from tests.some import some

LAYERS = 2


def cluster(ranks, bandwidth_gbps=10.0):
    return Cluster("cpu", gpus=ranks, bandwidth_gbps=bandwidth_gbps, latency_us=10)


def setup(ranks=8, bandwidth_gbps=10.0, rows=1, unshard_async_op=False, **keys):
    config = TrainConfig(n_layer=LAYERS, seq_len=32, global_batch=rows * ranks, **keys)
    return Setup(config, cluster(ranks, bandwidth_gbps), unshard_async_op=unshard_async_op)


class Kept:
    """A wire that keeps what it is given to carry."""

    def __init__(self):
        self.messages = []

    def carry(self, message, move, async_op=False):
        self.messages.append(message)
        move()


class Group:
    group_name = "shard"

    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


class TestWhatTheHooksMove:
    def test_an_all_gather_writes_what_the_others_would_send(self):
        ranks, wire, tape = 8, Kept(), PretendedTape(ThreadClock())
        gather = AllGather("layers.0", wire, tape)
        output = gather.allocate((ranks * 6,), dtype=torch.float32, device=torch.device("cpu"))
        shard = output[:6].copy_(torch.arange(6.0))
        output[6:] = torch.nan
        gather(output, shard, Group(ranks))
        assert torch.equal(output.view(ranks, 6), torch.arange(6.0).expand(ranks, 6))
        (message,) = wire.messages
        assert (message.n_bytes, message.moved_bytes, message.group_size) == (24 * ranks, 24 * (ranks - 1), ranks)

    def test_a_reduce_scatter_reads_all_of_its_input(self):
        wire, tape, reduced = Kept(), PretendedTape(ThreadClock()), []
        scatter = ReduceScatter("layers.0", wire, tape, reduced.append)
        cpu = torch.device("cpu")
        input_, output = (scatter.allocate((n,), dtype=torch.float32, device=cpu) for n in (24, 3))
        input_.copy_(torch.arange(24.0))
        scatter(output, input_, Group(8), dist.ReduceOp.AVG)
        assert torch.equal(output, torch.arange(24.0).view(8, 3).mean(0))
        assert (wire.messages[0].n_bytes, reduced) == (96, ["layers.0"])

    @pytest.mark.parametrize(("ranks", "keys"), [(8, {}), (512, {}), (64, {"api": "hsdp", "shard_size": 16})])
    def test_fsdp2_asks_for_the_messages_that_the_simulator_knows(self, ranks, keys):
        asked = setup(ranks, **keys)
        with session(asked) as rank:
            rank.train(1)
            found = rank.train(1).timeline
        messages = [(e.op, e.unit, e.bytes, e.group_size) for e in found.ops if e.op in COLLECTIVES]
        program = [i for i in asked.simulation.program.ops if i.op in COLLECTIVES and i.step == 0]
        assert messages == [(i.op, i.unit, i.bytes, i.group_size) for i in program]


def once(order):
    """What follows itself counts once: a wait divides an operation in two."""
    return [one for one, before in zip(order, [None, *order], strict=False) if one != before]


class TestTheProgram:
    @pytest.mark.parametrize(
        "keys",
        [
            {},
            {"reshard_after_forward": False},
            {"forward_prefetch": 1, "backward_prefetch": 2},
            {"activation_checkpointing": "full"},
            {"api": "hsdp"},
            {"unshard_async_op": True},
            {"rows": 2, "micro_batch": 1},
        ],
        ids=str,
    )
    def test_what_is_issued_and_computed_comes_in_the_predicted_order(self, keys):
        asked = setup(**keys)
        with session(asked) as rank:
            rank.train(1)
            found = rank.train(1).timeline
        program = [i for i in asked.simulation.program.ops if i.step == 0]
        for ops in (COLLECTIVES, {Op.FWD, Op.BWD, Op.OPTIM}, {Op.AG_COPY_OUT}, {Op.RS_COPY_IN}):
            found_order, program_order = ([(i.op, i.unit) for i in of if i.op in ops] for of in (found.ops, program))
            assert once(found_order) == once(program_order)

    def test_every_piece_of_the_program_was_timed(self):
        asked = setup()
        pieces = timed(asked, 1).of_steps[0]
        assert {(i.op, i.unit) for i in asked.simulation.program.ops} == set(pieces)
        assert all(seconds >= 0 for seconds in pieces.values())


class TestTheWire:
    def test_a_stream_is_held_and_the_thread_goes_on_until_it_waits(self):
        tape = PretendedTape(ThreadClock())
        clocks = Clocks(tape)
        wire = ClockWire(lambda message: 0.05, clocks, tape)
        side = clocks.Stream()
        message = Message(Op.ALL_GATHER, "a", 8, 8, 2, "shard")
        with clocks.stream(side):
            wire.carry(message, lambda: None)
        issued = clocks.Event()
        issued.record()
        done = side.record_event()
        assert not done.query()
        clocks.current_stream().wait_event(done)
        reached = clocks.Event()
        reached.record()
        assert reached.done_s - issued.done_s > 0.03

    def test_collectives_of_a_communicator_queue_up_on_whatever_stream(self):
        tape = PretendedTape(ThreadClock())
        clocks = Clocks(tape)
        wire = ClockWire(lambda message: 1.0, clocks, tape)
        for communicator in ("shard", "shard", "replicate"):
            with clocks.stream(clocks.Stream()):
                wire.carry(Message(Op.ALL_GATHER, "a", 8, 8, 2, communicator), lambda: None)
        first, second, other = tape.collectives
        assert second.start == first.end == pytest.approx(first.start + 1.0)
        assert other.start < first.end

    def test_an_asynchronous_one_returns_a_handle(self):
        tape = PretendedTape(ThreadClock())
        clocks = Clocks(tape)
        wire = ClockWire(lambda message: 0.05, clocks, tape)
        work = wire.carry(Message(Op.ALL_GATHER, "a", 8, 8, 2, "shard"), lambda: None, async_op=True)
        assert isinstance(work, dist.Work)
        assert not work.is_completed()
        assert clocks.compute.done_s == 0.0
        work.wait()
        assert work.is_completed()

    def test_it_takes_what_the_simulator_says(self):
        asked = setup(64, 1.0, api="hsdp", shard_size=16)
        seconds = seconds_on(asked.simulation)
        for i in asked.simulation.program.ops:
            if i.op in COLLECTIVES:
                stride = 16 if i.op is Op.ALL_REDUCE else 1
                message = Message(i.op, i.unit, i.bytes, i.bytes, i.group_size, i.communicator, stride)
                assert seconds(message) == pytest.approx(asked.simulation.costs.seconds(i))


class TestTheStep:
    """Of ranks on a link so slow that a loaded machine's own time is small beside it."""

    @pytest.fixture(scope="class")
    def slow(self):
        asked = setup(bandwidth_gbps=0.05)  # 110 ms for the 790 kB of a block
        with session(asked) as rank:
            rank.train(1)
            seconds = seconds_on(asked.simulation)
            return asked, rank.train(2, seconds), rank.train(1)

    def test_a_wire_lengthens_it_by_what_it_exposes(self, slow):
        _, run, instant = slow
        assert instant.exposed_comm_s < 0.01 * run.exposed_comm_s
        assert run.step_time_s > run.exposed_comm_s > 0.2

    def test_the_exposed_time_is_between_what_the_engine_says_with_and_without_compute(self, slow):
        asked, run, _ = slow
        slowest = predict(asked.simulation, dataclasses.replace(timed(asked, 1), of_steps=[{}]))
        hidden_at_most_s = run.step_time_s - run.exposed_comm_s
        alone_s = exposure(slowest).exposed_s  # with nothing to hide behind
        assert run.exposed_comm_s < 1.05 * alone_s
        assert run.exposed_comm_s > 0.95 * (alone_s - hidden_at_most_s)

    def test_half_the_bandwidth_exposes_more(self, slow):
        _, run, _ = slow
        slower = setup(bandwidth_gbps=0.025)
        with session(slower) as rank:
            rank.train(1)
            assert rank.train(1, seconds_on(slower.simulation)).exposed_comm_s > 1.5 * run.exposed_comm_s

    def test_the_predicted_timeline_has_the_same_collectives(self, slow):
        asked, run, _ = slow
        predicted = predicted_timeline(predict(asked.simulation, timed(asked, 1)))
        of = [[e.label for e in t.ops if e.op in COLLECTIVES] for t in (predicted, run.timeline.select(step=1))]
        assert of[0] == of[1]
        lasted = [
            [e.duration_s for e in t.ops if e.op in COLLECTIVES] for t in (predicted, run.timeline.select(step=1))
        ]
        assert lasted[0] == pytest.approx(lasted[1])


PLANS = [
    {},
    {"reshard_after_forward": False},
    {"reshard_after_forward": True, "forward_prefetch": 2, "backward_prefetch": 2},
    {"activation_checkpointing": "full"},
    {"api": "hsdp"},
    {"param_dtype": "bf16"},
]
ON_RANKS = [pytest.param(ranks, keys) for ranks, keys in zip([64, 8, 512] * 2, PLANS, strict=True)]


class TestMemory:
    @pytest.mark.parametrize(("ranks", "keys"), some(ON_RANKS, first=2), ids=str)
    def test_the_peak_is_the_simulators(self, ranks, keys):
        asked = setup(ranks, rows=2, **keys)
        with session(asked) as rank:
            rank.train(1)
            assert asked.simulation.peak_memory_bytes == pytest.approx(rank.peak_bytes(), rel=0.05)

    def test_more_ranks_need_less(self):
        peaks = []
        for ranks in (2, 8):
            with session(setup(ranks)) as rank:
                rank.train(1)
                peaks.append(rank.peak_bytes())
        assert peaks[1] < peaks[0]


class TestResult:
    @pytest.fixture(scope="class")
    def result(self):
        return compare({"a": setup(bandwidth_gbps=1.0)}, steps=1)

    def test_it_says_what_is_pretended_and_that_the_loss_means_nothing(self, result):
        assert result.kind == "pretended"
        assert "the loss means nothing" in result.caption
        assert "The loss means nothing" in result.notes[0]
        assert all("the loss means nothing" in t.header.title for n, t in result.timelines.items() if "pretended" in n)

    def test_it_has_every_quantity_both_ways(self, result):
        assert [row.quantity for row in result.rows] == ["step time", "exposed communication", "peak memory"]
        assert all(row.predicted and row.measured for row in result.rows)
        assert abs(result.errors()["a", "peak memory"]) < 0.05

    def test_its_timelines_are_the_predicted_and_the_pretended(self, result):
        assert [(t.header.clock, t.header.world_size) for t in result.timelines.values()] == [
            ("simulated", 8), ("measured", 8),
        ]  # fmt: skip


class TestErrors:
    @pytest.mark.parametrize(
        ("asked", "says"),
        [
            (setup(api="ddp"), "api=ddp: the pretend cluster runs torch's FSDP2"),
            (setup(1), "gpus=1: a cluster of one rank"),
            (setup(api="hsdp", shard_size=3), "8 ranks do not divide into groups of 3"),
            (setup(rows=2, micro_batch=3), "micro_batch=3 does not divide the 2 rows"),
            (Setup(TrainConfig(global_batch=12), cluster(8)), "global_batch=12: 8 ranks do not divide it; use 16"),
            (setup(param_dtype="fp16"), "param_dtype=fp16: its loss scaling"),
        ],
        ids=lambda value: value[:20] if isinstance(value, str) else "",
    )
    def test_what_cannot_be_is_said(self, asked, says):
        with pytest.raises(ValueError, match=says.replace("(", r"\(")), session(asked):
            pass
        assert not dist.is_initialized()

    def test_a_model_that_does_not_fit_here(self):
        with pytest.raises(
            ValueError, match=r"teaching: rank 0 of 8 needs [\d.,]+ [GT]iB here, and [\d.,]+ [GM]iB are free"
        ):
            setup(rows=1_000_000).check()

    def test_a_torch_without_the_hooks(self):
        class Old:
            def set_custom_all_gather(self):
                pass

        with pytest.raises(ValueError, match=r"has no FSDPModule\.set_custom_reduce_scatter"):
            check_hooks(Old)

    def test_a_process_that_has_a_group(self):
        with session(setup()), pytest.raises(RuntimeError, match="a process group of 8 ranks"), session(setup()):
            pass

    def test_torch_is_left_as_it_was(self):
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives

        before = _fsdp_collectives._get_device_handle
        with session(setup()):
            assert _fsdp_collectives._get_device_handle is not before
        assert _fsdp_collectives._get_device_handle is before
        assert not dist.is_initialized()


class TestCommand:
    def test_it_prints_a_table(self, capsys):
        plan = "n_layer=1,forward_prefetch=1"
        assert main(["--rows=1", "--seq-len=16", "--steps=1", f"--plan={plan}", "--bandwidth-gbps=10"]) == 0
        printed = capsys.readouterr().out
        assert "peak memory" in printed
        assert "The loss means nothing" in printed

    @pytest.mark.parametrize(
        ("argument", "says"),
        [
            ("--plan=reshard=1", "unknown argument '--reshard=1'"),
            ("--cluster=Voodoo", "Voodoo"),
            ("--plan=api=hsdp,shard_size=3", "do not divide"),
        ],
    )
    def test_what_cannot_be_has_status_2(self, argument, says, capsys):
        assert main([argument]) == 2
        assert says in capsys.readouterr().out


def test_what_measures_a_gpus_copies_takes_memory_once(monkeypatch):
    """Else its buffers, 512 MiB, are in the peak of each step that is measured. Not run on a GPU."""
    taken = []
    monkeypatch.setattr(network.torch, "empty", lambda n_bytes, **_: taken.append(n_bytes))
    monkeypatch.setattr(network, "_median_s", lambda work: 0.5)
    network._copy_rate.cache_clear()
    try:
        assert [network._copy_rate() for _ in range(3)] == [2 * 2**28] * 3
    finally:
        network._copy_rate.cache_clear()
    assert taken == [2**28] * 2


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def gpu(self):
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU to hold its streams")

    def test_a_slower_wire_exposes_more(self):
        exposed = []
        for bandwidth_gbps in (1.0, 100.0):
            asked = dataclasses.replace(setup(bandwidth_gbps=bandwidth_gbps), device=torch.device("cuda"))
            with session(asked) as rank:
                rank.train(2)
                exposed.append(rank.train(3, seconds_on(asked.simulation)).exposed_comm_s)
        assert exposed[0] > exposed[1]

    def test_collectives_last_as_long_as_the_wire_says(self):
        asked = dataclasses.replace(setup(bandwidth_gbps=1.0), device=torch.device("cuda"))
        with session(asked) as rank:
            rank.train(2)
            run = rank.train(3, seconds_on(asked.simulation))
        gathers = [event for event in run.timeline.ops if event.op is Op.ALL_GATHER]
        predicted = {
            i.unit: asked.simulation.costs.seconds(i) for i in asked.simulation.program.ops if i.op is Op.ALL_GATHER
        }
        ratios = [event.duration_s / predicted[event.unit] for event in gathers]
        assert statistics.median(ratios) == pytest.approx(1.0, rel=0.1)
