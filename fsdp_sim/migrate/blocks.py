"""Which classes of modules are the blocks, where no wrap policy says it: those of which a model has a list."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

import libcst as cst

from fsdp_sim.migrate.source import Script, calls_in, walk

MOST_BYTES = 2_000_000


def find_blocks(script: Script) -> None:
    """Give a script its blocks: of a list of modules in it, or in a file beside it from which it imports a model."""
    found = dict.fromkeys(_listed(script))
    for module, names in _imported(script.module):
        path = script.folder / f"{module.replace('.', '/')}.py"
        if path.is_file() and path.stat().st_size < MOST_BYTES:
            try:
                other = Script.of(path.read_text("utf-8"), path.parent)
            except (cst.ParserSyntaxError, UnicodeDecodeError):
                continue
            script.others[path.name] = other
            for name in _listed(other) if not script.blocks else ():
                found[name] = None
                if name not in names and name.isidentifier():
                    script.need(module, name)
    if script.blocks:
        return
    script.blocks = tuple(found)
    if not found and any(_is_hugging_face(script, call) for call in calls_in(script.module)):
        script.by_name = True


def _is_hugging_face(script: Script, call: cst.Call) -> bool:
    name = script.name_of(call)
    return name.startswith("transformers.") and (name.endswith((".from_pretrained", ".from_config")) or "For" in name)


def _listed(script: Script) -> list[str]:
    """Classes of which there is a ``ModuleList`` or an unpacked ``Sequential``; not those that lie in another's."""
    classes = {one.name.value: one for one in walk(script.module) if isinstance(one, cst.ClassDef)}
    inside = {name: set(_members(script, one, classes)) for name, one in classes.items()}
    others = [one for one in script.module.body if not isinstance(one, cst.ClassDef)]
    rest = [name for one in others for name in _members(script, one, classes)]
    found = dict.fromkeys([*(name for names in inside.values() for name in sorted(names)), *rest])
    nested = {name for owner in found for name in inside.get(owner, ()) if name != owner}
    return [name for name in found if name not in nested]


def _members(script: Script, node: cst.CSTNode, own: Container[str]) -> Iterator[str]:
    for call in calls_in(node):
        if script.is_a(call, "nn.TransformerEncoder", "nn.TransformerDecoder"):
            layer = (
                "TransformerEncoderLayer" if script.is_a(call, "nn.TransformerEncoder") else "TransformerDecoderLayer"
            )
            script.need("torch", "nn")
            yield f"nn.{layer}"
        elif script.is_a(call, "nn.ModuleList", "nn.Sequential"):
            for inner in calls_in(call):
                name = script.code(inner.func)
                repeated = script.is_a(call, "nn.ModuleList") or any(one.star == "*" for one in call.args)
                if inner is not call and repeated and (name in own or _is_imported_class(script, inner)):
                    yield name


def _is_imported_class(script: Script, call: cst.Call) -> bool:
    """A class by its name (PEP 8), of a package; of torch's own only its transformer layers are blocks."""
    name = script.name_of(call)
    last = name.rpartition(".")[2]
    if name.startswith("torch."):
        return last in ("TransformerEncoderLayer", "TransformerDecoderLayer")
    return "." in name and last[:1].isupper() and not name.startswith("builtins.")


def _imported(module: cst.Module) -> Iterator[tuple[str, set[str]]]:
    for node in walk(module):
        if isinstance(node, cst.ImportFrom) and node.module is not None and not isinstance(node.names, cst.ImportStar):
            yield (
                Path(cst.Module([]).code_for_node(node.module)).as_posix(),
                {str(one.evaluated_name) for one in node.names},
            )
