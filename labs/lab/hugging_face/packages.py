"""What this lab needs besides torch. It is imported when it is used: the rest of the labs does without."""

from __future__ import annotations

import importlib
from types import ModuleType

EXTRA = "huggingface"


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
        raise ImportError(
            f"labs.lab.hugging_face needs {error.name}, which is not installed: pip install 'fsdp-sim[{EXTRA}]'"
        ) from error
