"""Every fault ends the call with one message that names the ranks, the collective, the unit and the line."""

import fcntl
import importlib
import io
import os
import pdb
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.ranks import RanksError, launch, run, unit, watchdog
from fsdp_sim.ranks.watchdog import source_line

TIMEOUT_S = 2.0


def failure(fn, world_size: int = 4, timeout_s: float = TIMEOUT_S) -> str:
    """The message of a call that must fail, and fail in time."""
    start_s = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run(fn, world_size, timeout_s=timeout_s, progress=False)
    assert time.monotonic() - start_s < 60  # far from gloo's own 30 minutes
    message = str(caught.value)
    for rank in range(world_size):
        assert f"rank {rank}  " in message  # each rank has its line
    assert "fix: " in message
    return message


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    def fn() -> None:
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 2:
            raise ValueError("no such layer")
        dist.all_reduce(torch.ones(2))

    message = failure(fn)
    assert message.startswith("rank 2 raised ValueError: no such layer")
    assert 'raise ValueError("no such layer")' in message
    assert "ranks/rank.py" not in message  # the launcher's own frames
    assert "rank 0  waits in #2 all_reduce of 2 fp32" in message
    assert "Connection closed" not in message  # nobody else's secondary error


def test_the_same_exception_on_all_ranks_is_reported_once() -> None:
    def fn() -> None:
        raise KeyError("wte")

    message = failure(fn, 3)
    assert message.startswith("ranks 0, 1 and 2 raised KeyError: 'wte'")
    assert message.count("Traceback") == 1


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: sys.exit(3), "rank 1 exited with code 3"),
        (lambda: os._exit(4), "rank 1 exited with code 4"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by SIGKILL"),
    ],
    ids=["sys.exit", "os._exit", "SIGKILL"],
)
def test_a_rank_that_ends_is_named_with_how_it_ended(end, words: str) -> None:
    def fn() -> None:
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 1:
            end()
        dist.all_reduce(torch.ones(2))

    # Not a matter of waiting: on a busy machine the end of a process may be seen later than the others' 2 s.
    assert failure(fn, timeout_s=20.0).startswith(words)


def test_a_rank_that_sleeps_for_ever_is_named_by_those_who_wait() -> None:
    def fn() -> None:
        if dist.get_rank() == 3:
            time.sleep(3600)
        with unit("layers.1"):
            dist.all_reduce(torch.ones(2))

    message = failure(fn)
    assert message.startswith("ranks 0, 1 and 2 waited 2 s in #1 all_reduce(layers.1) of 2 fp32 [SUM] for rank 3")
    assert "not computing (asleep, or waiting for input): rank 3" in message
    assert "test_watchdog.py, line" in message


@pytest.mark.parametrize(
    ("other", "usual", "words"),
    [
        (lambda: dist.broadcast(torch.ones(4), 0), lambda: dist.all_reduce(torch.ones(4)), "a different collective"),
        (lambda: dist.all_reduce(torch.ones(2008)), lambda: dist.all_reduce(torch.ones(2000)), "a different size"),
        (lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX), lambda: dist.all_reduce(torch.ones(4)), "MAX"),
    ],
    ids=["collective", "size", "reduce op"],
)
def test_another_collective_than_the_others_call(
    other: Callable[[], object], usual: Callable[[], object], words: str
) -> None:
    headline, _, _ = failure(lambda: other() if dist.get_rank() == 1 else usual(), 3).partition("\n")
    assert words in headline  # below it stand the lines of this file


@pytest.mark.parametrize("whose", ["torch.distributed.fsdp", "fsdp_sim.mini"])
def test_equal_units_in_another_order(whose: str) -> None:
    """With gloo alone this gives wrong numbers in silence."""

    def fn() -> None:
        shard = importlib.import_module(whose).fully_shard
        blocks = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = blocks

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for name in ("b", "a") if dist.get_rank() == 1 else ("a", "b"):
                    x = self.blocks[name](x)
                return x

        root = Root()
        for module in (*blocks.values(), root):
            shard(module)
        root(torch.ones(2, 8)).sum().backward()

    message = failure(fn, 2)
    assert "called the same collective for another unit" in message
    assert "all_gather(blocks.a)" in message
    assert "all_gather(blocks.b)" in message


