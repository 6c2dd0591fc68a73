"""LoRA's adapters as peft has them: which linear layers its ``target_modules`` mean, and its calls in a script.

Source: peft 0.21.2, `LoraConfig`, `peft.tuners.tuners_utils.check_target_module_exists` (a text is a regular expression
that has to match the whole name of a module; a list has names, or their last parts) and
`TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`; transformers 5.24.0, `BitsAndBytesConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsdp_sim.configurations.keys import Keys

ALL_LINEAR = ("all", "all-linear", "all_linear")
PLAIN = re.compile(r"[\w.-]+")
PEFTS_OWN = ("q_proj", "v_proj")  # of Llama, Mistral, Mixtral, Qwen and Gemma
LINEARS = (  # of a block, by the names that transformers' models give them
    *(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)  # fmt: skip
OTHERS = ("", "input_layernorm", "post_attention_layernorm", "self_attn", "mlp")  # modules without a weight to adapt
AROUND = ("embed_tokens", "norm", "lm_head")
STARTS = ("model", "model.language_model", "language_model.model", "language_model", "model.model", "base_model.model")
BLOCKS = 3  # whose names are compared
MOST_CHARACTERS, MOST_REPEATS = 300, 4


def lora_plan(keys: Keys, rank: int, targets: Sequence[str] | None, dotted: str) -> dict[str, Any]:
    """The fields of `Plan` of adapters.

    Args:
        targets: names of linear layers, or one regular expression; None leaves them to peft.
        dotted: the key that says them.

    Raises:
        ValueError: an expression that does not mean the same linear layers of each block.
    """
    if targets is None:
        keys.remarks.append(
            f"{keys.file} leaves the targets of LoRA to peft: taken to be {' and '.join(PEFTS_OWN)}, which are its "
            f"own for Llama, Mistral, Qwen and Gemma; --plan lora_targets=... says others."
        )
        targets = PEFTS_OWN
    elif strange := [name for name in targets if not PLAIN.fullmatch(name)]:
        if len(targets) > 1:
            raise keys.wrong(
                dotted, strange[0], "names of linear layers, such as q_proj", "in a list peft has no pattern"
            )
        targets = _matched(keys, strange[0], dotted)
    if any(name in ALL_LINEAR for name in targets):
        return {"lora_rank": rank, "lora_targets": "all-linear"}
    return {"lora_rank": rank, "lora_targets": tuple(targets)}


def _matched(keys: Keys, pattern: str, dotted: str) -> tuple[str, ...]:
    """The linear layers of a block that a regular expression means."""

    def wrong(why: str) -> ValueError:
        return keys.wrong(dotted, pattern, "names of linear layers, such as q_proj, or all-linear", why)

    expression = _compiled(pattern)
    if expression is None:
        raise wrong("this expression is not read")
    for start in STARTS:
        blocks = [
            frozenset(
                name for name in (*LINEARS, *OTHERS) if expression.fullmatch(f"{start}.layers.{n}.{name}".rstrip("."))
            )
            for n in range(BLOCKS)
        ]
        if not any(blocks):
            continue
        around = [name for name in AROUND if expression.fullmatch(name) or expression.fullmatch(f"{start}.{name}")]
        if beside := sorted({*around, *blocks[0].intersection(OTHERS)}):
            raise wrong(f"it matches {beside[0] or 'whole blocks'} too, whose adapters are not simulated")
        if len(set(blocks)) > 1:
            raise wrong("it matches other layers in some blocks, and here each block has the same")
        found = tuple(name.rpartition(".")[2] for name in LINEARS if name in blocks[0])
        keys.remarks.append(
            f"{dotted} of {keys.file} is an expression, which of each block matches {', '.join(found)}."
        )
        return found
    raise wrong(f"it matches no linear layer, such as {STARTS[0]}.layers.0.{LINEARS[0]}")


def _compiled(pattern: str) -> re.Pattern[str] | None:
    """The expression; None where it is none, or might take for ever: repeats inside of repeats, or many."""
    repeats = re.findall(r"(?<!\\)[*+{]", pattern)
    nested = re.search(r"[*+}]\??\)\s*[*+{]", pattern)
    if len(pattern) > MOST_CHARACTERS or len(repeats) > MOST_REPEATS or nested:
        return None
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None


def plan_of_calls(keys: Keys) -> dict[str, Any]:
    """What `LoraConfig` and `BitsAndBytesConfig` of the same script say, whoever they are given to."""
    lora, bits = "LoraConfig", "BitsAndBytesConfig"
    quantised = bits in keys.sections and keys[f"{bits}.load_in_4bit"]
    if lora not in keys.sections:
        if quantised:
            raise keys.wrong(
                f"{bits}.load_in_4bit", True, "False", "weights of four bits are trained by LoraConfig alone"
            )
        return {}
    targets = keys[f"{lora}.target_modules"]
    plan = lora_plan(keys, keys[f"{lora}.r"], targets, f"{lora}.target_modules")
    if quantised:
        double = "_double_quant" * keys[f"{bits}.bnb_4bit_use_double_quant"]
        plan["base_quantization"] = keys[f"{bits}.bnb_4bit_quant_type"] + double
    return plan
