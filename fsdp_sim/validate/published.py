"""`read_csv`: published measurements of training runs, as requests to the simulator.

One row is one configuration: the model's dimensions, how it was trained, on what, and the step time (and sometimes
the peak memory) that its source reports. ``data/measured.csv`` holds those the simulator is fitted to and judged by;
its ``source`` column names where each was published.

A cell that says something the reader does not know is an error, and so is a column: what is not understood would be
predicted as if it were not there. An empty cell is what the source does not say.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fsdp_sim.spec import Cluster, Model, Plan, plan_fields

MEASURED = files("fsdp_sim.validate").joinpath("data/measured.csv")
FITTED_SOURCE = "mosaicml/llm-foundry"  # the rows the simulator's numbers are fitted to
NO_FSDP = {"DDP": "ddp", "NONE": "ddp"}
REQUIRED = (
    "n_layer", "d_model", "n_head", "d_ffn", "vocab", "seq_len", "micro_batch", "gpu_type", "n_gpus",
)  # fmt: skip
COLUMNS = (
    *REQUIRED, "source", "model", "n_kv_head", "ffn_type", "tied_embeddings", "grad_accum", "inter_node", "framework",
    "sharding", "precision", "fp8", "param_dtype", "reduce_dtype", "activation_checkpointing", "cpu_offload", "compile",
    "attention_impl", "forward_prefetch", "backward_prefetch", "step_time_s", "tokens_per_s_per_gpu", "peak_memory_GiB",
    "peak_memory_kind",
)  # fmt: skip


@dataclass(frozen=True)
class PublishedRun:
    """A published measurement and the request that describes it.

    Attributes:
        step_time_s: seconds per optimizer step, measured; None where the source does not say.
        peak_memory_bytes: measured; None where the source does not say.
        peak_memory_kind: ``reserved``, ``allocated`` or empty.
        remark: why the row is not like the others: quantised, no FSDP, another framework; empty for plain FSDP.
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


class RowError(ValueError):
    """A row that cannot be understood; says which row and which column."""


