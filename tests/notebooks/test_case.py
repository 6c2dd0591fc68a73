"""The one case of the course, an 8B model: every number that a chapter gives for it is what the command prints."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest

from notebooks.masters import build
from tests.cli.commands import call

EIGHT_B = "--model llama3-8b --gpu H100-SXM-80GB --seq-len 8192"
FULL = "--activation-checkpointing full"
CHEAP = f"--gpus 64 --inter 100GbE {FULL} --grad-accum 8"
SAID = [  # chapter, options, what it says with the numbers of `fsdp-sim simulate`
    ("06", "--gpus 8", "a step holds about {peak:.0f} GiB: it fits"),
    ("06", "--gpus 8 --plan wrap=root", "the same step wants about {peak:.0f} GiB"),
    ("07", "--gpus 8", "holds about {peak:.0f} GiB, and torch's allocator keeps {held:.0f} of the {limit:.1f} that"),
    ("07", f"--gpus 8 {FULL}", "holds about {peak:.0f} GiB and takes about {step:.1f} s ({low:.1f} to {high:.1f})"),
    ("07", "--gpus 8", "where it took about {step:.1f} s ({low:.2f} to {high:.2f})"),
    ("08", f"--gpus 8 {FULL}", "a step takes about {step:.1f} s. In plain fp32"),
    ("08", f"--gpus 8 {FULL} --param-dtype none", "it would be about {step:.0f} s ({low:.0f} to {high:.0f})"),
    ("09", "--gpus 32", "a step then holds about {peak:.0f} GiB instead of"),
    ("09", "--gpus 64", "GiB instead of {peak:.0f} ("),
    ("10", f"--gpus 64 {FULL}", "a step takes about {step:.1f} s ({low:.1f} to {high:.1f})"),
    ("10", f"--gpus 64 --inter 100GbE {FULL}", "same step takes about {step:.0f} s ({low:.1f} to {high:.1f})"),
    (
        "10",
        f"{CHEAP} --shard-size 8 --plan requires_all_reduce=last",
        "about {step:.0f} s ({low:.0f} to {high:.0f}) inst",
    ),
    ("10", CHEAP, "instead of about {step:.0f} s ({low:.0f} to {high:.0f})"),
    ("10", f"--gpus 64 {FULL} --grad-accum 8", "With InfiniBand it is about {step:.0f} s."),
    ("11", f"--gpus 8 {FULL} --api ddp", "would need about {peak:.0f} GiB on every card"),
    ("11", f"--gpus 8 {FULL}", "FSDP2 holds about {peak:.0f} GiB"),
    ("13", f"--gpus 8 {FULL}", "your step take {step:.1f} seconds"),
]


@functools.cache
def simulated(options: str) -> dict[str, float]:
    """What the command says, in seconds and GiB."""
    result: dict[str, Any] = json.loads(
        call("simulate", *EIGHT_B.split(), *options.split(), "--json", "--no-explain").stdout
    )
    low, high = result["step_time_interval_s"]
    sizes = {"peak": "peak_memory_bytes", "held": "reserved_memory_bytes", "limit": "memory_limit_bytes"}
    return {name: result[key] / 2**30 for name, key in sizes.items()} | {
        "step": result["step_time_s"], "low": low, "high": high
    }  # fmt: skip


@functools.cache
def text(chapter: str) -> str:
    """The text cells of a chapter, on one line."""
    (master,) = (master for master in build.masters() if master.stem.startswith(f"{chapter}_"))
    return " ".join(re.sub(r"^# ?(?:> ?)?", "", master.read_text(encoding="utf-8"), flags=re.MULTILINE).split())


@pytest.mark.parametrize(("chapter", "options", "says"), SAID, ids=[f"{row[0]} {row[1]}" for row in SAID])
def test_a_number_of_the_case_is_what_the_command_prints(chapter: str, options: str, says: str) -> None:
    assert says.format(**simulated(options)) in text(chapter)


def test_every_chapter_that_names_the_case_is_held_to_its_numbers() -> None:
    naming = {master.stem[:2] for master in build.masters() if "Our 8B model" in master.read_text(encoding="utf-8")}
    assert {row[0] for row in SAID} <= naming
