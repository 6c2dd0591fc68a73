"""`check` always answers with a verdict: whatever the code does, it hurts neither the notebook nor the machine."""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch.distributed as dist

from fsdp_sim.learn import Verdict, check, progress
from fsdp_sim.learn.check import judge
from fsdp_sim.learn.find import load
from fsdp_sim.ranks import Limits, inbox
from fsdp_sim.ranks.plain import encode
from tests.some import some

NAME = "all_gathers_per_step"
SHORT = Limits(cpu_s=1, wall_s=20.0)


def right(layers: int, reshard_after_forward: bool | None) -> int:
    return layers + 1 + {True: layers + 1, None: layers, False: 0}[reshard_after_forward]


def answer_to(code: Callable[[], Any], limits: Limits | None = None) -> Verdict:
    """The verdict on a function that runs some code and answers rightly."""

    def solution(layers: int, reshard_after_forward: bool | None) -> int:
        code()
        return right(layers, reshard_after_forward)

    return judge(load(NAME), solution, limits)


def test_the_right_answer_passes_and_goes_on_the_record() -> None:
    verdict = check(NAME, right)

    assert verdict.passed
    assert progress.entry(NAME).state is progress.ExerciseState.PASSED
    assert verdict.use(4, None) == 9
    assert repr(verdict.use) == "<your right>"


def test_a_cell_that_goes_on_with_another_exercise_is_told_to_run_its_check_again() -> None:
    verdict = check(NAME, right)

    with pytest.raises(TypeError, match=r"right was checked last.*run the check above this cell again"):
        verdict.use("one argument")


def test_after_a_wrong_answer_the_notebook_goes_on_with_the_reference() -> None:
    verdict = check(NAME, lambda layers, keep: 7)

    assert not verdict.passed
    assert verdict.use(4, None) == 9
    assert repr(verdict.use) == "<the reference solution of all_gathers_per_step>"
    assert progress.entry(NAME).state is progress.ExerciseState.TRIED


def test_an_answer_that_is_only_printed_is_none() -> None:
    verdict = check(NAME, lambda layers, keep: print(right(layers, keep)))

    assert "it returns nothing: write the answer after `return`; printing it is not enough" in verdict.message


def test_what_cannot_be_sent_back_is_said_without_a_place_in_our_code() -> None:
    verdict = check(NAME, lambda layers, keep: (n for n in [right(layers, keep)]))

    assert verdict.message.endswith("return numbers, texts, lists, dicts or tensors.")


# ---------------------------------------------------------------------- code that does not return


def bomb_of_threads() -> None:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def bomb_of_processes() -> None:
    while True:
        os.fork()


def endless_loop() -> None:
    while True:
        pass


def endless_print() -> None:
    while True:
        print("x" * 10_000)


def memory() -> None:
    kept = []
    while True:
        kept.append(bytearray(50_000_000))


def segmentation_fault() -> None:
    ctypes.string_at(0)


@pytest.mark.parametrize(
    ("code", "message"),
    some(
        [
            pytest.param(lambda: {}[3], "it raised KeyError: 3, in solution"),
            pytest.param(
                endless_loop, "it was still running after 1 s of computing; is there a loop that does not end?"
            ),
            pytest.param(bomb_of_processes, "it started more than 120 threads and processes"),
            pytest.param(memory, "it wanted more"),
            pytest.param(lambda: sys.exit(3), "it exited with code 3"),
            pytest.param(segmentation_fault, "it was killed by SIGSEGV"),
            pytest.param(lambda: time.sleep(60), "it was still running after 3 s"),
            pytest.param(bomb_of_threads, "threads"),
            pytest.param(lambda: exit(), "it exited with code 0"),
            pytest.param(lambda: os._exit(1), "it exited with code 1"),
            pytest.param(lambda: os.kill(os.getpid(), 9), "it was killed by SIGKILL"),
        ],
        first=6,
    ),
    ids=lambda value: None if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_it_is_said_what_happened(code: Callable[[], Any], message: str) -> None:
    limits = {"it wanted more": Limits(), "it was still running after 3 s": Limits(wall_s=3.0)}.get(message, SHORT)

    verdict = answer_to(code, limits)

    assert not verdict.passed
    assert message in verdict.message
    assert "\n" not in verdict.message


def test_code_that_fills_the_disk_with_its_output_is_stopped_and_its_output_is_cut() -> None:
    verdict = answer_to(endless_print, Limits(cpu_s=5, wall_s=60.0, file_bytes=2_000_000))

    assert not verdict.passed
    assert len(str(verdict)) < 5_000


def test_what_it_started_does_not_outlive_it(tmp_path: Path) -> None:
    """Also where it hides in sessions of its own, below processes that have ended, and is still being started."""

    def daemons() -> None:
        for _ in range(6):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    (tmp_path / str(os.getpid())).touch()
                    time.sleep(600)
                os._exit(0)
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)

    answer_to(daemons)
    until_s = time.monotonic() + 20
    for pid in (int(path.name) for path in tmp_path.iterdir()):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until_s, "the daemon is still there"
            time.sleep(0.05)


