"""`request_of_texts`: builds a request from the options of a command line or a row of a sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from fsdp_sim import configurations
from fsdp_sim.requests.from_json import convert, decode, read_text
from fsdp_sim.requests.structs import (
    ALIASES,
    CLUSTER_FIELDS,
    MODEL_FIELDS,
    NAMES,
    PLAN_FIELDS,
    ModelFields,
    PlanFields,
    Request,
    given,
)
from fsdp_sim.spec import (
    Cluster,
    Model,
    gpus_of_job,
    job_of_text,
    plan_fields,
    plan_of_job,
    text_of,
    toml_or_json,
    value_of,
)
from fsdp_sim.words import did_you_mean, in_brief

OF_CONFIG_JSON = {"model_type", "architectures", "hidden_size", "num_hidden_layers"}  # and of no file of ours


def request_of_texts(texts: Mapping[str, str], *, without_file: bool = False) -> Request:
    """Build a request from texts, such as the options of a command or a row of a sweep.

    Args:
        texts: by name: ``model``, ``model_file``, ``torchtitan``, ``config`` and ``config_format`` (see `with_job`),
            ``cluster``, and the fields of `Model`, `Cluster` and `Plan`.
        without_file: leave the model's file out: `resolve` is given its work.

    Raises:
        ValueError: a name that does not exist (with the nearest one), a text that is no value of its field.

    Example:
        >>> request = request_of_texts({"model": "llama3-8b", "gpu": "H100", "gpus": "64", "seq_len": "8192"})
        >>> request.gpus, request.plan.seq_len
        (64, 8192)
    """
    notes: list[str] = []
    if "config" in texts:
        texts, notes = _with_config(texts)
    texts = with_job(texts)
    dims: dict[str, Any] = {}
    top: dict[str, Any] = {}
    of_plan: dict[str, str] = {}
    for name, text in texts.items():
        key = ALIASES.get(name, name)
        if name == "model" and text.endswith((".json", ".toml")):
            raise ValueError(f"model is a name, and {text} a file: give it as model_file (--model-file)")
        if name in ("model", "cluster"):
            top[name] = text
        elif name == "model_file":
            dims = {} if without_file else model_file(text) | dims
        elif name in PLAN_FIELDS:
            of_plan[name] = text
        elif name in CLUSTER_FIELDS:
            top[name] = value_of(Cluster, name, text)
        elif key in MODEL_FIELDS:
            dims[key] = value_of(Model, key, text)
        else:
            raise ValueError(f"there is no {name}; {did_you_mean(name, NAMES)}")
    if of_plan:
        top["plan"] = PlanFields(**plan_fields(of_plan))
    if dims:
        if "model" in top and "preset" in dims:
            raise ValueError(f"model is {top['model']} and the model file's preset {dims['preset']}; name one of them")
        top["model"] = ModelFields(**({"preset": top["model"]} if "model" in top else {}) | dims)
    if notes:
        top["notes"] = notes
    return Request(**top)


def with_job(texts: Mapping[str, str]) -> Mapping[str, str]:
    """The texts with what the file named by ``torchtitan`` or ``config`` says in its place: the model, the GPUs, the
    plan. Any other text replaces what the file says of the same.

    Raises:
        ValueError: see `fsdp_sim.spec.plan_of_job` and `fsdp_sim.configurations.read`; both are given.
    """
    if "config" in texts:
        return _with_config(texts)[0]
    if "config_format" in texts:
        raise ValueError("config_format says which format config is in, and no config is given")
    if "torchtitan" not in texts:
        return texts
    path = texts["torchtitan"]
    own = {name: text for name, text in texts.items() if name != "torchtitan"}
    job = job_of_text(read_text(path), path)
    found = {} if {"model", "model_file"} & set(own) else {"model_file": path}
    gpus = _gpus_beside(own)
    if gpus is None and (gpus := gpus_of_job(job, path)) is not None:
        found["gpus"] = str(gpus)
    given = plan_fields({name: text for name, text in own.items() if name in PLAN_FIELDS})
    found |= {name: text_of(value) for name, value in plan_of_job(job, path, gpus, given).items()}
    return found | own


def _gpus_beside(texts: Mapping[str, str]) -> int | None:
    """How many GPUs the texts beside a file say that there are."""
    if "gpus" in texts:
        return int(value_of(Cluster, "gpus", texts["gpus"]))
    return Cluster.from_file(texts["cluster"]).gpus if "cluster" in texts else None


def _with_config(texts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The texts with what the file ``config`` says, and notes of how it was read."""
    if "torchtitan" in texts:
        raise ValueError("config and torchtitan both name a run; give one of them")
    path = texts["config"]
    own = {name: text for name, text in texts.items() if name not in ("config", "config_format")}
    given = plan_fields({name: text for name, text in own.items() if name in PLAN_FIELDS})
    of = configurations.read(path, texts.get("config_format"), gpus=_gpus_beside(own), given=given)
    found = {name: text_of(value) for name, value in (of.plan | of.cluster).items()}
    if not {"model", "model_file"} & set(own):
        if of.preset is not None:
            found["model"] = of.preset
        elif of.model_file is not None:
            found["model_file"] = of.model_file
        elif of.model is not None and "n_layer" not in {ALIASES.get(name, name) for name in own}:
            raise ValueError(
                f"{path}: its model {of.model} is neither in the catalogue nor a folder here that has a config.json; "
                f"name it with model, or its file with model_file"
            )
    from_file = "model_file" in found | own  # it may have another dtype than the default
    usual = {} if from_file else {name: Model.__dataclass_fields__[name].default for name in of.dims}
    found |= {_option_of(name): text_of(value) for name, value in of.dims.items() if value != usual.get(name)}
    if of.plan.get("api") == "ddp" and of.plan.get("reduce_dtype") == of.dims.get("dtype", "fp32"):
        found["reduce_dtype"] = own.get(_option_of("dtype"), found["reduce_dtype"])  # that of parameters
    filled = ", ".join(of.filled)
    notes = [f"{path} is read as {of.package} does (format {of.format}).", *of.remarks]
    return found | own, [*notes, f"Defaults of {of.package} where the file is silent: {filled}."] if filled else notes


