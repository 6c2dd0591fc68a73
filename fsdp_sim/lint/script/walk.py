"""`read_script`: goes through a Python file as Python would, without running any of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from fsdp_sim.lint.script.record import WRAPPERS, Condition, Script, Thing, alternatives
from fsdp_sim.lint.script.values import Expressions

DEEPEST = 12  # calls of the script's own functions inside of each other
MOST_ENTERED = 3_000  # of all of them
MOST_CHARACTERS = 2_000_000
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
RANKS = ("rank", "local_rank", "global_rank")
ANNOTATED = {"FullyShardedDataParallel": "fsdp1", "FSDPModule": "fsdp2", "DistributedDataParallel": "ddp"}


def read_script(text: str, path: str) -> Script:
    """A script with all that it calls, in order.

    Raises:
        ValueError: it is no Python, or too large.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{path} has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: no Python: {error.msg}") from None
    except (RecursionError, ValueError, MemoryError) as error:
        raise ValueError(f"{path} is no Python that can be read: {error}") from None
    script = Script(path, text, tree)
    try:
        Walker(script).all()
    except RecursionError:
        raise ValueError(f"{path} nests too deep to be read") from None
    return script


class Walker(Expressions):
    """Goes through the statements: first what the module does, then each function that nothing has called."""

    def all(self) -> None:
        self._imports()
        self.entered: set[int] = set()
        self.depth: list[int] = []
        self.count = 0
        self.instances: dict[int, Thing] = {}
        self.results: list[list[Thing]] = []
        self.block(self.script.tree.body)
        self._what_nobody_called()

    def _imports(self) -> None:
        guarded = {
            id(inner) for node in ast.walk(self.script.tree) if isinstance(node, ast.Try | ast.If)
            for inner in ast.walk(node)
        }  # fmt: skip
        for node in ast.walk(self.script.tree):
            is_guarded = id(node) in guarded
            if isinstance(node, ast.Import):
                for one in node.names:
                    self.script.imported.append((one.name, node, is_guarded))
                    if one.asname:
                        self.script.imports[one.asname] = one.name
                    else:
                        top = one.name.partition(".")[0]
                        self.script.imports[top] = top
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                for one in node.names:
                    full = f"{node.module}.{one.name}"
                    self.script.imported.append((full, node, is_guarded))
                    self.script.imports[one.asname or one.name] = full
            elif isinstance(node, ast.ImportFrom):
                for one in node.names:
                    self.script.imports[one.asname or one.name] = f"<own>.{node.module or ''}.{one.name}"

    def _what_nobody_called(self) -> None:
        for node in self.script.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and id(node) not in self.entered:
                self.enter(Thing("function", node.name, node=node), [], {}, unknown=True)
            elif isinstance(node, ast.ClassDef) and not any(
                id(one) in self.entered
                for one in node.body
                if isinstance(one, ast.FunctionDef) and one.name != "__init__"
            ):
                made = self._instance(Thing("class", node.name, node=node), [], {}, unknown=True)
                for one in node.body:
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name != "__init__":
                        self.enter(
                            made.parts.get(one.name) or Thing("function", one.name, node=one),
                            [],
                            {},
                            made,
                            unknown=True,
                        )
            elif isinstance(node, ast.ClassDef):
                for one in node.body:
                    if isinstance(one, ast.FunctionDef) and id(one) not in self.entered and id(node) in self.instances:
                        self.enter(
                            Thing("function", one.name, node=one), [], {}, self.instances[id(node)], unknown=True
                        )

    # ---- functions and classes

    def enter(
        self, function: Thing, args: Sequence[Thing], words: dict[str, Thing], me: Thing | None = None, *,
        unknown: bool = False,
    ) -> Thing:  # fmt: skip
        """Go through a function, a lambda or a class of the script.

        Args:
            args, words: what it is given. me: its instance. unknown: nobody knows what it is given.
        """
        node = function.node
        if function.kind == "class":
            return self._instance(function, args, words)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return Thing("call", function.name)
        if id(node) in self.depth or len(self.depth) >= DEEPEST or self.count >= MOST_ENTERED:
            return Thing("call", function.name, node=node)
        self.entered.add(id(node))
        self.count += 1
        scope: dict[str, Thing] = {}
        names = [*node.args.posonlyargs, *node.args.args]
        static = isinstance(node, ast.FunctionDef) and any(
            isinstance(one, ast.Name) and one.id == "staticmethod" for one in node.decorator_list
        )
        is_method = function.owner is not None
        given = [me, *args] if me is not None and is_method and not static else list(args)
        defaults = dict(
            zip([one.arg for one in names[len(names) - len(node.args.defaults) :]], node.args.defaults, strict=True)
        )
        defaults |= {one.arg: of for one, of in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if of}
        for number, one in enumerate([*names, *node.args.kwonlyargs]):
            if number < len(names) and number < len(given):
                scope[one.arg] = given[number]
            elif one.arg in words:
                scope[one.arg] = words[one.arg]
            elif one.arg in defaults and isinstance(defaults[one.arg], ast.Constant) and not unknown:
                scope[one.arg] = self._argument(one, defaults[one.arg])
            else:
                scope[one.arg] = self._argument(one)
        for rest in (node.args.vararg, node.args.kwarg):
            if rest is not None:
                scope[rest.arg] = Thing("argument", rest.arg)
        kept = self.scopes, self.within, self.depth, self.functions, self.path
        self.scopes = [*(function.scopes or self.scopes[:1]), scope]
        self.depth = [*self.depth, id(node)]
        self.functions = (*self.functions, getattr(node, "name", "lambda"))
        self.results.append([])
        try:
            if isinstance(node, ast.Lambda):
                return self.value(node.body)
            for decorator in node.decorator_list:
                self._decorate(decorator, node)
            self.block(node.body)
        finally:
            self.scopes, self.within, self.depth, self.functions, self.path = kept
            results = self.results.pop()
        if not results:
            return Thing("constant", node=node)
        if len(results) == 1:
            return results[0]
        tests = next((one for one in results if one.kind == "rank-test"), None)
        return tests or Thing("either", items=results, when=[()] * len(results), node=node)

    def _decorate(self, decorator: ast.expr, node: ast.AST) -> None:
        """What a decorator puts around a function: a context of torch, or that one rank alone runs it."""
        is_call = isinstance(decorator, ast.Call)
        called = decorator if is_call else ast.copy_location(ast.Call(decorator, [], []), node)
        found = self.value(called)
        if found.call is not None and found.call.full.startswith("torch."):
            self.within = (*self.within, found.call)
        name = decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
        if name in ("rank_zero_only", "on_main_process", "on_local_main_process"):
            self.path = (*self.path, Condition(decorator, True, True))

    def _argument(self, one: ast.arg, default: ast.expr | None = None) -> Thing:
        annotation = "" if one.annotation is None else (self.dotted(one.annotation) or ast.unparse(one.annotation))
        kind = ANNOTATED.get(annotation.rpartition(".")[2], "argument")
        if one.arg in RANKS:
            kind = "rank"
        return Thing(kind, one.arg, node=default or one)

    def _instance(
        self, function: Thing, args: Sequence[Thing], words: dict[str, Thing], unknown: bool = False
    ) -> Thing:
        node = function.node
        assert isinstance(node, ast.ClassDef)
        made = Thing("instance", node.name, node=node)
        self.instances[id(node)] = made
        for of in reversed(list(self._lineage(node))):
            for one in of.body:
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                    kind = "function"
                    is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in one.decorator_list)
                    if not is_property:
                        made.parts[one.name] = Thing(kind, one.name, node=one, owner=made)
        if (init := made.parts.get("__init__")) is not None:
            self.enter(init, args, words, made, unknown=unknown)
        return made

    def _lineage(self, node: ast.ClassDef, seen: int = 0) -> Iterator[ast.ClassDef]:
        yield node
        for base in node.bases:
            found = self.look_up(base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found.node, ast.ClassDef) and seen < 10:
                yield from self._lineage(found.node, seen + 1)

    # ---- statements

    def block(self, body: Sequence[ast.stmt]) -> None:
        """Statements in order; after an ``if`` that leaves, the rest is where its test is false."""
        before = self.path
        try:
            for statement in body:
                self.statement(statement)
                if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
                    self.path = (*self.path, Condition(statement.test, False, self.is_by_rank(statement.test)))
        finally:
            self.path = before

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self.scopes[-1][name] = Thing("function", name, node=node, scopes=list(self.scopes))
            case ast.ClassDef(name=name):
                self.scopes[-1][name] = Thing("class", name, node=node)
            case ast.Assign(targets=targets, value=value):
                found = self.value(value)
                for target in targets:
                    self.assign(target, found)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self.assign(target, self.value(value))
            case ast.AugAssign(target=target, value=value):
                self.value(value)
                if isinstance(target, ast.Name):
                    old = self.look_up(target.id)
                    if old is None or old.kind not in ("several", "rank"):
                        self.scopes[-1][target.id] = Thing("call", "operation", node=node)
            case ast.Expr(value=ast.Call() as call):
                self.call(call, used=False)
            case ast.Expr(value=value):
                self.value(value)
            case ast.Return(value=value):
                if self.results:
                    self.results[-1].append(self.value(value))
            case ast.If():
                self._if(node)
            case ast.For(target=target, iter=iterated) | ast.AsyncFor(target=target, iter=iterated):
                self.assign(target, self.elements(self.value(iterated)))
                self._loop(node)
            case ast.While(test=test):
                self.value(test)
                self._loop(node)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                self._with(items, body)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                self.block(body)
                for handler in handlers:
                    with self.on_path(Condition(ast.Name("an exception"), True)):
                        self.block(handler.body)
                self.block(orelse)
                self.block(final)
            case ast.Match(subject=subject, cases=cases):
                self.value(subject)
                for case in cases:
                    pattern = ast.Compare(subject, [ast.Eq()], [ast.Name(ast.unparse(case.pattern))])
                    with self.on_path(Condition(pattern, True)):
                        self.block(case.body)
            case ast.Continue() | ast.Break():
                self.record("<skip>", "<skip>", node)
            case ast.Delete() | ast.Assert() | ast.Raise():
                for one in ast.iter_child_nodes(node):
                    if isinstance(one, ast.expr) and not isinstance(node, ast.Delete):
                        self.value(one)

    def _if(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "__name__ == '__main__'":
            self.block(node.body)
            return
        self.value(node.test)
        by_rank = self.is_by_rank(node.test)
        before = dict(self.scopes[-1])
        after = []
        for holds, body in ((True, node.body), (False, node.orelse)):
            self.scopes[-1].clear()
            self.scopes[-1].update(before)
            # of ``rank == 0 and step == 10`` the other side is reached by every rank
            mixed = isinstance(node.test, ast.BoolOp) and not holds
            condition = Condition(node.test, holds, by_rank and not mixed)
            with self.on_path(condition):
                self.block(body)
            after.append(((condition,), dict(self.scopes[-1]), _leaves(body)))
        going = [(when, scope) for when, scope, leaves in after if not leaves] or [(w, s) for w, s, _ in after]
        names = {name for _, scope in going for name in scope}
        for name in names:
            found = [(when, scope[name]) for when, scope in going if name in scope]
            if len({id(thing) for _, thing in found}) == 1:
                self.scopes[-1][name] = found[0][1]
            else:
                self.scopes[-1][name] = Thing("either", name, items=[t for _, t in found], when=[w for w, _ in found])

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        self.loops = (*self.loops, id(node))
        self.block(node.body)
        self.loops = self.loops[:-1]
        self.block(node.orelse)

    def _with(self, items: Sequence[ast.withitem], body: Sequence[ast.stmt]) -> None:
        before = self.within
        for item in items:
            count = len(self.script.calls)
            found = self.value(item.context_expr)
            new = [call for call in self.script.calls[count:] if call.node is item.context_expr]
            either = [one for one in alternatives(found) if one.call is not None]
            self.within = (*self.within, *(new or [one.call for one in either if one.call is not None]))
            if item.optional_vars is not None:
                self.assign(item.optional_vars, found)
        self.block(body)
        self.within = before

    def assign(self, target: ast.expr, value: Thing) -> None:
        match target:
            case ast.Name(id=name):
                self.scopes[-1][name] = value
            case ast.Starred(value=inner):
                self.assign(inner, value)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                fits = value.kind == "several" and len(value.items) == len(elements) and value.name != "comprehension"
                for number, one in enumerate(elements):
                    self.assign(one, value.items[number] if fits else value.part(f"[{number}]"))
            case ast.Attribute(value=base, attr=name):
                owner = self.value(base)
                self.record("<assign>", name, target, on=owner, args=[value])
                if value.owner is None and value.kind in ("call", "instance", "several") and _is_module(owner):
                    value.owner = owner
                for thing in alternatives(owner, self.path):
                    held = thing.of if thing.kind in WRAPPERS and thing.of is not None else thing
                    held.parts[name] = value
            case ast.Subscript(value=base):
                owner = self.value(base)
                self.record("<assign>", "[]", target, on=owner, args=[value])
                if value.kind in WRAPPERS:
                    owner.parts["[]"] = value
                elif owner.kind == "several":
                    owner.items.append(value)


def _is_module(thing: Thing) -> bool:
    return isinstance(thing.node, ast.ClassDef) and any("Module" in ast.unparse(base) for base in thing.node.bases)


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether a block never goes on to what comes after it."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return ast.unparse(last.value.func) in ("sys.exit", "exit", "quit", "os._exit")
    return isinstance(last, LEAVES)
