"""What an install may lack: the extra that has a package and how to get it; and the newest torch this was tried with.

The base install has four packages, and simulates. Whatever needs another says so with `missing`, in one sentence. The
way to more is the one by which fsdp_sim came: a checkout, a wheel, or an index.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

OLDEST_TORCH, NEWEST_TRIED_TORCH = (2, 11), (2, 15)
"""An older one will not do. A newer one is used all the same, with a warning; `make matrix` tries the versions."""

EXTRAS = {
    "mini": ("torch", "cloudpickle", "tqdm", "psutil"),
    "labs": ("fsrs", "tyro", "platformdirs", "safetensors", "filelock", "snowballstemmer"),
    "trainers": ("accelerate", "lightning_fabric"),
    "explore": ("pandas", "scipy"),
    "configurations": ("yaml",),
    "migrate": ("libcst",),
    "figures": ("plotly", "pygments", "anywidget"),
    "course": ("traitlets", "ipywidgets", "IPython", "ipykernel", "jupyterlab", "jupytext"),
    "bpe": ("tiktoken",),
    "tensorboard": ("tensorboard",),
    "huggingface": ("transformers",),
    "parquet": ("pyarrow",),
    "dev": ("kaleido",),
}
"""The names that are imported, by the extra of pyproject.toml that brings them."""
LEARNERS = ("mini", "labs", "trainers", "explore", "configurations", "figures", "course")
"""The extras that `make setup` installs; `make dev` installs all."""


def extra_of(package: str) -> str | None:
    """The extra that brings a package, by the name that is imported; None for one that no part of fsdp_sim imports."""
    return next((extra for extra, names in EXTRAS.items() if package.partition(".")[0] in names), None)


def in_checkout(checkout: str, otherwise: str) -> str:
    """What to do where fsdp_sim runs from a checkout, whose commands are make's; and where it was installed."""
    return checkout if (Path(__file__).parents[1] / "Makefile").exists() else otherwise


def remedy(package: str) -> str:
    """What to do where a package is missing, as the end of a sentence."""
    extra = extra_of(package)
    if extra is None:
        return f"pip install {package}"
    make = "setup" if extra in LEARNERS else "dev"
    return in_checkout(
        f"in a checkout of fsdp_sim, run make {make}, or pip install -e '.[{extra}]'",
        f"pip install '{requirement(extra)}'",
    )


def requirement(extra: str) -> str:
    """fsdp_sim with an extra, from where this install of it came: PEP 610 has it kept, but for what an index gave."""
    try:
        kept = json.loads(distribution("fsdp-sim").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        kept = {}
    return f"fsdp-sim[{extra}] @ {kept['url']}" if "archive_info" in kept else f"fsdp-sim[{extra}]"


def missing(package: str, what: str = "this") -> str:
    """The sentence for a package that is not installed: what needs it, and how to get it."""
    return f"{what} needs {package}, which is not installed: {remedy(package)}"


def need(what: str, *packages: str) -> None:
    """To be called before `what` imports packages that the base install lacks.

    Raises:
        ModuleNotFoundError: one is not installed; says how to get it.
    """
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(missing(package, what), name=package)


def warn_of_untried_torch(version: str) -> None:
    """Warn where torch is newer than those tried; the first rank alone says it, and none whose parent has said it."""
    first = multiprocessing.parent_process() is None and os.environ.get("LOCAL_RANK", "0") == "0"
    if first and is_untried(version):
        newest = ".".join(map(str, NEWEST_TRIED_TORCH))
        warnings.warn(
            f"torch {version} is newer than {newest}, the newest that fsdp_sim was tried with; where something differs "
            f"from what the course says, that may be why.",
            stacklevel=3,
        )


def is_untried(version: str) -> bool:
    """Whether a version of torch is newer than those tried."""
    return release(version) > NEWEST_TRIED_TORCH


def release(version: str) -> tuple[int, ...]:
    """Major and minor of a version of torch: (2, 13) of "2.13.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