def test_ranks_that_hang_are_told_who_waits_for_whom() -> None:
    def hangs(chunks: Any) -> None:
        if dist.get_rank() == 0:
            dist.barrier()

    verdict = judge(load("reduce_scatter_from_sends"), hangs)

    assert "returned without calling #1 barrier" in verdict.message
    assert "rank 0 issued it" in verdict.message


def test_a_function_that_cannot_be_sent_is_told_why() -> None:
    lock = threading.Lock()
    verdict = answer_to(lambda: lock.locked())

    assert not verdict.passed
    assert "your function cannot be sent to a process of its own" in verdict.message
    assert "something that lives in this process only" in verdict.message


def test_a_notebooks_own_exit_is_pythons() -> None:
    """IPython's ``exit`` holds the whole kernel, which cannot be sent."""

    class ZMQExitAutocall:
        def __init__(self) -> None:
            self.kernel = threading.Lock()

        def __call__(self) -> None: ...

    leave = ZMQExitAutocall()

    assert "it exited with code 0" in answer_to(lambda: leave()).message


# ---------------------------------------------------------------------- nothing executes where it comes back


class Evil:
    """An object whose pickle runs a command where it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_result_with_a_malicious_reduce_does_not_execute(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    pickle.loads(pickle.dumps(Evil(tmp_path / "it_works")))
    assert (tmp_path / "it_works").exists()  # else this test would show nothing

    def answers(layers: int, keep: bool | None, path: str = str(mark)) -> Any:
        class Local:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.system, (f"touch {path}",)

        return Local()

    verdict = judge(load(NAME), answers)

    assert "cannot be sent back as plain data" in verdict.message
    assert not mark.exists()


def test_a_pickle_written_into_the_rank_s_own_connection_does_not_execute(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    evil = pickle.dumps(Evil(mark))

    def writes() -> None:
        frame = inspect.currentframe()
        while frame is not None:
            for thing in frame.f_locals.values():
                if isinstance(thing, Connection):
                    thing.send_bytes(evil)
            frame = frame.f_back

    verdict = answer_to(writes)

    assert not verdict.passed
    assert "is no message of a rank" in verdict.message
    assert not mark.exists()


def control_of_this_rank() -> Connection:
    """The rank's own connection, from the frames of its callers."""
    frame = inspect.currentframe()
    while True:
        assert frame is not None
        for thing in frame.f_locals.values():
            if isinstance(thing, Connection):
                return thing
        frame = frame.f_back


def writes_raw(*parts: bytes) -> None:
    for part in parts:
        os.write(control_of_this_rank().fileno(), part)
    time.sleep(600)


