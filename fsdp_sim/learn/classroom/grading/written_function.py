"""A function as text. It becomes one where it is called, which is in a rank: who sends it there never runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_sim.learn.edit import made


@dataclass(frozen=True)
class Written:
    """The function ``name`` that the code of a cell defines.

    Raises:
        NameError: when called: the code defines no such function. And whatever the code raises.
    """

    name: str
    source: str

    @property
    def __name__(self) -> str:  # as of any function
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _made(self.name, self.source)(*args, **kwargs)


@functools.cache
def _made(name: str, source: str) -> Callable[..., Any]:
    function = made(name, source, f"<the cell of {name}>", {"__name__": "__main__"})
    if not callable(function):
        raise NameError(f"the cell defines no function {name}")
    return function
