"""Checks of ``fsdp-sim doctor``: what this operating system, its limits and its tools allow."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np

from fsdp_sim.cli.doctor_finding import DoctorFinding
from fsdp_sim.words import human_bytes

MIB, GIB = 2**20, 2**30
FILES, THREADS = 512, 64  # more than 8 ranks, their sockets and a notebook have open at once
TORCHRUN_PORT, JUPYTER_PORT = 29500, 8888
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMPILERS = ("c++", "g++", "clang++")


def machine() -> DoctorFinding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        import psutil
    except ModuleNotFoundError:
        return DoctorFinding("machine", "works", f"{cores} cores", "4 ranks are comfortable on 2 cores and 8 GiB")
    free = psutil.virtual_memory().available
    good = free >= 3 * GIB
    remedy = "" if good else "close other programs; the notebooks start 4 ranks"
    found = f"{cores} cores, {human_bytes(free)} of memory free"
    return DoctorFinding("machine", "works" if good else "broken", found, "the notebooks: 4 ranks, about 3 GiB", remedy)


def disk() -> DoctorFinding:
    """Writes and reads back a file in this folder, which is where runs and checkpoints go."""
    free = shutil.disk_usage(Path.cwd()).free
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()) as file:
            file.write(bytes(MIB))
    except OSError as error:
        remedy = "change to a folder of your own, or free some space"
        return DoctorFinding(
            "this folder", "broken", f"cannot be written to: {error.strerror}", "runs, checkpoints", remedy
        )
    good = free >= GIB
    remedy = "" if good else "free some space: set-up takes 2.5 GB, a run's checkpoints some more"
    return DoctorFinding(
        "this folder", "works" if good else "broken", f"{human_bytes(free)} free", "runs, checkpoints", remedy
    )


def temporary_folder() -> DoctorFinding:
    """Writes and reads back a file where the ranks meet."""
    folder, needed_for = tempfile.gettempdir(), "ranks: they meet there"
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(MIB))
        file.flush()
        good = Path(file.name).read_bytes() == bytes(MIB)
    free = shutil.disk_usage(folder).free
    good = good and free >= 64 * MIB
    remedy = "" if good else "free some space there, or set TMPDIR to another folder"
    found = f"{folder}, {human_bytes(free)} free"
    return DoctorFinding("temporary folder", "works" if good else "broken", found, needed_for, remedy)


def limits() -> DoctorFinding:
    """Opens files and starts threads, as many as the ranks of a notebook need together."""
    needed_for, remedy = "several ranks at once", "raise the limits: ulimit -n 4096, ulimit -u 4096"
    with ExitStack() as stack:
        try:
            for opened in range(FILES):  # noqa: B007 - told below
                stack.enter_context(open(os.devnull))
        except OSError as error:
            return DoctorFinding("limits", "broken", f"{opened} files open: {error.strerror}", needed_for, remedy)
        go_on = threading.Event()
        stack.callback(go_on.set)
        try:
            for started in range(THREADS):  # noqa: B007
                threading.Thread(target=go_on.wait, daemon=True).start()
        except RuntimeError:
            return DoctorFinding("limits", "broken", f"no more than {started} threads start", needed_for, remedy)
    return DoctorFinding("limits", "works", f"{FILES} files and {THREADS} threads at once", needed_for)


def ports() -> DoctorFinding:
    """Listens on loopback and connects to it; then asks whether the ports that are used by default are free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        with socket.create_connection(server.getsockname(), timeout=10) as client, server.accept()[0] as other:
            client.sendall(b"?")
            answered = other.recv(1) == b"?"
    needed_for = "gloo, torchrun, Jupyter"
    if not answered:
        remedy = "let programs connect to 127.0.0.1"
        return DoctorFinding("ports", "broken", "loopback does not answer", needed_for, remedy)
    taken = [port for port in (TORCHRUN_PORT, JUPYTER_PORT) if _taken(port)]
    remedies = {
        TORCHRUN_PORT: f"{TORCHRUN_PORT} is torchrun's: use --standalone, or --master-port",
        JUPYTER_PORT: f"{JUPYTER_PORT} is Jupyter's, which takes the next one",
    }
    found = "loopback answers; " + (f"in use: {', '.join(map(str, taken))}" if taken else "29500 and 8888 are free")
    return DoctorFinding("ports", "works", found, needed_for, "; ".join(remedies[port] for port in taken))


def _taken(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


def shared_memory() -> DoctorFinding:
    """Allocates some shared memory, as NCCL does between processes."""
    needed_for = "NCCL, and Chromium's pages"
    if not os.path.isdir("/dev/shm"):
        return DoctorFinding("shared memory", "absent", "no /dev/shm", needed_for, "not used on this system")
    piece = SharedMemory(create=True, size=MIB)
    try:
        np.ndarray(MIB, np.uint8, buffer=piece.buf)[:] = 1
    finally:
        piece.close()
        piece.unlink()
    free = shutil.disk_usage("/dev/shm").free
    good = free >= 64 * MIB
    remedy = "" if good else "start the container with --shm-size=1g"
    return DoctorFinding(
        "shared memory", "works" if good else "broken", f"{human_bytes(free)} free", needed_for, remedy
    )


def compiler() -> DoctorFinding:
    """Compiles a program and runs it."""
    needed_for = "torch.compile on CPU cores"
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        remedy = "apt install g++; or train with --compile_backend=aot_eager, which needs none"
        return DoctorFinding("C++ compiler", "absent", f"none of {', '.join(names)}", needed_for, remedy)
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "two.cpp"), Path(folder, "two")
        source.write_text("#include <vector>\nint main() { return std::vector<int>(2, 1).size() == 2 ? 0 : 1; }\n")
        asked = [path, "-fopenmp" if sys.platform == "linux" else "-O1", str(source), "-o", str(program)]
        built = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        good = built.returncode == 0 and subprocess.run([program], timeout=60, check=False).returncode == 0
    found = path if good else f"{path} compiles nothing that runs: {_first(built.stderr)}"
    remedy = "" if good else "reinstall it, with its standard library and OpenMP: apt install g++"
    return DoctorFinding("C++ compiler", "works" if good else "broken", found, needed_for, remedy)


def browser() -> DoctorFinding:
    """Opens a page in a browser."""
    needed_for = "pictures of figures (PNG, SVG), browser tests"
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        return DoctorFinding(
            "Chromium", "absent", "not found", needed_for, "apt install chromium, or any Chrome on the PATH"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    with tempfile.TemporaryDirectory() as folder:
        asked = [
            path, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            f"--user-data-dir={folder}", "--dump-dom", "data:text/html,<p id=shown>",
        ]  # fmt: skip
        shown = subprocess.run(asked, capture_output=True, text=True, timeout=90, check=False)
    good = 'id="shown"' in shown.stdout
    found = version.stdout.strip() if good else f"shows no page: {_first(shown.stderr)}"
    remedy = "" if good else "reinstall it; in a container give it shared memory: --shm-size=1g"
    return DoctorFinding("Chromium", "works" if good else "broken", found, needed_for, remedy)


def _first(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:120] if lines else "no message"
