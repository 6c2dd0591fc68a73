"""Accelerate's YAML or JSON with FSDP1, DDP or DeepSpeed, and a DeepSpeed JSON, for Accelerate's FSDP2.

Source: accelerate 1.15.0, `accelerate.commands.to_fsdp2` (which keys go, and what becomes of a sharding strategy),
`FullyShardedDataParallelPlugin.__post_init__` and `set_state_dict_type` (what FSDP2 refuses, and its defaults).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

from fsdp_sim.configurations import Configuration, read
from fsdp_sim.migrate.numbers import has_model
from fsdp_sim.migrate.result import Difference, LookAt, Migration, diff_of, told
from fsdp_sim.migrate.yaml_text import YamlText
from fsdp_sim.requests import Job, request_of_texts, resolve
from fsdp_sim.spec import text_of

SECTION = "fsdp_config"
GONE = {  # keys of FSDP1 that FSDP2 has not (`ARGUMENT_KEY_MAPPING`)
    "backward_prefetch": "FSDP2 by itself gathers the next unit before the gradients of this one (BACKWARD_PRE)",
    "forward_prefetch": "FSDP2's forward gathers one unit ahead by itself where the CPU is ahead of the GPU",
    "use_orig_params": "each parameter stays one of its own in FSDP2",
    "sync_module_states": "with cpu_ram_efficient_loading Accelerate sends rank 0's weights itself; without, each rank "
    "must load the same ones",
}
KEPT = ("param_dtype", "reduce_dtype", "cpu_offload", "activation_checkpointing", "compile")
FROM_SCRIPT = ("micro_batch", "grad_accum", "optimizer", "clip_grad_norm")
"""Fields that DeepSpeed's configuration says, and Accelerate leaves to the script."""


def promised(old: Configuration) -> dict[str, Any]:
    """The fields of `Plan` that the new text must give."""
    plan = {name: old.plan[name] for name in KEPT if name in old.plan}
    if plan.get("param_dtype") is not None or "reduce_dtype" not in plan:
        plan["reduce_dtype"] = plan.get("param_dtype")  # `set_mixed_precision`
    wrap, strategy = old.plan.get("wrap", "block"), old.plan.get("sharding_strategy", "FULL_SHARD")
    keeps = old.plan["api"] in ("zero1", "zero2") or strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    plan |= {
        "api": "fsdp2", "wrap": "embed_block_head" if wrap == "block" else wrap,
        "reshard_after_forward": False if keeps else None,
    }  # fmt: skip
    return plan | ({"shard_size": old.plan["shard_size"]} if "HYBRID" in strategy else {})


def migration_of_configuration(path: str, text: str, gpus: int | None = None) -> tuple[Migration, Configuration]:
    """A configuration's migration, and what the old text says.

    Args:
        gpus: how many there are, in place of what the file says.

    Raises:
        ValueError: it has a key or a value that is not understood, or a format that is not migrated; names it.
    """
    old = read(path, gpus=gpus)
    if old.format not in ("accelerate", "deepspeed"):
        raise ValueError(
            f"{path} is a configuration of {old.package}, which is not migrated yet; Accelerate's and DeepSpeed's are. "
            f"fsdp-sim lint {path} looks for its traps"
        )
    way = "DEEPSPEED" if old.format == "deepspeed" else old.given["distributed_type"]
    source = {"FSDP": old.plan["api"], "MULTI_GPU": "ddp", "DEEPSPEED": "deepspeed"}.get(way, "")
    if source in ("", "fsdp2"):
        why = "uses FSDP2 already" if source else "starts one process, of which nothing is sharded"
        return Migration(file=path, source=[], changed=False, notes=[f"{path} {why}: nothing to do."]), old
    same, differs, test = told([f"accelerate-{source}", "accelerate"])
    found = Migration(
        file=path, source=[source], changed=True, same=same, differs=differs, test=test,
        notes=[*old.defaults, *old.remarks],
    )  # fmt: skip
    if left := _no_equal(old):
        keys, what = left
        found.look.append(LookAt(_line(text, *keys), what, must=True))
        found.changed = False
        return found, old
    found.new_file = f"{PurePath(path).stem}.accelerate.yaml" if old.format == "deepspeed" else ""
    found.new = _of_deepspeed(old, gpus) if found.new_file else _changed(path, text, old, source, found)
    new_name = str(PurePath(path).with_name(found.new_file)) if found.new_file else path
    found.diff = diff_of("" if found.new_file else text, found.new, path, new_name)
    _see_that_it_holds(path, found, old, gpus)
    if source == "deepspeed":
        _left_to_the_script(old, text, found)
    return found, old