def test_one_collective_too_few() -> None:
    def fn() -> None:
        for _ in range(3 + (dist.get_rank() != 0)):
            dist.all_reduce(torch.ones(4))

    message = failure(fn)
    assert message.startswith("rank 0 returned without calling #4 all_reduce")
    assert "one collective too few" in message


def test_one_asynchronous_collective_too_few_that_nobody_waits_for() -> None:
    def fn() -> None:
        for _ in range(1 + (dist.get_rank() == 1)):
            dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.1)

    assert "rank 0 returned without calling #2 all_reduce" in failure(fn, 2)


def test_a_deadlock_across_groups_names_where_each_rank_is() -> None:
    def fn() -> None:
        pair = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2), group=pair)
        dist.all_reduce(torch.ones(3))

    message = failure(fn)
    assert "waited 2 s" in message
    assert "rank 1  waits in #1 all_reduce of 3 fp32" in message


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux, where a process can be given no core")
def test_a_rank_that_a_busy_machine_keeps_from_computing_is_not_a_hang() -> None:
    def fn() -> float:
        if dist.get_rank() == 1:
            until_s = time.monotonic() + 3 * TIMEOUT_S
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            if os.fork() == 0:  # takes the core for itself
                while time.monotonic() < until_s:
                    pass
                os._exit(0)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            while time.monotonic() < until_s:
                pass
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    assert list(run(fn, 2, timeout_s=TIMEOUT_S, progress=False)) == [2.0, 2.0]


def test_a_rank_held_by_a_debugger_is_not_a_hang() -> None:
    def fn() -> str:
        if dist.get_rank() == 0:

            class Slow:  # somebody thinks before typing
                def readline(self) -> str:
                    time.sleep(1.5 * TIMEOUT_S)
                    return "continue\n"

            pdb.Pdb(stdin=Slow(), stdout=io.StringIO(), nosigint=True).set_trace()
        dist.all_reduce(torch.ones(1))
        return "done"

    assert list(run(fn, 2, timeout_s=TIMEOUT_S, progress=False)) == ["done", "done"]


def test_sleeping_outside_collectives_is_not_a_hang() -> None:
    def fn() -> str:
        time.sleep(1.5 * TIMEOUT_S)
        return "done"

    assert list(run(fn, 2, timeout_s=TIMEOUT_S, progress=False)) == ["done", "done"]


def test_the_next_call_works_after_every_kind_of_end() -> None:
    assert list(run(lambda: dist.get_rank(), 2, progress=False)) == [0, 1]


# ---------------------------------------------------------------------- sends and receives


@pytest.mark.parametrize(
    ("sent", "received", "words"),
    [
        (torch.ones(4), torch.ones(4, dtype=torch.int32), "of another dtype than rank 0 sends"),
        (torch.ones(4), torch.ones(8), "of another size than rank 0 sends"),
        (torch.ones(8), torch.ones(4), "of another size than rank 0 sends"),  # gloo ends the process
    ],
    ids=["dtype", "more is received", "less is received"],
)
def test_a_receive_that_does_not_fit_its_send_is_named(sent: torch.Tensor, received: torch.Tensor, words: str) -> None:
    def fn() -> None:
        same = torch.ones(2)
        if dist.get_rank() == 0:
            dist.send(same, 1)
            dist.send(sent, 1)
        else:
            dist.recv(same, 0)
            dist.recv(received, 0)

    message = failure(fn, 2)
    assert message.startswith(f"rank 1 receives into a tensor {words}")
    assert f"rank 0 sends {sent.numel()} fp32 to rank 1 (test_watchdog.py, line " in message
    kind = "int32" if received.dtype == torch.int32 else "fp32"
    assert f"rank 1 receives {received.numel()} {kind} from rank 0 (test_watchdog.py, line " in message


