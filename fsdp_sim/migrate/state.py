"""Calls on a wrapped model: its state, the optimizer's, clipping, ``.module``, and what one rank does alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from fsdp_sim.migrate.gradients import body_of, flattened
from fsdp_sim.migrate.ranks import asks_for_rank, split
from fsdp_sim.migrate.sharding import FSDP, STATE
from fsdp_sim.migrate.source import SHARDED, Change, Script, arguments_of, calls_in, dotted, names_in, statements, walk

WHOLE = "full_state_dict=True"
Statements = cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel


@dataclass
class OnOneRank:
    """An ``if`` that asks for the rank, and what all ranks have to call before it. ``depth``: branches inside of it."""

    node: cst.If
    depth: int = 0
    before: dict[str, str] = field(default_factory=dict)


class States(Change):
    """Rewrites calls. ``state_dict_type`` says how, as far as its ``with`` goes, or from ``set_state_dict_type`` on."""

    def __init__(self, script: Script, since: dict[str, int]) -> None:
        super().__init__(script)
        self.since = since  # names of models, and the line at which a wrapper makes them; in other functions they are
        self.options: list[str] = []
        self.everywhere = next(
            (_options(script, call) for call in calls_in(script.module) if script.is_a(call, "set_state_dict_type")),
            None,
        )
        self.ranks: list[OnOneRank] = []
        self.unused: set[int] = set()
        self.loads: dict[str, str] = {}
        self.functions = {one.name.value: one for one in walk(script.module) if isinstance(one, cst.FunctionDef)}

    # ---- where we are ------------------------------------------------------------------------------------------------

    def visit_Expr(self, node: cst.Expr) -> None:
        self.unused.add(id(node.value))

    def visit_With(self, node: cst.With) -> None:
        for item in node.items:
            if isinstance(item.item, cst.Call) and self.script.is_a(item.item, "state_dict_type"):
                self.options.append(_options(self.script, item.item))

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Statements:
        if not any(self.script.is_a(one.item, "state_dict_type") for one in original_node.items):
            return updated_node
        self.options.pop()
        rest = [
            new for item, new in zip(original_node.items, updated_node.items, strict=True)
            if not self.script.is_a(item.item, "state_dict_type")
        ]  # fmt: skip
        if rest:
            rest[-1] = rest[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return updated_node.with_changes(items=rest)
        return flattened(updated_node, body_of(updated_node))

    def visit_If(self, node: cst.If) -> None:
        if asks_for_rank(self.script, node.test) and node.orelse is None:
            self.ranks.append(OnOneRank(node))
        elif self.ranks:
            self.ranks[-1].depth += 1

    def visit_For(self, node: cst.For) -> None:
        if self.ranks:
            self.ranks[-1].depth += 1

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        if self.ranks:
            self.ranks[-1].depth -= 1
        return updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Statements:
        if not self.ranks or self.ranks[-1].node is not original_node:
            if self.ranks:
                self.ranks[-1].depth -= 1
            return updated_node
        before = self.ranks.pop().before
        if not before:
            return updated_node
        config = self.script.module.config_for_parsing
        code = "".join(f"{name} = {call}\n" for call, name in before.items())
        common, own = split(self.script, original_node.test)
        lines = updated_node.leading_lines
        if not common:
            first, *rest = statements(code, config)
            inner = updated_node.with_changes(leading_lines=[])
            return cst.FlattenSentinel([first.with_changes(leading_lines=lines), *rest, inner])
        outer = cst.ensure_type(statements(f"if {common}:\n    pass\n", config)[0], cst.If)
        inner = updated_node.with_changes(test=cst.parse_expression(own), leading_lines=[])
        return outer.with_changes(body=cst.IndentedBlock(body=[*statements(code, config), inner]), leading_lines=lines)

    # ---- what is called ----------------------------------------------------------------------------------------------

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        script, function = self.script, original_node.func
        owner = dotted(function.value) if isinstance(function, cst.Attribute) else ""
        owner = owner.removesuffix(".module") if owner.removesuffix(".module") in script.models else owner
        method = function.attr.value if isinstance(function, cst.Attribute) else ""
        if method == "clip_grad_norm_":
            return self._clip(original_node, updated_node, owner)
        if method == "state_dict" and owner and not original_node.args:
            return self._state(original_node, updated_node, owner)
        if method == "load_state_dict" and owner and original_node.args:
            return self._load(original_node, updated_node, owner)
        of_optimizer = {
            "optim_state_dict": self._how,
            "full_optim_state_dict": f"{WHOLE}, cpu_offload=True",
            "sharded_optim_state_dict": "",
        }
        for name, how in of_optimizer.items():
            if script.is_a(original_node, name):
                given = [script.code(one.value) for one in original_node.args[:2]]
                return self._called("get_optimizer_state_dict", given, how)
        if script.is_a(original_node, "ShardedGradScaler"):
            script.need("torch", "")
            rest = [
                script.code(one) for one in original_node.args if one.keyword and one.keyword.value != "process_group"
            ]
            scaled = ", ".join(['"cuda"', *rest])
            return cst.parse_expression(f"torch.amp.GradScaler({scaled})")
        if script.is_a(original_node, "isinstance") and len(original_node.args) == 2:
            of = original_node.args[1].value
            if script.name_of(of) in SHARDED:
                script.need(FSDP, "FSDPModule")
                args = [updated_node.args[0], updated_node.args[1].with_changes(value=cst.Name("FSDPModule"))]
                return updated_node.with_changes(args=args)
        if method in ("join", "register_comm_hook") and owner in script.models:
            script.look(original_node, f"{owner}.{method} has no equivalent in FSDP2.", must=True)
        self._alone(original_node)
        return updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        if original_node.attr.value == "module" and dotted(original_node.value) in self.script.models:
            return updated_node.value
        return updated_node

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.BaseExpression:
        changed = updated_node.body is not original_node.body or updated_node.orelse is not original_node.orelse
        same = self.script.code(updated_node.body) == self.script.code(updated_node.orelse)
        return updated_node.body if changed and same else updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Statements:
        inner = original_node.body[0]
        value = getattr(inner, "value", None)
        if (
            isinstance(inner, cst.Expr)
            and isinstance(value, cst.Call)
            and self.script.is_a(value, "set_state_dict_type")
        ):
            return cst.RemoveFromParent()
        target = inner.targets[0].target if isinstance(inner, cst.Assign) else None
        if not isinstance(value, cst.Call) or not isinstance(target, cst.Name):
            return updated_node
        if self.script.is_a(value, "optim_state_dict_to_load"):
            self.loads[target.value] = _to_load(self.script, value)
            return cst.RemoveFromParent()
        return updated_node

    def _clip(self, call: cst.Call, updated: cst.Call, owner: str) -> cst.BaseExpression:
        script = self.script
        if owner in script.models:
            script.need("torch", "")
            script.use("fsdp1-method")
            given = ", ".join([f"{owner}.parameters()", *(script.code(one) for one in updated.args)])
            code = f"torch.nn.utils.clip_grad_norm_({given})"
        elif script.is_a(call, "utils.clip_grad_norm_", "clip_grad.clip_grad_norm_"):
            code = script.code(updated)
            if not call.args or not any(
                name in script.code(call.args[0].value) for name in (*script.models, *script.optimizers)
            ):
                return updated
        else:
            return updated
        script.use("clip")
        if id(call) in self.unused:
            return cst.parse_expression(code) if owner in script.models else updated
        return cst.parse_expression(f"{code}.full_tensor()")  # the norm of all ranks, as a plain tensor

    def _is_before(self, call: cst.Call, owner: str) -> bool:
        """Whether a call on a model stands above its wrapper, in the same function."""
        return self.script.line_of(call) < self.since.get(owner, 0) and not self._in_other_function(call, owner)

    def _in_other_function(self, call: cst.Call, owner: str) -> bool:
        line, since = self.script.line_of(call), self.since.get(owner, 0)
        for function in self.functions.values():
            inside = {self.script.lines.get(id(one), 0) for one in walk(function)}
            if (min(inside) <= line <= max(inside)) != (min(inside) <= since <= max(inside)):
                return True
        return False

    def _state(self, call: cst.Call, updated: cst.Call, owner: str) -> cst.BaseExpression:
        script = self.script
        if owner in script.models:
            if self._is_before(call, owner):
                return updated
            name, given = "get_model_state_dict", [owner]
        elif owner in script.optimizers and (model := self._model_of(call, owner)):
            name, given = "get_optimizer_state_dict", [model, owner]
        else:
            return updated
        script.use("state-dict")
        if not self.ranks:
            return self._called(name, given, self._how)
        frame = self.ranks[-1]
        if frame.depth:
            script.look(
                call, f"Only one rank comes here, under conditions of its own, and {owner}.state_dict() gathers "
                f"from all "
                "of them: call it on every rank, and keep the test of the rank for saving.", must=True,
                rule="state-dict-on-one-rank",
            )  # fmt: skip
            return updated
        code = script.code(self._called(name, given, f"{WHOLE}, cpu_offload=True"))
        variable = f"{owner.rpartition('.')[2]}_state"
        while variable in names_in(script.module) and frame.before.get(code) != variable:
            variable += "_"
        frame.before[code] = variable
        return cst.Name(variable)

    def _load(self, call: cst.Call, updated: cst.Call, owner: str) -> cst.BaseExpression:
        script, what = self.script, call.args[0].value
        code = script.code(updated.args[0].value)
        if isinstance(what, cst.Call) and script.is_a(what, "optim_state_dict_to_load"):
            code = _to_load(script, what)
        code = self.loads.get(code, code)
        if owner in script.models:
            if self._is_before(call, owner):
                return updated
            return self._called("set_model_state_dict", [owner, code], self._how)
        if owner in script.optimizers and (model := self._model_of(call, owner)):
            script.use("optimizer-checkpoint")
            return self._called("set_optimizer_state_dict", [model, owner, code], self._how)
        return updated

    @property
    def _how(self) -> str:
        return self.options[-1] if self.options else WHOLE if self.everywhere is None else self.everywhere

    def _model_of(self, call: cst.Call, optimizer: str) -> str:
        """The model of an optimizer, whose states are told by its parameters' names."""
        model = self.script.optimizers[optimizer]
        if not model:
            self.script.look(
                call, f"Which model {optimizer} is of is not told here: use get_optimizer_state_dict(model, "
                f"{optimizer}) and "
                "set_optimizer_state_dict, for its own state_dict has shards.", must=True,
            )  # fmt: skip
        return model

    def _called(self, name: str, given: list[str], how: str) -> cst.BaseExpression:
        self.script.need(STATE, name)
        options = ""
        if how:
            self.script.need(STATE, "StateDictOptions")
            how = how.replace(", cpu_offload=True", "") if name.startswith("set") else how
            options = f", options=StateDictOptions({how})"
        return cst.parse_expression(f"{name}({', '.join(given)}{options})")

    def _alone(self, call: cst.Call) -> None:
        """Says where one rank alone runs the model, or what gathers its state."""
        if not self.ranks:
            return
        script, name = self.script, dotted(call.func)
        given = {dotted(one.value) for one in call.args}
        function = self.functions.get(name)
        if name in script.models or (function is not None and given & script.models and _runs(function)):
            script.look(
                call, f"Only one rank comes to {name}(...), and a sharded model runs on all of them or waits for "
                f"ever: call "
                "it on every rank.", must=True, rule="forward-on-one-rank",
            )  # fmt: skip
        elif function is not None and ".state_dict()" in script.code(function):
            script.look(
                call, f"Only one rank comes to {name}(...), which gathers the model's state from all of them: "
                f"call it on "
                "every rank, and ask for the rank inside, around the saving.", must=True, rule="state-dict-on-one-rank",
            )  # fmt: skip


