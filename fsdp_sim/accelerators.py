"""Which accelerators a process sees. The course runs on CPU cores: ranks and notebooks see no GPU but where one asks.

[Note: two ways to hide]  A driver reads ``CUDA_VISIBLE_DEVICES`` and its like once in a process, when something first
asks for a GPU: so they are set before, and what was hidden stays hidden there. Only a new process sees GPUs again. But
torch's idea of "the accelerator" is decided when it is built (`torch.accelerator.current_accelerator`): it is what
`fully_shard` without a mesh shards on, and no variable hides Apple's MPS or an XPU. So torch is told as well.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping

HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": ""}
"""What hides every GPU. HIP ignores an empty value, and reads CUDA's variable where its own is not set."""
KEPT = "FSDP_SIM_VISIBLE_DEVICES"
"""The variable that remembers, as JSON, what the others were before."""
LOOK_S = 120.0  # for a process that imports torch and asks the driver


def hidden(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is to see no GPU."""
    before = shown(environ)
    return before | HIDDEN | {KEPT: json.dumps({name: before[name] for name in HIDDEN if name in before})}


def shown(environ: Mapping[str, str]) -> dict[str, str]:
    """The same environment with the GPUs that were there before `hidden`, or that were set by hand since."""
    if KEPT not in environ:
        return dict(environ)
    by_hand = {name: value for name, value in environ.items() if name != KEPT and HIDDEN.get(name) != value}
    return json.loads(environ[KEPT]) | by_hand


def environ_for(device: str) -> dict[str, str]:
    """This process's environment for one that computes on ``device``: no GPU, or with ``cuda`` all of them."""
    return shown(os.environ) if device == "cuda" else hidden(os.environ)


def hide() -> None:
    """Hide accelerators from this process, from its torch and from every process that it starts."""
    import torch

    os.environ.update(hidden(os.environ))
    if torch._C._get_accelerator().type != "cpu":  # see [Note: two ways to hide]
        torch._C._get_accelerator = lambda check=None: torch.device("cpu")
        torch._C._accelerator_getAccelerator = lambda: None  # type: ignore[assignment, return-value]


def hide_from_notebook() -> None:
    """`hide`, if this process is a notebook's kernel and has not used a GPU yet."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if hasattr(shell, "kernel"):
        import torch

        if not torch.cuda.is_initialized():
            hide()


def gpus() -> list[str]:
    """The names of the GPUs that a process with ``device="cuda"`` can use, in order; asked of a process of its own.

    So this one neither keeps memory on a GPU nor has to see it.

    Raises:
        ValueError: there are none; says why, and what to do about it.
    """
    return list(_found(tuple(sorted((name, value) for name, value in shown(os.environ).items() if name in HIDDEN))))


@functools.cache
def _found(visible: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(
            f"torch {torch.__version__} is a build for CPU cores and uses no GPU; on a machine with one, "
            "make TORCH=cuda setup installs a build that does"
        )
    asked = [sys.executable, "-m", "fsdp_sim.accelerators"]
    try:
        done = subprocess.run(asked, env=shown(os.environ), capture_output=True, text=True, timeout=LOOK_S, check=False)
        answer = json.loads(done.stdout.splitlines()[-1]) if done.stdout else done.stderr.strip()[-200:]
    except subprocess.TimeoutExpired:
        answer = f"the driver did not answer in {LOOK_S:g} s"
    if isinstance(answer, str):
        reason = " ".join(answer.split()).rstrip(".")
        raise ValueError(f"torch {torch.__version__} can use no GPU here: {reason}; fsdp-sim doctor says more")
    return tuple(answer)


def _look() -> list[str] | str:
    """Of this process: the GPUs' names, or why there are none."""
    import torch

    try:
        torch.cuda.init()
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or "the driver shows none"
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]


if __name__ == "__main__":
    print(json.dumps(_look()))
