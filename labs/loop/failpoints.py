"""Named moments at which the fault tests make a rank fail for real: killed, hung, out of step, with a NaN.

    FSDP_SIM_FAULTS="kill:before-rename@4@1"            rank 1 kills itself (SIGKILL) there, in step 4
    FSDP_SIM_FAULTS="hang:step@2@0,raise:loader@3@1"    several, with commas; * stands for any step or rank

Without the variable a point does nothing. A fault happens in the first attempt only: ranks that torchrun starts anew
get through.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from functools import cache

VARIABLE = "FSDP_SIM_FAULTS"
ACTIONS = ("kill", "hang", "raise", "nan", "slow", "full")
SLOW_S = 3.0
FULL_BYTES = 1024
"""``full`` lets no file grow beyond this until the next point: writing more fails, as on a full disk."""


@cache
def _faults(text: str) -> tuple[tuple[str, str, str, str], ...]:
    found = []
    for one in filter(None, text.split(",")):
        action, _, rest = one.partition(":")
        name, step, rank = [*rest.split("@"), "*", "*"][:3]
        if action not in ACTIONS or not name:
            raise ValueError(f"{VARIABLE}={one!r}: it is ACTION:POINT@STEP@RANK with an action of {', '.join(ACTIONS)}")
        found.append((action, name, step, rank))
    return tuple(found)


def failpoint(name: str, step: int | None = None) -> str:
    """Fail here if the tests want it; else return "", or the action that the caller is to take itself ("nan")."""
    text = os.environ.get(VARIABLE)
    if not text:
        return ""
    _lift()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return ""
    for action, where, at_step, at_rank in _faults(text):
        here = where == name and at_step in ("*", str(step)) and at_rank in ("*", os.environ.get("RANK", "0"))
        if not here:
            continue
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "hang":
            while True:
                time.sleep(60)
        elif action == "slow":
            time.sleep(SLOW_S)
        elif action == "full":
            _limit_files()
        elif action == "raise":
            raise RuntimeError(f"the fault {action}:{name} that {VARIABLE} asks for")
        else:
            return action
    return ""


_limited_by: list[int] = []  # the thread that asked for a full disk


def _limit_files() -> None:
    sys.dont_write_bytecode = True  # else a compiled module that is cut short would be loaded ever after
    _limited_by.append(threading.get_ident())
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _lift() -> None:
    """The disk is no longer full, when the thread that found it so comes to its next point."""
    if threading.get_ident() in _limited_by:
        _limited_by.clear()
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
