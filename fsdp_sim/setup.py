"""Make `.venv`, the environment everything here runs in: `python3 fsdp_sim/setup.py [--torch keep|cpu|cuda]`.

The Makefile runs this file before anything is installed. So it uses the standard library alone, and syntax (hence no
annotations) that a Python as old as 3.6 can read, up to the sentence that says that it is too old.

Read it from the bottom: `main` checks, `set_up` installs in four steps, and every way to fail is one sentence that says
what to do. uv installs what is locked, in seconds; pip brings uv, torch (whose build its settings may choose), and what
uv could not. Modules are compiled when they are first imported: most never are.

A set-up that did not reach its end leaves no stamp, and the next one starts over; what was downloaded before stays in
the caches of uv and pip.
"""

import argparse
import ast
import contextlib
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

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "setup.json"  # written last: it is there only when the set-up reached its end
LOCK = ROOT / "requirements.lock"
DEV_LOCK = ROOT / "requirements-dev.lock"  # what developers need besides
PYPROJECT = ROOT / "pyproject.toml"
NBGRADER = ROOT / ".venv-nbgrader"  # apart, so that learners' JupyterLab has no part of it
NBGRADER_LOCK = ROOT / "notebooks" / "instructor" / "nbgrader.lock"

OLDEST_PYTHON, FIRST_UNTRIED_PYTHON = (3, 11), (3, 15)  # torch has builds for 3.11 to 3.14
TORCH = "2.13.0"  # installed where none is kept; the locks leave it out, since its build is chosen here
CHOICES = ("auto", "keep", "cpu", "cuda")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What .venv holds when done, and what passes through the temporary folder, in bytes, with some room. Measured on Linux:
# 1.4 GB with the CPU build, 0.75 GB of it torch; the CUDA figures are estimates.
DISK_BYTES = {"keep": 9 * 10**8, "cpu": 17 * 10**8, "cuda": 88 * 10**8}
TEMP_BYTES = {"keep": 3 * 10**8, "cpu": 6 * 10**8, "cuda": 4 * 10**9}
# For NCCL's buffers and Chromium's pages; a container has 64 MiB unless told otherwise.
SHARED_MEMORY_BYTES = 64 * 2**20
AGAIN = "then run the same command again"


class SetupError(Exception):
    """A sentence that names what is wrong and what to do."""


# ---- checks: each a function of what was found ----------------------------------------------------------------------


def check_python(version, executable):
    """Raise SetupError unless `version`, a tuple like `sys.version_info`, is one that this project and torch run on."""
    found = "{} is Python {}".format(executable, ".".join(map(str, version[:3])))
    if tuple(version[:2]) < OLDEST_PYTHON:
        raise SetupError(
            f"{found}, and 3.11 or newer is needed: install one (Debian, Ubuntu: sudo apt install python3.11 "
            f"python3.11-venv) or name one you have, as in make PYTHON=/path/to/python3.11."
        )
    if tuple(version[:2]) >= FIRST_UNTRIED_PYTHON:
        raise SetupError(
            f"{found}, and torch has no builds for it yet: name an older one, as in make PYTHON=/path/to/python3.13."
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


def choose_torch(request, found, oldest, has_driver):
    """Turn the request into the build to install: "keep", "cpu" or "cuda".

    Args:
        request: One of CHOICES.
        found: Version of the torch that the base Python can import and that has gloo, or None.
        oldest: (2, 11): the lowest version that will do.
        has_driver: Whether an NVIDIA driver answers.
    """
    if request not in CHOICES:
        raise SetupError(f"TORCH={request} is not a choice: take one of {', '.join(CHOICES)}.")
    usable = found is not None and tuple(int(n) for n in re.findall(r"\d+", found)[:2]) >= oldest
    if request == "keep" and not usable:
        wanted = f"{oldest[0]}.{oldest[1]} or newer, with gloo"
        raise SetupError(
            f"TORCH=keep found {'no torch' if found is None else 'torch ' + found} in {sys.executable}, and it must be "
            f"{wanted}: install one there, or let make TORCH=cpu or TORCH=cuda install it into .venv."
        )
    if request == "auto":
        return "keep" if usable else "cuda" if has_driver else "cpu"
    return request


UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolution|Max retries|ProxyError|ReadTimeout|ConnectTimeout|SSLError"
)


def explain(log):
    """Return the sentence for a pip run that failed, from what it printed."""
    if re.search(r"No space left on device|Disk quota exceeded", log):
        return f"The disk filled up during the set-up: make room, {AGAIN}."
    if UNREACHABLE.search(log):
        return f"pip cannot reach its package index: check the network or pip's proxy and index settings, {AGAIN}."
    other_file = re.search(r"DO NOT MATCH THE HASHES(?:.*\n)*? +(\S+==\S+) from", log)
    if other_file:
        return (
            f"pip's index gives another file for {other_file[1]} than the one the lock names by its SHA-256: use an "
            f"index with PyPI's own files (pip config list shows which is used), {AGAIN}."
        )
    missing = re.search(r"No matching distribution found for ([^\s;]+)", log)
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