def done(result: bytes) -> tuple[bytes]:
    """A whole message of a rank that has returned, as `fsdp_sim.ranks.inbox.send` writes it."""
    message = msgspec.msgpack.encode(inbox.ResultMessage(result, msgspec.msgpack.encode([])))
    return (len(message).to_bytes(4, "big") + message,)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((b"\x00\x00\x01\x00", b"!"), "no message of a rank: it ends after 5 bytes"),  # a length, and one byte of it
        ((b"\x00",), "no message of a rank: it ends after 1 bytes"),
        ((b"\x7f\xff\xff\xff",), "no message of a rank: it has 2,147,483,647 bytes; at most"),
        ((b"\xff\xff\xff\xff" + b"\xff" * 8,), "no message of a rank: it has 18,446,744,073,709,551,615 bytes"),
        ((b"\x80\x00\x00\x00",), "no message of a rank: its length is given as -2,147,483,648"),
        (done(b"\x00"), "what a rank sent back is no result"),
        (done(encode({})), "what your code sent back cannot be read ('answers')"),
        (done(encode(7)), "what your code sent back cannot be read ('int' object"),
    ],
    ids=["half a message", "half a length", "too long", "far too long", "below zero", "none", "empty", "a number"],
)
def test_what_it_writes_to_its_connection_holds_nobody_up(
    parts: tuple[bytes, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "STILL_S", 0.5)
    verdict = answer_to(lambda: writes_raw(*parts), SHORT)

    assert not verdict.passed
    assert message in verdict.message


def test_a_message_of_empty_lists_takes_no_memory() -> None:
    """Sixty million of them would be five gigabytes."""

    def writes() -> None:
        control = control_of_this_rank()
        size = 60_000_000
        os.write(control.fileno(), (size + 5).to_bytes(4, "big") + b"\xdd" + size.to_bytes(4, "big"))
        for _ in range(60):
            left = memoryview(b"\x90" * 1_000_000)
            while left:
                left = left[os.write(control.fileno(), left) :]
        time.sleep(600)

    before = peak_memory_bytes()
    verdict = answer_to(writes)

    assert "no message of a rank" in verdict.message
    assert peak_memory_bytes() - before < 300e6


def peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("issued", [10**12, -1, 2 * 10**8])
def test_a_count_that_cannot_be_is_no_exception_and_takes_no_memory(issued: int) -> None:
    def counts() -> None:
        from fsdp_sim.ranks.work import Context

        Context.board.status["issued"][0] = issued
        time.sleep(600)

    verdict = answer_to(counts)

    assert not verdict.passed
    assert "it has overwritten the count of its collectives" in verdict.message


def test_a_board_cut_short_does_not_end_the_caller() -> None:
    def cuts() -> None:
        from fsdp_sim.ranks.work import Context

        os.truncate(Context.board.status.filename, 0)
        time.sleep(600)

    verdict = answer_to(cuts)

    assert not verdict.passed
    assert "cut short" in verdict.message or "SIGBUS" in verdict.message


def test_a_board_full_of_nonsense_is_no_exception() -> None:
    def scribbles() -> None:
        from fsdp_sim.ranks.work import Context

        Context.board.records["numel"] = -1
        Context.board.status["issued"] = 2**62

    assert not answer_to(scribbles).passed


@pytest.mark.parametrize("answer", [float("nan"), 10**400, "x" * 10**6, [[[]]], {"a": {}}, b"\xff", object, "\ud800"])
def test_odd_answers_are_only_wrong(answer: object) -> None:
    verdict = judge(load(NAME), lambda layers, keep: answer)

    assert not verdict.passed
    assert len(verdict.message) < 1_000


# ---------------------------------------------------------------------- calls


def test_wrong_calls_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'all_gathers_per_step'"):
        check("all_gather_per_step", right)
    with pytest.raises(TypeError, match="without calling it"):
        check(NAME, 11)  # type: ignore[arg-type]


def test_what_it_printed_is_shown() -> None:
    verdict = answer_to(lambda: print("here <b>"))

    assert "here <b>" in str(verdict)
    assert "here &lt;b&gt;" in verdict._repr_html_()


def test_importing_the_room_brings_in_no_torch_and_no_exercise_and_code_on_ranks_no_simulator() -> None:
    question = (
        "import sys, fsdp_sim.learn; "
        "print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('fsdp_sim.learn.exercises.'))); "
        "fsdp_sim.learn.find.load('case_31'); "
        "print(sorted(m for m in sys.modules if m.startswith(('fsdp_sim.simulat', 'fsdp_sim.engine', "
        "'fsdp_sim.schedule'))))"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)

    assert (answer.returncode, answer.stdout.split()) == (0, ["[]", "[]"])
