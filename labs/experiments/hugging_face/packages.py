"""What this lab needs besides torch. It is imported when it is used: the rest of the labs does without."""

from __future__ import annotations

import importlib
from types import ModuleType

from fsdp_sim.packages import missing


def needs(package: str) -> ModuleType:
    """Import ``package``.

    Raises:
        ImportError: it is not installed; names the extra that has it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise ImportError(missing(error.name, "labs.experiments.hugging_face")) from error
