"""A field means the same through every door: Python, command line, JSON, TOML, rows of a sweep, the explorer's line.

Every field of `Model`, `Cluster` and `Plan`, and of each all that its declaration allows and much that it does not: the
same object, or the same sentence.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.cli.options import CLUSTER, MODEL, PLAN, request_options
from fsdp_sim.cli.sweep import lists
from fsdp_sim.explore import combinations
from fsdp_sim.forms import FormState
from fsdp_sim.requests import ALIASES, MODEL_FIELDS, Failure, read_requests, request_of_texts, resolve
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.spec.plan import SETTINGS_OF
from fsdp_sim.spec.texts import text_of

Given = dict[str, Any]
DIMS: Given = {"name": "m", "n_layer": 2, "d_model": 64, "n_head": 4, "d_ffn": 128, "vocab": 100}
GPUS: Given = {"gpu": "A100-SXM-40GB", "gpus": 8}
DTYPES: Given = {"param_dtype": None}  # or others are chosen for a request that names none
BASE = {Model: DIMS, Cluster: GPUS, Plan: DTYPES}
CALLED = {name: option for option, name in ALIASES.items()}
POOL = [None, True, False, 0, 1, 2, 3, 16, 1000, -1, 0.5, 1.0, 2.5, -0.5, 1e-3]
POOL += ["", "no such name", "none", "cpu", "1600 Gb/s per node", "4090"]
TEXTS = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=12)
POOL += [("layers.0",), ("Block", "block"), ("0",), ("block",)]


def cases() -> list[Any]:
    found = []
    for spec in (Model, Cluster, Plan):
        for f in dataclasses.fields(spec):
            values = [*POOL, *f.metadata["allowed"].names]
            apis = dict.fromkeys((*SETTINGS_OF.get(f.name, ()), "fsdp2", "fsdp1"))
            for api in apis if spec is Plan and f.name != "api" else (None,):
                found.append(pytest.param(spec, f.name, values, api, id=f"{spec.__name__}.{f.name}-{api}"))
    return found


def python(spec: type, given: Given) -> Any:
    return spec(**given)


def as_json(spec: type, given: Given) -> Any:
    fields = BASE | {spec: given}
    request = {"model": fields[Model], "plan": fields[Plan], **fields[Cluster]}
    (read,) = read_requests(json.dumps([request]).encode())
    if isinstance(read, Failure):
        raise ValueError(read.error)
    return part(spec, resolve(read))


def words(spec: type, texts: dict[str, str]) -> Any:
    return part(spec, resolve(request_of_texts(texts)))


asked: list[dict[str, str]] = []  # what the command below was given


@click.command()
@request_options(MODEL, CLUSTER, PLAN)
def command(texts: dict[str, str]) -> None:
    asked.append(texts)


OPTIONS = {name.removeprefix("--").replace("-", "_") for p in command.params for name in p.opts}


def command_line(spec: type, texts: dict[str, str]) -> Any:
    """Options where there is one, else ``--dim`` or ``--plan``; what a command makes of them."""
    arguments = [
        word
        for name, text in texts.items()
        for pair in ["--dim" if name in MODEL_FIELDS else "--plan"]
        for word in ([f"--{name.replace('_', '-')}={text}"] if name in OPTIONS else [pair, f"{name}={text}"])
        if name != "model_name"  # no option: a name is for headings
    ]
    command.main(arguments, standalone_mode=False)
    made = words(spec, asked.pop())
    return dataclasses.replace(made, name=texts["model_name"]) if spec is Model else made


def row_of_a_sweep(spec: type, texts: dict[str, str]) -> Any:
    vary = lists([f"{name}={text}" if "," not in text else f"{name}={text};" for name, text in texts.items()])
    (row,) = combinations(vary)
    return words(spec, row)


def explorer(spec: type, texts: dict[str, str]) -> Any:
    state = FormState.read(" ".join(f"{name}={shlex.quote(text)}" for name, text in texts.items()))
    return getattr(state, spec.__name__.lower())


def part(spec: type, asked: Any) -> Any:
    return getattr(asked, spec.__name__.lower())


def outcome(door: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What a door makes, or its sentence."""
    try:
        return door(*arguments), ""
    except ValueError as error:
        return None, str(error)


