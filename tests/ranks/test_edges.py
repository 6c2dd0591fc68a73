"""What learners do beside the plain path: other collectives, threads, child processes, odd results, odd exceptions."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_sim.ranks import Network, RanksError, launch, run
from fsdp_sim.ranks.board import RECORD, RING, RankBoard, Record
from fsdp_sim.ranks.network import Wire
from fsdp_sim.ranks.output import SHOWN_BYTES
from fsdp_sim.ranks.watchdog import source_line
from fsdp_sim.timeline import Op

FAST = Network(bandwidth_gbps=10, latency_us=100)
TIMEOUT_S = 2.0


def message_of(fn, world_size: int = 2, **settings) -> str:
    with pytest.raises(RanksError) as caught:
        run(fn, world_size, timeout_s=TIMEOUT_S, progress=False, **settings)
    return str(caught.value)


# ---------------------------------------------------------------------- every way to communicate


def every_collective() -> dict[str, object]:
    rank, got = dist.get_rank(), {}
    objects: list = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    got["all_gather_object"] = objects
    box = [f"from {rank}"]
    dist.broadcast_object_list(box, 1)
    got["broadcast_object_list"] = box
    gathered = [torch.zeros(2) for _ in range(2)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), gathered, dst=0)
    got["gather"] = gathered and [t.tolist() for t in gathered]
    mine = torch.zeros(2)
    dist.scatter(mine, [torch.ones(2), torch.ones(2) * 2] if rank == 0 else None, src=0)
    got["scatter"] = mine.tolist()
    swapped = torch.empty(2)
    dist.all_to_all_single(swapped, torch.arange(2.0) + 10 * rank)
    got["all_to_all_single"] = swapped.tolist()
    total = torch.ones(3)
    dist.reduce(total, dst=1)
    got["reduce"] = total.tolist() if rank == 1 else None
    dist.barrier()
    dist.monitored_barrier()
    return got


@pytest.mark.parametrize("network", [None, FAST], ids=["gloo", "slow network"])
def test_every_collective_brings_what_it_should(network: Network | None) -> None:
    zero, one = run(every_collective, 2, network=network, progress=False)
    assert zero["all_gather_object"] == one["all_gather_object"] == [{"rank": 0}, {"rank": 1}]
    assert zero["broadcast_object_list"] == one["broadcast_object_list"] == ["from 1"]
    assert (zero["gather"], one["gather"]) == ([[0.0, 0.0], [1.0, 1.0]], None)
    assert (zero["scatter"], one["scatter"]) == ([1.0, 1.0], [2.0, 2.0])
    assert (zero["all_to_all_single"], one["all_to_all_single"]) == ([0.0, 10.0], [1.0, 11.0])
    assert one["reduce"] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("network", [None, FAST], ids=["gloo", "slow network"])
def test_sends_and_receives_pair_up_alone_in_batches_and_from_anyone(network: Network | None) -> None:
    def fn() -> list[float]:
        rank, (x, y, z) = dist.get_rank(), torch.zeros(3, 1)
        ops = [dist.P2POp(dist.isend, torch.full((1,), 1.0 + rank), 1 - rank), dist.P2POp(dist.irecv, x, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if rank == 0:
            dist.send(torch.full((1,), 5.0), 1)
            return [x.item(), dist.recv(z), z.item()]
        dist.recv(y, 0)
        dist.send(y + 1, 0)
        return [x.item(), y.item()]

    assert list(run(fn, 2, network=network, progress=False)) == [[2.0, 1, 6.0], [1.0, 5.0]]


def test_a_peer_in_a_group_is_named_by_its_global_rank() -> None:
    def fn() -> None:
        group = dist.new_group([1, 2])
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(4), 2, group=group)

    message = message_of(fn, 3)
    assert message.startswith("rank 1 waited 2 s in recv (peer=2) of 4 fp32 for rank 2")
    assert "rank 2 returned before that" in message


def test_a_receive_from_anyone_that_nobody_answers_ends_too() -> None:
    def fn() -> None:
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(1))

    assert message_of(fn).startswith("rank 0 waited 2 s in recv (peer=any)")


def test_a_group_that_one_of_its_members_does_not_create_is_named() -> None:
    def fn() -> None:
        if dist.get_rank() == 0:
            dist.new_group([0, 1])
        else:
            time.sleep(600)

    assert message_of(fn, 3).startswith("rank 0 waited 2 s in #1 new_group [ranks=0,1] for ranks 1 and 2")


def test_groups_created_in_another_order_are_named() -> None:
    def fn() -> None:
        for ranks in ([0], [1]) if dist.get_rank() == 0 else ([1], [0]):
            dist.new_group(ranks)

    message = message_of(fn)
    assert "new_group [ranks=0]" in message
    assert "new_group [ranks=1]" in message


def test_a_mesh_of_two_dimensions_has_its_groups_in_the_same_order_everywhere() -> None:
    def fn() -> float:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=mesh.get_group("shard"))
        return total.item()

    assert list(run(fn, 4, progress=False)) == [1.0, 1.0, 5.0, 5.0]


def test_a_time_out_inside_nested_groups_names_the_group_that_waits() -> None:
    def fn() -> None:
        dist.new_group([0, 1, 2])
        inner = dist.new_group([1, 2])
        if dist.get_rank() == 2:
            time.sleep(600)
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(7), group=inner)
        dist.barrier()

    assert "all_reduce of 7 fp32 [SUM] for rank 2" in message_of(fn, 3)


def test_honest_compute_that_others_wait_for_through_others_is_not_a_hang() -> None:
    def fn() -> str:
        inner = dist.new_group([1, 2])
        if dist.get_rank() == 2:
            end_s = time.monotonic() + 2 * TIMEOUT_S
            while time.monotonic() < end_s:
                torch.ones(64, 64) @ torch.ones(64, 64)
        if dist.get_rank() > 0:
            dist.all_reduce(torch.ones(7), group=inner)
        dist.barrier()
        return "done"

    assert list(run(fn, 3, timeout_s=TIMEOUT_S, progress=False)) == ["done"] * 3


def test_a_monitored_barrier_is_watched_too() -> None:
    def fn() -> None:
        if dist.get_rank() == 0:
            dist.monitored_barrier()

    assert message_of(fn).startswith("rank 1 returned without calling #1 barrier")


def test_code_that_destroys_the_process_group_as_under_torchrun_may_do_so() -> None:
    def fn() -> float:
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    assert list(run(fn, 2, progress=False)) == [2.0, 2.0]


def test_the_bytes_of_a_coalesced_collective_are_those_of_all_its_tensors() -> None:
    def fn() -> None:
        dist.all_reduce_coalesced([torch.ones(10), torch.ones(20)])

    timeline = run(fn, 2, progress=False).timeline
    assert [e.bytes for e in timeline.ops] == [120, 120]


# ---------------------------------------------------------------------- DDP and FSDP2


def train_ddp() -> float:
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(p.sum().item() for p in model.parameters())


def test_ddp_trains_and_its_gradients_are_on_the_timeline() -> None:
    results = run(train_ddp, 2, network=FAST, progress=False)
    assert results[0] == results[1]
    assert len(results.timeline.select(rank=0, op=Op.ALL_REDUCE).ops) == 3


def test_a_rank_that_leaves_ddps_backward_out_is_waited_for_and_named() -> None:
    def fn() -> None:
        model = DistributedDataParallel(nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        if dist.get_rank() == 1:
            time.sleep(600)
        loss.backward()

    message = message_of(fn)
    assert "all_reduce of 20 fp32 [SUM] for rank 1" in message
    assert "loss.backward()" in message


@pytest.mark.parametrize(("whose", "network"), [("torch", FAST), ("mini", None)], ids=["torch", "mini"])
def test_collectives_of_fully_shard_carry_the_unit(whose: str, network: Network | None) -> None:
    def fn() -> None:
        if whose == "torch":
            from torch.distributed.fsdp import fully_shard
        else:
            from fsdp_sim.mini import fully_shard
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        fully_shard(model[0])
        fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()

    timeline = run(fn, 2, network=network, progress=False).timeline
    reduced = [e.label for e in timeline.select(rank=0, op=Op.REDUCE_SCATTER)]
    assert reduced == ["REDUCE_SCATTER(root)", "REDUCE_SCATTER(0)"] or reduced == [
        "REDUCE_SCATTER(0)",
        "REDUCE_SCATTER(root)",
    ]


# ---------------------------------------------------------------------- futures and peeks


def test_a_hang_behind_a_future_ends_too() -> None:
    def fn() -> None:
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()

    assert message_of(fn).startswith("rank 0 waited 2 s in #1 all_reduce")


def test_the_end_of_one_wait_does_not_hide_another() -> None:
    def fn() -> None:
        late = dist.new_group([0, 1])
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()  # done while the next one waits
        if dist.get_rank() == 1:
            time.sleep(0.5)
            future.wait()
            time.sleep(600)
        dist.all_reduce(torch.ones(5), group=late)

    assert "all_reduce of 5 fp32 [SUM] for rank 1" in message_of(fn)


def test_a_peek_at_a_slow_collective_does_not_wait_for_it() -> None:
    slow = Network(bandwidth_gbps=0.08)  # 10 MB/s: 0.4 s for the all-reduce below

    def fn() -> tuple[int, bool]:
        work, peeks = dist.all_reduce(torch.ones(1_000_000), async_op=True), 0
        while not work.is_completed():
            peeks += 1
            time.sleep(0.01)
        return peeks, work.is_completed()

    for peeks, done in run(fn, 2, network=slow, progress=False):
        assert peeks > 5
        assert done


# ---------------------------------------------------------------------- what goes in and comes out


def test_arrays_tensors_and_dtensors_come_back() -> None:
    def fn() -> dict[str, object]:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        weight = torch.ones(2, requires_grad=True)
        sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        return {"array": np.arange(3), "graph": weight * 2, "bf16": torch.ones(2).bfloat16(), "sharded": sharded}

    zero, one = run(fn, 2, progress=False)
    assert zero["array"].tolist() == [0, 1, 2]
    assert zero["graph"].tolist() == [2.0, 2.0]
    assert zero["bf16"].dtype is torch.bfloat16
    assert (zero["sharded"].to_local().tolist(), one["sharded"].to_local().tolist()) == ([0.0, 1.0], [2.0, 3.0])


def test_an_exception_that_cannot_be_sent_or_printed_is_reported_all_the_same() -> None:
    class BadError(Exception):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __str__(self) -> str:
            raise RuntimeError("no")

    def fn() -> None:
        raise BadError

    message = message_of(fn)
    assert message.startswith("ranks 0 and 1 raised BadError: (its __str__ raised RuntimeError)")
    assert "raise BadError" in message


def test_an_exceptions_text_drives_no_terminal() -> None:
    def fn() -> None:
        raise ValueError("\x1b[2J\x1b]0;owned\x07 gone")

    message = message_of(fn)
    assert r"raised ValueError: \x1b[2J\x1b]0;owned\x07 gone" in message
    assert "\x1b" not in message


def test_what_cannot_be_made_again_from_a_result_is_the_ranks_fault() -> None:
    class Leaves:
        def __reduce__(self):
            return sys.exit, (7,)

    assert message_of(Leaves).startswith("rank 0 returned what cannot be made again in this process (SystemExit(7))")


def test_of_a_rank_that_forks_only_the_rank_itself_returns() -> None:
    def fn() -> str:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        return "rank" if child else "child"

    assert list(run(fn, 2, progress=False)) == ["rank", "rank"]


def test_each_has_arguments_for_every_rank() -> None:
    with pytest.raises(ValueError, match="for each of 2 ranks, not 3"):
        run(print, 2, each=[(1,), (2,), (3,)])


def test_of_an_exception_as_long_as_a_book_both_ends_are_shown() -> None:
    def fn() -> None:
        raise type("Begin" + "x" * 1_000_000, (Exception,), {})("x" * 50_000_000 + "end")

    message = message_of(fn)
    assert len(message) < 100_000
    assert message.startswith("ranks 0 and 1 raised Beginx")
    assert "characters cut" in message
    assert "raise type(" in message


@pytest.mark.parametrize("what", ["closed", "no file"])
def test_a_function_may_close_its_standard_output(what: str) -> None:
    def fn() -> int:
        if what == "closed":
            sys.stdout.close()
        else:
            sys.stdout = sys.stderr = None
        return 7

    assert list(run(fn, 2, progress=False)) == [7, 7]


def test_megabytes_of_output_are_cut_from_the_front() -> None:
    def fn() -> None:
        for number in range(200_000):
            print("line", number)

    (text,) = run(fn, 1, progress=False, show_output=False).output
    assert len(text) < SHOWN_BYTES + 100
    assert text.startswith("... ")
    assert text.endswith("line 199999\n")


def test_what_c_code_prints_arrives() -> None:
    def fn() -> None:
        import ctypes

        ctypes.CDLL(None).printf(b"from C\n")

    assert run(fn, 1, progress=False, show_output=False).output == ["from C\n"]


def test_ranks_see_the_callers_environment_and_folder_and_keep_theirs(tmp_path, monkeypatch) -> None:
    def fn() -> tuple[str | None, str | None, str]:
        left = os.environ.get("LEFT_BY_A_RANK")
        os.environ["LEFT_BY_A_RANK"] = "1"
        return os.environ.get("SET_BY_A_CELL"), left, os.getcwd()

    monkeypatch.setenv("SET_BY_A_CELL", "now")
    monkeypatch.chdir(tmp_path)
    assert run(fn, 1, progress=False)[0] == ("now", None, str(tmp_path))
    monkeypatch.delenv("SET_BY_A_CELL")
    assert run(fn, 1, progress=False)[0] == (None, None, str(tmp_path))
    assert not {"RANK", "WORLD_SIZE", launch.IN_SERVER} & set(os.environ)


def test_random_numbers_differ_between_calls_as_in_fresh_processes() -> None:
    def fn() -> tuple[float, float]:
        import random

        return random.random(), float(np.random.rand())

    draws = [draw for _ in range(2) for result in run(fn, 2, progress=False) for draw in result]
    assert len(set(draws)) == 8


def test_a_data_loader_may_have_workers() -> None:
    def fn() -> list[list[int]]:
        loader = torch.utils.data.DataLoader(range(4), batch_size=2, num_workers=1)
        return [batch.tolist() for batch in loader]

    assert list(run(fn, 2, progress=False)) == [[[0, 1], [2, 3]]] * 2


def test_run_inside_a_rank_is_refused() -> None:
    assert "run() was called inside a rank" in message_of(lambda: run(lambda: None, 1), 1)


def test_run_inside_a_rank_is_refused_where_another_started_the_fork_server() -> None:
    source = """
