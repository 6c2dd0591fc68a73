"""Changes the code in ways that tests must notice, one by one, and runs those tests: who tests the tests?

    python -m tests.mutation                  make mutation
    python -m tests.mutation reshard seeds    those whose names contain one of these words

A fault is one edit of one file, in a copy of the checkout. Its tests have to pass without it and fail with it, where an
error before any test counts for nothing. Exit status 1: a fault was not noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
COPIED = ("fsdp_sim", "labs", "tests", "notebooks", "conftest.py", "pyproject.toml")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Fault:
    """An edit, and the tests that must fail with it."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # arguments of pytest


FAULTS = [
    Fault(
        "an all-reduce sends half",
        "fsdp_sim/timeline/ring.py",
        '"all_reduce": 2',
        '"all_reduce": 1',
        "tests/ranks/test_network.py",
    ),
    Fault(
        "intervals that touch are merged to the shorter",
        "fsdp_sim/timeline/analysis.py",
        "        elif end > until:\n            until = end",
        "        else:\n            until = end",
        "tests/timeline/test_analysis.py",
    ),
    Fault(
        "a hole is covered only from its middle",
        "fsdp_sim/timeline/analysis.py",
        "while here < len(cuts) and cuts[here][0] < end:",
        "while here < len(cuts) and cuts[here][1] < end:",
        "tests/timeline/test_analysis.py",
    ),
    Fault(
        "a CPU forgets that it waits",
        "fsdp_sim/engine/one_rank.py",
        "if until > cpu:",
        "if until < cpu:",
        "tests/engine/test_replay.py",
    ),
    Fault(
        "whole parameters stay after reshard",
        "fsdp_sim/mini/param.py",
        "        self._register(self.sharded_param)\n        self.free_unsharded_param()\n",
        "        self._register(self.sharded_param)\n",
        "tests/mini/test_programs.py -k 'test_network and toy'",
    ),
    Fault(
        "an all-gather is kept for the next use",
        "fsdp_sim/mini/group.py",
        "            self._all_gather_result = None\n",
        "            pass\n",
        "tests/mini/test_programs.py -m 'not tail' -k test_network",
    ),
    Fault(
        "inputs of a forward keep their dtype",
        "fsdp_sim/mini/precision.py",
        "if policy.param_dtype is None or not policy.cast_forward_inputs:",
        "if True:",
        "tests/mini/test_precision.py tests/mini/parity/test_precision.py -m 'not tail'",
    ),
    Fault(
        "every epoch has the order of the first",
        "labs/data/loader.py",
        "np.random.PCG64((seed, epoch))",
        "np.random.PCG64((seed, 0))",
        "tests/labs/data/test_loader.py",
    ),
    Fault(
        "a checkpoint is named before its manifest is there",
        "labs/checkpoint/checkpointer.py",
        "        write_file(partial / MANIFEST, [manifest.encode()])\n",
        "",
        "tests/labs/checkpoint/test_checkpointer.py",
    ),
    Fault(
        "what a rank sends is counted once for an all-reduce",
        "fsdp_sim/learn/judges/account.py",
        "{op: RING_PASSES[op] for",
        "{op: 1 for",
        "tests/learn/test_judges.py",
    ),
    Fault(
        "a judge overlooks replaced functions",
        "fsdp_sim/learn/judges/account.py",
        "    if ran.replaced:\n",
        "    if False:\n",
        "tests/learn/test_judges.py",
    ),
    Fault(
        "a rank that hangs is left alone",
        "fsdp_sim/ranks/watchdog.py",
        "if self._idle_s[rank] > self.timeout_s or",
        "if",
        "tests/ranks/test_edges.py tests/ranks/test_watchdog.py -x",
    ),
]


def applied(fault: Fault, root: Path) -> None:
    """Make the edit.

    Raises:
        ValueError: the text to be changed is not in its file exactly once.
    """
    path = root / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} is in {fault.file} {text.count(fault.old)} times, not once")
    path.write_text(text.replace(fault.old, fault.new))


def tested(fault: Fault, root: Path) -> tuple[int, str]:
    """pytest's exit status (1: tests failed) and what it printed."""
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = f"{sys.executable} -m pytest -q -p no:cacheprovider {fault.tests}"
    done = subprocess.run(
        command, shell=True, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return done.returncode, done.stdout[-3000:]


def noticed(fault: Fault, folder: Path) -> str:
    """Why a fault counts as unnoticed, or nothing."""
    root = folder / fault.name.replace(" ", "_")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        root.mkdir(exist_ok=True)
        copy(ROOT / name, root / name)
    status, said = tested(fault, root)
    if status != 0:
        return f"its tests fail without it:\n{said}"
    applied(fault, root)
    status, said = tested(fault, root)
    return "" if status == 1 and " failed" in said else f"nothing failed ({fault.tests}):\n{said}"


def main() -> int:
    words = sys.argv[1:]
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for fault in tqdm(chosen, disable=None):
            why = noticed(fault, Path(folder))
            unnoticed += bool(why)
            print(f"{'NOT NOTICED' if why else 'noticed    '}  {fault.file}: {fault.name} {why}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} faults were noticed")
    return int(unnoticed > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
