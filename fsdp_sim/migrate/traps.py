"""Traps that the new script would have: weights tied across units, a model on the meta device, and what lint finds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import libcst as cst

from fsdp_sim.lint import Finding, lint
from fsdp_sim.migrate.result import LookAt
from fsdp_sim.migrate.source import Script, calls_in, dotted, targets_of, walk

ON_META = ("init_empty_weights", "init_on_device")


def name_traps(script: Script) -> None:
    """Look for ties and for the meta device."""
    _name_meta(script)
    if any(True for one in (script, *script.others.values()) for _ in _ties(one.module)):
        script.use("tied-weights")


def name_ties(script: Script, wrapper: cst.Call, units: str) -> None:
    """Name each weight that two modules share of which one is a unit of its own, by the condition ``units``."""
    classes = {name.rpartition(".")[2] for name in re.findall(r"[\w.]+", units)}
    for file, one in (("", script), *script.others.items()):
        for node, *owners in _ties(one.module):
            of = [_class_of(one, owner.rpartition(".")[2]) for owner in owners]
            own = [owner for owner, name in zip(owners, of, strict=True) if name.rpartition(".")[2] in classes]
            if own:
                at = f"{file}, line {one.line_of(node)}: " if file else ""
                script.look(
                    wrapper if file else node,
                    f"{at}{' and '.join(owners)} share a weight, and {' and '.join(own)} would be a unit alone: torch "
                    f"refuses that from 2.13 on. Leave {' and '.join(dict.fromkeys(name for name in of if name))} out "
                    f"of the classes of units, so that the root has both, or give both to one call: "
                    f"fully_shard([{', '.join(owners)}]).", must=True, rule="tied-across-units",
                )  # fmt: skip


def _ties(module: cst.Module) -> Iterator[tuple[cst.Assign, str, str]]:
    """Statements by which two modules share a weight, and the names of the two."""
    for node in walk(module):
        if isinstance(node, cst.Assign) and dotted(node.value).endswith(".weight"):
            for target in targets_of(node):
                if (name := dotted(target)).endswith(".weight"):
                    yield node, name.removesuffix(".weight"), dotted(node.value).removesuffix(".weight")


def _class_of(script: Script, name: str) -> str:
    """What makes the module of that name: of ``self.head = nn.Linear(...)``, or ``dict(head=nn.Linear(...))``."""
    for node in walk(script.module):
        if isinstance(node, cst.Assign) and isinstance(node.value, cst.Call):
            if any(dotted(target).rpartition(".")[2] == name for target in targets_of(node)):
                return script.code(node.value.func)
        elif isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == name:
            return script.code(node.value.func) if isinstance(node.value, cst.Call) else ""
    return ""


def _name_meta(script: Script) -> None:
    filled = [call for call in calls_in(script.module) if script.code(call.func).endswith(".to_empty")]
    for call in filled:
        script.look(
            call, "to_empty gives every parameter and buffer memory with nothing in it, and unties weights. After "
            "fully_shard and to_empty: tie again, call init_weights (or reset_parameters of each module) or load with "
            "set_model_state_dict, and compute anew the buffers that no state dict has (persistent=False).",
            rule="meta-never-filled",
        )  # fmt: skip
    if filled or any("param_init_fn" in one.what for one in script.looks):
        return
    for node in walk(script.module):
        says = isinstance(node, cst.SimpleString) and node.raw_value == "meta"
        if says or (isinstance(node, cst.Call) and script.is_a(node, *ON_META)):
            script.look(
                node, "The model is made on the meta device. FSDP1 and DeepSpeed gave it memory and values by "
                'themselves, FSDP2 does not: after fully_shard call model.to_empty(device="cuda"), tie weights again, '
                "then init_weights (or reset_parameters of each module) or set_model_state_dict, and compute anew the "
                "buffers that no state dict has (persistent=False).", must=True, rule="meta-never-filled",
            )  # fmt: skip


def traps_of_new(old: str, new: str, told: set[str]) -> list[LookAt]:
    """What lint finds in the new text alone, at lines of the old one, but for rules that are told already."""
    before, after = _findings(old), _findings(new)
    known = told | {one.rule for one in before}
    return [
        LookAt(_line_before(old, new, one.line), f"{one.message}. {one.of.fix}", one.of.level == "error", one.rule)
        for one in after
        if one.rule not in known
    ]


def _findings(text: str) -> tuple[Finding, ...]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(text, "utf-8")
        return lint(str(path))[0].findings


def _line_before(old: str, new: str, line: int) -> int:
    """The line of the old text from which a line of the new one came, or the one at which it was put in."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    for _, start, end, new_start, new_end in matcher.get_opcodes():
        if new_start < line <= new_end:
            return min(start + line - new_start, max(end, start + 1))
    return 1
