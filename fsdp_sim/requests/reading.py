"""Reading JSON: what is wrong is said with its place, a misspelt field with the nearest right one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from fsdp_sim.requests.structs import PLAN_FIELDS, Failure, ModelFields, PlanFields, Request


def read_requests(data: bytes, source: str = "requests") -> list[Request | Failure]:
    """The requests of a JSON list, in order; of one object a list of one. One that is wrong does not stop the others.

    A plan's fields may also stand in the request itself, beside the model's and the cluster's.

    Raises:
        ValueError: it is no JSON (says line and column), or neither a list nor an object.
    """
    found = decode(data, source)
    if isinstance(found, dict):
        found = [found]
    if not isinstance(found, list):
        raise ValueError(f"{source} holds {_kind(found)}; it must hold a list of requests, such as {EXAMPLE}")
    requests: list[Request | Failure] = []
    for number, item in enumerate(found):
        try:
            requests.append(convert(_nested(item), Request, f"{source}[{number}]"))
        except ValueError as error:
            requests.append(Failure(error=str(error), id=_id(item)))
    return requests


EXAMPLE = '[{"model": "llama3-8b", "gpu": "H100", "gpus": 64, "plan": {"seq_len": 8192}}]'


def _id(item: Any) -> Any:
    found = item.get("id", UNSET) if isinstance(item, dict) else UNSET
    return found if isinstance(found, str | int) else UNSET


def _nested(item: Any) -> Any:
    """The same request with the fields of a plan in ``plan``."""
    if not isinstance(item, dict) or not isinstance(item.get("plan", {}), dict):
        return item
    flat = {key: value for key, value in item.items() if key in PLAN_FIELDS}
    if not flat:
        return item
    plan = dict(item.get("plan", {}))
    if twice := sorted(set(flat) & set(plan)):
        raise ValueError(f"{twice[0]} is given twice, in the plan and beside it; give it once")
    return {key: value for key, value in item.items() if key not in flat} | {"plan": plan | flat}


def decode(data: bytes, source: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"{source} is not JSON: {_where(str(error), data)}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from None


def _where(message: str, data: bytes) -> str:
    """A decoder's message with line and column in place of the byte."""
    words, _, place = message.rpartition("(byte ")
    if not words:
        return f"{message} (line {data.count(10) + 1})" if data else "it is empty"
    before = data[: int(place.rstrip(")"))]
    return f"line {before.count(10) + 1}, column {len(before) - before.rfind(10)}: {words.strip()}"


def convert(table: Any, struct: Any, source: str) -> Any:
    """A table as a struct; a field that does not exist is answered with the nearest one."""
    if not isinstance(table, dict):
        raise ValueError(f"{source} is {_kind(table)}; it must be an object with {', '.join(struct.__struct_fields__)}")
    parts: list[tuple[str, Any, Any]] = [("", table, struct)]
    for name, inner in (("plan", PlanFields), ("model", ModelFields)):
        if struct is Request and isinstance(table.get(name), dict):
            parts.append((f".{name}", table[name], inner))
    for place, part, kind in parts:
        known = kind.__struct_fields__ + (PLAN_FIELDS if kind is Request else ())
        for key in part:
            if key not in kind.__struct_fields__:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(kind.__struct_fields__)}"
                raise ValueError(f"{source}{place} has no field {key}; {hint}")
    try:
        return msgspec.convert(table, struct)
    except msgspec.ValidationError as error:
        words, _, place = str(error).partition(" - at `$")
        raise ValueError(f"{source}{place.rstrip('`')}: {words}") from None


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "true or false"}.get(type(value), f"{value!r}")


def read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