def jobs_of_configuration(path: str, found: Migration, texts: Mapping[str, str]) -> tuple[Job, Job] | None:
    """The job as a configuration says it, and as the new text does; None where no option names a model and a GPU.

    What the new text leaves to the script (micro-batch, accumulation, optimizer, clipping) is what the old one says.

    Raises:
        ValueError: see `fsdp_sim.requests.resolve`.
    """
    if not has_model(texts) or not ("gpu" in texts or "cluster" in texts):
        return None
    before = resolve(request_of_texts({**texts, "config": path}))
    with TemporaryDirectory() as folder:
        new = Path(folder) / (found.new_file or PurePath(path).name)
        new.write_text(found.new, "utf-8")
        plan = {name: text_of(value) for name in FROM_SCRIPT if (value := getattr(before.plan, name)) is not None}
        after = resolve(request_of_texts({**plan, **texts, "config": str(new)}))
    return before, after


def _no_equal(old: Configuration) -> tuple[tuple[str, ...], str] | None:
    """The key for which Accelerate's FSDP2 has nothing, and what to do."""
    if old.plan.get("sharding_strategy") == "NO_SHARD":
        return ("sharding_strategy",), "NO_SHARD is DDP: write distributed_type: MULTI_GPU, and leave fsdp_config out."
    if type(old.plan.get("reshard_after_forward")) is int:
        return ("zero_hpz_partition_size", "deepspeed_config_file"), (
            "A second copy of the parameters in each node (zero_hpz_partition_size) has no key in Accelerate: call "
            "fully_shard(module, reshard_after_forward=N) in the script, or leave the key out and ask again."
        )
    if str(old.given.get(f"{SECTION}.state_dict_type", "")).upper() == "LOCAL_STATE_DICT":
        return ("state_dict_type",), (
            "Accelerate refuses LOCAL_STATE_DICT with FSDP2: write SHARDED_STATE_DICT, and ask again. What was saved "
            "so loads with FSDP1 alone."
        )
    return None


def _changed(path: str, text: str, old: Configuration, source: str, found: Migration) -> str:
    yaml = YamlText(text, path)
    if source != "fsdp1":
        yaml.set(("distributed_type",), "FSDP")
    if source == "deepspeed":
        yaml.remove(("deepspeed_config",))
        mixed = promised(old).get("param_dtype") or "no"
        if old.given.get("mixed_precision") != mixed:
            yaml.set(("mixed_precision",), mixed)
    if source != "fsdp1" or not any(key.startswith(f"{SECTION}.") for key in old.given):
        yaml.set((SECTION,), _section(old))
        return _with_mesh(yaml, old).text
    written = {key.removeprefix("fsdp_"): key for key in yaml.keys((SECTION,))}
    prefix = "fsdp_" if any(key.startswith("fsdp_") for key in written.values()) else ""
    section = _section(old)
    reshard = written.get("reshard_after_forward") or written.get("sharding_strategy")
    yaml.set((SECTION, written.get("version", f"{prefix}version")), 2)
    yaml.set(
        (SECTION, reshard or f"{prefix}reshard_after_forward"), section["fsdp_reshard_after_forward"],
        name=f"{prefix}reshard_after_forward",
    )  # fmt: skip
    if {"reshard_after_forward", "sharding_strategy"} <= written.keys():
        yaml.remove((SECTION, written["sharding_strategy"]))
    if "state_dict_type" not in written:
        yaml.set((SECTION, f"{prefix}state_dict_type"), "FULL_STATE_DICT")
    for name, why in GONE.items():
        if name in written:
            value = old.given.get(f"{SECTION}.{name}")
            found.differs.append(Difference(f"{written[name]} ({value}) has no equal: {why}."))
            yaml.remove((SECTION, written[name]))
    return _with_mesh(yaml, old).text


