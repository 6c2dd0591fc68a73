"""What the changes of a script share: names as torch knows them, lines of the original, places to look at, new code."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider

SHARDED = {
    "torch.distributed.fsdp.FullyShardedDataParallel": "fsdp1",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "fsdp1",
    "torch.nn.parallel.DistributedDataParallel": "ddp",
    "torch.nn.parallel.distributed.DistributedDataParallel": "ddp",
    "deepspeed.initialize": "deepspeed",
}
"""The calls that make a model one of many ranks, and what they make it."""
NO_CODE: Sequence[cst.BaseStatement] = ()


@dataclass(frozen=True)
class Look:
    """A place that a person has to look at.

    Attributes:
        line: of the script as it was.
        what: what is there, why it was left or what changes, and what to do.
        must: the script does not run, or trains something else, until it is done.
        rule: the trap's id in `fsdp_sim.lint`, where it has one.
    """

    line: int
    what: str
    must: bool = False
    rule: str = ""


@dataclass
class Script:
    """A script on its way from one API to another.

    Attributes:
        module: as it is by now.
        folder: where the script lies; files that it imports are read there.
        blocks: classes of the modules that become units of their own, as the script can write them.
        lines: line of each node of the script as it was, by its identity.
        models: names of wrapped models, such as ``model`` and ``self.model``.
        optimizers: names of optimizers, and of each its model, empty where that is not told.
        found: the APIs that were found, in order. plan: what the script says of a `Plan`.
        names: what imports bind, and what that is in full.
        imports: (module, name) of what the new code needs.
        uses: what of the old API was met, for the lists of what to test.
        others: by file name, those from which it imports.
    """

    module: cst.Module
    folder: Path
    blocks: tuple[str, ...] = ()
    blocks_given: bool = False
    by_name: bool = False  # of classes that the script does not import: Hugging Face's _no_split_modules
    lines: dict[int, int] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    optimizers: dict[str, str] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    plan: dict[str, object] = field(default_factory=dict)
    imports: set[tuple[str, str]] = field(default_factory=set)
    refused: bool = False  # a wrapper stays as it was
    looks: list[Look] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    others: dict[str, Script] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)

    @classmethod
    def of(cls, text: str, folder: Path) -> Script:
        """Parse a script.

        Raises:
            libcst.ParserSyntaxError: it is no Python.
        """
        script = cls(cst.parse_module(text), folder)
        wrapper = MetadataWrapper(script.module, unsafe_skip_copy=True)
        positions = wrapper.resolve(PositionProvider)
        script.lines = {id(node): place.start.line for node, place in positions.items()}
        script._kept.append(positions)  # an identity is one as long as the node is there
        script.names = _imports(script.module)
        return script

    def apply(self, change: Change) -> None:
        changed = self.module.visit(change)
        assert isinstance(changed, cst.Module)
        self.module = changed

    def name_of(self, node: cst.CSTNode) -> str:
        """The name as its import says, such as ``torch.nn.Module``, or as it is written; empty for what is no name."""
        if isinstance(node, cst.Call):
            node = node.func
        head, dot, rest = (get_full_name_for_node(node) or "").partition(".")
        return f"{self.names.get(head, head)}{dot}{rest}"

    def is_a(self, node: cst.CSTNode, *names: str) -> bool:
        """Whether a name ends so: torch gives the same thing from several modules."""
        own = self.name_of(node)
        return any(own == name or own.endswith(f".{name}") for name in names)

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node).strip()

    def line_of(self, node: cst.CSTNode) -> int:
        """The line where a node stood, or the first of those in it."""
        return next((self.lines[id(one)] for one in walk(node) if id(one) in self.lines), 0)

    def look(self, node: cst.CSTNode, what: str, *, must: bool = False, rule: str = "") -> None:
        found = Look(self.line_of(node), what, must, rule)
        if found not in self.looks:
            self.looks.append(found)

    def use(self, *names: str) -> None:
        self.uses += [name for name in names if name not in self.uses]

    def need(self, module: str, name: str) -> None:
        self.imports.add((module, name))

    def value_of(self, node: cst.BaseExpression, inside: Sequence[cst.FunctionDef] = ()) -> cst.BaseExpression | None:
        """What a name is given, where it is given something once, in its function if elsewhere too; or what a function
        of the script returns that gives it. The expression itself where it is no name.

        Args:
            inside: the functions through which one has come, the last of which has the name.
        """
        if not isinstance(node, cst.Name):
            return node
        given = list(self._given(node.value, inside[-1] if inside else self.module, inside))
        if len(given) > 1 and not inside:
            around = [one for one in self._functions() if any(inner is node for inner in walk(one))]
            given = list(self._given(node.value, around[-1], inside)) if around else given
        return given[0] if len(given) == 1 else None

    def _functions(self) -> list[cst.FunctionDef]:
        return [one for one in walk(self.module) if isinstance(one, cst.FunctionDef)]

    def _given(self, name: str, where: cst.CSTNode, inside: Sequence[cst.FunctionDef]) -> Iterator[cst.BaseExpression]:
        """What a name is given in some place."""
        for one in walk(where):
            if not isinstance(one, cst.Assign | cst.AnnAssign) or one.value is None:
                continue
            for target in [one.target] if isinstance(one, cst.AnnAssign) else [to.target for to in one.targets]:
                parts = [to.value for to in target.elements] if isinstance(target, cst.Tuple | cst.List) else [target]
                for number, part in enumerate(parts):
                    if isinstance(part, cst.Name) and part.value == name:
                        yield self._part(one.value, number if part is not target else None, inside)

    def _part(
        self, value: cst.BaseExpression, number: int | None, inside: Sequence[cst.FunctionDef]
    ) -> cst.BaseExpression:
        """A value, or one of those that it is of, through a function of the script that returns in one place."""
        whole, function = value, None
        if isinstance(value, cst.Call) and isinstance(value.func, cst.Name):
            known = [one for one in self._functions() if one not in inside]  # one that calls itself is met once
            function = next((one for one in known if one.name.value == dotted(value.func)), None)
            returned = [one.value for one in walk(function) if isinstance(one, cst.Return)] if function else []
            whole = returned[0] or value if len(returned) == 1 else value
        if number is not None:
            if not isinstance(whole, cst.Tuple) or number >= len(whole.elements):
                return value
            whole = whole.elements[number].value
        return whole if function is None else self.value_of(whole, [*inside, function]) or value


class Change(cst.CSTTransformer):
    """One change of a script. What it makes of a node keeps that node's line: libcst makes every node anew."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> Any:
        result = super().on_leave(original_node, updated_node)
        line = self.script.lines.get(id(original_node))
        if line is not None:
            first = next(iter(result), None) if isinstance(result, cst.FlattenSentinel) else result
            self.script.lines[id(first)] = line
            self.script._kept.append(first)
        return result


