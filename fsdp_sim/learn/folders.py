"""Folders that a judge makes for its ranks. Where they are another user's, they are lent to that user."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@functools.cache
def _all() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="checkpoints-", ignore_cleanup_errors=True)
    Path(folder.name).chmod(0o711)  # whoever is lent one may pass
    return folder


def new_folder() -> str:
    """An empty folder that all ranks see; it is gone when this process ends."""
    return tempfile.mkdtemp(dir=_all().name)


def folders_in(given: Any) -> Iterator[str]:
    """The folders of `new_folder` among what functions are given."""
    if isinstance(given, list | tuple):
        for one in given:
            yield from folders_in(one)
    elif isinstance(given, str) and Path(given).is_relative_to(_all().name):
        yield given