def for_uv(pip_config):
    """Return what `pip config list` printed as arguments and environment of uv, which does not read pip's settings."""
    settings = {}
    for line in sorted(pip_config.splitlines(), key=lambda line: (line.startswith(":env:"), "install." in line)):
        name, _, value = line.partition("=")
        if value:
            settings[name.rpartition(".")[2]] = ast.literal_eval(value).split()  # the environment comes last, and wins
    flags = {
        "index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links",
        "trusted-host": "--allow-insecure-host",
    }  # fmt: skip
    # pip takes the best file of all indexes. What "unsafe" warns of, a stranger's file of that name, hashes exclude.
    arguments = ["--index-strategy", "unsafe-best-match"]
    for name, flag in flags.items():
        for value in settings.get(name, []):
            arguments += [flag, value]
    if settings.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on"):
        arguments.append("--no-index")
    env = {"cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY"}
    return arguments, {env[name]: settings[name][0] for name in env if settings.get(name)}


# ---- what is there ----------------------------------------------------------------------------------------------


def oldest_torch():
    """Return the oldest version of torch that pyproject.toml allows, as (2, 11)."""
    return tuple(map(int, re.search(r'"torch>=(\d+)\.(\d+)"', PYPROJECT.read_text()).groups()))


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


def digest(*files):
    """Return a hash of what an environment is made from, and of its place: its scripts hold absolute paths."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files) + str(VENV).encode()).hexdigest()[:16]


def stamp():
    """Return what the last complete set-up wrote, or {} where there is none to build on."""
    try:
        return json.loads(STAMP.read_text()) if (VENV / "bin" / "python").exists() else {}
    except (OSError, ValueError):
        return {}


def write_stamp(file, content):
    """Write a stamp whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    os.replace(partial, file)


def is_ready(request):
    """Return whether .venv is complete, up to date and holds the build of torch asked for."""
    last = stamp()
    return last.get("digest") == digest(LOCK, PYPROJECT) and request in ("auto", last["torch"])


def has_dev():
    """Return whether .venv holds the developers' packages too."""
    return stamp().get("dev") == digest(DEV_LOCK)


def has_nbgrader():
    """Return whether .venv-nbgrader is complete and up to date."""
    ready = NBGRADER / "setup.json"
    return ready.exists() and json.loads(ready.read_text()) == digest(NBGRADER_LOCK)


# ---- the set-up -------------------------------------------------------------------------------------------------