def read_csv(path: str | Path | None = None) -> list[PublishedRun]:
    """The measurements of a file; by default those that come with the project.

    Raises:
        RowError: names the row, the column, the value and what would be right.
        OSError: the file cannot be read.
    """
    if path is None:
        text = MEASURED.read_text()
    else:
        try:
            text = Path(path).read_text()
        except UnicodeDecodeError as error:
            raise RowError(f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
    if missing:
        raise RowError(f"{path} has no column {missing[0]!r}; it needs {', '.join(REQUIRED)}")
    if unknown := [name for name in reader.fieldnames or () if name not in (*COLUMNS, *UNREAD)]:
        raise RowError(f"{path} has a column {unknown[0]!r}, which is not understood; there are {', '.join(COLUMNS)}")
    return [_row(number, row) for number, row in enumerate(reader, start=2)]


def _row(number: int, row: dict[str, str]) -> PublishedRun:
    if None in row or None in row.values():
        raise RowError(f"line {number} (id {row.get('id', '?')}) has not as many fields as the header")
    cell = _Cells(number, row)
    name = row.get("model") or "unnamed"
    swiglu = row.get("ffn_type", "gelu") == "swiglu"
    try:
        model = Model(
            name=name, n_layer=cell.whole("n_layer"), d_model=cell.whole("d_model"), n_head=cell.whole("n_head"),
            n_kv_head=cell.optional("n_kv_head", cell.whole), d_ffn=cell.whole("d_ffn"), vocab=cell.whole("vocab"),
            ffn_type=row.get("ffn_type") or "gelu", norm="composed_rmsnorm" if swiglu else "layernorm", bias=not swiglu,
            positions="rope" if swiglu else "learned", max_seq_len=None,
            tied_embeddings=cell.flag("tied_embeddings", default=not swiglu),
        )  # fmt: skip
        cluster = _cluster(row, cell)
        plan = _plan(row, cell, cluster)
    except RowError:
        raise
    except (ValueError, TypeError) as error:
        raise RowError(f"line {number} (id {row.get('id', '?')}): {error}") from error
    memory = cell.optional("peak_memory_GiB", cell.number)
    return PublishedRun(
        id=row.get("id") or f"line {number}", source=row.get("source", ""), model=model, cluster=cluster, plan=plan,
        step_time_s=_step_time(cell, plan), peak_memory_bytes=None if memory is None else memory * 2**30,
        peak_memory_kind=_memory_kind(cell), remark=_remark(row), raw=row,
    )  # fmt: skip


FABRIC = re.compile(r"not stated[^(]*(?:\((?:.*assume (?P<rate>[^)]+)|[^)]*)\))?", re.IGNORECASE)
PLAN_COLUMNS = {  # the fields of a plan that a row says, and what its stack does where the source does not say
    "seq_len": "", "micro_batch": "", "grad_accum": "1", "param_dtype": "bf16", "reduce_dtype": "",
    "activation_checkpointing": "none", "compile": "false", "cpu_offload": "false",
}  # fmt: skip
FSDP1_COLUMNS = {"forward_prefetch": "false", "backward_prefetch": "BACKWARD_PRE"}
WORDS = {  # what other stacks call a plan's value: torchtitan's "selective 2" is every second block
    "activation_checkpointing": {"selective-op": "selective", "selective-block": "2"},
    "cpu_offload": {"none": "false", "params": "true", "full": "true"},
}
_SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD", "ZeRO-3", *NO_FSDP)
SHARDING = {word: word for word in _SHARDINGS}
STACKS = ("fsdp", "torchtitan", "composer", "deepspeed", "ddp", "nanogpt")
ATTENTION = {  # the first that is in the cell; kernels of 2023 are those of FlashAttention 1 and triton
    "triton": "flash1", "flash": "sdpa", "sdpa": "sdpa", "math": "math", "eager": "math", "torch": "math",
}  # fmt: skip
UNREAD = ("id", "notes", "address", "mfu", "params_b")  # columns about the row, not about what ran
FP8 = re.compile(r"fp8|float8|mxfp8|nvfp4|fp4", re.IGNORECASE)


def _cluster(row: dict[str, str], cell: _Cells) -> Cluster:
    gpus = cell.whole("n_gpus")
    part = Cluster(row["gpu_type"], gpus=1).gpu
    size = part.gpus_per_node
    per_node = None if gpus <= size or gpus % size == 0 else max(n for n in range(1, size) if gpus % n == 0)
    return Cluster(part.name, gpus=gpus, gpus_per_node=per_node, inter=_fabric(row.get("inter_node", "").strip()))


def _fabric(text: str) -> str | None:
    """A rate or the name of a link; None is what such servers ship with."""
    if text.lower() in ("", "single node"):
        return None
    unstated = FABRIC.fullmatch(text)
    return unstated["rate"] if unstated else text


def _plan(row: dict[str, str], cell: _Cells, cluster: Cluster) -> Plan:
    framework, sharding = row.get("framework", ""), cell.word("sharding", SHARDING) or "FULL_SHARD"
    if framework and not any(stack in framework.lower() for stack in STACKS):
        raise cell.wrong("framework", f"a stack that is known; name one of {', '.join(STACKS)}")
    if FP8.search(row.get("precision", "")) or row.get("fp8", "").strip().lower() not in ("", "false"):
        raise cell.wrong(
            "fp8" if row.get("fp8") else "precision", "priced yet: the simulator computes in bf16, fp16 or fp32"
        )
    api = NO_FSDP.get(sharding) or ("fsdp2" if "FSDP2" in framework or "torchtitan" in framework else "fsdp1")
    unsaid = PLAN_COLUMNS | (FSDP1_COLUMNS if api == "fsdp1" else {})
    cells = {name: row.get(name, "").strip() or text for name, text in unsaid.items()}
    cells["reduce_dtype"] = cells["reduce_dtype"] or cells["param_dtype"]
    texts = {name: WORDS.get(name, {}).get(text.lower(), text) for name, text in cells.items()}
    fields: dict[str, Any] = plan_fields({"api": api} | texts) | {"attention_impl": _attention(cell, framework)}
    if "Composer" in framework:
        # llm-foundry's defaults: FlashAttention's loss, LanguageCrossEntropy and LanguagePerplexity of every batch
        fields |= {"cross_entropy": "fused", "loss_metrics": 1}
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


def _attention(cell: _Cells, framework: str) -> str:
    """``flash1`` for the kernels of 2023 (FlashAttention 1, triton), ``sdpa`` for FlashAttention-2 and torch's own."""
    text = cell.row.get("attention_impl", "").lower()
    if not text:
        return "flash1" if "Composer" in framework else "sdpa"
    found = next((ours for word, ours in ATTENTION.items() if word in text), None)
    if found is None:
        raise cell.wrong("attention_impl", f"an attention that is known; name one of {', '.join(ATTENTION)}")
    return found


def _remark(row: dict[str, str]) -> str:
    framework, sharding = row.get("framework", ""), row.get("sharding", "")
    if "qlora" in framework.lower():
        return "quantised base model"
    if sharding in NO_FSDP:
        return "no FSDP"
    return "DeepSpeed ZeRO-3" if sharding == "ZeRO-3" else ""


def _memory_kind(cell: _Cells) -> str:
    text = cell.row.get("peak_memory_kind", "")
    kinds = ("reserved", "allocated", "active")
    found = next((kind for kind in kinds if kind in text), "")
    if text and not found:
        raise cell.wrong("peak_memory_kind", f"a kind that is known; name one of {', '.join(kinds)}")
    return found


def _step_time(cell: _Cells, plan: Plan) -> float | None:
    given = cell.optional("step_time_s", cell.number)
    rate = cell.optional("tokens_per_s_per_gpu", cell.number)
    if given is None and rate:
        return plan.seq_len * plan.micro_batch * plan.grad_accum / rate
    return given


class _Cells:
    """The cells of one row, read with errors that say where."""

    def __init__(self, line: int, row: dict[str, str]) -> None:
        self.line = line
        self.row = row

    def wrong(self, column: str, what: str) -> RowError:
        row_id = self.row.get("id", "?")
        return RowError(f"line {self.line} (id {row_id}), column {column}: {self.row[column]!r} is not {what}")

    def optional(self, column: str, read: Callable[[str], Any]) -> Any:
        return read(column) if self.row.get(column, "").strip() else None

    def whole(self, column: str) -> int:
        try:
            value = int(self.row[column])
        except ValueError:
            value = 0
        if value < 1:
            raise self.wrong(column, "a whole number of at least 1")
        return value

    def number(self, column: str) -> float:
        try:
            value = float(self.row[column])
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise self.wrong(column, "a number above 0")
        return value

    def flag(self, column: str, *, default: bool) -> bool:
        text = self.row.get(column, "").strip().lower()
        if text not in ("", "true", "false"):
            raise self.wrong(column, "True or False")
        return default if not text else text == "true"

    def word(self, column: str, words: Mapping[str, Any]) -> Any:
        """What a word means; an empty cell is the word ''."""
        text = self.row.get(column, "").strip()
        found = {word.lower(): meaning for word, meaning in words.items()}
        if text.lower() not in found and text:
            raise self.wrong(column, f"a word that is known; write one of {', '.join(filter(None, words))}")
        return found.get(text.lower())
