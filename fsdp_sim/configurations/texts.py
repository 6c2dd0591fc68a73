"""What a file holds: YAML, JSON or TOML as a tree; of Python the calls that are asked for, read and never run."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_sim.configurations.keys import Call, Unread
from fsdp_sim.packages import need
from fsdp_sim.spec import toml_or_json
from fsdp_sim.timeline import read_text

MOST_BYTES = 10**6
MOST_NODES = 10**5  # of a tree, where an alias of YAML counts as all that it stands for
Tree = dict[str, Any]


def text_of_file(path: str | Path) -> str:
    """The text of a configuration.

    Raises:
        ValueError: it is larger than `MOST_BYTES`, or no text. OSError: there is no such file.
    """
    try:
        return read_text(path, MOST_BYTES).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None


def tree_of(text: str, where: str, suffix: str) -> tuple[Tree, str]:
    """The tree of a text in JSON, TOML or YAML, by the suffix of its file, and what of JSON was passed over, in words.

    Raises:
        ValueError: it is none, or holds no table.
        ModuleNotFoundError: it is YAML, and PyYAML is not installed.
    """
    kind = {".json": "JSON", ".toml": "TOML"}.get(suffix, "YAML")
    plain = plain_json(text) if kind == "JSON" else text
    try:
        found = _yaml(text, where) if kind == "YAML" else toml_or_json(plain, kind)
    except (ValueError, tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{where} is not {kind}: {error}") from None
    _refuse_a_bomb(found, where)
    if not isinstance(found, dict):
        what = {type(None): "nothing", list: "a list", str: "one text"}.get(type(found), f"a {type(found).__name__}")
        raise ValueError(f"{where} holds {what}, and no keys; a configuration is a table of them, such as key: value")
    return {str(key): value for key, value in found.items()}, PASSED_OVER if plain != text else ""


PASSED_OVER = "has comments, or a comma before a bracket: passed over; json.load refuses both."
BESIDE = re.compile(r"""("(?:\\.|[^"\\])*")|//[^\n]*|\#[^\n]*|/\*.*?\*/""", re.DOTALL)
LAST_COMMA = re.compile(r"""("(?:\\.|[^"\\])*")|,(?=\s*[}\]])""")


def plain_json(text: str) -> str:
    """JSON without comments and without commas before a closing bracket, which people write and some readers take.

    Example:
        >>> plain_json('{"a": "//", // two\\n "b": [1,],}')
        '{"a": "//", \\n "b": [1]}'
    """
    for beside in (BESIDE, LAST_COMMA):
        text = beside.sub(lambda match: match[1] or "", text)
    return text


def _yaml(text: str, where: str) -> Any:
    need(where, "yaml")
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if not isinstance(key.value, str) or key.value == "<<":
                    continue
                if key.value in lines:
                    at = f"lines {lines[key.value]} and {line}" if lines[key.value] != line else f"line {line}"
                    raise ValueError(f"{key.value} is given twice, in {at}; give it once")
                lines[key.value] = line
            return super().construct_mapping(node, deep)

    try:
        documents = list(yaml.load_all(text, Loader))
        if len(documents) > 1:
            raise ValueError(f"it holds {len(documents)} documents, with --- between them; leave one")
        return documents[0] if documents else None
    except yaml.YAMLError as error:
        template = "; it is a template, with {{ }} to be filled in first" * ("{{" in text)
        raise ValueError(" ".join(str(error).split()) + template) from None
    except (RecursionError, OverflowError, AttributeError, TypeError) as error:
        raise ValueError(f"it cannot be read ({type(error).__name__})") from None


def _refuse_a_bomb(tree: Any, where: str) -> None:
    ahead, count = [tree], 0
    while ahead:
        node = ahead.pop()
        count += 1
        if count > MOST_NODES:
            raise ValueError(f"{where} has more than {MOST_NODES:,} values, aliases counted")
        if isinstance(node, Mapping):
            ahead += node.values()
        elif isinstance(node, list | tuple):
            ahead += node


Values = dict[str, ast.expr | str | None]
"""What names stand for: an expression, what is imported or defined, or nothing that is known."""
Calls = Sequence[tuple[ast.Call, Values]]
"""Calls, each with what the names of its file stand for."""


def calls_in(text: str, where: str) -> Calls:
    """The calls of a Python file.

    Raises:
        ValueError: it is no Python.
    """
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, RecursionError, ValueError, MemoryError) as error:
        raise ValueError(f"{where} is not Python: {error}") from None
    values: Values = {}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            values |= {name: name for alias in node.names if (name := alias.asname or alias.name.partition(".")[0])}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            values[node.name] = node.name
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            values[name] = None if name in values else node.value
        elif isinstance(node, ast.AugAssign | ast.For | ast.NamedExpr) and isinstance(node.target, ast.Name):
            values[node.target.id] = None
    return [(node, values) for node in nodes if isinstance(node, ast.Call)]


