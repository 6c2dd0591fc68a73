"""How functions and results travel between the notebook and the ranks: by value, with cloudpickle."""

from __future__ import annotations

import importlib
import io
import sys
from types import ModuleType
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.CloudPickler):
    """cloudpickle, which also sends modules of a class of their own by name.

    A function that uses ``torch.distributed`` and a variable called ``config`` drags in ``torch.distributed.config``,
    whose class plain cloudpickle cannot send. And ``exit`` of a notebook, which holds the whole kernel, as Python's.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            return importlib.import_module, (obj.__name__,)
        if type(obj).__name__ in ("ExitAutocall", "ZMQExitAutocall"):
            return getattr, (sys, "exit")
        return super().reducer_override(obj)


def pack(obj: Any) -> bytes:
    """``obj`` as bytes; whatever it raises is about something that lives in this process only."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


unpack = cloudpickle.loads
