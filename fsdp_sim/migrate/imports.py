"""Imports that the new code needs are added, those that only the old code needed go; what is left of it is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node

from fsdp_sim.migrate.source import SHARDED, Change, Script, statements, walk

MOST_COLUMNS = 100
OLD = ("torch.distributed.fsdp", "torch.nn.parallel", "functools", "contextlib", "deepspeed",
       "torch.distributed.algorithms", "lightning", "pytorch_lightning")  # fmt: skip
FSDP2 = {
    "fully_shard", "FSDPModule", "MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy", "UnshardHandle",
    "register_fsdp_forward_method", "DataParallelMeshDims", "share_comm_ctx",
}  # fmt: skip
SAYS = {
    "summon_full_params": "summon_full_params is gone: to read, parameter.full_tensor() on every rank; to write, load "
    "a state with set_model_state_dict.",
    "FullyShardedDataParallel": "This FSDP1 stays as it is, and with it what belongs to it.",
    "DistributedDataParallel": "This DDP stays as it is.",
    "wrap": "wrap() and enable_wrap() are gone: call fully_shard on the module after it is made.",
    "enable_wrap": "wrap() and enable_wrap() are gone: call fully_shard on the module after it is made.",
    "Init": "deepspeed.zero.Init is gone: make the model on the meta device, shard it, then to_empty and init_weights.",
}
"""What to do about a name of the old API that is left."""


def mend_imports(script: Script) -> None:
    """Add and remove imports, then say what of the old API is left."""
    script.apply(_Forgotten(script))
    _drop_unused(script)
    have = _bound(script.module)
    for module, name in sorted(script.imports):
        if name == "distributed as dist":
            if "dist" not in have:
                _add(script, "import torch.distributed as dist\n")
        elif (name or module) not in have:
            _add_name(script, module, name) if name else _add(script, f"import {module}\n")
    _say_what_is_left(script)
    script.module = _wrapped(script.module)


def _add(script: Script, code: str) -> None:
    """Put an import after the last of torch's at the top of the file."""
    body: list[cst.BaseStatement] = list(script.module.body)
    places = [n for n, one in enumerate(body) if _modules(one)]
    torchs = [n for n in places if any(name.partition(".")[0] == "torch" for name in _modules(body[n]))]
    at = max(torchs or places) + 1 if places else int(_is_docstring(body))
    body[at:at] = statements(code, script.module.config_for_parsing)
    script.module = script.module.with_changes(body=body)


def _add_name(script: Script, module: str, name: str) -> None:
    """Add a name to the import from its module, as the names there are written, or a new import."""
    for number, line in enumerate(script.module.body):
        if not isinstance(line, cst.SimpleStatementLine) or not isinstance(line.body[0], cst.ImportFrom):
            continue
        one = line.body[0]
        if isinstance(one.names, cst.ImportStar) or _modules(line) != [module]:
            continue
        first, last = one.names[0], one.names[-1]
        between = first.comma if len(one.names) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        new = cst.ImportAlias(cst.Name(name), comma=last.comma)
        changed = one.with_changes(names=[*one.names[:-1], last.with_changes(comma=between), new])
        body = list(script.module.body)
        body[number] = line.with_changes(body=[changed, *line.body[1:]])
        script.module = script.module.with_changes(body=body)
        return
    _add(script, f"from {module} import {name}\n")


def _modules(node: cst.CSTNode) -> list[str]:
    """The modules that a statement imports from."""
    found = []
    for one in node.body if isinstance(node, cst.SimpleStatementLine) else ():
        if isinstance(one, cst.Import):
            found += [str(alias.evaluated_name) for alias in one.names]
        elif isinstance(one, cst.ImportFrom) and one.module is not None:
            found.append(get_full_name_for_node(one.module) or "")
    return found


def _is_docstring(body: Sequence[cst.CSTNode]) -> bool:
    return bool(body) and isinstance(body[0], cst.SimpleStatementLine) and isinstance(body[0].body[0], cst.Expr)


