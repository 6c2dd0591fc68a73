"""torchtitan's TOML (`JobConfig` of 0.2.2, the last version that reads TOML): the model, the GPUs and the plan it says.

A key that is not there has torchtitan's own default. `READ` has the keys that become a plan, ``torchtitan_keys.toml``
all others; a key that neither has is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_sim.spec.catalogue import tables, toml_or_json
from fsdp_sim.spec.dtypes import TORCH_DTYPES
from fsdp_sim.spec.fields import Allowed, check, one_of, whole
from fsdp_sim.spec.model import Model
from fsdp_sim.timeline import read_text
from fsdp_sim.words import did_you_mean

TABLE, KEYS = "torchtitan.toml", "torchtitan_keys.toml"
DTYPES = {torch.removeprefix("torch."): ours for ours, torch in TORCH_DTYPES.items()}
RESHARD = {"default": None, "always": True, "never": False}
BUCKET_CAP_MB = 100  # apply_ddp in models/llama3/infra/parallelize.py
FLOAT8 = "quantize.linear.float8"  # a converter, and the section that says how it converts


class Key(NamedTuple):
    """What a key may be, and what it is where it is not given."""

    default: Any
    allowed: Allowed


_BOOL = one_of(True, False)
_DEGREE = one_of(-1) | whole(1)
READ: dict[str, dict[str, Key]] = {
    "training": {
        "local_batch_size": Key(8, whole(1)),
        "global_batch_size": Key(-1, _DEGREE),
        "seq_len": Key(2048, whole(1)),
        "dtype": Key("float32", one_of("float32", "bfloat16")),
        "mixed_precision_param": Key("bfloat16", one_of("float32", "bfloat16")),
        "mixed_precision_reduce": Key("float32", one_of("float32")),
        "enable_cpu_offload": Key(False, _BOOL),
    },
    "parallelism": {
        "data_parallel_replicate_degree": Key(1, whole(1)),
        "data_parallel_shard_degree": Key(-1, _DEGREE),
        "expert_parallel_degree": Key(1, whole(1)),
        "fsdp_reshard_after_forward": Key("default", one_of(*RESHARD)),
    },
    "activation_checkpoint": {
        "mode": Key("selective", one_of("none", "full", "selective")),
        "selective_ac_option": Key(
            "2",
            Allowed("'op' or a whole number as a text", lambda v: isinstance(v, str) and (v == "op" or v.isdecimal())),
        ),
    },
    "compile": {
        "enable": Key(False, _BOOL),
        "components": Key(
            ["model", "loss"],
            Allowed("a list of 'model' and 'loss'", lambda v: isinstance(v, list) and set(v) <= {"model", "loss"}),
        ),
    },
    "optimizer": {
        "name": Key("AdamW", one_of("Adam", "AdamW")),
        "implementation": Key("fused", one_of("fused", "foreach")),
    },
    "model": {
        "converters": Key(
            [],
            Allowed(f"[] or [{FLOAT8!r}] (anything else is not simulated)", lambda v: v in ([], [FLOAT8])),
        ),
    },
    FLOAT8: {
        "recipe_name": Key(None, one_of(None, "tensorwise", "rowwise", "rowwise_with_gw_hp")),
        "enable_fsdp_float8_all_gather": Key(False, _BOOL),
        "precompute_float8_dynamic_scale_for_fsdp": Key(False, _BOOL),
        "filter_fqns": Key(
            [], Allowed("a list of names", lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v))
        ),
    },
}


def torchtitan_keys() -> dict[str, dict[str, Any]]:
    """All keys, by section: ``read`` with their defaults, ``only`` one value of which is simulated, and ``beside``."""
    found: dict[str, dict[str, Any]] = {}
    for section, of in tables(KEYS).items():
        read = {name: {"takes": "any", "default": key.default} for name, key in READ.get(section, {}).items()}
        only = {name: {"takes": "any"} for name in of.get("only", {})}
        found[section] = {"beside": of.get("beside", []), "read": read, "only": only}
    return found


def is_torchtitan(table: object) -> bool:
    """Whether a TOML is torchtitan's: its model has a flavor."""
    model = table.get("model") if isinstance(table, Mapping) else None
    return isinstance(model, Mapping) and "flavor" in model


