"""torchrun from Python: the command that one would type, and the numbers that it left behind.

    run = train("--api=fsdp1", "--steps=5", ranks=2)              # torchrun ... -m labs.train
    run.losses, run.report["state_bytes"]
    torchrun("-m", "labs.train", "--steps=5", ranks=2).losses     # in a notebook: shows the command and its output
    launch("my_script.py", ranks=2)                               # any script or module; returns what it printed

Nothing outlives a call: not after an error, not after Ctrl-C, nor (on Linux) when the process that called is killed.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil
from tqdm import tqdm

from fsdp_sim.accelerators import environ_for
from labs.cluster.process_group import n_ranks

GRACE_S = 10.0
"""For ranks that are told to leave; after it they are killed."""

STEP = re.compile(r"step +\d+ +loss \S+")
SENTENCE = re.compile(r"^labs\.[\w.]+: (.+)$", re.MULTILINE)
BOX = re.compile(r"^╭.*\n((?:│ [^\s─].*\n)+)", re.MULTILINE)
"""What tyro draws around a wrong argument; up to the first empty line or rule its sentence."""
LOGGED = re.compile(r"[IWE]\d{4} \d\d:\d\d:")
SUMMARY = re.compile(r"^E\d{4} .*failed \(exitcode", re.MULTILINE)
"""Of torchrun: a line of its log, and the one with which its summary begins."""


# On Linux the command is told to leave when the kernel that started it dies, be it by SIGKILL: torchrun passes it on,
# and the ranks save and leave. On other systems it runs to its end.
TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, which outlasts exec
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class TrainingRun:
    """What a run left behind.

    Attributes:
        losses, norms: of each step, averaged over the ranks; nan for what is not finite.
        steps: the lines of metrics.jsonl that are steps, see `labs.loop.metrics.Record`.
        report: report.json, see `labs.loop.report.TrainingReport`.
        out: the run's folder; it is gone already if none was asked for.
        printed: all that torchrun and the ranks printed.
    """

    losses: list[float]
    norms: list[float]
    steps: list[dict[str, Any]]
    report: dict[str, Any]
    out: Path
    printed: str


@dataclass(frozen=True)
class LabRun:
    """What a lab command did: its output and the metrics it wrote, one dict per step."""

    output: str
    metrics: list[dict[str, float]]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]


class FailedError(Exception):
    """A run that failed, or a number that is not what it has to be."""


def train(
    *arguments: str,
    ranks: int = 2,
    device: str = "cpu",
    out: Path | None = None,
    env: Mapping[str, str] = {},
    timeout_s: float = 600.0,
    progress: bool = True,
) -> TrainingRun:
    """Run the trainer under torchrun, and read its numbers.

    Args:
        arguments: of the trainer, as in ``--api=ddp``.
        device: ``cpu``; with ``cuda`` each rank has a GPU.
        out: its folder; what is there is gone on with. By default a temporary one.
        env: environment variables, besides this process's.

    Raises:
        FailedError: it failed; in the trainer's own words.
    """
    what = f"labs.train on {n_ranks(ranks)} {' '.join(arguments)}".strip()
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trained-")))
        command = ("-m", "labs.train", *arguments, f"--device={device}", f"--out={folder}")
        how: dict[str, Any] = {"device": device, "env": env, "timeout_s": timeout_s, "progress": progress}
        printed = launch(*command, ranks=ranks, what=what, **how)
        try:
            lines = [msgspec.json.decode(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
            steps = [line for line in lines if "loss" in line]
            losses, norms = ([_number(line[key]) for line in steps] for key in ("loss", "grad_norm"))
            report = msgspec.json.decode((folder / "report.json").read_bytes())
        except (OSError, KeyError, msgspec.DecodeError) as error:
            raise FailedError(f"{what} ended well, but its numbers cannot be read: {error!r}") from error
    return TrainingRun(losses, norms, steps, report, folder, printed)


def torchrun(*arguments: str, ranks: int = 2, timeout_s: float = 300.0) -> LabRun:
    """Run ``torchrun --standalone --nproc_per_node=RANKS ARGUMENTS`` and print the command and what it prints.

    It runs on CPU cores and sees no GPU; with ``--device=cuda`` among the arguments it does.

    Raises:
        FailedError: the command failed (its output is printed) or took longer than ``timeout_s``.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        print(f"$ torchrun --standalone --nproc_per_node={ranks}", *arguments)
        device = "cuda" if "--device=cuda" in arguments else "cpu"
        printed, failure = _run(
            *arguments, f"--metrics={metrics}", ranks=ranks, device=device, env={}, timeout_s=timeout_s, progress=False
        )
        print(printed)
        if failure:
            raise FailedError(f"torchrun {failure}; its output is above")
        lines = [msgspec.json.decode(line) for line in metrics.read_bytes().splitlines()]
        return LabRun(printed, [line for line in lines if "loss" in line])  # the others are events


