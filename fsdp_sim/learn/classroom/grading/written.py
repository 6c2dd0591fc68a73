"""A function as text. It becomes one where it is called, which is in a rank: who sends it there never runs it."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
    file = f"<the cell of {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # tracebacks quote its lines
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), space)
    if not callable(space.get(name)):
        raise NameError(f"the cell defines no function {name}")
    made: Callable[..., Any] = space[name]
    return made