def _imports(module: cst.Module) -> dict[str, str]:
    """What each name is that an import binds, wherever it stands."""
    found: dict[str, str] = {}
    for node in walk(module):
        if isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
            base = get_full_name_for_node(node.module) if node.module is not None else ""
            for alias in node.names:
                found[str(alias.evaluated_alias or alias.evaluated_name)] = f"{base}.{alias.evaluated_name}"
        elif isinstance(node, cst.Import):
            for alias in node.names:
                name = str(alias.evaluated_name)
                found |= {alias.evaluated_alias: name} if alias.evaluated_alias else {}
    return found


def walk(node: cst.CSTNode, *, into_functions: bool = True) -> Iterator[cst.CSTNode]:
    """A node and those in it, parents first."""
    yield node
    for child in _children(node):
        if into_functions or not isinstance(child, cst.FunctionDef | cst.ClassDef | cst.Lambda):
            yield from walk(child, into_functions=into_functions)


@functools.lru_cache(2**16)
def _children(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    return node.children  # libcst visits the node to know them


def calls_in(node: cst.CSTNode, *, into_functions: bool = True) -> Iterator[cst.Call]:
    return (one for one in walk(node, into_functions=into_functions) if isinstance(one, cst.Call))


def targets_of(node: cst.Assign | cst.AnnAssign) -> list[cst.BaseExpression]:
    """What an assignment gives values to, tuples taken apart."""
    found = [node.target] if isinstance(node, cst.AnnAssign) else [one.target for one in node.targets]
    return [
        part
        for one in found
        for part in ([e.value for e in one.elements] if isinstance(one, cst.Tuple | cst.List) else [one])
    ]


def arguments_of(call: cst.Call, names: Sequence[str] = ()) -> dict[str, cst.BaseExpression]:
    """A call's arguments by name; those without one get ``names`` in turn, ``*`` and ``**`` their sign."""
    found = {}
    for number, one in enumerate(call.args):
        name = one.star or (
            one.keyword.value if one.keyword else names[number] if number < len(names) else f"#{number}"
        )
        found[name] = one.value
    return found


def dotted(node: cst.CSTNode) -> str:
    """``self.model`` for that expression; empty for one that is more than names and dots."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        of = dotted(node.value)
        return of and f"{of}.{node.attr.value}"
    return ""


def names_in(node: cst.CSTNode) -> set[str]:
    """The plain names that occur in a node."""
    return {one.value for one in walk(node) if isinstance(one, cst.Name)}


def statements(code: str, config: cst.PartialParserConfig) -> list[cst.BaseStatement]:
    """The statements of some lines."""
    return list(cst.parse_module(code.replace("\n", config.default_newline), config).body)  # type: ignore[arg-type]


def with_lines_before(new: Sequence[cst.BaseStatement], old: cst.CSTNode) -> list[cst.BaseStatement]:
    """New statements in the place of an old one: the blank lines and comments above it stay."""
    first, *rest = new
    lines = getattr(old, "leading_lines", ())
    return [first.with_changes(leading_lines=[*lines, *getattr(first, "leading_lines", ())]), *rest]
