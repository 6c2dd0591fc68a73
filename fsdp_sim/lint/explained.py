"""A rule with its examples and its proof, as `--explain` shows it. Nothing is imported or run: the text is read."""

from __future__ import annotations

import ast
import functools
import tomllib
from importlib.resources import files
from typing import NamedTuple

from fsdp_sim.lint.rules import PLACES


class Example(NamedTuple):
    """A text that has a trap, and one that looks like it and has none. ``suffix``: of the file, such as .yaml."""

    trap: str
    clean: str
    suffix: str = ".py"


@functools.cache
def examples(place: str) -> dict[str, Example]:
    """By rule: the examples in one of `PLACES`."""
    text = files("fsdp_sim.lint").joinpath("examples", f"{place}.toml").read_text("utf-8")
    return {id: Example(**of) for id, of in tomllib.loads(text).items()}


def examples_of(rule: str) -> dict[str, Example]:
    """By place: the examples of a rule."""
    return {place: found[rule] for place in PLACES if rule in (found := examples(place))}


@functools.cache
def _sources() -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for file in sorted(files("fsdp_sim.lint").joinpath("proofs").iterdir(), key=lambda one: one.name):
        if not file.name.endswith(".py") or file.name.startswith("_"):
            continue
        text = file.read_text("utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found[node.name.replace("_", "-")] = (
                    file.name.removesuffix(".py"),
                    ast.get_source_segment(text, node) or "",
                )
    return found


def proof_of(rule: str) -> tuple[str, str] | None:
    """The module of `fsdp_sim.lint.proofs` that has the proof of a rule, and its text; None where there is none."""
    return _sources().get(rule)
