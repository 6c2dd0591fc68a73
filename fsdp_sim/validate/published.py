"""`read_csv`: published measurements of training runs, as requests to the simulator.

One row is one configuration: the model (its name in the catalogue, or its dimensions), how it was trained, on what, and
the step time or the peak memory that its source reports. The files of ``data`` hold those the simulator is fitted to
and judged by; their ``source`` column names where each was published, ``data/sources.toml`` what a source trains with.

A cell that says something the reader does not know is an error, and so is a column: what is not understood would be
predicted as if it were not there. An empty cell is what the source does not say.
"""

from __future__ import annotations

import csv
import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from fsdp_sim.spec import Cluster, Model, Plan, block_shapes, plan_fields, stack_names
from fsdp_sim.timeline import read_text
from fsdp_sim.validate.cells import Cells, RowError

DATA = files("fsdp_sim.validate").joinpath("data")
MEASURED = DATA.joinpath("measured.csv")
LATER = DATA.joinpath("measured_2026-11.csv")
FITTED_SOURCE = "mosaicml/llm-foundry"  # the rows the simulator's numbers are fitted to
NO_FSDP = {"DDP": "ddp", "NONE": "ddp"}
ALSO = {"gpus": "n_gpus", "dtype": "precision", "peak_memory_gib": "peak_memory_GiB"}  # other names of columns
DIMENSIONS = ("n_layer", "d_model", "n_head", "d_ffn", "vocab")  # or the name of a model in the catalogue
REQUIRED = ("seq_len", "micro_batch", "gpu_type", "n_gpus")
COLUMNS = (
    *DIMENSIONS, *REQUIRED, "source", "model", "n_kv_head", "ffn_type", "tied_embeddings", "grad_accum", "inter_node",
    "framework", "sharding", "precision", "fp8", "param_dtype", "reduce_dtype", "activation_checkpointing",
    "cpu_offload", "compile", "attention_impl", "forward_prefetch", "backward_prefetch", "base_quantization",
    "lora_rank", "lora_targets", "step_time_s", "tokens_per_s_per_gpu", "peak_memory_GiB", "peak_memory_kind",
)  # fmt: skip
UNREAD = ("id", "notes", "address", "mfu", "params_b")  # columns about the row, not about what ran


@dataclass(frozen=True)
class PublishedRun:
    """A published measurement and the request that describes it.

    Attributes:
        step_time_s: seconds per optimizer step, measured; None where the source does not say.
        peak_memory_bytes: measured; None where the source does not say.
        peak_memory_kind: ``reserved``, ``allocated`` or empty.
        remark: what is unlike other rows: quantised, LoRA, fp8, no FSDP, another framework; empty for plain FSDP.
        raw: the cells of the row, as they stand in the file.
    """

    id: str
    source: str
    model: Model
    cluster: Cluster
    plan: Plan
    step_time_s: float | None
    peak_memory_bytes: float | None
    peak_memory_kind: str
    remark: str
    raw: dict[str, str]


@dataclass(frozen=True)
class Refused:
    """A published row that is not predicted, and why."""

    id: str
    source: str
    why: str


