"""A function as an edit of another one: what a wrong answer changes in the right one, and nothing else."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Edit:
    """The function ``of`` with some of its text replaced. It is made where it is first called, and sent as text.

    Attributes:
        texts: old text and new text. Each old text stands exactly once in the source of ``of``; its lines are written
            without their indentation, and new ones are indented as the first old one. Nothing in the place of whole
            lines leaves them out.
        of: the function that is edited; left out in an exercise, it is the reference.
        name: what it is, in words, where that says more than the texts.
    """

    texts: Mapping[str, str]
    of: Callable[..., Any] | None = None
    name: str = ""

    @property
    def __name__(self) -> str:  # as of any function
        return getattr(self.of, "__name__", "edit")

    @functools.cached_property
    def source(self) -> str:
        """The edited source.

        Raises:
            ValueError: an old text does not stand exactly once in it, or what comes out is no Python.
        """
        assert self.of is not None, "an edit outside an exercise says of what"
        source, texts = source_of(self.of), []
        for old, new in self.texts.items():
            places = [*re.finditer(r"\n *".join(map(re.escape, old.split("\n"))), source)]
            if len(places) != 1:
                raise ValueError(f"{old!r} stands {len(places)} times in {self.of.__name__}; an edit needs it once")
            texts.append((*places[0].span(), new))
        for start, end, new in sorted(texts, reverse=True):
            begin, rest = source.rfind("\n", 0, start) + 1, source.find("\n", end) + 1 or len(source)
            indent = re.match(" *", source[begin:])[0]  # type: ignore[index]
            if not new and not (source[begin:start] + source[end:rest]).strip():
                start, end = begin, rest
            source = source[:start] + new.replace("\n", f"\n{indent}") + source[end:]
        try:
            compile(source, "", "exec")
        except SyntaxError as error:
            raise ValueError(f"{self.of.__name__} with the edit {self.texts} is no Python: {error.msg}") from None
        return source

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """The function, with the names of the module of the one that is edited."""
        assert self.of is not None
        file = f"{self.of.__code__.co_filename}, edited"  # in the folder of the original: it is no learner's code
        function = made(self.of.__name__, self.source, file, dict(self.of.__globals__))
        assert callable(function)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Edit, (self.texts, self.of)


@functools.cache  # looking it up takes Python a millisecond, and an exercise asks for it with every edit
def source_of(function: Callable[..., Any]) -> str:
    """The source text of a function or an edit."""
    return function.source if isinstance(function, Edit) else textwrap.dedent(inspect.getsource(function)).strip()


def made(name: str, source: str, file: str, space: dict[str, Any]) -> object:
    """What ``source`` defines as ``name``, or None; ``space`` has the names that it may use, and gets its own."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # tracebacks quote its lines
    exec(compile(source, file, "exec"), space)
    return space.get(name)
