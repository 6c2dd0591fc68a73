"""Wrappers become calls of fully_shard: ``model = FSDP(model, ...)``, ``return DDP(model)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import libcst as cst

from fsdp_sim.migrate.arguments import of_ddp, of_fsdp1
from fsdp_sim.migrate.deepspeed import initialized
from fsdp_sim.migrate.sharding import Sharding, choose_units, policy_of_dtype, policy_of_offload
from fsdp_sim.migrate.source import (
    SHARDED,
    Change,
    Script,
    arguments_of,
    dotted,
    statements,
    targets_of,
    with_lines_before,
)
from fsdp_sim.migrate.traps import name_ties

Statements = cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]


class Policies(Change):
    """FSDP1's policies of dtype and offload become FSDP2's where they are made."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        for name, read in (("MixedPrecision", policy_of_dtype), ("CPUOffload", policy_of_offload)):
            if self.script.is_a(original_node, f"fsdp.{name}", f"api.{name}", f"fully_sharded_data_parallel.{name}"):
                return cst.parse_expression(read(self.script, original_node))
        return updated_node


class Splitting(Change):
    """``model = FSDP(Model(), ...)`` becomes two statements: what comes between them has a place then."""

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Statements:
        inner = original_node.body[0]
        call = getattr(inner, "value", None)
        if (
            len(original_node.body) > 1
            or not isinstance(inner, cst.Assign | cst.Return)
            or not isinstance(call, cst.Call)
        ):
            return updated_node
        at = next((n for n, one in enumerate(call.args) if one.keyword is None or one.keyword.value == "module"), None)
        api = SHARDED.get(self.script.name_of(call))
        if api in (None, "deepspeed") or at is None or dotted(call.args[at].value) or call.args[at].star:
            return updated_node
        target = dotted(targets_of(inner)[0]) if isinstance(inner, cst.Assign) else "model"
        if not target:
            return updated_node
        made = statements(
            f"{target} = {self.script.code(call.args[at].value)}\n", self.script.module.config_for_parsing
        )
        args = list(call.args)
        args[at] = args[at].with_changes(value=cst.parse_expression(target))
        whole = updated_node.with_changes(
            body=[inner.with_changes(value=call.with_changes(args=args))], leading_lines=[]
        )
        self.script.models.add(target)
        return cst.FlattenSentinel([*with_lines_before(made, updated_node), whole])


class Wrapping(Change):
    """Statements that wrap a model. What was not understood is left as it is, and said."""

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Statements:
        inner = original_node.body[0]
        value = getattr(inner, "value", None)
        if len(original_node.body) > 1 or not isinstance(value, cst.Call):
            return updated_node
        api = SHARDED.get(self.script.name_of(value))
        if api == "deepspeed":
            new = initialized(self.script, original_node, value)
        elif api is None or not isinstance(inner, cst.Assign | cst.AnnAssign | cst.Return):
            return updated_node
        else:
            new = self._sharded(api, value, inner)
        return updated_node if new is None else cst.FlattenSentinel(with_lines_before(new, updated_node))

    def _sharded(
        self, api: str, call: cst.Call, statement: cst.Assign | cst.AnnAssign | cst.Return
    ) -> Sequence[cst.BaseStatement] | None:
        script = self.script
        read: Callable[[Script, cst.Call], Sharding] = of_ddp if api == "ddp" else of_fsdp1
        module = arguments_of(call, ("module",)).get("module")
        if module is None or not dotted(module) or len(getattr(statement, "targets", "1")) != 1:
            return None
        sharding = read(script, call)
        script.found.append(api)
        if sharding.refused:
            script.refused = True
            return None
        choose_units(script, sharding, call, by_class=api == "ddp")
        name_ties(script, call, sharding.units)
        target = script.code(targets_of(statement)[0]) if not isinstance(statement, cst.Return) else ""
        name = dotted(module) or target or "model"
        code = sharding.lines(script, name)
        if not target:
            code += f"return {name}\n"
        elif target != name:
            code += f"{target} = {name}\n"
        script.models |= {name, target} - {""}
        return statements(code, script.module.config_for_parsing)
