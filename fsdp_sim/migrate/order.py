"""Checkpointing, then compile, then sharding, then the optimizer: statements that stand otherwise are moved."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from fsdp_sim.migrate.sharding import units_of
from fsdp_sim.migrate.source import (
    SHARDED,
    Change,
    Script,
    arguments_of,
    calls_in,
    dotted,
    names_in,
    statements,
    targets_of,
    walk,
    with_lines_before,
)

OPTIMIZER = re.compile(
    r"(^|\.)(torch\.optim\.(?!lr_scheduler)\w+|torchao\.optim\.\w+|configure_optimizers?|get_optimizers?)$"
)
"""What makes an optimizer, by its name."""


def makes_optimizer(script: Script, call: cst.Call) -> bool:
    name = script.name_of(call)
    return bool(OPTIMIZER.search(name)) and not name.startswith("torch.optim.swa_utils")


def wraps(script: Script, node: cst.CSTNode) -> bool:
    """Whether a statement makes a model one of many ranks, not counting functions that it defines."""
    return any(script.name_of(call) in SHARDED for call in calls_in(node, into_functions=False))


def _wrapped(script: Script, node: cst.CSTNode) -> set[str]:
    """The last names of the models that a statement wraps."""
    if not wraps(script, node):
        return set()
    calls = [call for call in calls_in(node, into_functions=False) if script.name_of(call) in SHARDED]
    parts = [arguments_of(call, ("module",)) for call in calls]
    names = {
        dotted(given.get("module", given.get("model", call.func))) for given, call in zip(parts, calls, strict=True)
    }
    return {name.rpartition(".")[2] for name in (*names, *_given(node)) if name} or {""}


def compiles(script: Script, node: cst.CSTNode) -> bool:
    return any(
        script.is_a(call, "torch.compile") and dotted(arguments_of(call).get("#0", call.func)) in script.models
        for call in calls_in(node, into_functions=False)
    )


class Ordering(Change):
    """Moves statements of one body, in which a wrapper stands."""

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        return updated_node.with_changes(body=self._ordered(original_node.body, updated_node.body))

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        return updated_node.with_changes(body=self._ordered(original_node.body, updated_node.body))

    def _ordered(self, original: Sequence[cst.CSTNode], updated: Sequence[cst.CSTNode]) -> Sequence[cst.CSTNode]:
        order = list(range(len(original)))
        wrappers = {n: _wrapped(self.script, one) for n, one in enumerate(original) if _is_plain(one)}
        for place, names in [(n, names) for n, names in wrappers.items() if names]:
            late = self._that_use_an_optimizer(original, place, names)
            early = [
                n for n in range(place + 1, len(original))
                if _is_plain(original[n]) and names & names_in(original[n])
                and (self._checkpoints(original[n]) or compiles(self.script, original[n]))
            ]  # fmt: skip
            early.sort(key=lambda n: not self._checkpoints(original[n]))
            order = [n for n in order if n not in late and n not in early]
            at = order.index(place)
            order[at : at + 1] = [*early, place, *late]
        return updated if order == sorted(order) else [updated[n] for n in order]

    def _that_use_an_optimizer(self, body: Sequence[cst.CSTNode], place: int, models: set[str]) -> list[int]:
        """The statements before a wrapper that make an optimizer of its model, and those that use that."""
        script, found, names = self.script, list[int](), set[str]()
        for n in range(place):
            one = body[n]
            if not _is_plain(one):
                continue
            calls = calls_in(one, into_functions=False)
            makes = bool(models & names_in(one)) and any(makes_optimizer(script, call) for call in calls)
            if makes or names & names_in(one):
                given = _given(one)
                if not makes and given & names_in(body[place]):
                    script.look(
                        one, "The optimizer is made before the model is sharded, and what lies between uses both: move "
                        "the sharding up by hand, before the optimizer.", must=True, rule="optimizer-before-sharding",
                    )  # fmt: skip
                    return []
                names |= given
                found.append(n)
        if found:
            script.use("optimizer-before-sharding")
        return found

    def _checkpoints(self, node: cst.CSTNode) -> bool:
        return any(
            self.script.is_a(one, "apply_activation_checkpointing") for one in calls_in(node, into_functions=False)
        )


def _is_plain(node: cst.CSTNode) -> bool:
    return not isinstance(node, cst.FunctionDef | cst.ClassDef)


def _given(node: cst.CSTNode) -> set[str]:
    """Names that a statement gives values to."""
    assigns = [one for one in walk(node, into_functions=False) if isinstance(one, cst.Assign | cst.AnnAssign)]
    return {name for one in assigns for target in targets_of(one) if (name := dotted(target))}


class Compiling(Change):
    """``model = torch.compile(model)`` compiles the blocks in place, where it stands."""

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        script, inner = self.script, original_node.body[0]
        call = getattr(inner, "value", None)
        if not isinstance(inner, cst.Assign) or not isinstance(call, cst.Call) or not compiles(script, inner):
            return updated_node
        model, target = script.code(call.args[0].value), script.code(inner.targets[0].target)
        units = units_of(script, script.blocks)
        if not units:
            script.look(
                call, "The model is compiled whole, around what fully_shard does: name the class of its blocks "
                "with --block, "
                "and each block is compiled.",
            )  # fmt: skip
            return updated_node
        given = ", ".join(script.code(one) for one in call.args[1:])
        code = (
            f"for module in reversed(list({model}.modules())):  # whole blocks, before they are sharded\n"
            f"    if {units.replace('{model}', model)}:\n        module.compile({given})\n"
        )
        code += "" if target == model else f"{target} = {model}\n"
        script.use("compile")
        script.plan["compile"] = True
        return cst.FlattenSentinel(with_lines_before(statements(code, script.module.config_for_parsing), updated_node))
