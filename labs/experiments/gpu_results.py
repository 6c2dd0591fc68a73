"""Record what the labs find on this machine's hardware, for those who do not have it.

    python -m labs.experiments.gpu_results                       (every lab that can use GPUs)
    python -m labs.experiments.gpu_results overlap memory        (these)
    python -m labs.experiments.gpu_results --out=/tmp/recorded   (elsewhere than in labs/experiments/recorded)

Each lab that can use GPUs is run here on all of them, with its own defaults, and what it returns goes to
labs/experiments/recorded/NAME.json.gz with hardware, versions and date. What ran on CPU cores is not recorded: it runs
everywhere.
Exit status: 0 all recorded; 1 a lab failed; 2 asked wrongly, or no GPU; 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import tyro

import labs.experiments
from fsdp_sim.accelerators import environ_for, gpus
from labs.cluster import torchrun
from labs.experiments.result import LabResult
from labs.model.gpt import did_you_mean

RECORDED = Path(__file__).with_name("recorded")
SUFFIX = ".json.gz"
MOST_SAID = 400  # characters of why a lab failed
USAGE = "\n    ".join(line.strip() for line in (__doc__ or "").splitlines() if line)


def names(package: Any = labs.experiments) -> tuple[str, ...]:
    """The labs: modules of `labs.experiments` (of a folder NAME its ``run_NAME``) whose ``run`` returns `LabResult`."""
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(name for name in modules if _run_of(f"{package.__name__}.{name}") is not None)


def on_gpus(package: Any = labs.experiments) -> tuple[str, ...]:
    """Those of them whose ``run`` takes a ``device``; the others are about CPU cores."""
    return tuple(name for name in names(package) if "device" in inspect.signature(lab(name, package)).parameters)


def _run_of(module: str) -> Callable[..., LabResult] | None:
    found = importlib.import_module(module)
    inner = f"{module}.run_{module.rpartition('.')[2]}"
    if hasattr(found, "__path__") and importlib.util.find_spec(inner):
        found = importlib.import_module(inner)  # a folder that ranks import may not have it at its top
    run = getattr(found, "run", None)
    if not callable(run) or inspect.signature(run).return_annotation not in (LabResult, "LabResult"):
        return None
    return cast(Callable[..., LabResult], run)


def lab(name: str, package: Any = labs.experiments) -> Callable[..., LabResult]:
    """A lab's ``run``.

    Raises:
        ValueError: there is no such lab; says which there are.
    """
    there = [module.name for module in pkgutil.iter_modules(package.__path__)]
    run = _run_of(f"{package.__name__}.{name}") if name in there else None
    if run is None:
        raise ValueError(f"no lab is called {name!r}{did_you_mean(name, names(package))}")
    return run


def recorded(name: str, folder: Path = RECORDED) -> LabResult | None:
    """What was recorded of a lab, its kind ``recorded`` (or ``pretended``); None if nothing was.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / f"{name}{SUFFIX}"
    return LabResult.load(path) if path.exists() else None


def result_of(name: str, folder: Path = RECORDED) -> LabResult:
    """What a lab finds on GPUs: on this machine's, if it has any, else as it was recorded.

    The lab runs in a process of its own, so this one keeps no memory on a GPU, and a notebook need not see it.

    Args:
        name: of a lab that can use GPUs, see `on_gpus`.

    Returns:
        a `LabResult` whose kind and notes say which it is. Where there is neither a GPU on which it ran nor a
        recording, one without rows that says why.
    """
    try:
        gpus()
    except ValueError as error:
        reason = f"No GPU is here ({error})"
    else:
        ran = _run_apart(name)
        if isinstance(ran, LabResult):
            return ran
        reason = f"The lab did not run on the GPU that is here ({ran})"
    found = recorded(name, folder)
    if found is None:
        note = (
            f"{reason}, and no recording of the lab {name!r} on one has been made: there is nothing to show. On a "
            f"machine with a GPU, python -m labs.experiments.gpu_results {name} makes it."
        )
        return LabResult(name, "recorded", (), "no hardware: nothing was measured", versions={}, notes=(note,))
    note = f"{reason}: this was recorded on {found.date} on {found.hardware}, with the lab's defaults."
    return replace(found, notes=(note, *found.notes))


def _run_apart(name: str) -> LabResult | str:
    """What the lab finds in a process that sees the GPUs, or why it finds nothing."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        command = [
            sys.executable,
            "-c",
            torchrun.TIED,
            sys.executable,
            "-m",
            "labs.experiments.gpu_results",
            name,
            f"--out={folder}",
        ]
        done = subprocess.run(
            command, env=environ_for("cuda"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            _, found, why = f"\n{done.stdout}".rpartition(f"\n{name}: ")  # what `main` says of a lab that failed
            last = (done.stdout.strip().splitlines() or [f"status {done.returncode}"])[-1]
            return " ".join((why if found else last).split())[:MOST_SAID]
        here = LabResult.load(Path(folder, f"{name}{SUFFIX}"))
    return replace(here, kind="measured") if here.kind == "recorded" else here


def record(name: str, run: Callable[..., LabResult], hardware: str, folder: Path = RECORDED) -> Path:
    """Run a lab here and write what it finds.

    Args:
        hardware: what the result has to be of: part of its `LabResult.hardware`, such as the GPU's name.

    Returns:
        the file.

    Raises:
        ValueError: the result is of something else, is a recording itself, or is too large. Nothing is written.
    """
    result = run()
    if result.kind == "recorded":
        raise ValueError(f"{name} returned a recording; only what runs here is recorded")
    if hardware not in result.hardware:
        raise ValueError(f"{name} ran on {result.hardware}, not on {hardware}; nothing was recorded")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{SUFFIX}"
    result.save(path)
    return path


@dataclass(frozen=True)
class Settings:
    """What to record."""

    labs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of labs; by default all that can use GPUs."""
    out: Path = RECORDED
    """The folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Record on this machine's GPUs. Returns the exit status."""
    settings = tyro.cli(Settings, prog="python -m labs.experiments.gpu_results", description=USAGE, args=arguments)
    try:
        hardware = gpus()[0]
        chosen = {name: lab(name) for name in settings.labs or on_gpus()}
        if wrong := [name for name, run in chosen.items() if "device" not in inspect.signature(run).parameters]:
            raise ValueError(f"the lab {wrong[0]!r} is about CPU cores and runs everywhere; there is nothing to record")
    except (ValueError, ModuleNotFoundError) as error:
        print(f"labs.experiments.gpu_results: {error}")
        return 2
    failed = 0
    for name, run in chosen.items():
        try:
            path = record(name, partial(run, device="cuda"), hardware, settings.out)
            print(f"{name}: {path}, {path.stat().st_size:,} bytes", flush=True)
        except KeyboardInterrupt:
            return 130
        except Exception as error:  # one lab that fails does not keep the others from being recorded
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