def as_texts(spec: type, given: Given) -> dict[str, str]:
    fields = BASE | {spec: given}
    return {CALLED.get(k, k): text_of(v) for some in fields.values() for k, v in some.items()}


@pytest.mark.parametrize(("spec", "name", "values", "api"), cases())
def test_a_value_is_the_same_object_or_the_same_sentence_through_every_door(spec, name, values, api):
    assert_the_same_through_every_door(spec, name, values, api)


@given(st.sampled_from([case.values for case in cases()]), st.integers(-5, 2000) | st.floats(-1e6, 1e6) | TEXTS)
def test_so_is_any_number_and_any_text(case, value):
    spec, name, pool, api = case
    whole = [int(value)] if isinstance(value, float) and value.is_integer() else []
    assert_the_same_through_every_door(spec, name, [value, *whole, *pool], api)


def assert_the_same_through_every_door(spec: type, name: str, values: list[Any], api: str | None) -> None:
    of_api = {"api": api} if api else {}
    allowed = spec.__dataclass_fields__[name].metadata["allowed"]
    given = [(value, BASE[spec] | of_api | {name: value}) for value in values]
    legal = [value for value, fields in given if outcome(python, spec, fields)[0] is not None]
    texts_of_legal = {text_of(value) for value in legal}
    any_words = allowed.test("no such name")
    for value, fields in given:
        made, sentence = outcome(python, spec, fields)

        of_json, of_json_sentence = outcome(as_json, spec, fields)
        assert of_json == made, f"JSON: {value!r}"
        assert of_json_sentence.endswith(sentence), f"JSON: {value!r}"

        if api == "fsdp1" and name == "backward_prefetch" and value is None:
            continue  # the word "none" is FSDP1's own; its default is said by leaving it out
        if made is None and (text_of(value) in texts_of_legal or any_words or isinstance(value, str | tuple)):
            continue  # as a text it is another value, or a name like any other
        for door in (words, command_line, row_of_a_sweep, explorer):
            found, found_sentence = outcome(door, spec, as_texts(spec, fields))
            assert found == made, f"{door.__name__}: {value!r}"
            assert found_sentence.endswith(sentence), f"{door.__name__}: {value!r}"


def toml(given: Given) -> str:
    """As TOML; what is None is left out, for TOML has none."""
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items() if value is not None)


def takes_any_name(f: dataclasses.Field[Any]) -> bool:
    return any(f.metadata["allowed"].test(value) for value in ("no such name", ("no such name",)))


@pytest.mark.parametrize(("spec", "name", "values", "_"), [case for case in cases() if case.values[0] is not Plan])
def test_a_model_and_a_cluster_in_toml_are_those_in_python(spec, name, values, _, tmp_path):
    path = tmp_path / "it.toml"
    for value in values:
        fields = BASE[spec] | {name: value}
        made, sentence = outcome(python, spec, fields)
        if isinstance(value, tuple) or (value is None and spec.__dataclass_fields__[name].default is not None):
            continue  # TOML has neither
        if spec is Model:
            path.write_text(toml(fields))
            texts = {"model_file": str(path)} | {key: str(value) for key, value in GPUS.items()}
            found, found_sentence = outcome(words, Model, texts)
        else:
            path.write_text("[cluster]\n" + toml(fields))
            found, found_sentence = outcome(Cluster.from_file, path)
        assert found == made, repr(value)
        assert found_sentence.endswith(sentence), repr(value)


CLOSED = [f.name for spec in (Model, Plan) for f in dataclasses.fields(spec) if not takes_any_name(f)]


@pytest.mark.parametrize("door", [words, command_line, row_of_a_sweep, explorer])
@pytest.mark.parametrize("name", [*CLOSED, "gpus", "gpus_per_node", "latency_us", "bandwidth_gbps"])
def test_words_that_are_no_value_are_refused_as_in_python(door, name):
    spec = next(spec for spec in (Model, Cluster, Plan) if name in spec.__dataclass_fields__)
    text = "no such name"
    fields = BASE[spec] | {name: text}

    _, sentence = outcome(python, spec, fields)
    _, found = outcome(door, spec, as_texts(spec, fields))

    assert f"{spec.__name__}.{name} is {text!r}; it must be" in sentence
    assert found.endswith(sentence)