def run(command, log, **env):
    """Run `command`, its output into `log` and, at a terminal, its last line on the screen; return (ok, output)."""
    # Another Python's paths and a user's habit of --user must not leak into .venv.
    env.update((k, v) for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PIP_USER"))
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


def make_venv(log, venv, python=sys.executable):
    """Make an empty virtual environment with pip in it."""
    ok, output = run([python, "-m", "venv", venv], log)
    if not ok:
        print(output.strip(), file=sys.stderr)
        raise SetupError(
            f"{python} -m venv did not work, for the reason above: name another Python, as in "
            f"make PYTHON=/path/to/python3.11."
        )


def pip(log, venv, *arguments):
    """Run pip install in an environment; return (ok, output)."""
    command = [venv / "bin" / "python", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    return run([*command, "--progress-bar", "off", "--no-compile", *arguments], log)


def pip_install(log, venv, *arguments, or_else=None):
    """Run pip install; where no index has the thing and `or_else` is given, once more with those arguments too."""
    ok, output = pip(log, venv, *arguments)
    if not ok and or_else and "No matching distribution" in output and not UNREACHABLE.search(output):
        ok, output = pip(log, venv, *or_else, *arguments)
    if not ok:
        sentence = explain(output)
        if "last words" in sentence:
            print(*output.strip().splitlines()[-8:], sep="\n", file=sys.stderr)
        raise SetupError(sentence)


def find_uv(log):
    """Return a uv: the one installed here, else one on PATH, else the lock's, which pip brings; or None."""
    own = VENV / "bin" / "uv"
    found = str(own) if own.exists() else shutil.which("uv")
    if found:
        return found
    locked = VENV / "uv.txt"
    locked.write_text(re.search(r"^uv==(?:.*\\\n)*.*\n", LOCK.read_text(), re.M)[0])
    ok, output = pip(log, VENV, "-r", locked)
    if not ok and UNREACHABLE.search(output):
        raise SetupError(explain(output))
    return str(own) if ok else None


def install(log, venv, *arguments):
    """Install by uv; by pip where there is no uv, or it fails: then it is pip that says why."""
    uv = find_uv(log)
    if uv:
        listed = subprocess.run([venv / "bin" / "python", "-m", "pip", "config", "list"], stdout=subprocess.PIPE)
        settings, env = for_uv(listed.stdout.decode())
        if run([uv, "pip", "install", "--python", venv / "bin" / "python", *settings, *arguments], log, **env)[0]:
            return
    pip_install(log, venv, *arguments)


def install_lock(log, venv, lock):
    """Install every pin of a lock, by its hash. It is complete, so nothing else is looked for: no torch by accident."""
    install(log, venv, "--no-deps", "-r", lock)


def install_torch(log, build, kept):
    """Put torch into .venv, or within its sight: the kept one stays where it is, behind .venv's own packages."""
    if build == "keep":
        # A .pth file rather than --system-site-packages: it also reaches a torch that lives in another virtual or conda
        # environment, or on PYTHONPATH. Its folders come last on sys.path, so that whatever .venv has itself wins.
        site = next((VENV / "lib").glob("python3*")) / "site-packages"
        (site / "kept_torch.pth").write_text("\n".join(kept["folders"]) + "\n")
    elif build == "cpu" and sys.platform == "linux":
        # Never plain torch here: on Linux that is the CUDA build, gigabytes of it.
        pip_install(log, VENV, f"torch=={TORCH}+cpu", or_else=("--extra-index-url", CPU_INDEX))
    else:
        pip_install(log, VENV, f"torch=={TORCH}")


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
    build = choose_torch(request, found, oldest_torch(), request == "auto" and has_nvidia_driver())
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
        "cpu": f"torch {TORCH}, CPU build (about 200 MB)",
        "cuda": f"torch {TORCH}, CUDA build (several GB)",
    }
    with logged(VENV) as log:
        if not update:
            say("1/4 creating .venv with Python {}.{}.{}".format(*sys.version_info[:3]))
            make_venv(log, VENV)
        say("2/4 the packages of requirements.lock (about 170 MB)")
        install_lock(log, VENV, LOCK)
        # The build backend is in the lock, so nothing is fetched to build with.
        install(log, VENV, "--no-deps", "--no-build-isolation", "-e", ROOT)
        # The package does not bring the labs; here they are imported from anywhere all the same.
        site = next((VENV / "lib").glob("python3*")) / "site-packages"
        (site / "checkout.pth").write_text(f"{ROOT}\n")
        say(f"3/4 {what[build]}")
        install_torch(log, build, kept)
        say("4/4 looking whether torch runs")
        torch = ask_for_torch(VENV / "bin" / "python")
        remark = check_torch(build, torch)
    if remark:
        say(f"note: {remark}")
    done = {"torch": build, "torch_version": torch["version"], "python": sys.version_info[:2]}
    write_stamp(STAMP, dict(done, digest=digest(LOCK, PYPROJECT)))
    say(f"ready in {time.monotonic() - started:.0f} s: .venv with torch {torch['version']}")


def add_dev():
    """Put into .venv what developing needs besides."""
    say("the developers' packages, once: tests, linters, Sphinx, a browser's driver (about 200 MB)")
    with logged(VENV) as log:
        install_lock(log, VENV, DEV_LOCK)
    write_stamp(STAMP, dict(stamp(), dev=digest(DEV_LOCK)))


def make_nbgrader():
    """Make .venv-nbgrader anew."""
    say("nbgrader, once, into .venv-nbgrader (about 50 MB)")
    shutil.rmtree(NBGRADER, ignore_errors=True)
    NBGRADER.mkdir()
    with logged(NBGRADER) as log:
        make_venv(log, NBGRADER)
        install_lock(log, NBGRADER, NBGRADER_LOCK)
    write_stamp(NBGRADER / "setup.json", digest(NBGRADER_LOCK))


@contextlib.contextmanager
def logged(venv):
    """Open an environment's log; an error from within names it."""
    path = venv / "setup.log"
    with path.open("a", encoding="utf-8") as log:
        try:
            yield log
        except SetupError as error:
            raise SetupError(f"{error} (log: {path.relative_to(ROOT)})") from None


def say(text):
    print(f"set-up: {text}", flush=True)


def main(arguments=None):
    """Check, and set up what is missing; return the exit status."""
    parser = argparse.ArgumentParser(description="Make .venv, the environment everything here runs in.")
    parser.add_argument("--torch", default="auto", help="auto (default), keep, cpu or cuda")
    parser.add_argument("--port", help="check first that this port of 127.0.0.1 is free")
    parser.add_argument("--dev", action="store_true", help="what developing needs, too")
    parser.add_argument("--nbgrader", action="store_true", help="nbgrader, too, in .venv-nbgrader")
    options = parser.parse_args(arguments)

    def missing():
        """Return what there is to do, in order: functions and their arguments."""
        parts = [(not is_ready(options.torch), set_up, options.torch), (options.dev and not has_dev(), add_dev)]
        parts.append((options.nbgrader and not has_nbgrader(), make_nbgrader))
        return [part for is_missing, *part in parts if is_missing]

    try:
        check_python(sys.version_info, sys.executable)
        if options.torch not in CHOICES:
            choose_torch(options.torch, None, oldest_torch(), False)
        if options.port is not None:
            check_port(options.port)
        if os.path.isdir("/dev/shm"):
            check_shared_memory(shutil.disk_usage("/dev/shm").free)
        if not missing():
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
            for part, *its_arguments in missing():
                part(*its_arguments)
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