import multiprocessing as mp
context = mp.get_context("forkserver")
if __name__ == "__main__":
    context.set_forkserver_preload(["fsdp_sim.ranks"])
    process = context.Process(target=print)
    process.start()
    process.join()
    from fsdp_sim.ranks import run
    run(lambda: run(lambda: None, 1), 1, progress=False)
"""
    done = subprocess.run([sys.executable, "-"], input=source, capture_output=True, text=True, timeout=60)
    assert "run() was called inside a rank" in done.stderr


# ---------------------------------------------------------------------- threads and processes of the caller


def test_two_threads_may_run_at_the_same_time() -> None:
    results: dict[int, list] = {}

    def call(number: int) -> None:
        def fn() -> float:
            total = torch.full((1,), float(number))
            dist.all_reduce(total)
            return total.item()

        for _ in range(3):
            results[number] = list(run(fn, 2, progress=False))

    threads = [threading.Thread(target=call, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [2.0, 2.0], 2: [4.0, 4.0]}


def test_two_threads_of_a_rank_may_communicate_in_groups_of_their_own() -> None:
    def fn() -> list[float]:
        groups, totals = [dist.new_group([0, 1]) for _ in range(2)], [torch.ones(1), torch.ones(1)]

        def work(number: int) -> None:
            for _ in range(100):
                dist.all_reduce(totals[number], group=groups[number])
                totals[number] /= 2

        threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [t.item() for t in totals]

    results = run(fn, 2, network=Network(bandwidth_gbps=100), progress=False)
    assert list(results) == [[1.0, 1.0]] * 2
    assert len(results.timeline.select(op=Op.ALL_REDUCE).ops) == 400


def test_nothing_is_left_in_the_temporary_folder(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, torch.distributed as dist\nfrom fsdp_sim.ranks import run, RanksError\n"
        "run(lambda: 1, 2, progress=False)\n"
        "try:\n    run(lambda: 1 / 0, 2, progress=False)\nexcept RanksError:\n    pass\n"
        "def fn():\n    os.kill(dist.get_rank() == 0 and caller or os.getpid(), signal.SIGKILL)\n"
        "caller = os.getpid()\nrun(fn, 2, progress=False)\n"
    )
    folder = tmp_path / "tmp"
    folder.mkdir()
    done = subprocess.run([sys.executable, script], env=os.environ | {"TMPDIR": str(folder)}, timeout=120, check=False)
    assert done.returncode != 0  # it was killed by its own rank
    end_s = time.monotonic() + 5
    while (left := list(folder.glob("fsdp_sim-*"))) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize("end", ["return", "raise", "die"])
def test_what_a_rank_started_in_a_session_of_its_own_ends_with_the_call(tmp_path, end: str) -> None:
    def fn() -> None:
        nested = "import os, sys, time; os.fork(); open(f'{sys.argv[1]}/{os.getpid()}', 'w'); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", nested, str(tmp_path)], start_new_session=True)
        while len(os.listdir(tmp_path)) < 2:
            time.sleep(0.01)
        if end == "raise":
            raise ValueError
        if end == "die":
            os._exit(3)

    with contextlib.suppress(RanksError):
        run(fn, 1, progress=False)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    until_s = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < until_s, "it is still there"
        time.sleep(0.02)
    assert len(pids) == 2


# ---------------------------------------------------------------------- the board and the wire


def record_of(group_seq: int, members: tuple[int, ...] = (0, 1), **fields) -> Record:
    plain = {"op": "all_reduce", "unit": "", "detail": "", "dtype": "", "source": "", "numel": 1, "group": 1}
    return Record(**plain | {"group_seq": group_seq, "members": members, "issue_s": 0.0, "cost_s": 0.0} | fields)


def test_of_a_text_too_long_for_the_board_the_end_is_kept(tmp_path) -> None:
    board = RankBoard.create(tmp_path / "board", 1)
    path = "/home/learner/" + "deep/" * 60 + "train.py:12"
    board.post(0, record_of(0, (0,), source=path, unit="é" * 80 + ".layers.7"))
    (record,) = board.read(0, 0, 1)
    assert record.source == path[-RECORD["source"].itemsize :]
    assert record.unit.endswith("é.layers.7")
    assert source_line(record.source) == "train.py, line 12"


def test_only_the_latest_of_several_waits_is_shown(tmp_path) -> None:
    board = RankBoard.create(tmp_path / "board", 1)
    with board.waiting(0, 3):
        with board.waiting(0, 5):
            assert board.status["waiting"][0] == 5
        assert board.status["waiting"][0] == 3
    assert board.status["waiting"][0] == -1


def test_a_wait_that_raises_is_over(tmp_path) -> None:
    board = RankBoard.create(tmp_path / "board", 1)
    with pytest.raises(ZeroDivisionError), board.waiting(0, 3):
        raise ZeroDivisionError
    assert board.status["waiting"][0] == -1


def test_the_wire_takes_the_cost_of_the_rank_that_has_the_whole_message(tmp_path) -> None:
    board = RankBoard.create(tmp_path / "board", 2)
    for rank, cost_s in ((0, 3.0), (1, 1.0)):  # a gather: rank 0 receives from all
        board.post(rank, record_of(0, issue_s=10.0 + rank, cost_s=cost_s))
    spans = [Wire(board, rank, FAST).span_if_known(record_of(0)) for rank in (0, 1)]
    assert spans == [(11.0, 14.0), (11.0, 14.0)]


def test_the_wire_does_not_know_what_has_not_been_issued(tmp_path) -> None:
    board = RankBoard.create(tmp_path / "board", 2)
    board.post(0, record_of(0, issue_s=1.0))
    wire = Wire(board, 0, FAST)
    assert wire.span_if_known(record_of(0)) is None
    board.post(1, record_of(0, issue_s=2.0))
    assert wire.span_if_known(record_of(0)) == (2.0, 2.0)


@pytest.mark.parametrize("network", [None, FAST], ids=["gloo", "slow network"])
def test_a_rank_that_looks_on_while_another_fills_its_ring(tmp_path, network: Network | None) -> None:
    board = RankBoard.create(tmp_path / "board", 2)
    board.post(0, record_of(0, issue_s=1.0))
    board.post(1, record_of(0, issue_s=2.0))
    board.status["read"] = 10 * RING  # the parent reads along
    for _ in range(RING + 1):
        board.post(1, record_of(-1, (1,), op="send", detail="peer=0"))
    wire = Wire(board, 0, network)
    if network is None:
        assert wire.span_if_known(record_of(0, issue_s=1.0)) == (1.0, 1.0)  # gloo was done, so rank 1 had come
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 issued 2,050 operations while rank 0 issued none"):
            wire.span_if_known(record_of(0))


def test_a_ring_of_sends_longer_than_the_board_then_a_collective() -> None:
    def fn() -> float:
        rank, x = dist.get_rank(), torch.zeros(1)
        for _ in range(RING):
            work = dist.isend(torch.ones(1), 1 - rank)
            dist.recv(x, 1 - rank)
            work.wait()
        dist.all_reduce(x)
        return x.item()

    assert list(run(fn, 2, network=Network(bandwidth_gbps=100), record=False, progress=False)) == [2.0, 2.0]
