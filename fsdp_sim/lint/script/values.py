"""What an expression of a script is: the half of `Walker` that reads expressions and writes down calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

from fsdp_sim.lint.script.record import WRAPPERS, Call, Condition, Path, Script, Thing, alternatives

WRAPS = {
    "FullyShardedDataParallel": "fsdp1", "DistributedDataParallel": "ddp", "checkpoint_wrapper": "checkpointed",
    "compile": "compiled",
}  # fmt: skip
"""torch's functions that return a module around the one that they are given, and the kind that this makes it."""
RETURNS_SELF = {
    "to", "cuda", "cpu", "train", "eval", "half", "bfloat16", "float", "double", "requires_grad_", "to_empty", "apply",
    "share_memory", "xpu", "type", "detach", "clone", "contiguous",
}  # fmt: skip
PARAMETERS = {"parameters", "named_parameters"}
GOES_THROUGH = {"list", "tuple", "iter", "reversed", "sorted", "set", "filter", "chain", "tqdm", "deque"}
PLAIN = {
    "print", "len", "isinstance", "sum", "min", "max", "str", "int", "float", "range", "type", "hasattr", "repr", "id",
    "getattr", "setattr",
    "enumerate", "zip", "list", "tuple", "set", "iter", "reversed", "sorted", "map", "filter", "vars",
    "super", "any", "all", "abs", "bool", "dict", "open", "next", "hash", "round", "format",
}  # fmt: skip
"""Builtins, which do nothing to a model."""
IS_RANK = re.compile(r"(global_|local_|world_|dist_|my_|dp_|ddp_|self\.)*(rank|RANK|LOCAL_RANK)$")
IS_FIRST = re.compile(
    r"(is_)?(main_process|master_process|rank_?(zero|0)|local_main_process|main_rank|world_process_zero|master|chief)$"
)
MOST_CALLS = 40_000