def read_csv(path: str | Path | None = None) -> list[PublishedRun]:
    """The measurements of a file; by default those that come with the project, without the rows it refuses.

    Raises:
        RowError: names the row, the column, the value and what would be right.
        OSError: the file cannot be read.
    """
    if path is None:
        return [row for row in published() if isinstance(row, PublishedRun)]
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise RowError(f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    rows = []
    for cell in _cells(text, str(path)):
        row = _read(cell)
        if isinstance(row, RowError):
            raise row
        rows.append(row)
    return rows


@functools.cache
def published() -> tuple[PublishedRun | Refused, ...]:
    """Every row that comes with the project: read, or refused with its reason."""
    rows: list[PublishedRun | Refused] = []
    for file in (MEASURED, LATER):
        for cell in _cells(file.read_text(), file.name):
            row = _read(cell)
            if isinstance(row, RowError):
                rows.append(Refused(cell.id, cell.text("source"), cell.without_place(row)))
            else:
                rows.append(row)
    return tuple(rows)


def _cells(text: str, path: str) -> Iterator[Cells]:
    reader = csv.DictReader(text.splitlines())
    names = [ALSO.get(name, name) for name in reader.fieldnames or ()]
    needed = (*REQUIRED, *(() if "model" in names else DIMENSIONS))
    if missing := [name for name in needed if name not in names]:
        raise RowError(f"{path} has no column {missing[0]!r}; it needs {', '.join(needed)}")
    if unknown := [name for name in names if name not in (*COLUMNS, *UNREAD)]:
        raise RowError(f"{path} has a column {unknown[0]!r}, which is not understood; there are {', '.join(COLUMNS)}")
    for number, row in enumerate(reader, start=2):
        if None in row or None in row.values():
            raise RowError(f"line {number} (id {row.get('id', '?')}) has not as many fields as the header")
        yield Cells(number, {ALSO.get(name, name): text.strip() for name, text in row.items()})


def _read(cell: Cells) -> PublishedRun | RowError:
    try:
        return _row(cell)
    except RowError as error:
        return error
    except (ValueError, TypeError) as error:
        return cell.error(str(error))


def _row(cell: Cells) -> PublishedRun:
    source, raw, trained = _source(cell), cell.row, _trained(cell)
    unsaid = source.get("unsaid", {}) | (trained and trained | source.get("adapters", {}))
    cell = cell.completed(unsaid)
    _check_scope(cell)
    cluster, model = _cluster(cell), _model(cell)
    source = source | {"plan": source.get("plan", {}) | source.get("of_model", {}).get(model.name, {})}
    plan = _plan(Cells(cell.line, cell.row | _attention_layers(cell, model)), cluster, source)
    if source.get("weights") == "compute":
        model = replace(model, dtype=plan.param_dtype or model.dtype)
    memory = cell.optional("peak_memory_GiB", cell.number)
    return PublishedRun(
        id=cell.id, source=cell.text("source"), model=model, cluster=cluster, plan=plan,
        step_time_s=_step_time(cell, plan), peak_memory_bytes=None if memory is None else memory * 2**30,
        peak_memory_kind=_memory_kind(cell), remark=_remark(cell, plan), raw=raw,
    )  # fmt: skip


# -- the model and the cluster

NAMES = {  # of models, as sources write them, in the catalogue
    "llama-2-7b": "llama2-7b", "llama-2-13b": "llama2-13b", "llama-2-70b": "llama2-70b",
    "mistral-7b-v0.1": "mistral-7b", "mixtral-8x7b-v0.1": "mixtral-8x7b", "llama4-scout-17b-16e": "llama4-scout",
    "gpt_bigcode-santacoder": "santacoder",
}  # fmt: skip
SUFFIXES = re.compile(r" .*|-hf|-gptq|-instruct")  # of a name: how its weights are stored, what they were trained for


def _model(cell: Cells) -> Model:
    if not cell.text("n_layer"):
        name = SUFFIXES.sub("", cell.text("model").lower())
        return Model.preset(NAMES.get(name, name))
    swiglu = cell.text("ffn_type") == "swiglu"
    dimensions: dict[str, Any] = {name: cell.whole(name) for name in DIMENSIONS}
    return Model(
        name=cell.text("model") or "unnamed", **dimensions,
        n_kv_head=cell.optional("n_kv_head", cell.whole), ffn_type=cell.text("ffn_type") or "gelu",
        norm="rmsnorm" if swiglu else "layernorm", bias=not swiglu, positions="rope" if swiglu else "learned",
        max_seq_len=None, tied_embeddings=cell.flag("tied_embeddings", default=not swiglu),
    )  # fmt: skip


FABRIC = re.compile(r"not stated[^(]*(?:\((?:.*assume (?P<rate>[^)]+)|[^)]*)\))?", re.IGNORECASE)


def _cluster(cell: Cells) -> Cluster:
    gpus = cell.whole("n_gpus")
    part = Cluster(cell.text("gpu_type"), gpus=1).gpu
    size = part.gpus_per_node
    per_node = None if gpus <= size or gpus % size == 0 else max(n for n in range(1, size) if gpus % n == 0)
    return Cluster(part.name, gpus=gpus, gpus_per_node=per_node, inter=_fabric(cell.text("inter_node")))


def _fabric(text: str) -> str | None:
    """A rate or the name of a link; None is what such servers ship with."""
    if text.lower() in ("", "single node"):
        return None
    unstated = FABRIC.fullmatch(text)
    return unstated["rate"] if unstated else text


# -- the plan

PLAN_COLUMNS = {  # the fields of a plan that a row says, and what they are where the source does not say
    "seq_len": "", "micro_batch": "", "grad_accum": "1", "param_dtype": "bf16", "reduce_dtype": "",
    "activation_checkpointing": "none", "compile": "false", "cpu_offload": "false",
}  # fmt: skip
FSDP1_COLUMNS = {"forward_prefetch": "false", "backward_prefetch": "BACKWARD_PRE"}
FROZEN_COLUMNS = ("base_quantization", "lora_rank", "lora_targets")  # of those who train adapters
WORDS = {  # what other stacks call a plan's value: torchtitan's "selective 2" is every second block
    "activation_checkpointing": {"selective-op": "selective", "selective-block": "2"},
    "cpu_offload": {"none": "false", "params": "true", "full": "true"},
}
_SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD", "ZeRO-3", *NO_FSDP)
SHARDING = {word: word for word in _SHARDINGS}
OUT_OF_SCOPE = {  # what a sharding combines with FSDP
    "TP=": "tensor parallelism is out of scope", "PP=": "pipeline parallelism is out of scope",
    "CP=": "context parallelism is out of scope", "SimpleFSDP": "the compiler writes SimpleFSDP's program",
    "EP=": "how the experts are sharded beside FSDP is not known of the row",
}  # fmt: skip
ATTENTION = {  # the first that is in the cell; kernels of 2023 are those of FlashAttention 1 and triton
    "triton": "flash1", "flash": "sdpa", "sdpa": "sdpa", "math": "math", "eager": "math", "torch": "math",
}  # fmt: skip
FP8 = {  # the first that is in the cell is the recipe
    "rowwise_with_gw_hp": "rowwise_with_gw_hp", "rowwise": "rowwise", "tensorwise": "tensorwise", "mxfp8": "mxfp8",
    "true": "tensorwise", "float8": "tensorwise", "fp8": "tensorwise",
}  # fmt: skip
TRAINED = {  # words after a model's name: how its weights are kept beside the adapters that are trained
    "lora": {"base_quantization": "none"}, "qlora": {"base_quantization": "nf4_double_quant"},
    "gptq-lora": {"base_quantization": "gptq"},
}  # fmt: skip


@functools.cache
def _sources() -> dict[str, dict[str, Any]]:
    return tomllib.loads(DATA.joinpath("sources.toml").read_text())


def _source(cell: Cells) -> dict[str, Any]:
    """What the row's source trains with."""
    for table in _sources().values():
        has = {"gpu_types": cell.text("gpu_type"), "shardings": cell.text("sharding")}
        if cell.text("source") in table.get("sources", ()) and all(of in table.get(n, [of]) for n, of in has.items()):
            return table
    for column in ("framework", "source"):
        text = cell.text(column).lower()
        if found := next((table for word, table in _sources().items() if word in text), None):
            return found
        if text and column == "framework":
            raise cell.wrong(column, f"a stack that is known; name one of {', '.join(_sources())}")
    return {"stack": "training-script", "api": "fsdp1"}


def _trained(cell: Cells) -> dict[str, str]:
    """What the words after the model's name say."""
    return next((TRAINED[word] for word in cell.text("model").lower().split()[1:] if word in TRAINED), {})


def _attention_layers(cell: Cells, model: Model) -> dict[str, str]:
    """What ``lora_targets`` are, where they are the linear layers of attention."""
    if cell.text("lora_targets") != "attention":
        return {}
    linear = [name for name, _, columns in block_shapes(model) if name.startswith("attn.") and columns > 1]
    return {"lora_targets": ",".join(name.removesuffix(".weight") for name in linear)}


def _check_scope(cell: Cells) -> None:
    sharding = cell.text("sharding")
    if why := next((why for word, why in OUT_OF_SCOPE.items() if word in sharding), None):
        raise cell.error(f"sharding {sharding!r}: {why}")
    if unsaid := [name for name in REQUIRED if not cell.text(name)]:
        raise cell.error(f"the source does not say {' nor '.join(unsaid)}")


def _plan(cell: Cells, cluster: Cluster, source: dict[str, Any]) -> Plan:
    sharding = cell.word("sharding", SHARDING) or "FULL_SHARD"
    api = NO_FSDP.get(sharding) or source["api"]
    unsaid = PLAN_COLUMNS | (FSDP1_COLUMNS if api == "fsdp1" else {})
    cells = {name: cell.text(name) or default for name, default in unsaid.items()}
    cells["reduce_dtype"] = cells["reduce_dtype"] or cells["param_dtype"]
    cells |= _precision(cell)
    cells |= {name: cell.text(name) for name in FROZEN_COLUMNS if cell.text(name)}
    texts = {name: WORDS.get(name, {}).get(said.lower(), said) for name, said in cells.items()}
    fields: dict[str, Any] = source.get("plan", {}) | plan_fields({"api": api} | texts)
    stack = source["stack"]
    if fields["compile"] and f"{stack}-compiled" in stack_names():
        stack += "-compiled"
    if fields.get("base_quantization"):
        fields |= source.get("quantised", {})
    fields |= {"stack": stack} | _attention(cell)
    if api == "fsdp1":
        fields["sharding_strategy"] = "FULL_SHARD" if sharding == "ZeRO-3" else sharding
        if sharding.startswith(("HYBRID", "_HYBRID")):
            fields["shard_size"] = min(cluster.node_size, cluster.gpus)
    elif api == "fsdp2" and sharding == "HYBRID_SHARD":
        fields["shard_size"] = min(cluster.node_size, cluster.gpus)
    elif api == "fsdp2" and sharding == "SHARD_GRAD_OP":
        fields["reshard_after_forward"] = False
    elif api == "fsdp2" and sharding != "FULL_SHARD":
        raise cell.wrong("sharding", "one that FSDP2 has; it has FULL_SHARD, SHARD_GRAD_OP and HYBRID_SHARD")
    if api == "ddp":  # bf16 autocast over fp32 parameters, gradients reduced once
        fields |= {"requires_gradient_sync": "last", "reduce_dtype": None}
    return Plan(**fields)


PRECISION = re.compile(r"(?P<param>bf16|bfloat16|fp16|float16|fp32|float32)(?: params)?(?:, (?P<reduce>\w+) reduce)?")


def _precision(cell: Cells) -> dict[str, str]:
    """Dtypes, where they are all that ``precision`` says, and fp8."""
    texts = {}
    said = PRECISION.fullmatch(cell.text("precision").lower())
    if said and not cell.text("param_dtype"):
        texts["param_dtype"] = said["param"]
        if said["reduce"] or not cell.text("reduce_dtype"):
            texts["reduce_dtype"] = said["reduce"] or said["param"]
    for column in ("fp8", "precision"):
        text = cell.text(column).lower()
        if recipe := next((recipe for word, recipe in FP8.items() if word in text), None):
            gathered = "fp8 all-gather" in text
            return texts | {"fp8": recipe, "fp8_all_gather": str(gathered).lower()}
        if column == "fp8" and text not in ("", "false"):
            raise cell.wrong(column, f"a recipe that is known; name one of {', '.join(FP8)}, or False")
    return texts


def _attention(cell: Cells) -> dict[str, str]:
    """``flash1`` for the kernels of 2023 (FlashAttention 1, triton), ``sdpa`` for FlashAttention-2 and torch's own."""
    text = cell.text("attention_impl").lower()
    if not text:
        return {}
    found = next((ours for word, ours in ATTENTION.items() if word in text), None)
    if found is None:
        raise cell.wrong("attention_impl", f"an attention that is known; name one of {', '.join(ATTENTION)}")
    return {"attention_impl": found}


# -- what was measured


def _remark(cell: Cells, plan: Plan) -> str:
    found = {"LoRA": plan.lora_rank, "quantised base model": plan.base_quantization, "fp8": plan.fp8}
    words = [word for word, there in found.items() if there]
    if cell.text("sharding") in NO_FSDP:
        words.append("no FSDP")
    if cell.text("sharding") == "ZeRO-3":
        words.append("DeepSpeed ZeRO-3")
    return ", ".join(words)


def _memory_kind(cell: Cells) -> str:
    text = cell.text("peak_memory_kind")
    kinds = ("reserved", "allocated", "active")
    found = next((kind for kind in kinds if kind in text), "")
    if text and not found:
        raise cell.wrong("peak_memory_kind", f"a kind that is known; name one of {', '.join(kinds)}")
    return found


def _step_time(cell: Cells, plan: Plan) -> float | None:
    given = cell.optional("step_time_s", cell.number)
    rate = cell.optional("tokens_per_s_per_gpu", cell.number)
    if given is None and rate:
        return plan.seq_len * plan.micro_batch * plan.grad_accum / rate
    return given
