"""Reads a plan and its numbers from a candidate's text: what was said, by name; what was not is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_sim.learn.corrected import corrected
from fsdp_sim.learn.numerals import in_digits

NUMBER = r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)\s*"
THOUSAND = {"": 1, "k": 1024, "K": 1024}
BIG = {
    "": 1,
    "k": 1e3,
    "m": 1e6,
    "b": 1e9,
    "t": 1e12,
    "thousand": 1e3,
    "million": 1e6,
    "billion": 1e9,
    "trillion": 1e12,
}
DENIED_BEFORE = re.compile(
    r"\b(?:not|never|instead of|rather than|unlike|no longer)(?: (?:with|a|use|using|do|take))?\s*$"
)
DENIED_AFTER = re.compile(
    r"[\w -]{0,20}?\b(?:(?:do|does|would|will|can|could) ?not|(?:do|does|would|wo|ca|could)n't|cannot)\b"
    r"(?! (?:use|need|want|recompute|require))|[\w -]{0,12}?\bis (?:out|too (?:slow|large|big|much))\b"
)


@dataclass(frozen=True)
class Said:
    """One thing that was read: its value, and the words."""

    value: Any
    words: str


@dataclass(frozen=True)
class _Reader:
    pattern: str
    value: Callable[[re.Match[str]], Any]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _whole(found: re.Match[str]) -> int:
    return int(_number(found[1]))


def _fixed(value: Any) -> Callable[[re.Match[str]], Any]:
    return lambda _: value


PLAN: dict[str, tuple[_Reader, ...]] = {
    "micro_batch": (
        _Reader(r"micro[- ]?batch(?:es)?(?: size)?(?: of| is| =|:| per gpu)*\s*(\d+)", _whole),
        _Reader(r"(\d+) (?:sequences?|rows?|samples?) (?:of|per)\b", _whole),
        _Reader(r"batch(?: size)?(?: of| is| =|:)*\s*(\d+) per (?:gpu|rank|card|device)", _whole),
        _Reader(r"(one|a single) (?:sequence|row|sample) per (?:gpu|rank|card|device)", _fixed(1)),
    ),
    "seq_len": (
        _Reader(
            r"(?:sequence length|seq_len|context(?: length)?|sequences)(?: of| is| =|:)*\s*([\d,]+)(?!\s*k)\b", _whole
        ),
        _Reader(r"(\d+)\s*k(?: tokens)?[- ](?:context|sequence|seq)", lambda f: 1024 * int(f[1])),
        _Reader(
            r"(?:sequence length|seq_len|context(?: length)?|sequences)(?: of| is| =|:)*\s*(\d+)\s*k",
            lambda f: 1024 * int(f[1]),
        ),
        _Reader(r"([\d,]{3,})[- ]tokens?(?:[- ](?:context|sequences?|long)| per sequence)", _whole),
        _Reader(
            r"(?:micro[- ]?batch(?:es)?|rows?|samples?)(?: of| is| =|:)*\s*(?:\d+ )?(?:of|x)\s*([\d,]{3,})[- ]tokens?",
            _whole,
        ),
    ),
    "grad_accum": (
        _Reader(r"accumulat\w*(?: over| of| =|:| steps)*\s*(\d+)", _whole),
        _Reader(r"(\d+) (?:accumulation steps|steps of accumulation|micro[- ]?batches)", _whole),
    ),
    "activation_checkpointing": (
        _Reader(
            r"(?:no|without|turn off|disable)\s+(?:activation |gradient )?(?:checkpointing|recompute|recomputation)",
            _fixed("none"),
        ),
        _Reader(
            r"selective (?:activation |gradient )?(?:checkpointing|recompute|recomputation|ac)", _fixed("selective")
        ),
        _Reader(
            r"(?:activation|gradient|full)[- ](?:activation )?(?:checkpoint\w*|ac\b)|recomput\w+|"
            r"checkpoint(?:s|ing)?(?: on| of| for| around)? (?:every|each|all)(?: the)? (?:block|layer)",
            _fixed("full"),
        ),
    ),
    "sharding": (
        _Reader(r"\bddp\b(?! is| would| does| needs| cannot| can't|'s)", _fixed("ddp")),
        _Reader(r"shard(?:ed|ing)? (?:over|across|among|group of|size)\s*(\d+)", lambda f: int(f[1])),
        _Reader(r"hsdp|hybrid|shard\w* (?:with)?in(?:side)? (?:a|the|each) node", _fixed("node")),
        _Reader(
            r"zero[- ]?2|shard_grad_op|reshard_after_forward\s*=\s*false|keep (?:the )?(?:parameters|weights) after f",
            _fixed("zero2"),
        ),
        _Reader(r"full(?:y)?[- ]?shard\w*|\bfsdp2?\b|zero[- ]?3", _fixed("full")),
    ),
    "param_dtype": (
        _Reader(r"\bfp8\b", _fixed("fp8")),
        _Reader(r"\bbf16\b|bfloat16|mixed precision", _fixed("bf16")),
        _Reader(r"\bfp16\b", _fixed("fp16")),
        _Reader(r"(?:all|everything|pure) (?:in )?fp32", _fixed("fp32")),
    ),
    "gpus": (_Reader(r"(?:use|on|with|take) (?:only )?(?:all )?(\d[\d,]*) (?:gpus|h100s?|cards|4090s?)", _whole),),
    "cpu_offload": (_Reader(r"(?:with|use|using|turn on|enable) (?:cpu )?offload\w*", _fixed(True)),),
    "expert_parallel": (
        _Reader(
            r"expert[- ]parallel\w*(?: of| degree| size| over| =|:)*\s*(\d+)|\bep\s*=?\s*(\d+)",
            lambda f: int(f[1] or f[2]),
        ),
    ),
    "loss_chunks": (
        _Reader(
            r"(?:chunked|fused|liger)[- ](?:linear )?(?:cross[- ]?entropy|loss)|loss in (?:chunks|pieces)", _fixed(8)
        ),
    ),
}
"""How each choice is said; of several ways the first that is found."""

CLAIMS: dict[str, tuple[_Reader, ...]] = {
    "states_bytes": (
        _Reader(
            NUMBER + r"(?:gb|gib|gigabytes?|gigs?)[^.;\d]{0,25}?\b(?:of )?(?:states|optimi[sz]er|parameters and)",
            lambda f: 1e9 * _number(f[1]),
        ),
        _Reader(
            r"\b(?:states|optimi[sz]er states?)\b[^.;\d]{0,30}?" + NUMBER + r"(?:gb|gib|gigabytes?|gigs?)",
            lambda f: 1e9 * _number(f[1]),
        ),
    ),
    "peak_bytes": (
        _Reader(
            r"(?:peak|memory|in total|total|all in all|altogether)[^.;\d]{0,40}?"
            + NUMBER
            + r"(?:gb|gib|gigabytes?|gigs?)",
            lambda f: 1e9 * _number(f[1]),
        ),
        _Reader(
            NUMBER + r"(?:gb|gib|gigabytes?|gigs?)[^.;\d]{0,20}?(?:peak|per gpu|in total|of memory|altogether|on each)",
            lambda f: 1e9 * _number(f[1]),
        ),
    ),
    "step_s": (
        _Reader(NUMBER + r"(?:s|sec|seconds?)\b(?: (?:per|a|each|for a|for each) step)", lambda f: _number(f[1])),
        _Reader(r"step[^.;\d]{0,30}?" + NUMBER + r"(?:s|sec|seconds?)\b", lambda f: _number(f[1])),
        _Reader(r"step[^.;\d]{0,30}?" + NUMBER + r"(?:ms|milliseconds?)\b", lambda f: 1e-3 * _number(f[1])),
    ),
    "mfu": (
        _Reader(r"mfu[^.;\d]{0,20}?" + NUMBER + r"(?:%|percent)", lambda f: _number(f[1]) / 100),
        _Reader(NUMBER + r"(?:%|percent)[^.;\d]{0,10}?mfu", lambda f: _number(f[1]) / 100),
        _Reader(r"mfu[^.;\d]{0,20}?(0\.\d+)", lambda f: float(f[1])),
    ),
    "tokens": (
        _Reader(
            NUMBER + r"(trillion|billion|million|t|b|m)\s*tokens(?! (?:per|a) (?:second|step))",
            lambda f: _number(f[1]) * BIG[f[2]],
        ),
    ),
}
"""Numbers that the simulator can judge."""

ASKED: dict[str, str] = {
    "sharding": "How do you shard: over all GPUs, within a node, or not at all?",
    "micro_batch": "How many sequences per GPU in a micro-batch?",
    "seq_len": "How many tokens in a sequence?",
    "param_dtype": "In which precision do you compute?",
    "activation_checkpointing": "Do you recompute activations: full, selective, or not at all?",
    "states_bytes": "How many GB of states does each GPU keep?",
    "peak_bytes": "And the peak of memory per GPU, in GB?",
    "step_s": "How many seconds does a step take?",
    "mfu": "Which MFU do you expect?",
}
"""What is asked for where it was not said, in this order."""


def extract(text: str, asked: str = "") -> dict[str, Said]:
    """What a text says of the plan and its numbers, by name.

    Args:
        asked: what was asked for last: a bare answer, such as "4" or "40%", is to that.
    """
    plain = corrected(in_digits(" ".join(text.lower().split())[:6000]))
    found: dict[str, Said] = {}
    left = plain
    for name, readers in {**PLAN, **CLAIMS}.items():
        for reader in readers:
            if match := next((m for m in re.finditer(reader.pattern, left) if not _denied(left, m)), None):
                found[name] = Said(reader.value(match), match[0])
                if name in CLAIMS:  # a number is read once: "16 GB of states per GPU" is no peak
                    left = left[: match.start()] + ";" + left[match.end() :]
                break
    if asked and asked not in found and (bare := _bare(asked, plain)) is not None:
        found[asked] = Said(bare, plain[:60])
    return found


def _denied(text: str, match: re.Match[str]) -> bool:
    """Whether a choice is named to be turned down: "not within a node", "DDP does not fit"."""
    return bool(DENIED_BEFORE.search(text[: match.start()]) or DENIED_AFTER.match(text[match.end() :]))


def _bare(asked: str, plain: str) -> Any:
    """A short answer to what was asked for; None if it is none."""
    if asked == "activation_checkpointing":
        return next(
            (way for way in ("full", "selective") if way in plain),
            "none" if re.match(r"no|not|none|off", plain) else None,
        )
    if asked == "sharding":
        ways = {"all": "full", "full": "full", "node": "node", "not": "ddp", "ddp": "ddp"}
        return next((way for word, way in ways.items() if re.search(rf"\b{word}", plain)), None)
    if asked == "param_dtype":
        return None
    number = re.search(NUMBER + r"(k\b|%|ms\b|gb|gib)?", plain)
    if not number:
        return {"one": 1}.get(plain)
    value = _number(number[1]) * (1024 if number[2] == "k" and asked == "seq_len" else 1)
    scale = {
        "states_bytes": 1e9,
        "peak_bytes": 1e9,
        "mfu": 0.01 if value > 1 else 1,
        "step_s": 1e-3 if number[2] == "ms" else 1,
    }
    return value * scale[asked] if asked in scale else int(value)