def _section(old: Configuration) -> dict[str, Any]:
    plan = promised(old)
    wrap = plan["wrap"]
    policy = {"root": "NO_WRAP", "embed_block_head": "TRANSFORMER_BASED_WRAP"}.get(wrap, "SIZE_BASED_WRAP")
    return {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": policy,
        "fsdp_reshard_after_forward": plan["reshard_after_forward"] is not False,
        "fsdp_offload_params": plan.get("cpu_offload", False),
        "fsdp_activation_checkpointing": plan.get("activation_checkpointing") == "full",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }  # fmt: skip


def _with_mesh(yaml: YamlText, old: Configuration) -> YamlText:
    if shards := promised(old).get("shard_size"):
        mesh = {
            "parallelism_config_dp_replicate_size": old.cluster["gpus"] // shards,
            "parallelism_config_dp_shard_size": shards,
        }  # fmt: skip
        yaml.set(("parallelism_config",), mesh)
    return yaml


def _of_deepspeed(old: Configuration, gpus: int | None) -> str:
    top = ["compute_environment: LOCAL_MACHINE", "distributed_type: FSDP",
           f"mixed_precision: {promised(old).get('param_dtype') or chr(39) + 'no' + chr(39)}"]  # fmt: skip
    top += [f"num_processes: {gpus}"] if gpus else []
    section = [f"  {key}: {str(value).lower() if isinstance(value, bool) else value}"
               for key, value in _section(old).items()]  # fmt: skip
    return "\n".join([*top, f"{SECTION}:", *section]) + "\n"


def _see_that_it_holds(path: str, found: Migration, old: Configuration, gpus: int | None) -> None:
    """Read the new text again: it must give the plan that was promised, of every field that it says."""
    with TemporaryDirectory() as folder:
        place = Path(folder) / (found.new_file or PurePath(path).name)
        place.write_text(found.new, "utf-8")
        try:
            new = read(place, gpus=gpus)
        except ValueError as error:
            raise ValueError(f"{path} cannot be migrated; with FSDP2, {str(error).replace(str(place), 'it')}") from None
    plan, wanted = {"compile": False, "cpu_offload": False, "activation_checkpointing": None} | new.plan, promised(old)
    wrong = {name: plan.get(name) for name, value in wanted.items() if plan.get(name) != value}
    if wrong or (old.format == "accelerate" and new.cluster != old.cluster):
        raise ValueError(f"{path} cannot be migrated: read again, the new text gives {wrong or new.cluster}")
    found.notes += [line for line in new.defaults if line not in found.notes]
    dtype = old.plan.get("reduce_dtype", wanted["reduce_dtype"])
    if old.plan["api"] != "ddp" and dtype != wanted["reduce_dtype"]:
        found.differs.append(Difference(
            f"Gradients were reduced in {dtype or 'fp32'}, and are in {wanted['reduce_dtype'] or 'fp32'}: Accelerate "
            "has no key for it. Give FullyShardedDataParallelPlugin a mixed_precision_policy in the script.",
            "reduce-dtype-unsaid",
        ))  # fmt: skip


def _left_to_the_script(old: Configuration, text: str, found: Migration) -> None:
    said = {name: old.plan[name] for name in FROM_SCRIPT if name in old.plan}
    if said:
        words = ", ".join(f"{name}={value}" for name, value in said.items())
        found.look.append(LookAt(_line(text, "deepspeed_config", "zero_optimization"), (
            f"DeepSpeed's configuration says {words}; with FSDP2 the script does: Accelerator("
            f"gradient_accumulation_steps=...), accelerator.clip_grad_norm_, and an optimizer of torch. Scheduler, "
            f"learning rate and loss scale go with it."
        ), must=False))  # fmt: skip


def _line(text: str, *names: str) -> int:
    lines = text.splitlines()
    return next((at for name in names for at, line in enumerate(lines, 1) if name in line.partition("#")[0]), 1)
