"""Make `.venv`, the environment everything here runs in: `python3 fsdp_sim/cli/setup.py [--torch keep|cpu|cuda]`.

The Makefile runs this file before anything is installed. So it uses the standard library alone, and syntax (hence no
annotations) that a Python as old as 3.6 can read, up to the sentence that says that it is too old.

Read it from the bottom: `main` checks, `set_up` installs in four steps, and every way to fail is one sentence that says
what to do. A set-up that did not reach its end leaves no stamp, and the next one starts over; what pip downloaded
before stays in pip's own cache.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
LOG = VENV / "setup.log"
STAMP = VENV / "setup.json"  # written last: it is there only when the set-up reached its end
LOCK = ROOT / "requirements.lock"
PYPROJECT = ROOT / "pyproject.toml"

OLDEST_PYTHON, FIRST_UNTRIED_PYTHON = (3, 11), (3, 15)  # torch 2.13 has builds for 3.11 to 3.14
CHOICES = ("auto", "keep", "cpu", "cuda")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What .venv holds when done, and what passes through the temporary folder, in bytes, with some room. Measured on Linux:
# 1.97 GB with the CPU build, 0.75 GB of it torch; the CUDA figures are estimates.
DISK_BYTES = {"keep": 14 * 10**8, "cpu": 24 * 10**8, "cuda": 94 * 10**8}
TEMP_BYTES = {"keep": 3 * 10**8, "cpu": 6 * 10**8, "cuda": 4 * 10**9}
# For NCCL's buffers and Chromium's pages; a container has 64 MiB unless told otherwise.
SHARED_MEMORY_BYTES = 64 * 2**20
AGAIN = "then run the same command again"


class SetupError(Exception):
    """A sentence that names what is wrong and what to do."""


# ---- checks: each a function of what was found ----------------------------------------------------------------------


def check_python(version, executable):
    """Raise SetupError unless `version`, a tuple like `sys.version_info`, is one that this project and torch run on."""
    said = "{} is Python {}".format(executable, ".".join(map(str, version[:3])))
    if tuple(version[:2]) < OLDEST_PYTHON:
        raise SetupError(
            f"{said}, and 3.11 or newer is needed: install one (Debian, Ubuntu: sudo apt install python3.11 "
            f"python3.11-venv) or name one you have, as in make PYTHON=/path/to/python3.11."
        )
    if tuple(version[:2]) >= FIRST_UNTRIED_PYTHON:
        raise SetupError(
            f"{said}, and torch has no builds for it yet: name an older one, as in make PYTHON=/path/to/python3.13."
        )


def check_venv_module(has_ensurepip, version, executable):
    """Raise SetupError where Python came without the part that makes virtual environments, as on bare Debian."""
    if not has_ensurepip:
        raise SetupError(
            f"{executable} cannot make a virtual environment: install its venv package (Debian, Ubuntu: "
            f"sudo apt install python{version[0]}.{version[1]}-venv), {AGAIN}."
        )


def check_disk(needs):
    """Raise SetupError unless every file system has room; `needs` lists (folder, bytes needed, bytes free, device)."""
    for device in {need[3] for need in needs}:
        here = [need for need in needs if need[3] == device]
        needed, free = sum(need[1] for need in here), min(need[2] for need in here)
        if free < needed:
            raise SetupError(
                f"The set-up needs about {needed / 1e9:.1f} GB of disk under {here[0][0]} and {free / 1e9:.1f} GB are "
                f"free: make room there, {AGAIN}."
            )


def check_shared_memory(free_bytes, folder="/dev/shm"):
    """Raise SetupError where `folder`, through which processes share memory, has too little of it."""
    if free_bytes < SHARED_MEMORY_BYTES:
        raise SetupError(
            f"{folder} has {free_bytes // 2**20} MiB free and {SHARED_MEMORY_BYTES // 2**20} are needed: make it "
            f"larger (sudo mount -o remount,size=1G {folder}; in a container, docker run --shm-size=1g), {AGAIN}."
        )


def check_port(port):
    """Raise SetupError unless `port`, as given on the command line, is a number and free on 127.0.0.1."""
    if not (port.isdigit() and 1 <= int(port) <= 65535):
        raise SetupError(f"PORT={port} is not a port: give a number from 1 to 65535, as in make lab PORT=8889.")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Jupyter does: a port just left is free
        try:
            listener.bind(("127.0.0.1", int(port)))
        except PermissionError:
            raise SetupError(f"Port {port} is for root alone: take a higher one, as in make lab PORT=8889.") from None
        except OSError:
            other = int(port) + 1 if int(port) < 65535 else 8888
            raise SetupError(
                f"Port {port} is taken by another program: stop it, or take another port with make lab PORT={other}."
            ) from None


def choose_torch(request, found, usable_range, has_driver):
    """Turn the request into the build to install: "keep", "cpu" or "cuda".

    Args:
        request: One of CHOICES.
        found: Version of the torch that the base Python can import and that has gloo, or None.
        usable_range: ((2, 11), (2, 14)): the lowest version that will do and the first that will not.
        has_driver: Whether an NVIDIA driver answers.
    """
    if request not in CHOICES:
        raise SetupError(f"TORCH={request} is not a choice: take one of {', '.join(CHOICES)}.")
    low, high = usable_range
    usable = found is not None and low <= tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < high
    if request == "keep" and not usable:
        wanted = f"{low[0]}.{low[1]} or newer and older than {high[0]}.{high[1]}, with gloo"
        raise SetupError(
            f"TORCH=keep found {'no torch' if found is None else 'torch ' + found} in {sys.executable}, and it must be "
            f"{wanted}: install one there, or let make TORCH=cpu or TORCH=cuda install it into .venv."
        )
    if request == "auto":
        return "keep" if usable else "cuda" if has_driver else "cpu"
    return request


def explain(log):
    """Return the sentence for a pip run that failed, from what it printed."""
    if re.search(r"No space left on device|Disk quota exceeded", log):
        return f"The disk filled up during the set-up: make room, {AGAIN}."
    if re.search(r"NewConnectionError|NameResolution|Max retries|ProxyError|ReadTimeout|ConnectTimeout|SSLError", log):
        return f"pip cannot reach its package index: check the network or pip's proxy and index settings, {AGAIN}."
    missing = re.search(r"No matching distribution found for (\S+)", log)
    if missing and "(from versions: none)" in log:
        return (
            f"pip found no version at all of {missing[1]}: check that it can reach a package index (the network, and "
            f"the settings that pip config list shows), {AGAIN}."
        )
    if missing:
        return (
            f"pip's index has no {missing[1]} for Python {sys.version_info[0]}.{sys.version_info[1]} on this system: "
            f"try another Python, as in make PYTHON=python3.12."
        )
    return "pip could not install what is needed: its last words are above."


# ---- what is there ----------------------------------------------------------------------------------------------


def torch_pin():
    """Return the version of torch that requirements.lock names, "2.13.0"."""
    return re.search(r"^torch==(\S+)$", LOCK.read_text(), re.M)[1]


def torch_range():
    """Return the versions of torch that pyproject.toml allows, as ((2, 11), (2, 14))."""
    low, high = re.search(r'"torch>=([\d.]+),<([\d.]+)"', PYPROJECT.read_text()).groups()
    return tuple(map(int, low.split("."))), tuple(map(int, high.split(".")))


def ask_for_torch(python):
    """Return what `python` says of the torch it can import: version, gloo, cuda, folders; None where it has none."""
    question = (
        "import json, os, sys, torch, torch.distributed as d\n"
        "folders = [os.path.dirname(os.path.dirname(torch.__file__))]\n"
        "folders += [p for p in sys.path if os.path.basename(p) in ('site-packages', 'dist-packages')]\n"
        "gloo = d.is_available() and d.is_gloo_available()\n"
        "print(json.dumps({'version': torch.__version__, 'gloo': gloo, 'cuda': torch.version.cuda,\n"
        "    'device': torch.cuda.is_available(), 'folders': list(dict.fromkeys(folders))}))"
    )
    answer = subprocess.run([str(python), "-W", "ignore", "-c", question], capture_output=True, text=True)
    return json.loads(answer.stdout.splitlines()[-1]) if answer.returncode == 0 else None


def has_nvidia_driver():
    """Return whether nvidia-smi is there and sees a GPU."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60).stdout.startswith(b"GPU")
    except (OSError, subprocess.TimeoutExpired):
        return False


