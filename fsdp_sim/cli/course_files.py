"""Which files the course is made of, and where they lie: in a checkout, or within the installed package.

`setup.py` at the root asks this file what a wheel carries, before anything is installed: it needs the standard library
alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
CHECKOUT = PACKAGE.parent
IN_WHEEL = "_course"
"""The folder of the installed package that has the course, laid out as a learner gets it."""


def in_checkout(checkout: Path) -> dict[str, Path]:
    """The files of the course in a checkout, by their place in a learner's folder: notebooks at its top."""
    notebooks = checkout / "notebooks"
    found = [*notebooks.glob("*.ipynb"), *notebooks.glob("solutions/*.ipynb"), notebooks / "glossary.md"]
    placed = {path.relative_to(notebooks).as_posix(): path for path in found if path.stem != "my_fsdp"}
    labs = [path for path in (checkout / "labs").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return dict(sorted((placed | {path.relative_to(checkout).as_posix(): path for path in labs}).items()))


def course_files() -> dict[str, Path]:
    """The files of this version's course, by their place in a learner's folder.

    Raises:
        ValueError: this install has none.
    """
    shipped = PACKAGE / IN_WHEEL
    if shipped.is_dir():
        files = (path for path in shipped.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(shipped).as_posix(): path for path in sorted(files)}
    if not (CHECKOUT / "notebooks" / "masters").is_dir():
        raise ValueError(f"there are no notebooks at {PACKAGE}: this install of fsdp_sim came without its course")
    return in_checkout(CHECKOUT)


def home_of_labs() -> Path | None:
    """The folder that has the ``labs`` of this version: no wheel installs them at the top."""
    return next((folder for folder in (PACKAGE / IN_WHEEL, CHECKOUT) if (folder / "labs" / "train.py").is_file()), None)


def bring_labs() -> None:
    """Let this process, its ranks and the torchrun that it starts import the ``labs`` of this version.

    They come first, so that no other package of that name is taken for them.
    """
    home = home_of_labs()
    if home is not None and str(home) not in sys.path:
        sys.path.insert(0, str(home))
        others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(home), *others])
