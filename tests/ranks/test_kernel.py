"""`run` in a real Jupyter kernel: functions of a cell, an interrupt, a killed kernel, what a cell shows."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from jupyter_client import BlockingKernelClient, KernelManager
from jupyter_client.kernelspec import KernelSpec

PATIENCE_S = 60.0  # the kernel and its fork server import torch, on a machine that may be busy

SLEEPERS = """
def sleepers():
    import time
    import torch.distributed as dist
    print("rank", dist.get_rank(), "sleeps", flush=True)
    while True:
        time.sleep(1)

run(sleepers, 4, progress=False)
"""


@dataclass
class Shown:
    """What a cell left behind."""

    text: str = ""
    html: list[str] = field(default_factory=list)
    error: str = ""  # its type
    traceback: list[str] = field(default_factory=list)


class Kernel:
    """A kernel with this Python, driven as a notebook does."""

    def __init__(self) -> None:
        self.manager = KernelManager()
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager._kernel_spec = KernelSpec(argv=argv, display_name="this Python", language="python")
        self.manager.start_kernel()
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def start(self, code: str) -> str:
        """Send a cell and return at once."""
        return self.client.execute(code)

    def finish(self, cell: str) -> Shown:
        """Wait for a cell."""
        shown = Shown()
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != cell:
                continue
            if kind == "stream":
                shown.text += content["text"]
            elif kind in ("display_data", "execute_result"):
                shown.html.append(content["data"].get("text/html", ""))
                shown.text += content["data"].get("text/plain", "") if kind == "execute_result" else ""
            elif kind == "error":
                shown.error, shown.traceback = content["ename"], content["traceback"]
            elif kind == "status" and content["execution_state"] == "idle":
                return shown

    def cell(self, code: str) -> Shown:
        return self.finish(self.start(code))

    def family(self) -> list[psutil.Process]:
        """The processes that the kernel has started, the ranks among them."""
        return psutil.Process(self.manager.provisioner.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        """The ranks: they alone lead sessions of their own."""
        return [p for p in self.family() if psutil.pid_exists(p.pid) and _session(p.pid) == p.pid]

    def stop(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def wait_for(condition: Callable[[], Any]) -> bool:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def all_gone(processes: list[psutil.Process]) -> bool:
    def gone(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return all(map(gone, processes))


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    assert kernel.cell("from fsdp_sim.ranks import run").error == ""
    yield kernel
    kernel.stop()


def test_a_function_of_the_cell_uses_the_notebooks_variables(kernel: Kernel) -> None:
    kernel.cell("scale = 10")
    shown = kernel.cell(
        "import torch, torch.distributed as dist\n"
        "def outer(shift):\n"
        "    def fn():\n"
        "        total = torch.tensor([dist.get_rank() * scale + shift])\n"
        "        dist.all_reduce(total)\n"
        "        return total.item()\n"
        "    return fn\n"
        "list(run(outer(1), 4, progress=False))"
    )
    assert (shown.text, shown.error) == ("[64, 64, 64, 64]", "")


def test_an_interrupt_ends_the_cell_and_its_ranks_and_nothing_else(kernel: Kernel) -> None:
    cell = kernel.start(SLEEPERS)
    assert wait_for(lambda: len(kernel.ranks()) == 4)
    ranks = kernel.ranks()
    kernel.manager.interrupt_kernel()
    assert wait_for(lambda: all_gone(ranks))
    assert kernel.finish(cell).error == "KeyboardInterrupt"
    assert kernel.manager.is_alive()
    assert kernel.cell("list(run(lambda: 7, 2, progress=False))").text == "[7, 7]"


def test_output_is_folded_by_rank(kernel: Kernel) -> None:
    shown = kernel.cell("run(lambda: print('<hello>'), 2, progress=False);")
    (html,) = shown.html
    assert html.count("<details>") == 2
    assert "<summary>rank 1: 1 lines</summary>" in html
    assert "&lt;hello&gt;" in html
    assert shown.text == ""


def test_an_error_shows_the_message_and_not_the_launcher(kernel: Kernel) -> None:
    shown = kernel.cell("def broken():\n    raise ValueError('no such layer')\nrun(broken, 2, progress=False)")
    assert shown.error == "RanksError"
    text = "\n".join(shown.traceback)
    assert text.startswith("RanksError: ranks 0 and 1 raised ValueError: no such layer")
    assert "raise ValueError('no such layer')" in text  # the line of the cell
    for launcher in ("_collect_messages", "run.py", "rank.py", "launch.py"):
        assert launcher not in text


def test_the_line_of_the_cell_is_quoted_where_a_rank_waits(kernel: Kernel) -> None:
    shown = kernel.cell(
        "def uneven():\n    if dist.get_rank() == 0:\n        dist.barrier()  # alone\nrun(uneven, 2, progress=False)"
    )
    assert "(this cell, line 3:  dist.barrier()  # alone)" in "\n".join(shown.traceback)


def test_a_fork_server_that_has_just_been_killed_is_started_again(kernel: Kernel) -> None:
    """It takes a moment to end: until then it accepts what asks it for ranks, and does not answer."""
    assert kernel.cell("list(run(lambda: 7, 2, progress=False))").text == "[7, 7]"
    (server,) = [p for p in kernel.family() if "forkserver" in str(p.cmdline())]
    server.kill()
    shown = kernel.cell("list(run(lambda: 7, 2, progress=False))")
    assert (shown.text, shown.error) == ("[7, 7]", "")


def test_killing_the_kernel_leaves_nothing_behind() -> None:
    kernel = Kernel()
    try:
        kernel.cell("from fsdp_sim.ranks import run")
        kernel.start(SLEEPERS)
        assert wait_for(lambda: len(kernel.ranks()) == 4)
        family = kernel.family()
        assert len(family) >= 5  # the fork server and the ranks
        psutil.Process(kernel.manager.provisioner.pid).kill()
        assert wait_for(lambda: all_gone(family))
    finally:
        kernel.stop()
