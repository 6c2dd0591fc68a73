"""The one case of the course, an 8B model: every number that a chapter gives for it is what the command prints."""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

import pytest

from fsdp_sim import Cluster, Model, Plan, Simulation, simulate
from fsdp_sim.cost.collectives import algorithms, collective_s, fitted_links
from fsdp_sim.timeline import Op
from notebooks.masters import build
from tests.cli.commands import call

EIGHT_B = "--model llama3-8b --gpu H100-SXM-80GB --seq-len 8192"
FULL = "--activation-checkpointing full"
CHEAP = f"--gpus 64 --inter 100GbE {FULL} --grad-accum 8"
LORA = "--plan lora_rank=16"
BF16_DDP = "--gpus 8 --api ddp --param-dtype bf16"
SAID = [  # chapter, options, what it says with the numbers of `fsdp-sim simulate`
    ("00", "--gpus 8", "a step takes about {step:.1f} s ({low:.2f} to {high:.2f})"),
    ("00", "--gpus 8", "the GPUs wait for about {exposed:.0f} ms"),
    ("01", "--gpus 1", "a step would hold about {peak:.0f} GiB, and a process gets {limit:.1f}."),
    ("01", BF16_DDP, "each of the eight wants about {peak:.0f} GiB"),
    ("01", "--gpus 8", "A step on them still holds about {peak:.0f} GiB"),
    ("02", "--gpus 8", "step of about {step:.1f} s. How many"),
    ("04", "--gpus 8", "busy for about {flight} ms of every step. Is the step {flight} ms longer"),
    (
        "05",
        "--gpus 8",
        "for about {flight} ms of each step on eight H100. Its GPUs wait for only about {exposed:.0f} ms",
    ),
    ("05", "--gpus 8", "The {exposed:.0f} ms are the two ends"),
    ("06", "--gpus 8", "a step holds about {peak:.0f} GiB: it fits"),
    ("06", "--gpus 8 --plan wrap=root", "the same step wants about {peak:.0f} GiB"),
    ("07", "--gpus 8", "holds about {peak:.0f} GiB, and torch's allocator keeps {held:.0f} of the {limit:.1f} that"),
    ("07", f"--gpus 8 {FULL}", "holds about {peak:.0f} GiB and takes about {step:.1f} s ({low:.1f} to {high:.1f})"),
    ("07", "--gpus 8", "where it took about {step:.1f} s ({low:.2f} to {high:.2f})"),
    ("07", "--gpus 8", "model needs {peak:.1f} GiB at its peak, and the allocator holds {held:.1f} for it"),
    ("07", "--gpus 8 --api fsdp1", "(`--api fsdp1`) {held:.1f}, with {limit:.1f} to be had"),
    ("07", "--gpus 8 --plan expandable_segments=true", "here the allocator holds {held:.1f} GiB instead of 75.3"),
    ("08", f"--gpus 8 {FULL}", "checkpointed, falls from about {peak:.0f} GiB"),
    ("08", f"--gpus 8 {FULL} {LORA}", "GiB to about {peak:.0f}."),
    ("08", f"--gpus 8 {FULL} {LORA} --plan base_quantization=nf4", "it is about {peak:.0f}: logits"),
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
def simulated(options: str, explained: bool = False) -> dict[str, float]:
    """What the command says, in seconds, milliseconds where it says so, and GiB."""
    arguments = (*EIGHT_B.split(), *options.split(), "--json", *([] if explained else ["--no-explain"]))
    result: dict[str, Any] = json.loads(call("simulate", *arguments).stdout)
    low, high = result["step_time_interval_s"]
    (flight,) = re.findall(r"in flight for (\d+) ms", " ".join(result.get("explanation", []))) or [0]
    sizes = {"peak": "peak_memory_bytes", "held": "reserved_memory_bytes", "limit": "memory_limit_bytes"}
    return {name: result[key] / 2**30 for name, key in sizes.items()} | {
        "step": result["step_time_s"], "low": low, "high": high,
        "exposed": 1e3 * result["exposed_comm_s"], "flight": int(flight),
    }  # fmt: skip


@functools.cache
def step() -> Simulation:
    """The first command, in Python."""
    plan = Plan(seq_len=8192, param_dtype="bf16", reduce_dtype="fp32")
    return simulate("llama3-8b", Cluster("H100-SXM-80GB", gpus=8), plan)


@functools.cache
def text(chapter: str) -> str:
    """The text cells of a chapter, on one line."""
    (master,) = (master for master in build.masters() if master.stem.startswith(f"{chapter}_"))
    return " ".join(re.sub(r"^# ?(?:> ?)?", "", master.read_text(encoding="utf-8"), flags=re.MULTILINE).split())


@pytest.mark.parametrize(("chapter", "options", "says"), SAID, ids=[f"{row[0]} {row[1]}" for row in SAID])
def test_a_number_of_the_case_is_what_the_command_prints(chapter: str, options: str, says: str) -> None:
    assert says.format(**simulated(options, "{flight" in says)) in text(chapter)


def test_what_eight_cards_keep_is_arithmetic_of_the_models_shapes() -> None:
    model = Model.preset("llama3-8b")
    rows = [param.shape[0] for unit in step().program.units for param in unit.params]
    states_gb, whole_gb = 16 * model.param_count / 1e9, 4 * model.param_count / 1e9
    assert f"{model.param_count / 1e9:.2f} billion parameters, and 16 bytes for each are {states_gb:.0f} GB" in text(
        "01"
    )
    assert f"keep {states_gb / 8:.0f} GB each" in text("01")
    assert f"In fp32 the model has {whole_gb:.0f} GB." in text("03")
    assert f"the node needs {8 * whole_gb:.0f} GB" in text("03")
    assert f"the embedding's {model.vocab:,} rows each of eight cards keeps {model.vocab // 8:,}" in text("03")
    assert f"each of 64 would keep {model.vocab // 64:,}. Nothing is padded" in text("03")
    assert not any(n % 64 for n in rows)
    assert f"{whole_gb / 8:.0f} GB a card, instead of {whole_gb:.0f}" in text("03")


def test_what_a_block_takes_and_sends_is_that_of_the_simulated_step() -> None:
    (block,) = (unit for unit in step().program.units if unit.name == "layers.3")
    numbers = sum(math.prod(param.shape) for param in block.params)
    assert f"{numbers / 1e6:.0f} million parameters" in text("04")
    assert f"an eighth of each, {4 * numbers / 8e6:.0f} MB in fp32" in text("04")
    assert text("04").count(f"{2 * numbers / 1e6:.0f} MB") == 2
    gathered, reduced = (
        7 / 8 * sum(i.bytes for i in step().program.ops if i.op is op) / 1e9
        for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER)
    )
    sends = f"sends {gathered:.0f} GB of parameters in bf16 and {reduced:.0f} GB of gradients in fp32."
    assert f"{sends} That is {gathered + reduced:.0f} GB in every step" in text("02")
    assert (gathered + reduced) / 12.5 > 4
    forward = {e.op: e.duration_s for e in step().timeline.select(rank=0, unit="layers.3", phase="forward").ops}
    gather_ms, forward_ms = (f"{1e3 * forward[op]:.1f} ms" for op in (Op.ALL_GATHER, Op.FWD))
    assert f"takes about {gather_ms}, and the forward beside it about {forward_ms}" in text("05")


