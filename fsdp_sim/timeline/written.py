"""Files that are there whole or not at all: the disk may be full, or the writer killed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written(path: str | Path) -> Iterator[Path]:
    """Where to write a file, which takes the place of ``path`` when the block ends; if it raises, what was there stays.

    Raises:
        OSError: it cannot be written; says so of ``path``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with written(f"{folder}/page.html") as new:
        ...         _ = new.write_text("all of it")
        ...     print(os.listdir(folder))
        ['page.html']
    """
    target = Path(path).resolve()  # where a link leads to
    if target.exists() and not target.is_file():  # such as /dev/stdout: nothing takes its place
        yield target
        return
    new = target.with_name(f".{target.name[:100]}.{os.getpid()}.new")
    try:
        yield new
        if target.exists():
            shutil.copymode(target, new)
        new.replace(target)
    except OSError as error:
        raise type(error)(
            f"{path} cannot be written ({error.strerror or error}); what was there is unchanged"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink()