class Expressions:
    """Reads expressions. What statements do is in `Walker`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.path: Path = ()
        self.loops: tuple[int, ...] = ()
        self.within: tuple[Call, ...] = ()
        self.functions: tuple[str, ...] = ()
        self.scopes: list[dict[str, Thing]] = [{}]
        self.rank_names: set[str] = set()

    def enter(self, function: Thing, args: Sequence[Thing], words: dict[str, Thing], me: Thing | None = None) -> Thing:
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Thing) -> None:
        raise NotImplementedError

    def record(self, name: str, full: str, node: ast.AST, **fields: Any) -> Call:
        call = Call(
            name, full, node, len(self.script.calls), path=self.path, loops=self.loops, within=self.within,
            function=self.functions[-1] if self.functions else "", **fields,
        )  # fmt: skip
        if len(self.script.calls) < MOST_CALLS:
            self.script.calls.append(call)
        return call

    @contextmanager
    def on_path(self, *conditions: Condition) -> Any:
        before, self.path = self.path, (*self.path, *conditions)
        try:
            yield
        finally:
            self.path = before

    def look_up(self, name: str) -> Thing | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def dotted(self, node: ast.expr) -> str:
        """``torch.nn.Linear`` for whatever name the script has for it; empty for what no import gave."""
        if isinstance(node, ast.Name):
            return "" if self.look_up(node.id) is not None else self.script.imports.get(node.id, "")
        if isinstance(node, ast.Attribute) and (base := self.dotted(node.value)):
            return f"{base}.{node.attr}"
        return ""

    def value(self, node: ast.expr | None) -> Thing:
        """The thing that an expression is."""
        match node:
            case None:
                return Thing("constant")
            case ast.Constant():
                return Thing("constant", node=node)
            case ast.Name(id=name):
                found = self.look_up(name)
                if found is not None:
                    return found
                kind = "rank" if IS_RANK.match(name) else "rank-test" if IS_FIRST.match(name) else "name"
                made = Thing(kind, self.script.imports.get(name, name), node=node)
                if name not in self.script.imports:
                    self.scopes[0][name] = made  # the same each time
                return made
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self.call(node)
            case ast.NamedExpr(target=target, value=inner):
                found = self.value(inner)
                self.assign(target, found)
                return found
            case (
                ast.Await(value=inner) | ast.Starred(value=inner) | ast.YieldFrom(value=inner) | ast.Yield(value=inner)
            ):
                return self.value(inner)
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                return Thing("several", node=node, items=[self.value(one) for one in elements])
            case ast.Dict(keys=keys, values=values):
                found = Thing("several", "dict", node=node)
                for key, one in zip(keys, values, strict=True):
                    item = self.value(one)
                    found.items.append(item)
                    if isinstance(key, ast.Constant):
                        found.parts[str(key.value)] = item
                return found
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._either(test, body, orelse)
            case ast.Subscript(value=base, slice=index):
                return self._element(node, self.value(base), index)
            case ast.Lambda():
                return Thing("function", "lambda", node=node)
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp() | ast.BinOp():
                parts = [self.value(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
                if self.is_by_rank(node):
                    return Thing("rank-test", node=node, items=parts)
                return Thing("call", "operation", node=node, items=parts)
        return Thing("call", "expression", node=node, items=[
            self.value(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)
        ])  # fmt: skip

    def is_by_rank(self, test: ast.expr) -> bool:
        """Whether a test holds on some ranks and not on others."""
        match test:
            case ast.BoolOp(values=values):
                return any(self.is_by_rank(one) for one in values)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.is_by_rank(operand) or self._is_rank(operand)
            case ast.Compare(left=left, comparators=[right, *_], ops=[op, *_]):
                if isinstance(op, ast.Is | ast.IsNot):
                    return False
                unset = {-1, None}  # rank == -1: not distributed at all
                constants = {one.value for one in (left, right) if isinstance(one, ast.Constant)}
                negative = any(isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.USub) for one in (left, right))
                ordered = (
                    isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and not constants
                )  # rank < shards: a group
                one_is = self._is_rank(left) or self._is_rank(right)
                return one_is and not negative and not (constants & unset) and not ordered
            case ast.Name() | ast.Attribute() | ast.Call():
                thing = self.value(test) if not isinstance(test, ast.Call) else self._quietly(test)
                return any(one.kind == "rank-test" for one in alternatives(thing))
        return False

    def _is_rank(self, node: ast.expr) -> bool:
        thing = self._quietly(node)
        return any(one.kind == "rank" for one in alternatives(thing))

    def _quietly(self, node: ast.expr) -> Thing:
        """The thing, without writing down calls a second time."""
        count = len(self.script.calls)
        found = self.value(node)
        del self.script.calls[count:]
        return found

    def _attribute(self, node: ast.Attribute) -> Thing:
        full = self.dotted(node)
        if full:
            return Thing("name", full, node=node)
        base = self.value(node.value)
        if node.attr in base.parts:
            return base.parts[node.attr]
        if IS_RANK.match(node.attr):
            return Thing("rank", node.attr, node=node)
        if IS_FIRST.match(node.attr):
            return Thing("rank-test", node.attr, node=node)
        if node.attr in ("module", "ndim"):
            self.record("<read>", node.attr, node, on=base)
        for one in alternatives(base, self.path):
            if one.kind in WRAPPERS and node.attr in ("module", "_orig_mod", "_fsdp_wrapped_module") and one.of:
                return one.of
        known = [one for one in alternatives(base, self.path) if one.kind in WRAPPERS and one.of is not None]
        if known:
            return known[0].of.part(node.attr)  # type: ignore[union-attr]
        return base.part(node.attr)

    def _element(self, node: ast.Subscript, base: Thing, index: ast.expr) -> Thing:
        if "environ" in ast.unparse(node.value) and isinstance(index, ast.Constant) and "RANK" in str(index.value):
            return Thing("rank", str(index.value), node=node)
        if isinstance(index, ast.Constant) and str(index.value) in base.parts:
            return base.parts[str(index.value)]
        if base.kind == "several" and base.items:
            if (
                isinstance(index, ast.Constant)
                and isinstance(index.value, int)
                and -len(base.items) <= index.value < len(base.items)
            ):
                return base.items[index.value]
            return Thing("either", items=list(base.items), when=[()] * len(base.items))
        if isinstance(index, ast.Slice):
            return base
        self.value(index)
        return base.part("[]")

    def _either(self, test: ast.expr, body: ast.expr, orelse: ast.expr) -> Thing:
        self.value(test)
        by_rank = self.is_by_rank(test)
        found = Thing("either", node=test)
        for holds, branch in ((True, body), (False, orelse)):
            condition = Condition(test, holds, by_rank)
            with self.on_path(condition):
                found.items.append(self.value(branch))
                found.when.append((condition,))
        return found

    def elements(self, thing: Thing) -> Thing:
        """What a loop over a thing gives."""
        if thing.kind == "several":
            return (
                thing.items[0]
                if len(thing.items) == 1
                else Thing("either", items=list(thing.items), when=[()] * len(thing.items))
            )
        if thing.kind == "parameters":
            return thing
        if thing.kind == "pairs":
            return Thing("several", items=[Thing("call", "name"), self.elements(thing.items[0])])
        return thing.part("[]")

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Thing:
        self.scopes.append({})
        conditions: list[Condition] = []
        self.loops = (*self.loops, id(node))
        try:
            for of in node.generators:
                self.assign(of.target, self.elements(self.value(of.iter)))
                for test in of.ifs:
                    self.value(test)
                    conditions.append(Condition(test, True, self.is_by_rank(test)))
            with self.on_path(*conditions):
                items = [self.value(node.value if isinstance(node, ast.DictComp) else node.elt)]
        finally:
            self.loops = self.loops[:-1]
            self.scopes.pop()
        return Thing("several", "comprehension", node=node, items=items)

    # ---- calls

    def call(self, node: ast.Call, used: bool = True) -> Thing:
        """What a call returns, once it is written down and, where the script has its function, followed."""
        full = self.dotted(node.func)
        on: Thing | None = None
        function: Thing | None = None
        if not full and isinstance(node.func, ast.Attribute):
            on = self.value(node.func.value)
            function = next(
                (one.parts[node.func.attr] for one in alternatives(on, self.path) if node.func.attr in one.parts), None
            )
            name = node.func.attr
        elif not full and isinstance(node.func, ast.Name):
            name, function = node.func.id, self.look_up(node.func.id)
        else:
            name = full.rpartition(".")[2]
            function = None if full else self.value(node.func)
            if not full:
                name = ""
        args = [self.value(one) for one in node.args]
        words = {word.arg or "**": self.value(word.value) for word in node.keywords}
        for name_, item in list(words.get("**", Thing("constant")).parts.items()):
            words.setdefault(name_, item)
        if function is not None and function.kind == "either":
            function = next(alternatives(function, self.path), None)
        if function is not None and function.kind not in ("function", "class", "partial") and on is None:
            on, name = function, "<call>"  # model(x)
        elif function is not None and function.kind not in ("function", "class", "partial"):
            on, name = function, "<call>"
        if function is not None and function.kind == "partial" and function.call is not None:
            args, words = [*function.call.args[1:], *args], function.call.words | words
            full = function.name
            name = full.rpartition(".")[2]
            function = None
        if not full:
            full = f".{name}" if on is not None else name
        call = self.record(name, full, node, on=on, args=args, words=words, used=used)
        if function is not None and function.kind in ("function", "class"):
            return self.enter(function, args, words, on)
        return self._result(call, node)

    def _result(self, call: Call, node: ast.Call) -> Thing:
        """What torch's functions, methods of modules and builtins return."""
        first = call.args[0] if call.args else call.words.get("module") or call.words.get("model")
        made = Thing("call", call.full, node=node, call=call)
        if call.on is None:
            if call.full.startswith("torch.") and call.name in WRAPS and first is not None:
                made.kind, made.of = WRAPS[call.name], first
                return made
            if call.is_torch("fully_shard", "replicate") and first is not None:
                return first
            if call.name in ("get_rank", "get_node_local_rank") or "RANK" in str(
                getattr(node.args[0], "value", "") if node.args else ""
            ):
                return Thing("rank", call.name, node=node)
            if call.full == "int" and first is not None and first.kind == "rank":
                return first
            if IS_FIRST.match(call.name.removeprefix("is_")) or IS_FIRST.match(call.name):
                return Thing("rank-test", call.name, node=node)
            if call.name == "partial" and first is not None:
                return self._partial(call, first, node)
            if call.name in GOES_THROUGH and first is not None:
                return call.args[-1] if call.name == "filter" else first
            if call.name == "enumerate" and first is not None:
                return Thing("pairs", items=[first], node=node)
            if call.name == "zip" and call.args:
                return Thing(
                    "several", items=[Thing("several", items=[self.elements(one) for one in call.args])], node=node
                )
            return made
        if call.name in ("get_rank", "get_local_rank") and call.name == "get_rank":
            return Thing("rank", call.name, node=node)
        if IS_FIRST.match(call.name):
            return Thing("rank-test", call.name, node=node)
        if call.name in PARAMETERS:
            found = Thing("parameters", call.name, call.on, node=node, call=call)
            return Thing("pairs", items=[found], node=node) if call.name == "named_parameters" else found
        if call.name in ("named_children", "named_modules", "items"):
            return Thing("pairs", items=[call.on], node=node)
        if call.name in ("modules", "children", "values"):
            return call.on
        if call.name in RETURNS_SELF:
            return call.on
        if call.name in ("append", "extend", "add") and call.args and call.on.kind == "several":
            call.on.items.extend(call.args[:1])
        if (
            call.name == "get"
            and "environ" in ast.unparse(node.func)
            and node.args
            and "RANK" in ast.unparse(node.args[0])
        ):
            return Thing("rank", "environ", node=node)
        made.of = call.on if call.name == "<call>" else None
        return made

    def _partial(self, call: Call, first: Thing, node: ast.Call) -> Thing:
        if first.kind == "name":
            return Thing("partial", first.name, node=node, call=call)
        return first if first.kind in ("function", "class") else Thing("call", "partial", node=node, call=call)
