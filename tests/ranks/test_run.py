"""`run`: a function of this very module, with its closure, on real gloo ranks."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from fsdp_sim.ranks import RanksError, launch, run, track
from fsdp_sim.ranks.board import RankBoard
from fsdp_sim.timeline import RECORDER, Lane, Op
from tests.ranks.test_kernel import all_gone, wait_for


def test_results_come_back_by_rank_with_closures_and_arguments() -> None:
    scale = 10

    def fn(shift: int) -> dict[str, torch.Tensor]:
        total = torch.tensor([float(dist.get_rank() * scale + shift)])
        dist.all_reduce(total)
        return {"total": total}

    results = run(fn, 3, 1, progress=False)
    assert [result["total"].item() for result in results] == [33.0, 33.0, 33.0]


def test_each_rank_has_its_own_environment_and_threads() -> None:
    def fn() -> tuple[str | None, str | None, int]:
        return os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), torch.get_num_threads()

    assert list(run(fn, 2, threads=1, progress=False)) == [("0", "2", 1), ("1", "2", 1)]


def test_output_is_kept_apart_per_rank_even_from_child_processes(capfd: pytest.CaptureFixture[str]) -> None:
    def fn() -> None:
        print(f"hello from {dist.get_rank()}")
        subprocess.run(["echo", f"child of {dist.get_rank()}"], check=True)

    results = run(fn, 2, progress=False)
    assert results.output == ["hello from 0\nchild of 0\n", "hello from 1\nchild of 1\n"]
    assert "[rank 1] child of 1" in capfd.readouterr().out


def test_raw_collectives_are_on_the_timeline_with_bytes_and_order() -> None:
    def fn() -> None:
        out = torch.empty(8)
        dist.all_gather(list(out.chunk(2)), torch.ones(4))
        dist.all_reduce(out)

    timeline = run(fn, 2, progress=False).timeline
    for rank in range(2):
        gather, reduce = timeline.select(rank=rank).ops
        assert (gather.op, gather.lane, gather.bytes, gather.group_size) == (Op.ALL_GATHER, Lane.ALL_GATHER, 32, 2)
        assert (reduce.op, reduce.bytes) == (Op.ALL_REDUCE, 32)
        assert gather.end_s <= reduce.start_s
        assert "test_run.py" in gather.source


def test_an_event_that_the_caller_has_opened_is_that_of_the_next_collective_alone() -> None:
    def fn() -> None:
        opened = RECORDER.begin(Op.ALL_GATHER, "a")
        with RECORDER.label("b", opened):
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1))
        RECORDER.end(opened)

    assert [event.label for event in run(fn, 1, progress=False).timeline.ops] == ["ALL_GATHER(a)", "ALL_REDUCE(b)"]


def test_functional_collectives_and_dtensor_work() -> None:
    def fn() -> list[float]:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,))
        return distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]).full_tensor().tolist()

    assert list(run(fn, 2, progress=False)) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


def test_a_long_run_of_collectives_neither_hangs_nor_loses_records() -> None:
    def fn() -> float:
        total = torch.ones(1)
        for _ in track(range(3000)):
            dist.all_reduce(total)
            total /= 2
        return total.item()

    results = run(fn, 2, progress=False)
    assert list(results) == [1.0, 1.0]
    assert len(results.timeline.ops) == 6000


@pytest.mark.parametrize(
    ("world_size", "words"),
    [(0, "must be between 1 and 64"), (-1, "must be between"), (65, "must be between"), (2.5, "whole number")],
)
def test_a_wrong_world_size_is_refused_before_anything_starts(world_size: object, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        run(lambda: None, world_size)  # type: ignore[arg-type]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="must be a function"):
        run(3)  # type: ignore[arg-type]
    for timeout_s in (0, -1.0, float("nan"), True, "3", None):
        with pytest.raises(ValueError, match=f"timeout_s={timeout_s!r}"):
            run(lambda: None, 1, timeout_s=timeout_s)  # type: ignore[arg-type]
    for threads in (0, True, 1.5):
        with pytest.raises(ValueError, match=f"threads={threads!r}"):
            run(lambda: None, 1, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Network"):
        run(lambda: None, 1, network=10)  # type: ignore[arg-type]


def test_what_cannot_travel_is_named_before_anything_starts() -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        run(lambda: lock, 1)


def test_what_cannot_come_back_is_named() -> None:
    with pytest.raises(RanksError, match="returned a generator, which cannot be sent back"):
        run(lambda: (i for i in range(3)), 1, progress=False)


def test_a_script_without_a_main_guard_may_call_run(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from fsdp_sim.ranks import run\nprint(list(run(lambda: 7, 2, progress=False)))\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[7, 7]\n", done.stderr


INTERRUPTED = """
    import pathlib, signal, sys
    from fsdp_sim.ranks import run
    runs, inside = 0, False
    def interrupted(*_):
        if inside:
            raise KeyboardInterrupt
    signal.signal(signal.SIGINT, interrupted)
    def one():
        global inside, runs
        inside = True
        try:
            run(lambda: None, 2, progress=False)
        finally:
            inside = False
        runs += 1
    folder = pathlib.Path(sys.argv[1])
    while not (folder / "stop").exists():
        try:
            one()
        except KeyboardInterrupt:
            inside = False
        (folder / "began").touch()
    print(runs)
