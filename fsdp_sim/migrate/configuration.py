"""A trainer's configuration with FSDP1, DDP or DeepSpeed, for FSDP2: keys are changed where they stand.

What each format calls them is in ``formats.toml``. The new text is read again, and gives the plan that was promised.
Sources: accelerate 1.15.0, `accelerate.commands.to_fsdp2` (which keys go, and what becomes of a sharding strategy),
`FullyShardedDataParallelPlugin.__post_init__` and `set_state_dict_type` (what FSDP2 refuses, and its defaults), which
transformers, TRL, LLaMA-Factory and axolotl fill too; `TrainingArguments._process_fsdp_args` of transformers 5.24.0 and
4.57.1; axolotl 0.19.0, `axolotl.utils.schemas.validation` and its page on several GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

from fsdp_sim.configurations import Configuration, read
from fsdp_sim.migrate.call_text import CallText
from fsdp_sim.migrate.formats import Keys, gone, table_of, text_of_configuration
from fsdp_sim.migrate.numbers import has_model
from fsdp_sim.migrate.result import Difference, LookAt, Migration, diff_of, told
from fsdp_sim.migrate.yaml_text import YamlText
from fsdp_sim.requests import Job, request_of_texts, resolve
from fsdp_sim.spec import SETTINGS_OF, text_of

SECTION = "fsdp_config"
DEEPSPEED_BECOMES = "accelerate"
OWN = ("api", "wrap", "reshard_after_forward", "reduce_dtype", "forward_prefetch", "backward_prefetch", "shard_size")
"""Fields of a plan that follow from the way to train."""
UNSAID = {"compile": False, "cpu_offload": False, "activation_checkpointing": None}
"""What a plan has where a configuration says nothing."""
PASSED_OVER = ("SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def migration_of_configuration(path: str, text: str, gpus: int | None = None) -> tuple[Migration, Configuration]:
    """A configuration's migration, and what the old text says.

    Args:
        gpus: how many there are, in place of what the file says.

    Raises:
        ValueError: it has a key or a value that is not understood, or a format that is not migrated; names it.
    """
    old = read(path, gpus=gpus)
    format = DEEPSPEED_BECOMES if old.format == "deepspeed" else old.format
    table, source = table_of(format), source_of(old)
    if not source:
        why = "uses FSDP2 already" if old.plan["api"] == "fsdp2" else "starts one process, of which nothing is sharded"
        return Migration(file=path, source=[], changed=False, notes=[f"{path} {why}: nothing to do."]), old
    if not table or "refuse" in table:
        why = table.get(
            "refuse", "Accelerate's, DeepSpeed's, transformers', TRL's, LLaMA-Factory's, axolotl's and verl's are"
        )
        raise ValueError(
            f"{path} is a configuration of {old.package}, which is not migrated: {why}. fsdp-sim lint {path} looks for "
            f"its traps"
        )
    names = dict.fromkeys((table.get("like", format), format))
    same, differs, test = told(
        [
            f"configuration-{source}",
            f"plugin-{source}" * table["plugin"],
            *names,
            *(f"{name}-{source}" for name in names),
        ]
    )
    found = Migration(
        file=path, source=[source], changed=True, same=same, differs=differs, test=test,
        notes=list(old.remarks), defaults=list(old.defaults),
    )  # fmt: skip
    found.look += [LookAt(_line(text, *where), what, must=True) for where, what in _no_equal(old, table)]
    if found.look:
        found.changed = False
        return found, old
    found.new_file = f"{PurePath(path).stem}.accelerate.yaml" if old.format == "deepspeed" else ""
    start = "compute_environment: LOCAL_MACHINE\n" + (f"num_processes: {gpus}\n" if gpus else "")
    new = YamlText(start, path) if found.new_file else text_of_configuration(text, path, format)
    wanted = promised(old, source, table)
    _rewrite(new, old, format, source, found)
    _say_what_differs(new, path, format, wanted, gpus, found)
    found.new = new.text
    _see_that_it_holds(path, found, old, wanted, gpus)
    new_name = str(PurePath(path).with_name(found.new_file)) if found.new_file else path
    found.diff = diff_of("" if found.new_file else text, found.new, path, new_name)
    found.look += _look_at(text, old, table, source)
    return found, old


def source_of(old: Configuration) -> str:
    """From what a configuration is migrated: ``fsdp1``, ``ddp``, ``zero1``, ``deepspeed``; ``fsdp2`` where nothing but
    the default of the package's latest version says so; empty where there is nothing to do."""
    table = table_of(old.format)
    key, *value = table.get("zero", [""])
    given = old.given.get(key)
    if old.format == "deepspeed" or (given == value[0] if value else given is not None):
        return "deepspeed"
    if old.given.get("distributed_type") == "NO":
        return ""
    if old.plan["api"] == "fsdp2":
        return "fsdp2" * any(one.startswith(f"{key}=") for key in table.get("version", ()) for one in old.filled)
    return str(old.plan["api"])


