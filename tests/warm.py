"""Torchrun and kernels without their 10 seconds of imports, for tests that are not about how they are started.

    python -c CLIENT python -m torch.distributed.run --standalone --nproc_per_node=2 -m labs.train --api=ddp
    python -c CLIENT python -m ipykernel_launcher -f FILE

run torchrun's own agent and its ranks, or a kernel, as ever, but forked from a server that has imported torch and the
trainer; a kernel's ranks come from the server's fork server. What they print, their environment and the exit status
are those of the client; what signal it gets they get.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
ADDRESS = "WARM_TORCHRUN"
"""The environment variable that tells a client where the server listens."""
START_TIMEOUT_S = 120
LATE = (
    "transformers.models.t5.modeling_t5", "transformers.models.bert.modeling_bert", "accelerate", "lightning_fabric",
    "labs.experiments.hugging_face.run_hugging_face",
)  # fmt: skip
"""What ranks would import when they train, which takes 6 seconds of each."""

CLIENT = f"""
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(os.environ[{ADDRESS!r}])
asked = json.dumps(dict(command=sys.argv[2:], environ=dict(os.environ), folder=os.getcwd())).encode()
spaces = [os.open("/proc/self/ns/" + of, os.O_RDONLY) for of in ("user", "net")] if sys.platform == "linux" else []
socket.send_fds(server, [len(asked).to_bytes(4, "big")], [1, 2, *spaces])
server.sendall(asked)
forked = int.from_bytes(server.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(forked, number))
status = server.recv(1)
sys.exit(status[0] if status else "it was killed")
"""
"""Given ``PYTHON -m MODULE ARGUMENTS``; stands where `labs.cluster.torchrun.TIED` did, or before a kernel's command."""


@contextmanager
def serving(folder: Path, *modules: str) -> Iterator[str]:
    """A server that starts; gives its address, see `listening`. What it has forked gets SIGTERM when it ends.

    Args:
        folder: for its socket.
        modules: what it and its fork server import besides.
    """
    address = str(folder / "warm")
    environ = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, __file__, address, *modules], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL
    ) as server:
        try:
            yield address
        finally:
            server.terminate()


def listening(address: str) -> str:
    """The address of a server, when it listens there."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while not os.path.exists(address):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{__file__} does not listen at {address} after {START_TIMEOUT_S} s")
        time.sleep(0.05)
    return address


def preload(*modules: str) -> None:
    """Start the server from which this process's ranks are forked: it imports what labs do and these, too.

    What is not installed is left out.
    """
    from fsdp_sim.ranks import launch

    launch.PRELOAD += ["labs.loop.run_state", "labs.checkpoint", "labs.measure.allocations", *modules]
    launch.start_server()


# ---- The server -----------------------------------------------------------------------------------------------------


def _serve(address: str, *modules: str) -> None:
    _end_with_parent()
    preload(*modules)
    import ipykernel.kernelapp  # noqa: F401
    import torch._dynamo  # noqa: F401  # which the first step of every optimizer imports

    import fsdp_sim.learn
    import fsdp_sim.mini
    import fsdp_sim.viz  # noqa: F401
    import labs.train  # noqa: F401

    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # what is imported is no garbage: to look through it copies its pages
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{address}.new")
    server.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked
    os.rename(f"{address}.new", address)
    while True:
        client, _ = server.accept()
        size, files, _, _ = socket.recv_fds(client, 4, 4)
        asked = json.loads(client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        if os.fork() == 0:
            server.close()
            _become(client, files, **asked)
        for file in files:
            os.close(file)
        client.close()


def _become(client: socket.socket, files: list[int], command: list[str], environ: dict[str, str], folder: str) -> None:
    """What the client was to be. Ranks that it starts come from the server's fork server, whose parent it is not."""
    from multiprocessing import forkserver

    forkserver.ForkServer.ensure_running = forkserver.ensure_running = lambda *_: None  # type: ignore[method-assign]
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for space, name in zip(files[2:], ("user", "net"), strict=False):  # nodes have networks of their own
        if os.fstat(space).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            assert ctypes.CDLL(None, use_errno=True).setns(space, 0) == 0, os.strerror(ctypes.get_errno())
    for number, file in enumerate(files[:2], start=1):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    client.sendall(os.getpid().to_bytes(4, "big"))
    threading.Thread(target=_end_with, args=(client,), daemon=True).start()
    from labs.cluster import torchrun

    torchrun.TIED = CLIENT  # what it starts is forked too
    module, *arguments = command[command.index("-m") + 1 :]
    status = _status_of(lambda: (_torchrun if module == "torch.distributed.run" else _kernel)(module, arguments))
    client.sendall(bytes([status]))
    os._exit(status)


def _torchrun(_: str, arguments: list[str]) -> None:
    """Its ranks are forked too."""
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = ForkedRank  # type: ignore[assignment, misc]
    torchrun.main(arguments)


def _kernel(module: str, arguments: list[str]) -> None:
    import torch

    if "OMP_NUM_THREADS" not in os.environ:  # which the server has
        torch.set_num_threads(os.cpu_count() or 1)
    sys.path[:] = [path for path in sys.path if path not in (str(ROOT), str(ROOT / "tests"))]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(client: socket.socket) -> None:
    """Who kills the client kills this process, and what it has started."""
    client.recv(1)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    os._exit(1)


class ForkedRank(subprocess.Popen[bytes]):
    """``PYTHON -u -m MODULE ...`` or ``PYTHON -u SCRIPT ...``, forked from this process, which has imported torch."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], **_: object) -> None:
        self._command, self._env = list(args[2:]), env
        super().__init__(args)

    def _execute_child(self, *_: object) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            _rank(self._command, self._env)
        self._child_created = True


def _rank(command: list[str], env: dict[str, str]) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the agent's
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    if command[0] == "-m":
        _, module, *arguments = command
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(module, None)  # the server has imported it, and it is to run
        run: Callable[[], object] = lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)  # noqa: E731
        sys.argv = [module, *arguments]
    else:
        script, *_ = sys.argv = command
        sys.path.insert(0, str(Path(script).parent))
        run = lambda: runpy.run_path(script, run_name="__main__")  # noqa: E731
    os._exit(_status_of(run))


def _end_with_parent() -> None:
    """The server ends with the tests, and what it has forked with it; on Linux however the tests end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _status_of(main: Callable[[], object]) -> int:
    """The exit status of a Python that runs this."""
    try:
        main()
        status = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    _serve(*sys.argv[1:])
