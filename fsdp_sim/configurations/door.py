"""`read`: finds out the format of a configuration, and what it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdp_sim.configurations import (
    accelerate,
    accelerator,
    axolotl,
    deepspeed,
    lightning,
    llamafactory,
    torchtitan,
    torchtune,
    trainer,
    trl,
    verl,
)
from fsdp_sim.configurations.interpolation import resolved, variables
from fsdp_sim.configurations.keys import TOP, Keys, Schema, schema_of
from fsdp_sim.configurations.said import Asked, Said
from fsdp_sim.configurations.texts import Tree, calls_in, calls_of, loaded_of, text_of_file, tree_of
from fsdp_sim.spec import Model, Plan
from fsdp_sim.words import did_you_mean, shortened

FORMATS: dict[str, Callable[[Keys, Asked], Said]] = {
    "accelerate": accelerate.read,
    "deepspeed": deepspeed.read,
    "trainer": trainer.read,
    "trl": trl.read,
    "torchtitan": torchtitan.read,
    "axolotl": axolotl.read,
    "llamafactory": llamafactory.read,
    "torchtune": torchtune.read,
    "lightning": lightning.read,
    "verl": verl.read,
    "accelerator": accelerator.read,
}
"""By name, in the order in which a file is tried: the reader of the keys in ``<name>.toml``."""
UNSAID = ("micro_batch", "seq_len", "grad_accum", "optimizer", "activation_checkpointing")
"""Fields of a plan that decide most, and of which a sentence says that a file is silent."""


class NothingCalledError(ValueError):
    """A Python file has no call that says a configuration."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What a configuration says.

    Attributes:
        format: its name in `FORMATS`. package: with the version whose keys and defaults these are.
        plan, cluster, dims: fields of `Plan`, `Cluster` and `Model`.
        model: the name or folder of the model, as the file has it; None where it names none.
        preset: the model of the catalogue that it is taken to be, by its name.
        model_file: the ``config.json`` of the model, where its folder is there.
        defaults: a sentence about each default that was filled in. filled: the same as ``key=value``.
        remarks: sentences about what differs, or was left open.
        understood, without_effect: keys of the file that were read, and those that change nothing of a step.
        given: by dotted name without prefix: the value of each key of the file.
    """

    format: str
    package: str
    plan: dict[str, Any]
    cluster: dict[str, Any]
    dims: dict[str, Any]
    model: str | None
    preset: str | None
    model_file: str | None
    defaults: tuple[str, ...]
    filled: tuple[str, ...]
    remarks: tuple[str, ...]
    understood: tuple[str, ...]
    without_effect: tuple[str, ...]
    given: dict[str, Any] = dataclasses.field(default_factory=dict)


def read(
    path: str | Path, format: str | None = None, *, gpus: int | None = None, given: Mapping[str, Any] | None = None
) -> Configuration:
    """Read a configuration of another trainer.

    Args:
        format: its name in `FORMATS`; None finds it out.
        gpus: how many there are, in place of what the file says.
        given: fields of `Plan` that replace the file's: what it says of a global batch follows from them.

    Raises:
        ValueError: no format fits, a key that it does not have, or a value that is not simulated; names it.
        NothingCalledError: it is Python, and has no call that says a configuration.
        OSError: there is no such file.
        ModuleNotFoundError: it is YAML, and PyYAML is not installed.
    """
    where, text = str(path), text_of_file(path)
    if format is not None and format not in FORMATS:
        raise ValueError(f"there is no format {format!r}; {did_you_mean(format, FORMATS)}")
    if Path(path).suffix == ".py":
        (format, tree, called), passed_over = _of_python(text, where, format), ""
    else:
        (tree, passed_over), called = tree_of(text, where, Path(path).suffix.lower()), set()
        format = format or format_of(tree, where)
    schema = schema_of(format)
    named = variables(text) if schema.interpolates else ()
    nested = _nested(resolved(tree) if schema.interpolates else tree, schema)
    keys = Keys(schema, nested, where, named, given or (), called)
    said = FORMATS[format](keys, Asked(gpus, dict(given or {}), Path(path).parent))
    if said.plan.get("api") == "ddp" and said.plan.get("param_dtype"):
        # Under autocast a gradient has the dtype of its parameter, and DDP reduces gradients as they are
        said.plan.setdefault("reduce_dtype", said.dims.get("dtype", "fp32"))
    if keys.halved:
        deepspeed.with_master_weights(keys, said, given or {})
    if passed_over:
        keys.remarks.append(f"{keys.file} {passed_over}")
    remarks = [*keys.remarks, *_unsaid(said, given or {}, keys.file)]
    preset, model_file = _model(said, Path(path).parent)
    if preset is not None:
        remarks.insert(0, f"{said.model} of {keys.file} is taken to be the catalogue's {preset}, by its name.")
    try:
        Plan(**said.plan | dict(given or {}))  # what does not go together is an error now
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Configuration(
        format, schema.package, said.plan, said.cluster, said.dims, said.model, preset, model_file,
        keys.sentences, tuple(f"{key}={value}" for key, value in keys.defaults.items()),
        tuple(dict.fromkeys(remarks)), keys.understood, keys.without_effect, dict(keys.given),
    )  # fmt: skip


def format_of(tree: Mapping[str, Any], where: str) -> str:
    """The format of which a tree has signs, and most keys.

    Raises:
        ValueError: it has signs of none.
    """

    def strange(name: str) -> list[str]:
        schema = schema_of(name)
        known = {*schema.sections[TOP], *(section.partition(".")[0] for section in schema.sections)}
        known |= {key for key in schema.earlier if "." not in key}
        return [str(key) for key in _nested(tree, schema) if key not in known]

    def is_possible(name: str) -> bool:
        schema = schema_of(name)
        return any(sign in tree for sign in schema.signs) or _nested(tree, schema) is not tree

    if isinstance(model := tree.get("model"), Mapping) and "flavor" in model:
        return "torchtitan"
    possible = [name for name in FORMATS if is_possible(name)]
    if not possible:
        keys = shortened(", ".join(map(str, tree)), 200) or "none"
        raise ValueError(
            f"{where} is in no format that is known by its keys ({keys}); config_format says which of "
            f"{', '.join(FORMATS)}"
        )
    found = min(possible, key=lambda name: len(strange(name)))
    if len(unknown := strange(found)) > max(1, len(tree) / 2):
        raise ValueError(
            f"{where} is in no format that is known: {schema_of(found).package} comes nearest, and has none of "
            f"{shortened(', '.join(unknown), 200)}; config_format says which of {', '.join(FORMATS)}"
        )
    return found


def _nested(tree: Mapping[str, Any], schema: Schema) -> Mapping[str, Any]:
    """The tree; in the section to which its keys belong, where it is a file of that section alone."""
    if schema.alone and tree and not set(tree) <= set(schema.sections[TOP]):
        prefix = schema.prefixes.get(schema.alone, "")
        if {str(key).removeprefix(prefix) for key in tree} <= set(schema.sections[schema.alone]):
            return {schema.alone: tree}
    return tree


def _of_python(text: str, where: str, format: str | None) -> tuple[str, Tree, set[str]]:
    """The format, the keys of the calls in a Python file, and these calls.

    Raises:
        NothingCalledError: there is no such call. ValueError: there are two for the same section.
    """
    of_format = {name: schema_of(name).calls for name in ([format] if format else FORMATS)}
    owner = {call: name for name, calls in of_format.items() for call in calls}
    alone = [call for call, name in owner.items() if call not in schema_of(name).along]
    try:
        every = calls_in(text, where)
        calls, loaded = calls_of(every, owner), loaded_of(every)
    except RecursionError:
        raise ValueError(f"{where} nests too deep to be read") from None
    if not any(name in alone for name, _, _ in calls):
        raise NothingCalledError(f"{where} calls nothing that is read; what is: {', '.join(alone)}")
    called = {name for name, _, _ in calls}
    found = format or max(of_format, key=lambda name: len(called & of_format[name].keys()))  # Trainer is two packages'
    tree: Tree = {}
    lines: dict[str, int] = {}
    for name, line, arguments in calls:
        section = schema_of(found).calls.get(name)
        if section is None:
            continue
        if section in lines:
            raise ValueError(f"{where} has two calls for the same, in lines {lines[section]} and {line}; leave one")
        lines[section] = line
        if section == TOP:
            tree |= arguments
        else:
            tree[section] = arguments
    of_model = {key: value for key, value in loaded.items() if key in schema_of(found).sections[TOP]}
    return found, of_model | tree, called


def _unsaid(said: Said, given: Mapping[str, Any], file: str) -> list[str]:
    left = [name for name in UNSAID if name not in said.plan and name not in given]
    if not left:
        return []
    values = ", ".join(f"{name}={getattr(Plan, name)}" for name in left)
    return [f"{file} does not say these: {values}, unless an option says them."]


def _model(said: Said, folder: Path) -> tuple[str | None, str | None]:
    """The preset that a model's name means, and the ``config.json`` in its folder."""
    if said.model is None or said.model_file is not None:
        return None, said.model_file
    for base in (folder / said.model, Path(said.model)):
        if (base / "config.json").is_file():
            return None, str(base / "config.json")
    short = _plain(said.model.rpartition("/")[2])
    for name in Model.presets():
        if _plain(name) == short:
            return name, None
    return None, None


ENDINGS = ("-instruct", "-chat", "-hf", "-base", "-it", "-pt", "-2407", "-v0.1", "-bnb-4bit", "-unsloth")


def _plain(name: str) -> str:
    """A model's name as it is compared: without what says how it was trained on, and without hyphens."""
    name = name.lower().removeprefix("meta-")
    while ending := next((one for one in ENDINGS if name.endswith(one)), ""):
        name = name.removesuffix(ending)
    return name.replace("-", "").replace("_", "")