def test_what_is_sent_is_compared_with_the_receive_of_its_tag_and_peer_and_from_anyone_with_nothing() -> None:
    def fn() -> list[float]:
        rank, small, large = dist.get_rank(), torch.zeros(1), torch.zeros(2)
        if rank == 0:
            works = [dist.isend(torch.full((1,), 1.0), 1, tag=7), dist.isend(torch.full((2,), 2.0), 1, tag=9)]
            for work in works:
                work.wait()
            dist.send(torch.full((1,), 3.0), 2)
        elif rank == 1:
            dist.recv(large, 0, tag=9)
            dist.recv(small, 0, tag=7)
            dist.recv(torch.zeros(3), 2)
            dist.send(torch.full((2,), 4.0), 2)
        else:
            dist.recv(small)
            dist.send(torch.zeros(3), 1)
            dist.recv(large)
        return [small.item(), large[0].item()]

    assert list(run(fn, 3, progress=False)) == [[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]


# ---------------------------------------------------------------------- loops, stopped ranks, odd signals


def test_an_endless_loop_is_called_computing_and_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn() -> None:
        while dist.get_rank() == 1:
            pass
        dist.all_reduce(torch.ones(1))

    monkeypatch.setattr(watchdog, "BUSY_FACTOR", 1.5)
    message = failure(fn, 2, timeout_s=1.4)
    waited = re.match(r"rank 0 waited ([\d.]+) s in #1 all_reduce of 1 fp32 \[SUM\] for rank 1", message)
    assert waited, message
    assert float(waited[1]) >= 2.1  # and not the time-out, which is no limit for a rank that computes
    assert "why: computing all that time, outside any collective: rank 1." in message
    assert "fix: look for a loop that does not end" in message
    assert "asleep" not in message


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_rank_that_is_stopped_is_named_whether_or_not_another_waits(others_wait: bool) -> None:
    def fn() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if others_wait:
            dist.all_reduce(torch.ones(1))

    message = failure(fn, 2, timeout_s=1.0)
    assert message.startswith("rank 1 stopped at a signal (SIGSTOP) and did not go on for 1 s")
    assert "kill -CONT" in message


def test_ranks_that_never_find_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program holds the lock of the file over which they meet, as a network's disk may."""
    prepare, held = launch._prepare, []

    def locked(folder: Path, settings: dict) -> launch.Ranks:
        held.append(os.open(folder / "store", os.O_RDWR | os.O_CREAT))
        fcntl.flock(held[0], fcntl.LOCK_EX)
        return prepare(folder, settings)

    monkeypatch.setattr(launch, "_prepare", locked)
    monkeypatch.setattr(watchdog, "JOIN_S", 1.5)
    message = failure(lambda: None, 2, timeout_s=1.0)
    os.close(held[0])
    assert message.startswith("ranks 0 and 1 did not join the others for 1.5 s")
    assert "set TMPDIR to a folder on a disk of this machine" in message


def test_where_no_rank_does_anything_the_call_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BUSY_FACTOR", 2)
    message = failure(lambda: time.sleep(600), 2, timeout_s=1.0)
    assert message.startswith("ranks 0 and 1 did nothing for 2 s, outside any collective")
    assert "if this wait is honest, pass a larger timeout_s" in message


def test_what_a_rank_has_started_may_compute_while_the_rank_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "import time; end_s = time.process_time() + 3\nwhile time.process_time() < end_s: pass"
    monkeypatch.setattr(watchdog, "BUSY_FACTOR", 1)
    run(lambda: subprocess.run([sys.executable, "-c", loop], check=True).returncode, 1, timeout_s=1.0, progress=False)


def test_a_rank_that_is_stopped_at_birth_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    start = BaseProcess.start

    def stopped(process: BaseProcess) -> None:
        start(process)
        if process.name == "rank1":
            os.kill(process.pid or 0, signal.SIGSTOP)

    monkeypatch.setattr(BaseProcess, "start", stopped)
    message = failure(lambda: None, 2, timeout_s=1.0)
    assert message.startswith("rank 1 stopped at a signal (SIGSTOP) and did not go on for 1 s")


def test_where_a_record_was_issued_may_be_no_place() -> None:
    assert source_line("nonsense:x") == "nonsense, line x"


def test_a_signal_without_a_name_is_given_by_its_number() -> None:
    assert "rank 0 was killed by signal 40" in failure(lambda: os.kill(os.getpid(), 40), 1)
