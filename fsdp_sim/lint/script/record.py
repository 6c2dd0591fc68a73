"""What is known of a script after it has been read: things, and the calls in the order in which they would be made.

Nothing is run. `Walker` (walk.py) goes through the text as Python would, enters the functions and methods that the file
itself defines, takes both ways of every ``if``, and writes down a `Call` for whatever is called. Rules look at that.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

WRAPPERS = {"fsdp1", "ddp", "compiled", "checkpointed"}
"""Kinds of things that hold another module, and stand for it."""


@dataclass(eq=False)
class Thing:
    """A value of the script, known by how it came about.

    Attributes:
        kind: fsdp1, ddp, compiled or checkpointed (``of`` is inside); parameters (of ``of``); part, call (what a call
            returned), instance, function, class, constant, several (``items``), argument, rank, rank-test;
            either: one of ``items``, by the conditions in ``when``.
        name: of the call, the attribute or the argument. node: where it came about.
        owner: the module of which it is a part. parts: its attributes and elements.
        call: that returned it. scopes: of a function: the names around it.
    """

    kind: str
    name: str = ""
    of: Thing | None = None
    owner: Thing | None = None
    node: ast.AST | None = None
    items: list[Thing] = field(default_factory=list)
    when: list[Path] = field(default_factory=list)
    parts: dict[str, Thing] = field(default_factory=dict)
    call: Call | None = None
    scopes: list[dict[str, Thing]] | None = None

    def part(self, name: str) -> Thing:
        """The attribute or element of this name, the same each time."""
        if name not in self.parts:
            self.parts[name] = Thing("part", name, owner=self)
        return self.parts[name]


@dataclass(frozen=True)
class Condition:
    """A test that has to be true (``holds``) or false for a call to be reached."""

    test: ast.expr
    holds: bool
    by_rank: bool = False

    @functools.cached_property
    def text(self) -> str:
        return ast.unparse(self.test)


Path = tuple[Condition, ...]


def compatible(one: Path, other: Path) -> bool:
    """Whether no test is true on the one path and false on the other."""
    said = {c.text: c.holds for c in one}
    return all(said.get(c.text, c.holds) == c.holds for c in other)


@dataclass(eq=False)
class Call:
    """Something that is called, or done, at one place of the script.

    Attributes:
        name: the last part of ``full``, or ``<call>`` (of a thing), ``<read>`` and ``<assign>`` (of the attribute
            ``full``), ``<skip>`` (continue or break).
        full: ``torch.distributed.fsdp.fully_shard``; ``.name`` of a method.
        on: whose method it is. args, words: what it is given, by position and by name.
        path: the conditions. loops: the loops around it. within: the calls of the ``with`` around it.
        function: the function of the script that it stands in.
        used: whether anything becomes of what it returns.
    """

    name: str
    full: str
    node: ast.AST
    order: int
    on: Thing | None = None
    args: list[Thing] = field(default_factory=list)
    words: dict[str, Thing] = field(default_factory=dict)
    path: Path = ()
    loops: tuple[int, ...] = ()
    within: tuple[Call, ...] = ()
    function: str = ""
    used: bool = True

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 1)

    def is_torch(self, *names: str) -> bool:
        """Whether it is torch's function of one of these names."""
        return self.name in names and self.full.partition(".")[0] == "torch"

    def given(self, name: str, position: int | None = None) -> Thing | None:
        """An argument, by its name or its position."""
        if name in self.words:
            return self.words[name]
        return self.args[position] if position is not None and position < len(self.args) else None

    def literal(self, name: str) -> object:
        """The constant that an argument is; `...` where it is none, or not given."""
        thing = self.words.get(name)
        return thing.node.value if thing and isinstance(thing.node, ast.Constant) else ...

    @property
    def by_rank(self) -> bool:
        """Whether only some ranks come here."""
        return any(condition.by_rank for condition in self.path)


def alternatives(thing: Thing | None, path: Path = ()) -> Iterator[Thing]:
    """What a thing may be on a path."""
    if thing is None:
        return
    if thing.kind != "either":
        yield thing
        return
    for one, when in zip(thing.items, thing.when, strict=True):
        if compatible(when, path):
            yield from alternatives(one, path)


def inside(thing: Thing, path: Path = ()) -> list[Thing]:
    """The thing and what it wraps, from the outside in."""
    found: list[Thing] = []
    ahead = list(alternatives(thing, path))
    while ahead and len(found) < 50:
        one = ahead.pop(0)
        if one not in found:
            found.append(one)
            if one.kind in WRAPPERS and one.of is not None:
                ahead += alternatives(one.of, path)
    return found


def every(thing: Thing | None, path: Path = (), depth: int = 0) -> Iterator[Thing]:
    """A thing, and what it holds if it is a list or a table, as deep as that goes."""
    for one in alternatives(thing, path):
        yield one
        if one.kind in ("several", "pairs") and depth < 6:
            for item in one.items:
                yield from every(item, path, depth + 1)


def whole(thing: Thing) -> Thing:
    """The module of which a thing is a part, through every wrapper; itself where it is of none."""
    for _ in range(50):
        if thing.kind in {*WRAPPERS, "parameters"} and thing.of is not None:
            thing = thing.of
        elif thing.kind == "either" and thing.items:
            thing = thing.items[0]
        elif thing.owner is not None:
            thing = thing.owner
        else:
            break
    return thing


@dataclass(eq=False)
class Script:
    """A Python file that was read.

    Attributes:
        calls: in the order in which they would be made.
        imports: by local name: the dotted name. imported: (dotted name, node, is guarded) of each import.
        unread: sentences about what was not followed.
    """

    path: str
    text: str
    tree: ast.Module
    calls: list[Call] = field(default_factory=list)
    imports: dict[str, str] = field(default_factory=dict)
    imported: list[tuple[str, ast.AST, bool]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @functools.cached_property
    def own(self) -> set[str]:
        """The names of the functions and classes that the script has."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        return {node.name for node in ast.walk(self.tree) if isinstance(node, kinds)}

    @functools.cached_property
    def sharded(self) -> list[tuple[Call, Thing]]:
        """Each `fully_shard` of torch with each module that it is given."""
        return [
            (call, one)
            for call in self.torch("fully_shard")
            for one in every(call.given("module", 0), call.path)
            if one.kind != "several"
        ]

    def torch(self, *names: str) -> list[Call]:
        """The calls of torch's functions of these names."""
        return [call for call in self.calls if call.is_torch(*names)]

    def methods(self, *names: str) -> list[Call]:
        """The calls of methods of these names."""
        return [call for call in self.calls if call.on is not None and call.name in names]