def _option_of(field: str) -> str:
    """What a model's field is called where its own name means something else, or nothing."""
    return next((name for name, of in ALIASES.items() if of == field), field)


def model_file(path: str) -> dict[str, Any]:
    """Read a model's fields, and maybe ``preset``, from a TOML or JSON file of these.

    Or from a Hugging Face ``config.json``, the folder that holds it, or torchtitan's TOML: see `Model.from_config`.

    Raises:
        ValueError: no such file, it cannot be read, or a field that a model does not have; names the file.
    """
    if Path(path).is_dir():
        path = str(Path(path, "config.json"))
    text = read_text(path)
    if Path(path).suffix == ".json":
        table = decode(text.encode(), path)
    else:
        try:
            table = toml_or_json(text)
        except ValueError as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
    if isinstance(table, dict) and (
        OF_CONFIG_JSON & table.keys() or (isinstance(table.get("model"), dict) and "flavor" in table["model"])
    ):
        return _fields(Model.from_config(path))
    if isinstance(table, dict) and "peft_type" in table:
        base = in_brief(table.get("base_model_name_or_path"))
        raise ValueError(
            f"{path} is peft's configuration of an adapter, not a model: its base is {base} (--model, or --model-file "
            f"with that one's config.json), and its r and target_modules are the plan's lora_rank and lora_targets"
        )
    if isinstance(table, dict) and set(table) == {"model"}:
        table = table["model"]
    return given(convert(table, ModelFields, path))


def with_config(request: Request, text: str) -> Request:
    """A request for the model of a Hugging Face ``config.json``, of which the text is given.

    Raises:
        ValueError: the request names a model already; the text is no such configuration, or a model that is not known.
    """
    if request.model is not UNSET:
        raise ValueError("a model and a configuration are given; give one of them")
    table = decode(text.encode(), "the config")
    if not isinstance(table, dict):
        raise ValueError(f"the config holds {in_brief(table, 40)}; a config.json is an object with a model_type")
    return msgspec.structs.replace(request, model=ModelFields(**_fields(Model.from_config(table))))


def _fields(model: Model) -> dict[str, Any]:
    """Those that are not the default."""
    return {f.name: value for f in dataclasses.fields(model) if (value := getattr(model, f.name)) != f.default}