def model_of_flavor(table: Mapping[str, Any], where: str) -> Model:
    """The model of ``[model] name = ..., flavor = ...``, its parameters in ``training.dtype``.

    Raises:
        ValueError: a name or flavor that is not known; gives those that are.
    """
    asked, known = table["model"], tables(TABLE)
    name, flavor = str(asked.get("name")), str(asked["flavor"])
    if name not in known:
        raise ValueError(f"{where}: model.name is {name!r}; {did_you_mean(name, known, 'known are')}")
    if flavor not in known[name]:
        raise ValueError(f"{where}: model.flavor is {flavor!r}; {did_you_mean(flavor, known[name], f'{name} has')}")
    changes: dict[str, Any] = {key: None if value is False else value for key, value in known[name][flavor].items()}
    if "window" in changes:
        changes |= {"full_attention_every": None, "chunked_window": False}
    changes |= {"name": f"torchtitan {name} {flavor}", "dtype": DTYPES[_section(table, "training", where)["dtype"]]}
    return replace(Model.preset(changes.pop("preset")), **changes)


def job_of_text(text: str, where: str) -> dict[str, Any]:
    """What torchtitan's TOML holds.

    Args:
        where: the file, for messages.

    Raises:
        ValueError: it is no TOML, or names no flavor of a model.
    """
    try:
        table = toml_or_json(text)
    except ValueError as error:
        raise ValueError(f"{where} is not TOML: {error}") from None
    if not is_torchtitan(table):
        raise ValueError(f"{where} is not torchtitan's: it has no [model] with a name and a flavor")
    found: dict[str, Any] = table
    return found


def job_of_file(path: str | Path) -> dict[str, Any]:
    """`job_of_text` of a file.

    Raises:
        ValueError: as there. OSError: there is no such file.
    """
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    return job_of_text(text, str(path))


def gpus_of_job(table: Mapping[str, Any], where: str) -> int | None:
    """How many GPUs a job takes; None where it shards over whatever there is."""
    of = _section(table, "parallelism", where)
    shards: int = of["data_parallel_shard_degree"]
    return None if shards == -1 else shards * int(of["data_parallel_replicate_degree"])


