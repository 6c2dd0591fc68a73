"""The explorer's controls as data: which word of the state each one writes, how it is called, what it offers.

A control offers texts; None stands for leaving the word out, which is torch's default. A state that a control does not
offer is added to what it offers, so that every state can be shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fsdp_sim.requests import PLAN_FIELDS
from fsdp_sim.spec import Model, Plan, gpu_names

Option = tuple[str, str | None]  # what is read, and the text it stands for
Form = Literal["slider", "menu", "check"]


@dataclass(frozen=True)
class Control:
    """One control.

    Attributes:
        word: of the state; ``precision`` stands for two, see `PRECISIONS`.
        label: as it is read.
        form: a slider over its options, a menu of them, or a box (off, on).
        options: in order.
        help: a sentence, shown when the pointer rests on it.
        apis: the ways to train that have it; empty for all.
        unit: of its numbers.
    """

    word: str
    label: str
    form: Form
    options: tuple[Option, ...]
    help: str
    apis: tuple[str, ...] = ()
    unit: str = ""

    @property
    def key(self) -> str:
        """The word, and the way to train where several have a control of that word."""
        return f"{self.word}:{self.apis[0]}" if self.word in ("forward_prefetch", "backward_prefetch") else self.word

    def suits(self, api: str) -> bool:
        return not self.apis or api in self.apis

    def shown(self, option: Option) -> str:
        """An option as it is read: a number with its unit."""
        read, _ = option
        if not self.unit or _number(read) is None:
            return read
        return f"{read} {self.unit.removesuffix('s') if read == '1' else self.unit}"

    def offering(self, text: str | None) -> tuple[Option, ...]:
        """The options, and the text among them if it is none of them."""
        if any(text == offered for _, offered in self.options):
            return self.options
        added: Option = ("as given" if text is None else text, text)
        numbers = [_number(offered) for _, offered in self.options]
        here = _number(text)
        if here is None:
            return (*self.options, added)
        place = sum(1 for number in numbers if number is None or number < here)
        return (*self.options[:place], added, *self.options[place:])


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _numbers(*numbers: float, default: str = "") -> tuple[Option, ...]:
    texts = [f"{number:g}" if number < 1e6 else str(int(number)) for number in numbers]
    return (*([(default, None)] if default else []), *((text, text) for text in texts))


def _powers(first: int, last: int, default: str = "") -> tuple[Option, ...]:
    numbers = [first]
    while numbers[-1] < last:
        numbers.append(numbers[-1] * 2)
    found = tuple((str(n), str(n)) for n in numbers)
    return ((default, None), *found) if default else found


OFF_ON: tuple[Option, ...] = (("off", None), ("on", "true"))
ON_OFF: tuple[Option, ...] = (("on", None), ("off", "false"))
PRECISIONS: dict[str, Mapping[str, str | None]] = {  # the two words that one control writes
    "bf16, reduced in fp32": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
    "bf16": {"param_dtype": "bf16", "reduce_dtype": None},
    "fp16, reduced in fp32": {"param_dtype": "fp16", "reduce_dtype": "fp32"},
    "fp16": {"param_dtype": "fp16", "reduce_dtype": None},
    "fp32 (torch's default)": {"param_dtype": "none", "reduce_dtype": None},
}

_FSDP = ("fsdp2", "fsdp1")
_BUCKETS = ("ddp", "zero1", "zero2")
SETTINGS = (
    Control("model", "model", "menu", tuple((n, n) for n in Model.presets()), "What is trained."),
    Control("gpu", "GPU", "menu", tuple((n, n) for n in gpu_names()), "The device of each rank."),
    Control(
        "api", "API", "menu",
        (("FSDP2: fully_shard", None), ("FSDP1: FullyShardedDataParallel", "fsdp1"),
         ("DDP", "ddp"), ("ZeRO-1", "zero1"), ("ZeRO-2", "zero2")),
        "How the model is distributed.",
    ),
    Control("gpus", "GPUs", "slider", _powers(1, 2048), "Ranks, one for each GPU."),
    Control(
        "bandwidth_gbps", "bandwidth", "slider",
        _numbers(1, 2, 5, 10, 25, 50, 100, 200, 400, 800, 1600, 3200, default="as shipped"),
        "Gigabits per second that a rank can send to other nodes.", unit="Gbit/s",
    ),
    Control(
        "latency_us", "latency", "slider", _numbers(0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, default="as shipped"),
        "Microseconds that a message of no bytes takes to another node.", unit="µs",
    ),
    Control("micro_batch", "micro-batch", "slider", _numbers(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
            "Sequences per rank and micro-batch.", unit="sequences"),
    Control("seq_len", "sequence", "slider", _powers(128, 131072), "Tokens per sequence.", unit="tokens"),
    Control("grad_accum", "accumulate", "slider", (("1", None), *_numbers(2, 3, 4, 6, 8, 12, 16)),
            "Micro-batches per optimizer step.", unit="per step"),
    Control("forward_prefetch", "fwd prefetch", "slider", _numbers(*range(1, 9), default="implicit"),
            "Layers gathered ahead in forward: set_modules_to_forward_prefetch.", ("fsdp2",), "ahead"),
    Control("backward_prefetch", "bwd prefetch", "slider", _numbers(*range(1, 9), default="implicit"),
            "Layers gathered ahead in backward: set_modules_to_backward_prefetch.", ("fsdp2",), "ahead"),
    Control("forward_prefetch", "fwd prefetch", "check", OFF_ON, "FSDP1's forward_prefetch.", ("fsdp1",)),
    Control("backward_prefetch", "bwd prefetch", "menu",
            (("BACKWARD_PRE", None), ("BACKWARD_POST", "BACKWARD_POST"), ("none", "none")),
            "FSDP1's backward_prefetch; `none` is torch's None.", ("fsdp1",)),
    Control("limit_all_gathers", "rate limiter", "check", ON_OFF, "FSDP1's limit_all_gathers.", ("fsdp1",)),
    Control("sharding_strategy", "strategy", "menu",
            (("FULL_SHARD", None), *((s, s) for s in ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD",
                                                      "_HYBRID_SHARD_ZERO2"))),
            "FSDP1's ShardingStrategy.", ("fsdp1",)),
    Control("reshard_after_forward", "reshard", "menu",
            (("all but the root (default)", None), ("true", "true"), ("false: keep until backward", "false"),
             *((f"to groups of {n}", str(n)) for n in (2, 4, 8, 16))),
            "reshard_after_forward: what becomes of whole parameters after forward.", ("fsdp2",)),
    Control("shard_size", "HSDP shards", "slider", _powers(1, 1024, default="all ranks"),
            "Ranks that share one copy of the parameters; the copies are replicas (HSDP).", _FSDP, "ranks"),
    Control("precision", "precision", "menu", tuple((name, name) for name in PRECISIONS),
            "Dtype of gathers and compute, and of the gradients' reduction."),
    Control("activation_checkpointing", "checkpoint", "menu",
            (("off", None), ("full", "full"), ("selective", "selective"), ("every 2nd block", "2"),
             ("every 4th block", "4"), ("keep matmuls, attention", "mm,addmm,scaled_dot_product_attention")),
            "Which activations are computed again in backward instead of kept."),
    Control("cpu_offload", "CPU offload", "check", OFF_ON, "Shards, gradients, optimizer in the CPU's memory.", _FSDP),
    Control("activation_offload", "act. offload", "menu",
            (("off", None), ("save_on_cpu", "save_on_cpu"), ("streams", "streams")),
            "What backward needs goes to the CPU's memory: save_on_cpu waits for it, streams copy beside compute.",
            ("fsdp2",)),
    Control("separate_reduce_scatter_group", "own RS group", "check", OFF_ON,
            "set_separate_reduce_scatter_group: reduce-scatters do not queue before all-gathers.", ("fsdp2",)),
    Control("reduce_scatter_max_input_buffers", "RS buffers", "slider", (("1", None), *_numbers(2, 3, 4)),
            "set_reduce_scatter_max_input_buffers.", ("fsdp2",), "buffers"),
    Control("bucket_cap_mb", "bucket", "slider", _numbers(1, 5, 10, 25, 50, 100, 200, default="25"),
            "Most bytes of a bucket of gradients.", _BUCKETS, "MiB"),
    Control("compile", "compile", "check", OFF_ON, "torch.compile of each block."),
    Control("straggler", "straggler", "slider", (("1", None), *_numbers(1.05, 1.1, 1.2, 1.3, 1.5, 2, 3)),
            "How many times as long the last rank computes.", unit="× as long"),
    Control("jitter", "jitter", "slider",
            (("0", None), ("1%", "0.01"), ("2%", "0.02"), ("5%", "0.05"), ("10%", "0.1"), ("20%", "0.2")),
            "How much every computation varies from rank to rank and from time to time."),
)  # fmt: skip
SETTING = {setting.key: setting for setting in SETTINGS}
CONTROLLED = {setting.word for setting in SETTINGS} - {"precision"} | {"param_dtype", "reduce_dtype"}


def api_of(texts: Mapping[str, str]) -> str:
    return texts.get("api", "fsdp2").lower()


def chosen(setting: Control, texts: Mapping[str, str]) -> str | None:
    """The option of a setting that a state means."""
    if setting.word != "precision":
        text = texts.get(setting.word)
        if text is not None and text.lower() in ("true", "false", "none"):
            text = text.lower()
        # a default that is spelt out is the option without a text
        same = {"false": "off", "true": "on", "none": "implicit", "fsdp2": "FSDP2: fully_shard"}
        for read, offered in setting.options:
            if offered is None and text is not None and (text == read or same.get(text) == read):
                return None
        if text is None and setting.word in PLAN_FIELDS and all(offered is not None for _, offered in setting.options):
            return str(getattr(Plan(), setting.word))
        return text
    pair = {name: texts.get(name) for name in ("param_dtype", "reduce_dtype")}
    if pair == {"param_dtype": None, "reduce_dtype": None}:
        return next(iter(PRECISIONS)) if api_of(texts) in _FSDP else "fp32 (torch's default)"
    return next(
        (name for name, words in PRECISIONS.items() if words == pair), " / ".join(str(t) for t in pair.values())
    )


def words_of(setting: Control, option: str | None) -> dict[str, str | None]:
    """What the choice of an option writes into the state."""
    if setting.word != "precision":
        return {setting.word: option}
    if option in PRECISIONS:
        return dict(PRECISIONS[option])
    param, _, reduce = str(option).partition(" / ")
    return {"param_dtype": None if param == "None" else param, "reduce_dtype": None if reduce == "None" else reduce}
