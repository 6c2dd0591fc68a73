"""How a sentence says a quantity, or what somebody else wrote, and which name was meant by one that does not exist."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
MINUS = "−"
TURNS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # what makes text run the other way


def human_ms(seconds: float) -> str:
    """Seconds as milliseconds with about three significant digits.

    Example:
        >>> human_ms(0.0412), human_ms(0.00321), human_ms(1.24)
        ('41.2 ms', '3.21 ms', '1,240 ms')
    """
    ms = seconds * 1e3 if abs(seconds) >= 5e-8 else 0.0  # what would read -0.0000
    digits = 0 if abs(ms) >= 100 else 1 if abs(ms) >= 10 else 2 if abs(ms) >= 0.1 or ms == 0 else 4
    return f"{ms:,.{digits}f} ms"


def human_latency(seconds: float) -> str:
    """Seconds as microseconds below a millisecond, as milliseconds above."""
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else human_ms(seconds)


def byte_unit(n_bytes: float) -> tuple[float, str]:
    """The binary unit in which ``n_bytes`` reads best: its size in bytes and its name."""
    power = min(max(int(abs(n_bytes)).bit_length() - 1, 0) // 10, len(BYTE_UNITS) - 1)
    return 1024.0**power, BYTE_UNITS[power]


def human_bytes(n_bytes: float) -> str:
    """Bytes in binary units with about three significant digits.

    Example:
        >>> human_bytes(13_002_342), human_bytes(2**30), human_bytes(12)
        ('12.4 MiB', '1.00 GiB', '12 B')
    """
    size, unit = byte_unit(n_bytes)
    value = n_bytes / size
    digits = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def human_count(number: float) -> str:
    """A large number in three digits.

    Example:
        >>> human_count(8_030_261_248), human_count(124e6), human_count(950.0)
        ('8.03 B', '124 M', '950')
    """
    for size, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:.3g}"


def human_rate(per_s: float) -> str:
    """So many a second, whole, unless they are few.

    Example:
        >>> human_rate(20_574.3), human_rate(1.78), human_rate(0.0803)
        ('20,574', '1.8', '0.08')
    """
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def signed_ms(seconds: float) -> str:
    """``+1.20 ms`` or ``−1.20 ms``, with a real minus sign."""
    return f"{MINUS if seconds < -5e-8 else '+'}{human_ms(abs(seconds))}"


def signed_bytes(n_bytes: float) -> str:
    """``+1.00 GiB`` or ``−1.00 GiB``, with a real minus sign."""
    return f"{MINUS if n_bytes < 0 else '+'}{human_bytes(abs(n_bytes))}"


def percent(part: float, whole: float) -> str:
    """A share in percent, with a decimal where it is below ten, or where without one it would be said to be all.

    Example:
        >>> percent(98, 100), percent(1.7, 100), percent(1, 0), percent(99.6, 100), percent(100, 100)
        ('98%', '1.7%', '0%', '99.6%', '100%')
    """
    share = part / whole if whole else 0.0
    return f"{share:.1%}" if 0 < share < 0.1 or 0.995 <= share < 0.9995 else f"{share:.0%}"


def harmless(text: str) -> str:
    """A stranger's text without what would drive a terminal: such a character is shown as Python writes it.

    Example:
        >>> print(harmless("\\x1b[2Jcleared"))
        \\x1b[2Jcleared
    """
    return "".join(c if c in "\n\t" or not _drives(c) else repr(c)[1:-1] for c in text)


def shortened(text: str, most: int = 4_000) -> str:
    """A text without the middle of a very long one: its author may have put a book where a name belongs.

    Example:
        >>> print(shortened("x" * 5_000_000, most=6))
        xxx
        ... 4,999,994 characters cut ...
        xxx
    """
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n... {len(text) - most:,} characters cut ...\n{text[-most // 2 :]}"


def in_brief(value: object, most: int = 60) -> str:
    """A value as Python writes it, in one line: what is left out of a long one is said, with how much it is.

    Example:
        >>> in_brief("abc"), in_brief(list(range(1_000)), most=12)
        ("'abc'", '[0, 1, 2, 3,... (4,878 more characters)')
    """
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a whole number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} more characters)"


def _drives(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or unicodedata.bidirectional(character) in TURNS


def nearest(name: str, names: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """The names that are most like one that does not exist, the likest first; none where none is like it."""
    # Those whose length alone keeps them from being like it: difflib would index each character of the name for them.
    near = [one for one in names if 2 * min(len(one), len(name)) >= cutoff * (len(one) + len(name))]
    return difflib.get_close_matches(name, near, n=most, cutoff=cutoff) if near else []


def meant(name: str, names: Iterable[str], *, cutoff: float = 0.8, most: int = 20) -> list[str]:
    """The names that somebody may have meant who wrote one that does not exist; none where none is like it.

    Those that begin with what was written, or else contain it; else those spelled like it (three at most); else those
    that begin with its first word. Case and what is between words do not matter.

    Example:
        >>> names = ["mixtral-8x7b", "mistral-7b", "gpt2-124m", "gpt2-1.5b"]
        >>> meant("Mixtral", names), meant("8x7", names), meant("mixtrel-8x7b", names), meant("gpt2-xl", names)
        (['mixtral-8x7b'], ['mixtral-8x7b'], ['mixtral-8x7b'], ['gpt2-124m', 'gpt2-1.5b'])
    """
    known = {one: _letters(one) for one in names}
    letters, first = _letters(name), _letters(re.split(r"[\s_-]", name.strip(), maxsplit=1)[0])
    holding = [one for one, of in known.items() if letters in of] if 2 <= len(letters) <= 100 else []
    if holding:
        return ([one for one in holding if known[one].startswith(letters)] or holding)[:most]
    lower = {one.lower(): one for one in known}
    like = [lower[one] for one in nearest(name.lower(), lower, most=3, cutoff=cutoff)]
    return like or [one for one, of in known.items() if len(first) >= 3 and of.startswith(first)][:most]


def _letters(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.lower())


OUT_OF_SCOPE = {  # what a name begins with, and what it means
    r"(tensor|sequence)_?parallel|[ts]p(_|$)": "tensor parallelism",
    r"pipeline_?(parallel|stages)|pp(_|$)": "pipeline parallelism",
    r"(context|ulysses|ring_attention)_?(parallel)?|cp(_|$)": "context parallelism",
    r"expert_?(model_)?parallel|ep(_|$)": "expert parallelism",
}
OF_LEARNING = (  # what a step does not see
    r"lr|learning_rate|weight_decay|warmup.*|(adam_)?(betas?|beta[12]|eps(ilon)?)|.*scheduler.*|seed|max_steps|epochs"
)
CALLED = {  # what other software calls a field, and what it is called here: whose field, its name, maybe a remark
    r"gradient_accumulation(_steps)?|accumulate_grad_batches|accum(ulation)?_steps|ga": "Plan.grad_accum",
    r"(per_device_)?(train_|local_|micro_)?batch_?size(_per_(gpu|device))?|train_micro_batch_size_per_gpu|mbs|bs": (
        "Plan.micro_batch, the sequences of one rank"
    ),
    r"(max_)?(sequence|seq|context|model_max)_?(length|len)|block_size|n_ctx|context": "Plan.seq_len",
    r"world_size|(n|num|n_|num_)gpus?|devices|nproc(_per_node)?|num_processes|ranks": (
        "Cluster.gpus, those of all nodes"
    ),
    r"n?nodes|(num_|n_)(nodes|machines)|machines": "Cluster.gpus, those of all nodes",
    r"zero|zero_?(stage|optimization)|deepspeed|distributed_type": "Plan.api, in which ZeRO's stage 3 is 'fsdp2'",
    r"mixed_precision|precision|amp|bf16|fp16|dtype|torch_dtype|autocast": "Plan.param_dtype",
    r"hsdp.*|(dp|data_parallel)_?(replicate|shard)(_(degree|size))?|num_replicas|replicas": (
        "Plan.shard_size, the ranks that share one copy"
    ),
    r"(use_)?(flash_attention|flash_attn|fa)_?\d?|attn_implementation": "Plan.attention_impl",
    r"(use_)?liger(_kernel)?": "Plan.loss_chunks, a head and a loss that never hold all logits",
    r"fused_adam|optim|use_8bit_adam": "Plan.optimizer",
    r"load_in_4bit|qlora|quantization": "Plan.base_quantization",
    r"lora(_r)?|peft": "Plan.lora_rank",
    r"hidden(_size)?|n_embd|embed_dim|width": "Model.d_model",
    r"num_hidden_layers|n_layers|num_layers|depth|blocks": "Model.n_layer",
    r"num_attention_heads|n_heads|num_heads": "Model.n_head",
    r"num_key_value_heads|n_kv_heads|num_kv_heads": "Model.n_kv_head",
    r"intermediate_size|ffn_dim|d_ff|d_mlp|hidden_dim": "Model.d_ffn",
    r"vocab_size|n_vocab": "Model.vocab",
    r"num_experts|num_local_experts|n_routed_experts": "Model.n_expert",
    r"top_k|num_experts_per_tok": "Model.experts_per_token",
    r"moe_intermediate_size": "Model.d_expert",
}
OURS = {"grad_accum", "gpus_per_node", "n_layer"}  # one of them is among the names of any of our own fields


def called_here(name: str) -> str:
    """What we call a field that other software has: ``Plan.grad_accum``; or why there is none; empty if not known.

    Example:
        >>> called_here("world-size")
        'Cluster.gpus, those of all nodes'
    """
    plain = name.lower().replace("-", "_")[:60]
    if re.fullmatch(OF_LEARNING, plain):
        return "it changes neither time nor memory; leave it out"
    return next((field for pattern, field in CALLED.items() if re.fullmatch(pattern, plain)), "")


def some_of(names: Iterable[str], most: int = 12) -> str:
    """Names one after the other; of many the first, and how many more there are.

    Example:
        >>> some_of(["a", "b"]), some_of(["a", "b", "c", "d"], most=1)
        ('a, b', 'a and 3 more')
    """
    every = list(names)
    shown = ", ".join(every if len(every) <= most + 2 else every[:most])
    return shown if len(every) <= most + 2 else f"{shown} and {len(every) - most:,} more"


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "there are") -> str:
    """The end of a message about a name that does not exist: that it is out of scope, or the nearest one, or all.

    What other software calls one of our own fields comes before a name that is spelled alike: ``world_size`` is not
    ``shard_size``.

    Example:
        >>> did_you_mean("modle", ["model", "gpu"]), did_you_mean("zzz", ["model", "gpu"], "it has")
        ('did you mean model?', 'it has model, gpu')
        >>> did_you_mean("batch", ["micro_batch", "seq_len"])
        'did you mean micro_batch?'
    """
    for pattern, meaning in OUT_OF_SCOPE.items():
        if re.match(pattern, name.replace("-", "_"), re.IGNORECASE):
            return f"{meaning} is out of scope: what is simulated is sharded data parallelism; leave it out"
    names = list(names)
    if OURS & set(names) and (called := called_here(name)):
        owner, _, field = called.partition(".")
        own = field.partition(",")[0] in names
        return f"did you mean {field if own else called}?" if field else owner
    near = nearest(name, names) or meant(name, names, most=3)
    return f"did you mean {' or '.join(near)}?" if near else f"{otherwise} {', '.join(names)}"
