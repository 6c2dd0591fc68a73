"""Torchrun without its 10 seconds of imports, for tests that train and are not about how a training is started.

    python -c CLIENT python -m torch.distributed.run --standalone --nproc_per_node=2 -m labs.train --api=ddp

runs torchrun's own agent and its ranks as ever, but both are forked from a server that has imported torch and the
trainer. What they print, their environment and the exit status are those of the client; what signal it gets they get.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from labs.notebook import TIED

ROOT = Path(__file__).parents[1]
ADDRESS = "WARM_TORCHRUN"
"""The environment variable that tells a client where the server listens."""

CLIENT = f"""
import json, os, signal, socket, sys
if "--standalone" not in sys.argv:  # nodes have networks of their own
    exec({TIED!r})
server = socket.socket(socket.AF_UNIX)
server.connect(os.environ[{ADDRESS!r}])
asked = json.dumps(dict(arguments=sys.argv[4:], environ=dict(os.environ), folder=os.getcwd())).encode()
socket.send_fds(server, [len(asked).to_bytes(4, "big")], [1, 2])
server.sendall(asked)
agent = int.from_bytes(server.recv(4), "big")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(agent, number))
status = server.recv(1)
sys.exit(status[0] if status else "the agent was killed")
"""
"""Takes the place of `labs.notebook.TIED`: given ``PYTHON -m torch.distributed.run ARGUMENTS``."""


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A server; gives its address. Its agents get SIGTERM when it ends.

    Args:
        folder: for its socket.
    """
    address = str(folder / "warm")
    environ = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-u", __file__, address]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == b"listening\n"
        try:
            yield address
        finally:
            server.terminate()


# ---- The server -----------------------------------------------------------------------------------------------------


def _serve(address: str) -> None:
    import torch._dynamo  # noqa: F401  # which the first step of every optimizer imports

    import labs.train  # noqa: F401

    _end_with_parent()
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for agents
    print("listening")
    while True:
        client, _ = server.accept()
        size, files, _, _ = socket.recv_fds(client, 4, 2)
        asked = json.loads(client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        if os.fork() == 0:
            server.close()
            _agent(client, files, **asked)
        for file in files:
            os.close(file)
        client.close()


def _agent(client: socket.socket, files: list[int], arguments: list[str], environ: dict[str, str], folder: str) -> None:
    """torchrun's `main`, whose ranks are forked."""
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    client.sendall(os.getpid().to_bytes(4, "big"))
    subprocess_handler.Popen = ForkedRank  # type: ignore[assignment, misc]
    status = _status_of(lambda: torchrun.main(arguments))
    client.sendall(bytes([status]))
    os._exit(status)


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
    """The server ends with the tests, and its agents with it; on Linux however the tests end."""
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
    _serve(sys.argv[1])
