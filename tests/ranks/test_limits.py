"""What code may use is limited, and nothing that it started is left. `tests/learn/test_check.py` has more."""

import mmap
import os
import resource
import time
from pathlib import Path

import pytest

from fsdp_sim.ranks import Limits, RanksError, run
from fsdp_sim.ranks.limits import memory_bytes


def test_wall_time_ends_ranks_that_sleep():
    with pytest.raises(RanksError, match="still running after 1 s"):
        run(lambda: time.sleep(60), 2, limits=Limits(wall_s=1.0), progress=False)


def test_threads_and_processes_are_counted_together():
    def starts_many() -> None:
        for _ in range(60):
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        time.sleep(60)

    with pytest.raises(RanksError, match="started more than 40 threads and processes") as caught:
        run(starts_many, 1, limits=Limits(tasks=40), progress=False)

    assert caught.value.verdict.ranks == (0,)


NEEDS_LINUX = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@NEEDS_LINUX
def test_a_file_that_has_no_name_counts_as_memory():
    def holds_one() -> int:
        before = memory_bytes([os.getpid()])
        os.write(os.memfd_create("nameless"), bytes(50 << 20))
        return memory_bytes([os.getpid()]) - before

    (more,) = run(holds_one, 1, limits=Limits(), progress=False)
    assert 40 << 20 < more < 60 << 20


@NEEDS_LINUX
def test_page_tables_count_as_memory():
    def looks_at_nothing() -> int:
        before, size = memory_bytes([os.getpid()]), 1 << 34
        nothing = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        nothing.madvise(mmap.MADV_NOHUGEPAGE)
        for place in range(0, size, 2 << 20):
            nothing[place]
        return memory_bytes([os.getpid()]) - before

    (more,) = run(looks_at_nothing, 1, limits=Limits(), progress=False)
    assert 32 << 20 <= more < 40 << 20  # 4 KiB for 2 MiB


@NEEDS_LINUX
def test_where_memory_is_out_the_kernel_ends_code_with_limits_first():
    def first() -> str:
        return Path("/proc/self/oom_score_adj").read_text()

    assert list(run(first, 1, limits=Limits(), progress=False)) == ["500\n"]
    assert list(run(first, 1, progress=False)) == [first()]


def test_the_kernel_counts_no_tasks_of_a_user_who_has_others():
    """Else what else the user runs would count, and ranks could start nothing."""
    before = resource.getrlimit(resource.RLIMIT_NPROC)

    assert list(run(lambda: resource.getrlimit(resource.RLIMIT_NPROC), 1, limits=Limits(), progress=False)) == [before]