def launch(
    *command: str,
    ranks: int = 2,
    device: str = "cpu",
    env: Mapping[str, str] = {},
    timeout_s: float = 600.0,
    progress: bool = True,
    what: str = "",
) -> str:
    """Run ``torchrun --standalone --nproc_per_node=RANKS COMMAND``; returns what it printed, errors included.

    Args:
        command: a script or ``-m module``, and its arguments.
        device: ``cpu``: the command sees no GPU; ``cuda``: it does.
        what: the words for it in an error, by default the command.

    Raises:
        FailedError: it ended with another status than 0, or was still running after ``timeout_s``.
    """
    printed, failure = _run(*command, ranks=ranks, device=device, env=env, timeout_s=timeout_s, progress=progress)
    if failure:
        what = what or f"torchrun {' '.join(command)} on {n_ranks(ranks)}"
        raise FailedError(f"{what} {failure}: {tool_message(printed)}")
    return printed


def _run(
    *command: str, ranks: int, device: str, env: Mapping[str, str], timeout_s: float, progress: bool
) -> tuple[str, str]:
    """What it printed, and how it failed: "" if it did not."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    process = subprocess.Popen(
        [sys.executable, "-c", TIED, *launcher, *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env={"OMP_NUM_THREADS": "1"} | environ_for(device) | dict(env),  # else torchrun sets it, and says so
    )  # fmt: skip
    assert process.stdout is not None
    with _ended(process), _alarm(process, timeout_s) as late:
        printed = _read(process.stdout, progress)
        status = process.wait()
    if late.is_set():
        return printed, f"was still running after {timeout_s:g} s"
    return printed, f"ended with status {status}" if status else ""


def run_for(command: Sequence[str], most_s: float, **how: Any) -> int | None:
    """Run any command; returns its exit status, or None if it had to be ended after so many seconds.

    Args:
        how: of `subprocess.Popen`.
    """
    process = subprocess.Popen([sys.executable, "-c", TIED, *command], **how)
    with _ended(process), _alarm(process, most_s) as late:
        status = process.wait()
    return None if late.is_set() else status


def _read(stdout: IO[str], progress: bool) -> str:
    """All that is printed, with a bar that counts the lines of steps, from the first one on."""
    shown = progress and ("ipykernel" in sys.modules or sys.stdout.isatty())  # no bar in a log file
    lines = []
    # Text in notebooks too: in a saved one a widget would leave its first state, which says that nothing was done.
    with tqdm(desc="training", unit=" steps", file=sys.stdout, leave=False, disable=not shown, delay=0.3) as bar:
        for line in stdout:
            lines.append(line)
            if STEP.match(line):
                bar.set_postfix_str(line.strip(), refresh=False)
                bar.update()
    return "".join(lines)


@contextmanager
def _alarm(process: subprocess.Popen[Any], timeout_s: float) -> Iterator[threading.Event]:
    """End the processes when it takes too long; the event says so."""
    late = threading.Event()

    def end() -> None:
        late.set()
        _end(process)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


@contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """After the block the launcher and its ranks are gone, however it was left."""
    try:
        yield
    finally:
        if process.poll() is None:
            _end(process)
        if process.stdout is not None:
            process.stdout.close()


def _end(process: subprocess.Popen[Any]) -> None:
    """Tell the launcher to leave, which tells its ranks; what is still there after a while is killed."""
    with suppress(psutil.Error):
        launcher = psutil.Process(process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        launcher.terminate()
        for still_there in psutil.wait_procs(family, timeout=GRACE_S)[1]:
            with suppress(psutil.Error):
                still_there.kill()
    process.wait()


def tool_message(printed: str) -> str:
    """Of all that torchrun prints the tool's own words: its sentence, what it did not understand, else its last ones.

    Torchrun's log and its summary of who failed come after them, and are left out if there is anything else.
    """
    if found := SENTENCE.search(printed):
        return found[1]
    if found := BOX.search(printed):
        return " ".join(line.strip(" │") for line in found[1].splitlines())
    own = [line for line in SUMMARY.split(printed)[0].splitlines() if not LOGGED.match(line)]
    return ("\n".join(own).strip() or printed.strip())[-500:]


def _number(value: float | None) -> float:
    """metrics.jsonl has null for what is not finite."""
    return math.nan if value is None else value