def _beside_imports(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        if not isinstance(child, cst.Import | cst.ImportFrom):
            yield from _beside_imports(child)


def _bound(module: cst.Module) -> set[str]:
    """Names that imports bind."""
    nodes = [one for one in walk(module) if isinstance(one, cst.Import | cst.ImportFrom)]
    return {_name_bound(alias) for one in nodes if not isinstance(one.names, cst.ImportStar) for alias in one.names}


def _name_bound(alias: cst.ImportAlias) -> str:
    return str(alias.evaluated_alias or alias.evaluated_name).partition(".")[0]


def _drop_unused(script: Script) -> None:
    """What stood above an import that goes, a comment or an empty line, stays above what follows."""
    change = _Unused(script, {one.value for one in _beside_imports(script.module) if isinstance(one, cst.Name)})
    body, above = list[cst.CSTNode](), list[cst.EmptyLine]()
    for one in script.module.body:
        new: Any = one.visit(change)
        gone = not isinstance(new, cst.CSTNode) or (
            new is not one and cst.Module([]).code_for_node(new).strip() == "pass"
        )
        if gone:
            above += getattr(one, "leading_lines", ())
            continue
        if above:
            lines = [*above, *getattr(new, "leading_lines", ())]
            empty = [line.comment is None for line in lines]
            lines = [line for n, line in enumerate(lines) if not (n and empty[n] and empty[n - 1])]
            new, above = new.with_changes(leading_lines=lines), []
        body.append(new)
    script.module = script.module.with_changes(body=body)


def _wrapped(module: cst.Module) -> cst.Module:
    """With one name a line where an import has become longer than a line."""
    end = module.default_newline
    lines = module.code.split(end)
    for number, line in enumerate(lines):
        head, found, names = line.partition(" import ")
        if found and len(line) > MOST_COLUMNS and line.startswith("from torch.distributed.") and names[0] != "(":
            lines[number] = end.join([f"{head} import (", *(f"    {name.strip()}," for name in names.split(",")), ")"])
    code = end.join(lines)
    return module if code == module.code else cst.parse_module(code, module.config_for_parsing)


class _Forgotten(Change):
    """Drops variables that held a wrap policy or a configuration of state dicts, and that nothing reads any more."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.times = Counter(one.value for one in _beside_imports(script.module) if isinstance(one, cst.Name))

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        inner = original_node.body[0]
        if not isinstance(inner, cst.Assign) or not isinstance(inner.value, cst.Call) or len(inner.targets) > 1:
            return updated_node
        target = inner.targets[0].target
        names = [self.script.name_of(one) for one in walk(inner.value) if isinstance(one, cst.Name | cst.Attribute)]
        old = any(name.startswith("torch.distributed.fsdp.") and name.rpartition(".")[2] not in FSDP2 for name in names)
        once = isinstance(target, cst.Name) and self.times[target.value] == 1
        return cst.RemoveFromParent() if old and once else updated_node


class _Unused(Change):
    """Drops names of the old API's modules that nothing uses any more."""

    def __init__(self, script: Script, used: set[str]) -> None:
        super().__init__(script)
        self.used = used

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        module = get_full_name_for_node(original_node.module) if original_node.module else ""
        if isinstance(updated_node.names, cst.ImportStar) or not (module or "").startswith(OLD):
            return updated_node
        kept = [one for one in updated_node.names if _name_bound(one) in self.used]
        if not kept:
            return cst.RemoveFromParent()
        if len(kept) < len(updated_node.names):
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            if updated_node.rpar is not None and len(kept) == 1:
                return updated_node.with_changes(names=kept, lpar=None, rpar=None)
            return updated_node.with_changes(names=kept)
        return updated_node

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import | cst.RemovalSentinel:
        kept = [
            one for one in updated_node.names
            if _name_bound(one) in self.used or not str(one.evaluated_name).startswith(OLD)
        ]  # fmt: skip
        if not kept:
            return cst.RemoveFromParent()
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(names=kept)


def _say_what_is_left(script: Script) -> None:
    told = {one.line for one in script.looks if one.must}
    for node in _beside_imports(script.module):
        if not isinstance(node, cst.Name | cst.Attribute):
            continue
        name = script.name_of(node)
        last = name.rpartition(".")[2]
        if name.startswith("torch.distributed.fsdp.") and last not in FSDP2 and last[:1] != "_":
            pass
        elif not (name in SHARDED or name.startswith("deepspeed.")):
            continue
        if any(one.must for one in script.looks) and (script.refused or script.line_of(node) in told):
            continue  # the reason is said
        if last.endswith(("_wrap_policy", "WrapPolicy")):
            script.look(node, "FSDP2 has no wrap policies, so nothing reads this one: it may go.")
            continue
        told.add(script.line_of(node))  # FSDP.summon_full_params is one thing, and not also an FSDP
        script.look(
            node,
            SAYS.get(last, f"{last} belongs to the old API, and what becomes of it is not certain here."),
            must=True,
        )
