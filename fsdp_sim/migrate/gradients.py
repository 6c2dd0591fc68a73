"""`no_sync` in its forms becomes `set_requires_gradient_sync`."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from fsdp_sim.migrate.source import Change, Script, dotted, statements, walk

Statements = cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel


def sync_of(script: Script, node: cst.BaseExpression) -> tuple[str, str] | None:
    """The model, and when gradients are reduced, of an expression that gives ``no_sync`` or nothing."""
    if isinstance(node, cst.Call) and not node.args:
        return sync_of(script, node.func)
    if isinstance(node, cst.Attribute) and node.attr.value == "no_sync":
        return script.code(node.value), "False"
    if isinstance(node, cst.IfExp):
        test = script.code(node.test)
        yes, no = sync_of(script, node.body), sync_of(script, node.orelse)
        if yes and yes[1] == "False" and _is_nothing(script, node.orelse):
            return yes[0], test.removeprefix("not ") if _negated(node.test) else f"not ({test})"
        if no and no[1] == "False" and _is_nothing(script, node.body):
            return no[0], test
    return None


def _negated(test: cst.BaseExpression) -> bool:
    return isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not)


def _is_nothing(script: Script, node: cst.BaseExpression) -> bool:
    return script.is_a(node, "nullcontext") or (isinstance(node, cst.Call) and script.is_a(node.func, "nullcontext"))


class Gradients(Change):
    """``with`` blocks lose ``no_sync``; what was left of them is a plain body."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.contexts = {  # names that are given such a context, and used in `with` alone
            one.targets[0].target.value
            for one in walk(script.module)
            if isinstance(one, cst.Assign)
            and isinstance(one.targets[0].target, cst.Name)
            and sync_of(script, one.value)
        }
        self.backwards = script.module.code.count(".backward(")

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Statements:
        inner = original_node.body[0]
        if not isinstance(inner, cst.Assign) or len(inner.targets) != 1:
            return updated_node
        target = inner.targets[0].target
        if isinstance(target, cst.Attribute) and target.attr.value == "require_backward_grad_sync":
            model, test = self.script.code(target.value), self.script.code(inner.value)
        elif (found := sync_of(self.script, inner.value)) is not None and isinstance(target, cst.Name):
            model, test = found
        else:
            return updated_node
        self.script.use("no-sync")
        new = self._setting(model, test)[0]
        return new.with_changes(
            leading_lines=updated_node.leading_lines, trailing_whitespace=updated_node.trailing_whitespace
        )

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Statements:
        script, rest, before, after = self.script, [], list[cst.BaseStatement](), list[cst.BaseStatement]()
        for item, new in zip(original_node.items, updated_node.items, strict=True):
            found = sync_of(script, item.item)
            name = dotted(item.item.func if isinstance(item.item, cst.Call) else item.item)
            if found is not None:
                before += self._setting(*found)
                if found[1] == "False" or self.backwards > 1:
                    after += self._setting(found[0], "True")
                script.use("no-sync")
            elif name not in self.contexts:
                rest.append(new)
        if len(rest) == len(original_node.items):
            return updated_node
        if rest:
            rest[-1] = rest[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return flattened(updated_node, [*before, updated_node.with_changes(items=rest, leading_lines=[]), *after])
        return flattened(updated_node, [*before, *body_of(updated_node), *after])

    def _setting(self, model: str, test: str) -> list[cst.BaseStatement]:
        code = f"{model}.set_requires_gradient_sync({test})\n"
        return statements(code, self.script.module.config_for_parsing)


def body_of(node: cst.With) -> list[cst.BaseStatement]:
    """The statements of a ``with``, also of one that stands in one line."""
    if isinstance(node.body, cst.SimpleStatementSuite):
        return [cst.SimpleStatementLine(body=node.body.body)]
    found: list[cst.BaseStatement] = list(node.body.body)  # type: ignore[arg-type]
    comment = getattr(node.body, "header", cst.TrailingWhitespace()).comment
    if comment is not None and found:
        first = found[0]
        found[0] = first.with_changes(
            leading_lines=[cst.EmptyLine(comment=comment), *getattr(first, "leading_lines", ())]
        )
    return found


def flattened(node: cst.With, new: Sequence[cst.BaseStatement]) -> cst.FlattenSentinel[cst.BaseStatement]:
    """Statements in the place of a ``with``, under the comments above it."""
    first, *rest = new
    lines = [*node.leading_lines, *getattr(first, "leading_lines", ())]
    return cst.FlattenSentinel([first.with_changes(leading_lines=lines), *rest])