"""


def test_interrupts_at_any_moment_and_pressed_twice_leave_no_rank_and_no_folder(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp_path = tmp_path_factory.mktemp("t")  # short: the server's socket lies below
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(tmp_path)]
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert wait_for((tmp_path / "began").exists)
            moments = random.Random(7)
            for _ in range(25):
                time.sleep(moments.uniform(0.0, 0.2))
                process.send_signal(signal.SIGINT)
                time.sleep(moments.uniform(0.0, 0.03))
                process.send_signal(signal.SIGINT)
            time.sleep(0.5)  # and some that nobody interrupts
            (tmp_path / "stop").touch()
            family = psutil.Process(process.pid).children(recursive=True)
            assert int(process.communicate(timeout=60)[0]) > 0
        finally:
            process.kill()
    assert process.returncode == 0
    assert not list((tmp_path / "tmp").glob("fsdp_sim-*"))
    assert wait_for(lambda: all_gone(family))


STOPPED_SERVER = """
    import os, signal, threading
    from multiprocessing import forkserver
    from fsdp_sim.ranks import launch, run
    run(print, 1, progress=False, show_output=False)
    stop = lambda: os.kill(forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
    def call():
        try:
            print(run(lambda: 7, 2, progress=False))
        except (OSError, KeyboardInterrupt) as error:
            print(type(error).__name__, error)
    launch.START_S = 1
    stop()
    call()
    ensure = forkserver._forkserver.ensure_running
    forkserver.ensure_running = lambda: (ensure(), stop())
    call()
    launch.START_S, launch.INTERRUPTED_S = 60, 0.5
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    call()
    forkserver.ensure_running = ensure
    call()
"""


def test_where_no_rank_can_be_forked_another_server_is_tried_then_the_call_ends_and_not_the_next_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STOPPED_SERVER)], stdout=subprocess.PIPE, text=True, timeout=240
    )
    after_one, refused, interrupted, again = done.stdout.splitlines()
    assert refused.startswith("NotStartedError rank 0 of 2 did not start within 1 s, in which the process that ranks")
    assert "call again" in refused
    assert interrupted.startswith("KeyboardInterrupt")
    assert (after_one, again) == ("[7, 7]",) * 2


def test_in_a_notebook_the_server_starts_when_the_cell_that_imports_ranks_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell_ends, started = [], []
    events = SimpleNamespace(
        register=lambda event, callback: cell_ends.append((event, callback)),
        unregister=lambda event, callback: cell_ends.remove((event, callback)),
    )
    shell = SimpleNamespace(events=events)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(launch, "start_server", lambda: started.append(True))

    launch.start_server_after_cell()
    ((event, callback),) = cell_ends
    assert (event, started) == ("post_run_cell", [])
    callback(None)
    assert (cell_ends, started) == ([], [True])


def test_a_folder_for_sockets_with_too_long_a_path_is_named(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    command = [sys.executable, "-c", "from fsdp_sim.ranks import run; run(print, 1)"]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(long)}, stderr=subprocess.PIPE, text=True)
    assert done.stderr.splitlines()[-1].startswith(f"OSError: TMPDIR={long} is too long")


def test_a_call_that_cannot_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(RankBoard, "create", refuse)
    with pytest.raises(OSError, match=r"no room for the ranks' shared files.*No space left on device.*set TMPDIR"):
        run(lambda: None, 1)
    assert not list(tmp_path.iterdir())


def test_a_variable_called_config_beside_torch_distributed_travels() -> None:
    config = {"layers": 2}
    globals()["config"] = config
    source = "def fn():\n    return dist.get_rank() + config['layers']\n"
    scope = {"dist": dist, "config": config, "__name__": "__main__"}
    exec(source, scope)  # as in a cell: by value, with globals
    assert list(run(scope["fn"], 2, progress=False)) == [2, 3]


def test_the_progress_bar_is_for_people_not_for_log_files(capfd: pytest.CaptureFixture[str]) -> None:
    def fn() -> None:
        for _ in track(range(3)):
            __import__("time").sleep(0.2)

    run(fn, 1)
    assert capfd.readouterr().out == ""


def test_who_died_is_named_even_where_its_neighbour_tells_first() -> None:
    def fn() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
        time.sleep(1.0)  # the news of a death may take longer than that of a connection
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RanksError, match=r"rank 0.*SIGKILL"):
        run(fn, 2, progress=False)
