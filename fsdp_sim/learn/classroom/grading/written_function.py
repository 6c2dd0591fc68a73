"""A function as text. It becomes one where it is called, which is in a rank: who sends it there never runs it."""

from __future__ import annotations

import ast
import contextlib
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

    def bring(self) -> None:
        """Import what the cell imports, which takes memory that is no tensor's; nothing else of it runs."""
        with contextlib.suppress(SyntaxError):
            for line in ast.parse(self.source).body:
                if isinstance(line, ast.Import | ast.ImportFrom):
                    with contextlib.suppress(Exception):  # the cell will raise it
                        exec(compile(ast.Module([line], []), "<imports>", "exec"), {"__name__": "__main__"})


@functools.cache
def _made(name: str, source: str) -> Callable[..., Any]:
    function = made(name, source, f"<the cell of {name}>", {"__name__": "__main__"})
    if not callable(function):
        raise NameError(f"the cell defines no function {name}")
    return function