def _runs(function: cst.FunctionDef) -> bool:
    own = {one.name.value for one in function.params.params}
    return any(isinstance(call.func, cst.Name) and call.func.value in own for call in calls_in(function))


def _to_load(script: Script, call: cst.Call) -> str:
    given = arguments_of(call, ("model", "optim", "optim_state_dict"))
    return script.code(given["optim_state_dict"]) if "optim_state_dict" in given else "{}"


def _options(script: Script, call: cst.Call) -> str:
    """Arguments of StateDictOptions that give what a ``state_dict_type`` gave."""
    given = arguments_of(call, ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config"))
    kind = script.name_of(given.get("state_dict_type", call.func)).rpartition(".")[2]
    script.use("state-dict-type")
    if kind == "LOCAL_STATE_DICT":
        script.look(
            call, "LOCAL_STATE_DICT is FSDP1's own format, which FSDP2 neither writes nor reads: save "
            "FULL_STATE_DICT once "
            "with the old script.", must=True, rule="local-state-dict",
        )  # fmt: skip
        return ""
    config = given.get("state_dict_config")
    value = script.value_of(config) if config is not None else None
    said = arguments_of(value, ("offload_to_cpu", "rank0_only")) if isinstance(value, cst.Call) else {}
    on_cpu, first = (
        script.code(said[key]) == "True" if key in said else False for key in ("offload_to_cpu", "rank0_only")
    )
    if kind != "FULL_STATE_DICT":
        return "cpu_offload=True" if on_cpu else ""
    if on_cpu and not first:
        script.look(
            call, "offload_to_cpu without rank0_only gave each rank the whole state on its CPU; StateDictOptions "
            "gives it "
            "to rank 0 alone with cpu_offload, so it is left on the GPU of each.",
        )  # fmt: skip
    return WHOLE + ", cpu_offload=True" * (on_cpu and first)