def promised(old: Configuration, source: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Plan` that the new text must give."""
    if source == "fsdp2":
        return dict(old.plan)
    plan = {
        name: value for name, value in old.plan.items()
        if name not in (*OWN, *table["silent"]) and "fsdp2" in SETTINGS_OF.get(name, ("fsdp2",))
    }  # fmt: skip
    if old.plan.get("optimizer") == "adamw_master_weights":  # DeepSpeed's; FSDP2's parameters are fp32 themselves
        plan = {name: value for name, value in plan.items() if name not in ("optimizer", "optimizer_impl")}
    wrap, strategy = old.plan.get("wrap", "block"), old.plan.get("sharding_strategy", "FULL_SHARD")
    keeps = old.plan["api"] in ("zero1", "zero2") or strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    if not table["plugin"]:
        kept = {name: old.plan[name] for name in ("wrap", "reduce_dtype", "shard_size") if name in old.plan}
        ahead = 1 if old.plan.get("forward_prefetch") else None
        own = {"api": "fsdp2", "reshard_after_forward": not keeps, "forward_prefetch": ahead, "cpu_offload": False}
        return plan | kept | own
    plan |= {
        "api": "fsdp2", "wrap": "embed_block_head" if wrap == "block" else wrap,
        "reshard_after_forward": False if keeps else None,
        "reduce_dtype": plan.get("param_dtype"),  # `set_mixed_precision`
    }  # fmt: skip
    return plan | ({"shard_size": old.plan["shard_size"]} if "HYBRID" in strategy else {})


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
        new.write_text(found.new, "utf-8", newline="")
        silent = table_of(read(new).format)["silent"]
        plan = {name: text_of(value) for name in silent if (value := getattr(before.plan, name)) is not None}
        if plan.get("optimizer") == "adamw_master_weights":
            plan["optimizer"] = "adamw"
        after = resolve(request_of_texts({**plan, **texts, "config": str(new)}))
    return before, after


def _no_equal(old: Configuration, table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The keys for which FSDP2 has nothing there, and what to do."""
    if old.plan.get("sharding_strategy") == "NO_SHARD":
        what = "NO_SHARD is DDP: write distributed_type: MULTI_GPU, and leave fsdp_config out."
        yield ("sharding_strategy",), what
    if type(old.plan.get("reshard_after_forward")) is int:
        what = (
            f"A second copy of the parameters in each node (zero_hpz_partition_size) has no key in {table['name']}: "
            f"call fully_shard(module, reshard_after_forward=N) in the script, or leave the key out and ask again."
        )
        yield ("zero_hpz_partition_size", "deepspeed_config_file", "deepspeed"), what
    if str(old.given.get(f"{SECTION}.state_dict_type", "")).upper() == "LOCAL_STATE_DICT":
        what = (
            "Accelerate refuses LOCAL_STATE_DICT with FSDP2: write SHARDED_STATE_DICT, and ask again. What was saved "
            "so loads with FSDP1 alone."
        )
        yield ("state_dict_type",), what
    if isinstance(file := old.given.get(SECTION), str):
        what = (
            f"What FSDP is told stands in {file}: put it here under {SECTION}, or migrate that file and write fsdp: "
            f"true here."
        )
        yield (SECTION,), what
    for one in _that_apply(old, table):
        if "must" in one:
            yield tuple(key.rpartition(".")[2] for key in one["of"]), one["must"]


def _that_apply(old: Configuration, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What goes with FSDP2 only otherwise, of what a configuration says."""
    return [
        one for one in table["when"]
        if all(str(old.given.get(key)) in map(str, values) for key, values in one["of"].items())
    ]  # fmt: skip


def _rewrite(text: YamlText | CallText, old: Configuration, format: str, source: str, found: Migration) -> None:
    table, keys, said = table_of(format), Keys(text, format), old.given if old.format == format else {}
    plan = promised(old, source, table)
    for key, value in table["on"].items():
        if said.get(key) is not value and said.get(key) != value:
            keys.put(key, value)
    for key in table["off"].get(source, ()):
        keys.drop(key)
    has = {key.partition(".")[0] for key in said}
    version = next((key for key in table["version"] if key.partition(".")[0] in has), table["version"][-1])
    keys.put(version, table["is"], instead=table["place"])
    for key in table["beside"]:
        if keys.written(key):
            keys.put(key, table["is"])
    if table["reshard"]:
        keys.put(table["reshard"], plan["reshard_after_forward"] is not False, instead=f"{SECTION}.sharding_strategy")
    for key, now in table["moved"].items():
        if key in said:
            value = said[key]
            keys.put(now, list(value) if isinstance(value, tuple) else value)
            keys.drop(key)
    for name, why in gone().items():
        if written := keys.written(f"{SECTION}.{name}"):
            found.differs.append(Difference(f"{written[-1]} ({said[f'{SECTION}.{name}']}) has no equal: {why}."))
            keys.drop(f"{SECTION}.{name}")
    for key, value in table["also"].items() if source != "fsdp2" else ():
        if not keys.written(key):
            keys.put(key, value)
    if table["mesh"] and (shards := plan.get("shard_size")):
        for key, value in zip(table["mesh"], (old.cluster["gpus"] // shards, shards), strict=True):
            keys.put(key, value)
    for one in _that_apply(old, table):
        for key, value in one.get("set", {}).items():
            keys.put(key, value)
    for section in table["bare"]:
        keys.bare(section)


def _say_what_differs(
    text: YamlText | CallText, path: str, format: str, wanted: Mapping[str, Any], gpus: int | None, found: Migration
) -> None:
    """Write the keys of what the new text does not say yet."""
    plan, says, keys = _read_again(text.text, path, found, gpus).plan, table_of(format)["says"], Keys(text, format)
    for name in wanted.keys() & says.keys():
        if (value := wanted[name]) != plan.get(name, UNSAID.get(name)):
            of = says[name]
            for key, new in ({of["*"]: value} if "*" in of else of.get(str(value), {})).items():
                keys.put(key, new)


def _read_again(text: str, path: str, found: Migration, gpus: int | None) -> Configuration:
    with TemporaryDirectory() as folder:
        place = Path(folder) / (found.new_file or PurePath(path).name)
        place.write_text(text, "utf-8", newline="")
        try:
            return read(place, gpus=gpus)
        except ValueError as error:
            raise ValueError(f"{path} cannot be migrated; with FSDP2, {str(error).replace(str(place), 'it')}") from None


def _see_that_it_holds(
    path: str, found: Migration, old: Configuration, wanted: Mapping[str, Any], gpus: int | None
) -> None:
    """Read the new text again: it must give the plan that was promised, of every field that it says."""
    new = _read_again(found.new, path, found, gpus)
    wrong = {name: new.plan.get(name) for name, value in wanted.items()
             if new.plan.get(name, UNSAID.get(name)) != value}  # fmt: skip
    if wrong or (old.format == new.format and new.cluster != old.cluster):
        raise ValueError(f"{path} cannot be migrated: read again, the new text gives {wrong or new.cluster}")
    found.defaults += [line for line in new.defaults if line not in found.defaults]
    dtype = old.plan.get("reduce_dtype", wanted["reduce_dtype"])
    if old.plan["api"] != "ddp" and dtype != wanted["reduce_dtype"]:
        found.differs.append(Difference(
            f"Gradients were reduced in {dtype or 'fp32'}, and are in {wanted['reduce_dtype'] or 'fp32'}: Accelerate "
            "has no key for it. Give FullyShardedDataParallelPlugin a mixed_precision_policy in the script.",
            "reduce-dtype-unsaid",
        ))  # fmt: skip
    if new.plan.get("requires_gradient_sync") == "last" and old.plan["api"] != "fsdp1":
        found.differs.append(Difference(
            f"Of {new.plan['grad_accum']} micro-batches the last alone reduces gradients, and until then each GPU "
            "holds whole ones; sync_each_batch=True keeps shards.",
            "gradients-kept-whole",
        ))  # fmt: skip


def _look_at(text: str, old: Configuration, table: Mapping[str, Any], source: str) -> Iterator[LookAt]:
    """Places of the old text that a person has to look at, though the new one runs."""
    for one in _that_apply(old, table):
        if "look" in one:
            yield LookAt(_line(text, *(key.rpartition(".")[2] for key in one["of"])), one["look"], must=False)
    said = {name: old.plan[name] for name in table["silent"] if name in old.plan}
    if source == "deepspeed" and said:
        words = ", ".join(f"{name}={value}" for name, value in said.items())
        yield LookAt(_line(text, "deepspeed_config", "zero_optimization"), (
            f"DeepSpeed's configuration says {words}; with FSDP2 the script does: Accelerator("
            f"gradient_accumulation_steps=...), accelerator.clip_grad_norm_, and an optimizer of torch. Scheduler, "
            f"learning rate and loss scale go with it."
        ), must=False)  # fmt: skip
    elif source == "deepspeed" and not table["silent"]:
        yield LookAt(_line(text, "deepspeed"), (
            "DeepSpeed's optimizer and scheduler, where its file names them, are those of the arguments now: optim, "
            "learning_rate, lr_scheduler_type. Batch, clipping and dtype were the arguments' already, or it did not "
            "start."
        ), must=False)  # fmt: skip
    given = old.given.get("fsdp")
    asked = next((one for one in given if one.upper() in PASSED_OVER), "") if isinstance(given, tuple) else ""
    if source == "fsdp1" and asked:
        yield LookAt(_line(text, "fsdp"), (
            f"{asked} did nothing with FSDP1 ({old.package} shards fully whatever it says), and so nothing becomes "
            f"of it. If you mean it, write reshard_after_forward: false."
        ), must=False)  # fmt: skip


def _line(text: str, *names: str) -> int:
    lines = text.splitlines()
    return next((at for name in names for at, line in enumerate(lines, 1) if name in line.partition("#")[0]), 1)
