"""Where in the code an event was issued: the lines of the learner's own files, and of the mini-FSDP, that led to it.

A walk up the Python stack, cheap enough for every event of a recording: while the program runs only code objects and
offsets are kept, and they become ``file:line`` when the recording is read.

In backward the walk reaches the learner's ``loss.backward()`` as long as autograd runs on the thread that called it,
as it does on a CPU. On a GPU autograd has threads of its own, whose stacks begin inside the hook: then nobody knows.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from fsdp_sim.timeline.event import Event

Calls: TypeAlias = list[tuple[CodeType, int]]
"""Code objects and where in them the call stood, innermost first."""

PACKAGE = Path(__file__).parents[1]
MINI = f"{PACKAGE.name}/mini/"
# What opens an event on behalf of the line that issues it.
OPENERS = (f"{MINI}recording.py", f"{MINI}observer.py", f"{MINI}siblings/watch.py")
RECORDED: set[str] = set()
"""The files that runs of this process, and of its ranks, were seen to run: what a figure may quote lines of."""
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_GENERATED = ("<frozen", "<string>", "<eval_with_key>")
_kept: dict[str, bool] = {}  # by name of a file: whether it is the learner's or the mini's


def calls(frame: FrameType | None) -> Calls:
    """The calls that led to a frame, those of libraries, the recorder and the ranks left out."""
    found = []
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if _kept[name] if name in _kept else _is_kept(name):
            found.append((code, frame.f_lasti))
        frame = frame.f_back
    return found


def located(found: Calls) -> dict[str, Any]:
    """The fields ``source`` and ``stack`` of an event: ``file:line`` where it was issued, and of what led there."""
    lines = [_file_and_line(code.co_filename, code, offset) for code, offset in found]
    lines = [line for line in lines if not line.startswith(OPENERS)] or lines[-1:]
    return {"source": lines[0] if lines else "", "stack": tuple(reversed(lines[1:]))}


def learners_line(found: Calls) -> str:
    """``file:line`` of the nearest call in the learner's own files; empty where there is none."""
    own = (call for call in found if not call[0].co_filename.startswith(f"{PACKAGE}/"))
    return next((_file_and_line(code.co_filename, code, offset) for code, offset in own), "")


def remember(events: Iterable[Event]) -> None:
    """Note the files of events that this process has from its own ranks."""
    places = {place for event in events for place in (event.source, *event.stack)}
    RECORDED.update(place.rpartition(":")[0] for place in places)


def _is_kept(name: str) -> bool:
    """Whether a file is the learner's or the mini's; libraries and the rest of this package only stand in between."""
    torch = getattr(sys.modules.get("torch"), "__path__", [])
    if name.startswith(f"{PACKAGE}/"):
        _kept[name] = name.startswith(f"{PACKAGE}/mini/")
    else:
        _kept[name] = not name.startswith((*_LIBRARIES, *torch, *_GENERATED))
    return _kept[name]


@cache  # by file too: code of two files may be equal
def _file_and_line(name: str, code: CodeType, offset: int) -> str:
    line = next((line for start, end, line in code.co_lines() if start <= offset < end and line), code.co_firstlineno)
    if name.startswith(f"{PACKAGE}/"):  # the same wherever the package is installed
        name = Path(name).relative_to(PACKAGE.parent).as_posix()
    RECORDED.add(name)
    return f"{name}:{line}"