def has_ensurepip():
    """Return whether this Python can put pip into a virtual environment."""
    from importlib.util import find_spec

    return find_spec("venv") is not None and find_spec("ensurepip") is not None


def digest():
    """Return a hash of everything .venv is made from, and of its place: its scripts hold absolute paths."""
    return hashlib.sha256(LOCK.read_bytes() + PYPROJECT.read_bytes() + str(VENV).encode()).hexdigest()[:16]


def stamp():
    """Return what the last complete set-up wrote, or {} where there is none to build on."""
    try:
        return json.loads(STAMP.read_text()) if (VENV / "bin" / "python").exists() else {}
    except (OSError, ValueError):
        return {}


def is_ready(request):
    """Return whether .venv is complete, up to date and holds the build of torch asked for."""
    last = stamp()
    return last.get("digest") == digest() and request in ("auto", last["torch"])


# ---- the set-up -------------------------------------------------------------------------------------------------


def run(command, log):
    """Run `command`, its output into `log` and, at a terminal, its last line on the screen; return (ok, output)."""
    # Another Python's paths and a user's habit of --user must not leak into .venv.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "PIP_USER")}
    log.write("\n$ {}\n".format(" ".join(map(str, command))))
    lines, terminal = [], sys.stdout.isatty()
    with subprocess.Popen(
        list(map(str, command)), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout:
            lines.append(line)
            log.write(line)
            log.flush()
            if terminal:
                print(f"\r\033[K      {line.strip()[:70]}", end="", flush=True)
    if terminal:
        print("\r\033[K", end="", flush=True)
    return process.returncode == 0, "".join(lines)


def make_venv(log):
    """Make an empty virtual environment with pip in it."""
    ok, output = run([sys.executable, "-m", "venv", VENV], log)
    if not ok:
        print(output.strip(), file=sys.stderr)
        raise SetupError(
            f"{sys.executable} -m venv did not work, for the reason above: name another Python, as in "
            f"make PYTHON=/path/to/python3.11."
        )


def pip_install(log, *arguments, or_else=None):
    """Run pip in .venv; where no index has the thing and `or_else` is given, once more with those arguments too."""
    pip = [VENV / "bin" / "python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    ok, output = run([*pip, "--progress-bar", "off", *arguments], log)
    if not ok and or_else and "No matching distribution" in output and "NewConnectionError" not in output:
        ok, output = run([*pip, "--progress-bar", "off", *or_else, *arguments], log)
    if not ok:
        sentence = explain(output)
        if "last words" in sentence:
            print(*output.strip().splitlines()[-8:], sep="\n", file=sys.stderr)
        raise SetupError(sentence)


def lock_without_torch():
    """Write the lock but for torch, whose build is chosen apart, into .venv; return the file's path."""
    rest = VENV / "requirements-without-torch.txt"
    rest.write_text("".join(line for line in LOCK.open() if not line.startswith("torch==")))
    return rest


def install_torch(log, build, kept):
    """Put torch into .venv, or within its sight: the kept one stays where it is, behind .venv's own packages."""
    if build == "keep":
        # A .pth file rather than --system-site-packages: it also reaches a torch that lives in another virtual or conda
        # environment, or on PYTHONPATH. Its folders come last on sys.path, so that whatever .venv has itself wins.
        site = next((VENV / "lib").glob("python3*")) / "site-packages"
        (site / "kept_torch.pth").write_text("\n".join(kept["folders"]) + "\n")
    elif build == "cpu" and sys.platform == "linux":
        # Never plain torch here: on Linux that is the CUDA build, gigabytes of it.
        cpu_index = ("--extra-index-url", CPU_INDEX)
        pip_install(log, "-c", lock_without_torch(), f"torch=={torch_pin()}+cpu", or_else=cpu_index)
    else:
        pip_install(log, "-c", lock_without_torch(), f"torch=={torch_pin()}")


def install_lock(log):
    """Install every pin of requirements.lock but torch, which is there already, then this project, editable."""
    pip_install(log, "-r", lock_without_torch())
    # The build backend is pinned in the lock, so nothing is fetched to build with.
    pip_install(log, "--no-deps", "--no-build-isolation", "-e", ROOT)


def check_torch(build, torch):
    """Raise SetupError unless the torch that .venv now imports is what was asked for; return a remark or None."""
    if torch is None or not torch["gloo"]:
        raise SetupError("The torch in .venv does not import, or lacks gloo: make TORCH=cpu installs one that does.")
    if build == "cuda" and torch["cuda"] is None:
        raise SetupError(
            f"TORCH=cuda was asked for and pip's index gave torch {torch['version']}, a CPU build: check the indexes "
            f"that pip config list shows, or take make TORCH=cpu."
        )
    if build == "cuda" and not torch["device"]:
        return f"torch {torch['version']} cannot use this NVIDIA driver, which has to support CUDA {torch['cuda']}"
    return None


def set_up(request):
    """Make or update .venv; the caller has the folder to itself."""
    started = time.monotonic()
    check_venv_module(has_ensurepip(), sys.version_info, sys.executable)
    kept = ask_for_torch(sys.executable) if request in ("auto", "keep") else None
    found = kept["version"] if kept and kept["gloo"] else None
    build = choose_torch(request, found, torch_range(), request == "auto" and has_nvidia_driver())
    update = stamp().get("torch") == build and stamp().get("python") == list(sys.version_info[:2])
    if not update:
        shutil.rmtree(VENV, ignore_errors=True)
        check_disk(
            [
                (folder, needed[build], shutil.disk_usage(folder).free, os.stat(folder).st_dev)
                for folder, needed in ((str(ROOT), DISK_BYTES), (tempfile.gettempdir(), TEMP_BYTES))
            ]
        )
    VENV.mkdir(exist_ok=True)
    if STAMP.exists():
        STAMP.unlink()

    what = {
        "keep": f"torch {found}, kept where {sys.executable} has it",
        "cpu": f"torch {torch_pin()}, CPU build (about 200 MB)",
        "cuda": f"torch {torch_pin()}, CUDA build (several GB)",
    }
    with LOG.open("a", encoding="utf-8") as log:
        try:
            if not update:
                say("1/4 creating .venv with Python {}.{}.{}".format(*sys.version_info[:3]))
                make_venv(log)
                say(f"2/4 {what[build]}")
                install_torch(log, build, kept)
            say("3/4 the other packages of requirements.lock (about 250 MB)")
            install_lock(log)
            say("4/4 looking whether torch runs")
            torch = ask_for_torch(VENV / "bin" / "python")
            remark = check_torch(build, torch)
        except SetupError as error:
            raise SetupError(f"{error} (log: {LOG.relative_to(ROOT)})") from None
    if remark:
        say(f"note: {remark}")
    done = {"digest": digest(), "torch": build, "torch_version": torch["version"], "python": sys.version_info[:2]}
    partial = STAMP.with_suffix(".partial")
    partial.write_text(json.dumps(done))
    os.replace(partial, STAMP)
    say(f"ready in {time.monotonic() - started:.0f} s: .venv with torch {torch['version']}")


def say(text):
    print(f"set-up: {text}", flush=True)


def main(arguments=None):
    """Check, and set up what is missing; return the exit status."""
    parser = argparse.ArgumentParser(description="Make .venv, the environment everything here runs in.")
    parser.add_argument("--torch", default="auto", help="auto (default), keep, cpu or cuda")
    parser.add_argument("--port", help="check first that this port of 127.0.0.1 is free")
    options = parser.parse_args(arguments)
    try:
        check_python(sys.version_info, sys.executable)
        if options.torch not in CHOICES:
            choose_torch(options.torch, None, torch_range(), False)
        if options.port is not None:
            check_port(options.port)
        if os.path.isdir("/dev/shm"):
            check_shared_memory(shutil.disk_usage("/dev/shm").free)
        if is_ready(options.torch):
            return 0
        if Path(sys.prefix).resolve() == VENV.resolve():  # make was called with .venv active: it must not remake itself
            return subprocess.call([sys._base_executable, __file__, *(arguments or sys.argv[1:])])
        import fcntl

        # Opened to write, though nothing is written, because a lock over NFS asks for it.
        with LOCK.open("a") as mutex:
            try:
                fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another set-up is at work in this folder, waiting for it")
                fcntl.flock(mutex, fcntl.LOCK_EX)
            if not is_ready(options.torch):
                set_up(options.torch)
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno != 28:  # ENOSPC
            raise
        print(f"set-up failed: {explain('No space left on device')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted: the same command starts it over.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