def plan_of_job(
    table: Mapping[str, Any], where: str, gpus: int | None = None, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields of `Plan` that a job of torchtitan says.

    Args:
        where: the file, for messages.
        gpus: how many there are; not needed where the job's degrees say it.
        given: fields of the plan that replace the job's: the micro-batches of a step follow from its global batch and
            from ``micro_batch``, unless ``grad_accum`` is given.

    Raises:
        ValueError: a key that torchtitan does not have, a value it does not take, or what is not simulated; names the
            key, its value and what would be right.
    """
    _refuse_what_is_not_read(table, where)
    training, parallelism, checkpoint, compiled, optimizer, model, _ = (_section(table, name, where) for name in READ)
    replicas, shards = (parallelism[f"data_parallel_{what}_degree"] for what in ("replicate", "shard"))
    gpus = gpus_of_job(table, where) if gpus is None else gpus
    if gpus is None:
        raise ValueError(
            f"{where}: parallelism.data_parallel_shard_degree is -1, all GPUs; say how many there are (gpus)"
        )
    if gpus % replicas or (shards != -1 and replicas * shards != gpus):
        raise ValueError(
            f"{where}: parallelism.data_parallel_replicate_degree is {replicas} and data_parallel_shard_degree "
            f"{shards}, and there are {gpus} GPUs; their product must be {gpus} (-1 shards over what is left)"
        )
    shards = gpus // replicas
    found: dict[str, Any] = {
        "api": "fsdp2",
        "stack": "torchtitan-compiled" if compiled["enable"] and "loss" in compiled["components"] else "torchtitan",
        "compile": compiled["enable"] and "model" in compiled["components"],
        "micro_batch": training["local_batch_size"],
        "seq_len": training["seq_len"],
        "param_dtype": DTYPES[training["mixed_precision_param"]],
        "reduce_dtype": DTYPES[training["mixed_precision_reduce"]],
        "cpu_offload": training["enable_cpu_offload"],
        "activation_checkpointing": _checkpointing(**checkpoint),
        "optimizer": "adamw",  # Adam keeps and moves as much
        "optimizer_impl": optimizer["implementation"],
        "clip_grad_norm": True,
    }
    if shards == 1:  # `parallelize_llama`: then it is DDP
        found |= {"api": "ddp"} | ({"bucket_cap_mb": BUCKET_CAP_MB} if replicas > 1 else {})
    else:
        found["wrap"] = "embed_block_head"
        found["reshard_after_forward"] = RESHARD[parallelism["fsdp_reshard_after_forward"]]
        found |= {"shard_size": shards} if replicas > 1 else {}
    if parallelism["expert_parallel_degree"] > 1:  # `apply_fsdp` of llama4: then it prefetches a block ahead
        found["expert_parallel"] = parallelism["expert_parallel_degree"]
        found |= {"forward_prefetch": 1, "backward_prefetch": 1}
    if model["converters"]:
        experts = "flavor" in table["model"] and model_of_flavor(table, where).n_expert
        others = ["output", "router.gate"] if experts else ["output"]  # linear layers that no plan has in fp8
        found |= _float8(**_section(table, FLOAT8, where), others=others, sharded=shards > 1, where=where)
    found |= given or {}
    if "grad_accum" not in found:
        found["grad_accum"] = _micro_batches(training["global_batch_size"], found["micro_batch"], gpus, where)
    return found


def _checkpointing(mode: str, selective_ac_option: str) -> str | int | None:
    if mode != "selective":
        return None if mode == "none" else "full"
    if selective_ac_option == "op":
        return "selective"
    return int(selective_ac_option) or "full"  # `_apply_layer_sac`: 0 is every block


def _float8(
    recipe_name: str | None,
    enable_fsdp_float8_all_gather: bool,
    precompute_float8_dynamic_scale_for_fsdp: bool,
    filter_fqns: list[str],
    *,
    others: list[str],
    sharded: bool,
    where: str,
) -> dict[str, Any]:
    """What `Float8LinearConverter` of torchtitan's components/quantization/float8.py makes of its section."""
    if not set(others) <= set(filter_fqns) <= {"output", "router.gate"}:
        raise ValueError(
            f"{where}: {FLOAT8}.filter_fqns is {filter_fqns!r}; it must be {others!r} (fp8 is simulated in all linear "
            f"layers of the blocks but routers, and not in the head)"
        )
    gathers = enable_fsdp_float8_all_gather
    if recipe_name is not None and gathers:
        raise ValueError(
            f"{where}: {FLOAT8}.enable_fsdp_float8_all_gather is True beside recipe_name {recipe_name!r}, which "
            f"torchtitan refuses; leave recipe_name out (it is tensorwise then)"
        )
    gathers = gathers and sharded
    return {
        "fp8": recipe_name or "tensorwise",
        "fp8_all_gather": gathers,
        "fp8_precompute_scale": gathers and precompute_float8_dynamic_scale_for_fsdp,
    }


def _micro_batches(sequences: int, micro_batch: int, gpus: int, where: str) -> int:
    """Of a step: of each rank."""
    if sequences == -1:
        return 1
    if sequences % (micro_batch * gpus):
        raise ValueError(
            f"{where}: training.global_batch_size is {sequences}, no multiple of {micro_batch * gpus}: "
            f"micro-batches of {micro_batch} on {gpus} GPUs"
        )
    return sequences // (micro_batch * gpus)


def _section(table: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """The keys of a section that are read."""
    given: Any = table
    for part in name.split("."):
        given = given.get(part, {})
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}: {name} is {given!r}; it must be a table")
    found = {key: given.get(key, of.default) for key, of in READ[name].items()}
    for key, value in found.items():
        check(f"{where}: {name}", key, value, READ[name][key].allowed)
    return found


def _refuse_what_is_not_read(table: Mapping[str, Any], where: str, section: str = "") -> None:
    """A key that no section knows, or a value that is not simulated: of a section and those inside of it."""
    others = tables(KEYS)
    of = others.get(section, {})
    only, start = of.get("only", {}), section and f"{section}."
    inside = [name.removeprefix(start) for name in others if name.rpartition(".")[0] == section]
    known = (*READ.get(section, ()), *only, *of.get("beside", ()), *inside)
    for key, value in table.items():
        if key not in known:
            owner = f"{section} has no key" if section else "torchtitan has no section"
            raise ValueError(f"{where}: {owner} {key}; {did_you_mean(key, known, 'it has')}")
        if key in inside:
            if not isinstance(value, Mapping):
                raise ValueError(f"{where}: {start}{key} is {value!r}; it must be a table")
            _refuse_what_is_not_read(value, where, f"{start}{key}")
        elif key in only:
            check(f"{where}: {section}", key, value, one_of(only[key]).explained("anything else is not simulated"))