def calls_of(calls: Calls, names: Iterable[str]) -> list[tuple[str, int, Tree]]:
    """Those of some names: of each its name, its line and its keyword arguments.

    Values are literals, names that are given one once, and arithmetic on these; what is imported
    (``torch.bfloat16``) or a class of the file is its name, a call a table with its name under
    ``call``. Whatever else is `Unread`.
    """
    wanted, found = set(names), []
    for node, values in calls:
        if _last(node.func) in wanted:
            # the first is a path (TrainingArguments' output_dir); another is a key that no format has
            further = {f"argument {n}": _value(one, values) for n, one in enumerate(node.args[1:], 2)}
            found.append((_last(node.func), node.lineno, further | _keywords(node, values)))
    return found


LOADERS = re.compile(r"(?!\w*Peft)(AutoModel\w*|\w+For[A-Z]\w+|\w+Model)")
"""Classes of transformers (and Unsloth) whose ``from_pretrained`` makes a model."""
NAMES = ("pretrained_model_name_or_path", "model_name", "model")


def loaded_of(calls: Calls) -> Tree:
    """The model that a Python file loads by a name in it, as keys of Hugging Face's own scripts.

    That is ``AutoModelForCausalLM.from_pretrained("gpt2")``, whose dtype is ``auto`` by default, or a trainer's
    ``model="gpt2"``. Where the file names two, such as a policy and its reference, there is none.
    """
    found: dict[str, Tree] = {}
    for node, values in calls:
        match node.func:
            case ast.Attribute(attr="from_pretrained", value=of) if LOADERS.fullmatch(_last(of)):
                dtype: Tree = {"dtype": "auto"}
            case ast.Attribute() | ast.Name() if _last(node.func).endswith("Trainer"):
                dtype = {}
            case _:
                continue
        words = {word.arg: word.value for word in node.keywords}
        named = (_literal(one, values) for one in (*node.args[:1], *(words[name] for name in NAMES if name in words)))
        if name := next(filter(None, named), ""):
            given = next((words[key] for key in ("dtype", "torch_dtype") if key in words), None)
            if given is not None and isinstance(said := _value(given, values), str):
                dtype = {"dtype": said}
            found.setdefault(name, {"model_name_or_path": name} | dtype)
    return next(iter(found.values())) if len(found) == 1 else {}


def _literal(node: ast.expr, values: Values) -> str:
    """A text that is written, also under a name; nothing if it is none."""
    of = values.get(node.id) if isinstance(node, ast.Name) else node
    return of.value if isinstance(of, ast.Constant) and isinstance(of.value, str) else ""


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _keywords(call: ast.Call, values: Values, depth: int = 0) -> Tree:
    found: Tree = {}
    for word in call.keywords:
        value = _value(word.value, values, depth + 1)
        if word.arg is not None:
            found[word.arg] = value
        elif isinstance(value, dict):
            found |= {str(key): of for key, of in value.items()}
        else:
            found[f"**{ast.unparse(word.value)[:60]}"] = value
    return found


def _value(node: ast.expr, values: Values, depth: int = 0) -> Any:
    if depth > 50:
        return _unread(node)
    match node:
        case ast.Constant(value=value):
            return _unread(node) if isinstance(value, bytes | complex) or value is ... else value
        case ast.Name(id=name):
            of = values.get(name)
            return _unread(node) if of is None else of if isinstance(of, str) else _value(of, values, depth + 1)
        case ast.Attribute():
            text = ast.unparse(node)
            return text if isinstance(values.get(text.partition(".")[0]), str) else _unread(node)
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            found = [_value(one, values, depth + 1) for one in elements]
            return _unread(node) if any(isinstance(one, Unread) for one in found) else found
        case ast.Dict(keys=keys, values=of):
            if not all(isinstance(key, ast.Constant) for key in keys):
                return _unread(node)
            return {str(key.value): _value(one, values, depth + 1) for key, one in zip(keys, of, strict=True)}  # type: ignore[union-attr]
        case ast.Call(func=function) if function and _last(function) == "dict" and not node.args:
            return _keywords(node, values, depth)
        case ast.Call(func=ast.Name(id="int"), args=[ast.Constant(value=int() | float() as value)], keywords=[]):
            return int(value) if abs(value) < 2**53 else _unread(node)
        case ast.Call(func=function) if _last(function):
            positional = {f"arg{n}": _value(one, values, depth + 1) for n, one in enumerate(node.args)}
            call = Call({"call": _last(function)} | positional | _keywords(node, values, depth))
            call.unread = _unread(node)
            return call
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand, values, depth + 1)
            return -value if type(value) in (int, float) else _unread(node)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Add() | ast.Sub() | ast.FloorDiv() as op, right=right):
            a, b = _value(left, values, depth + 1), _value(right, values, depth + 1)
            if type(a) is int and type(b) is int and max(abs(a), abs(b)) < 2**40:
                if isinstance(op, ast.FloorDiv):
                    return a // b if b else _unread(node)
                return a * b if isinstance(op, ast.Mult) else a + b if isinstance(op, ast.Add) else a - b
    return _unread(node)


def _unread(node: ast.expr) -> Unread:
    return Unread(ast.unparse(node), node.lineno)