def test_what_a_tree_and_a_switch_gain_is_what_the_simulator_has() -> None:
    def ms(gpus: int, n_bytes: float) -> dict[str, str]:
        ways = algorithms("all_reduce", gpus, Cluster("H100-SXM-80GB", gpus=gpus), 1, fitted_links())
        return {way.algorithm: f"{1e3 * way.seconds(n_bytes):.{1 if n_bytes > 2**20 else 2}f}" for way in ways}

    many, one = ms(64, 2**16), ms(8, 2**30)
    assert f"64 KiB there {many['ring']} ms as a ring and {many['tree']} ms as a tree" in text("02")
    assert f"takes {one['nvls']} ms instead of {one['ring']}." in text("02")


def test_what_a_generating_engine_is_sent_is_what_the_simulated_links_carry() -> None:
    sizes = [2 * math.prod(param.shape) for unit in step().program.units for param in unit.params]
    cluster = Cluster("H100-SXM-80GB", gpus=8)
    apart, together = (
        f"{1e3 * sum(collective_s('all_gather', n, 8, cluster) for n in some):.0f} ms" for some in (sizes, [sum(sizes)])
    )
    assert f"{sum(sizes) / 1e9:.0f} GB of bf16 beside" in text("15")
    assert f"more than {max(sizes) / 1e9:.2f} GB is whole" in text("15")
    assert f"gives {apart} for these {len(sizes)} gathers, and {together} for one" in text("15")


def test_the_step_in_python_is_that_of_the_command() -> None:
    assert simulated("--gpus 8")["step"] == step().step_time_s


def test_every_chapter_but_the_hunt_opens_and_closes_with_the_case() -> None:
    texts = {master.stem[:2]: master.read_text(encoding="utf-8") for master in build.masters()}
    naming = {chapter for chapter, master in texts.items() if master.count("> **Our 8B model") == 2}
    assert naming == {f"{n:02}" for n in range(14)} - {"12"}
    assert {row[0] for row in SAID} == naming - {"03"}  # whose numbers are arithmetic, above
