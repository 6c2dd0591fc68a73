"""Reads requests from JSON. An error says where it is, and a misspelt field is answered with the nearest one."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from msgspec import UNSET

from fsdp_sim import timeline
from fsdp_sim.requests.structs import PLAN_FIELDS, Failure, FitRequest, ModelFields, PlanFields, Request
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.spec.fields import check
from fsdp_sim.words import did_you_mean, shortened

SPEC_OF: dict[Any, type] = {Request: Cluster, FitRequest: Cluster, PlanFields: Plan, ModelFields: Model}


def read_requests(data: bytes, source: str = "requests") -> list[Request | Failure]:
    """Read a JSON list of requests, in order; a single object is a list of one. A wrong one does not stop the others.

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
            requests.append(Failure(error=shortened(str(error)), id=_id(item)))
    return requests


EXAMPLE = '[{"model": "llama3-8b", "gpu": "H100", "gpus": 64, "plan": {"seq_len": 8192}}]'


def _id(item: Any) -> Any:
    found = item.get("id", UNSET) if isinstance(item, dict) else UNSET
    return found if isinstance(found, str | int) else UNSET


def _nested(item: Any) -> Any:
    """The request with the plan's fields that stand beside ``plan`` moved into it."""
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
    except RecursionError:
        raise ValueError(f"{source} is not understood: its lists or objects are nested too deep") from None


def _where(message: str, data: bytes) -> str:
    """A decoder's message with line and column instead of the byte offset."""
    words, _, place = message.rpartition("(byte ")
    if not words:
        ended = "truncated" in message  # at the last line; what else has no offset says where in the lists it is
        return f"{message}{f' (line {data.count(10) + 1})' * ended}" if data else "it is empty"
    before = data[: int(place.rstrip(")"))]
    return f"line {before.count(10) + 1}, column {len(before) - before.rfind(10)}: {words.strip()}"


def convert(table: Any, struct: Any, source: str) -> Any:
    """Convert a table to a struct; an unknown field is answered with the nearest one."""
    if not isinstance(table, dict):
        raise ValueError(f"{source} is {_kind(table)}; it must be an object with {', '.join(struct.__struct_fields__)}")
    for name, inner in (("plan", PlanFields), ("model", ModelFields)) if struct is Request else ():
        if isinstance(table.get(name), dict):
            table = table | {name: convert(table[name], inner, f"{source}.{name}")}
    known = struct.__struct_fields__ + (PLAN_FIELDS if struct is Request else ())
    for key in table:
        if key not in struct.__struct_fields__:
            raise ValueError(f"{source} has no field {key}; {did_you_mean(key, known, 'it has')}")
    values = _values(table, SPEC_OF[struct], source)
    try:
        made = msgspec.convert({key: value for key, value in table.items() if key not in values}, struct)
    except msgspec.ValidationError as error:
        words, _, place = str(error).partition(" - at `$")
        raise ValueError(f"{source}{place.rstrip('`')}: {words}") from None
    return msgspec.structs.replace(made, **values)


def _values(table: dict[str, Any], spec: type, source: str) -> dict[str, Any]:
    """The values of a spec's fields, checked and not converted: neither 8.0 nor "8" is the number 8."""
    found = {}
    for f in dataclasses.fields(spec):
        if f.name in table:
            value = table[f.name]
            found[f.name] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
            try:
                check(spec.__name__, f.name, found[f.name], f.metadata["allowed"])
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from None
    return found


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "true or false"}.get(type(value), f"{value!r}")


def read_text(path: str) -> str:
    try:
        return timeline.read_text(path)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
