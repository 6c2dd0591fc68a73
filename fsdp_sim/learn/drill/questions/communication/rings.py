"""One collective as a ring: what each rank sends, and how long that takes."""

from __future__ import annotations

import functools
import itertools
import random

from fsdp_sim.learn.drill.draws import balanced
from fsdp_sim.learn.drill.question import Choice, Mistake, Number
from fsdp_sim.learn.drill.questions.communication.common import PASSES, sent_bytes
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.spec import link

HALVES = ("all-gather", "reduce-scatter")


FABRICS = ("NVLink3", "NVLink4", "IB HDR x8", "IB NDR x8", "IB XDR x8", "AWS EFA v1")


def _seconds(op: str, ranks: int, message: float, latency_s: float, bytes_per_s: float) -> float:
    """Of a ring: steps, each with its latency and a chunk."""
    return PASSES[op] * (ranks - 1) * (latency_s + message / ranks / bytes_per_s)


@template(
    level=1,
    seconds=45,
    section="02.5",
    rule="Ring all-reduce: each GPU sends 2 (N-1)/N of the message, half in its reduce-scatter, half in its "
    "all-gather.",
)
def sent_in_an_all_reduce(draw: random.Random) -> Number:
    ranks, gigabytes = draw.choice((4, 8, 16, 32)), draw.choice((1.2, 1.5, 3, 5, 6.4, 14, 16, 26))
    answer = sent_bytes("all-reduce", ranks, gigabytes * 1e9)
    return Number(
        text=f"{ranks} GPUs all-reduce gradients of {gigabytes} GB in a ring. How many bytes does each GPU send?",
        answer=answer,
        unit="bytes",
        given={"ranks": ranks, "message_bytes": gigabytes * 1e9},
        mistakes=(
            Mistake(answer / 2, "that is one half, the reduce-scatter or the all-gather; an all-reduce is both"),
            Mistake(2e9 * gigabytes, "a GPU does not send its own last chunk: the factor is 2 (N-1)/N"),
            Mistake((ranks - 1) * 1e9 * gigabytes, "that is everyone sending all to everyone, not a ring"),
            Mistake(answer * ranks, "that is what all GPUs send together"),
            Mistake(answer / ranks, "that is for a shard of the gradients; all of the message goes round the ring"),
        ),
        why=f"2 x {ranks - 1}/{ranks} x {gigabytes} GB.",
    )


@template(
    level=1,
    seconds=45,
    section="02.4",
    rule="Ring all-gather or reduce-scatter: each GPU sends (N-1)/N of the whole, or N-1 times one shard.",
)
def sent_from_a_shard(draw: random.Random) -> Number:
    op, ranks = draw.choice(HALVES), draw.choice((4, 8, 16, 64))
    shard_mb = draw.choice((3, 6, 12, 13.5, 25, 27, 54))
    answer = sent_bytes(op, ranks, ranks * shard_mb * 1e6)
    begin = "Before an all-gather each" if op == "all-gather" else "After a reduce-scatter each"
    return Number(
        text=f"{begin} of {ranks} GPUs has a shard of {shard_mb} MB. The collective "
        "runs as a ring. How many bytes does each GPU send in it?",
        answer=answer,
        unit="bytes",
        given={"op": op, "ranks": ranks, "shard_bytes": shard_mb * 1e6},
        mistakes=(
            Mistake(shard_mb * 1e6, "in a ring a GPU also passes on what it received"),
            Mistake((ranks - 1) / ranks * shard_mb * 1e6, "(N-1)/N is of the whole message, and this is a shard"),
            Mistake(ranks * shard_mb * 1e6, "there are N-1 steps, not N: nobody sends to itself"),
            Mistake(2 * answer, "that would be an all-reduce, which is both halves"),
        ),
        why=f"{ranks - 1} steps, a chunk of {shard_mb} MB in each: {ranks - 1}/{ranks} of "
        f"{written(ranks * shard_mb * 1e6, 'bytes')}.",
    )


@template(
    level=2,
    seconds=60,
    section="02.2",
    rule="All-gather against an owner that sends to each in turn: N times as fast, for every GPU's link works all "
    "the time.",
)
def owner_against_ring(draw: random.Random) -> Number:
    ranks, megabytes = draw.choice((4, 6, 8, 16, 32, 72)), draw.choice((100, 300, 436, 634, 1711))
    return Number(
        text=f"A layer of {megabytes} MB must come to all of {ranks} GPUs, whose links are equal and work both ways "
        "at once; ignore latency. Either one GPU owns it and sends all of it to each other GPU, one after the "
        "other; or each owns an equal shard, and a ring all-gathers. How many times as long as the ring does the "
        "owner take?",
        answer=ranks,
        unit="times",
        rel=0.005,
        given={"ranks": ranks, "megabytes": megabytes},
        mistakes=(
            Mistake(ranks - 1, "the owner sends N-1 times the layer, but the ring sends only (N-1)/N of it"),
            Mistake(1, "every GPU receives the same bytes, but one link sends them all"),
            Mistake(2, "that is an all-reduce against an all-gather"),
        ),
        why=f"The owner's link carries {ranks - 1} layers, each link of the ring {ranks - 1}/{ranks} of one.",
    )


@template(
    level=2,
    seconds=90,
    section="02.7",
    rule="A ring takes (N-1) (alpha + message / (N B)), an all-reduce twice that: latency grows with N, bytes hardly.",
)
def seconds_of_a_ring(draw: random.Random) -> Number:
    op, fabric, ranks = draw.choice(tuple(PASSES)), link(draw.choice(FABRICS)), draw.choice((4, 8, 16, 64, 128))
    latency_us, megabytes = draw.choice((5, 10, 20, 40)), draw.choice((4, 16, 50, 100, 436))
    message, latency_s, rate = megabytes * 1e6, latency_us * 1e-6, fabric.bytes_per_s
    what = {"all-reduce": "a buffer", "all-gather": "a result", "reduce-scatter": "an input on each GPU"}[op]
    passes, bytes_s = PASSES[op], sent_bytes(op, ranks, message) / rate
    return Number(
        text=f"{ranks} GPUs run a ring {op} with {what} of {megabytes} MB. Each link carries {rate / 1e9:g} GB/s "
        f"each way; each step from GPU to GPU costs {latency_us} us besides. How long does it take?",
        answer=_seconds(op, ranks, message, latency_s, rate),
        unit="s",
        given={"op": op, "ranks": ranks, "message_bytes": message, "latency_s": latency_s, "bytes_per_s": rate},
        mistakes=(
            Mistake(bytes_s, "you left the latency out"),
            Mistake(bytes_s + latency_s, "every step of the ring has its latency, not the collective once"),
            Mistake(
                passes * (ranks - 1) * (latency_s + message / rate),
                "a step moves a chunk of 1/N, not the whole message",
            ),
            Mistake(
                _seconds(op, ranks, message, latency_s, rate) * (0.5 if passes == 2 else 2),
                "an all-reduce has twice the steps of its halves",
            ),
        ),
        why=f"{passes * (ranks - 1)} steps of {latency_us} us + {message / ranks / 1e6:.3g} MB / {rate / 1e9:g} GB/s.",
    )


@template(
    level=2,
    seconds=60,
    section="02.7",
    rule="Latency and bytes cost the same at a chunk of latency x bandwidth: a message of N alpha B in a ring.",
)
def message_worth_its_latency(draw: random.Random) -> Number:
    op, fabric, ranks = draw.choice(tuple(PASSES)), link(draw.choice(FABRICS)), draw.choice((4, 8, 16, 32, 64))
    latency_us = draw.choice((5, 10, 20, 30, 50))
    chunk = latency_us * 1e-6 * fabric.bytes_per_s
    return Number(
        text=f"A ring {op} on {ranks} GPUs: links of {fabric.bytes_per_s / 1e9:g} GB/s each way, {latency_us} us of "
        "latency in each step. How large is the whole message for which the time spent on latency and on bytes is "
        "the same?",
        answer=ranks * chunk,
        unit="bytes",
        given={"op": op, "ranks": ranks, "latency_s": latency_us * 1e-6, "bytes_per_s": fabric.bytes_per_s},
        mistakes=(
            Mistake(chunk, "that is the chunk of one step; a message is N chunks"),
            Mistake((ranks - 1) * chunk, "there are N-1 steps, but N chunks"),
            Mistake(2 * ranks * chunk, "an all-reduce has twice the steps and sends twice: the balance is the same"),
            Mistake(8 * ranks * chunk, "the rate is in bytes, not bits"),
        ),
        why=f"In a step {latency_us} us x {fabric.bytes_per_s / 1e9:g} GB/s = {written(chunk, 'bytes')} of chunk; x "
        f"{ranks}.",
    )


FASTER = {
    "links of twice the bandwidth": (2, 1),
    "half the latency in each step": (1, 0.5),
    "the same message in two halves, one after the other": (1, 2),
}


def _faster(ranks: int, latency_us: int, megabytes: int, fabric: str) -> dict[str, float]:
    """Seconds after each change. Sending twice pays every latency twice."""
    rate = link(fabric).bytes_per_s
    return {
        change: _seconds("all-gather", ranks, megabytes * 1e6, latency_us * 1e-6 * latency, rate * more)
        for change, (more, latency) in FASTER.items()
    }


@functools.cache
def _rings() -> dict[str, list[tuple[int, int, int, str]]]:
    """For each change, the rings that it makes faster than the others do, and not by a hair."""
    found: dict[str, list[tuple[int, int, int, str]]] = {change: [] for change in FASTER}
    for ring in itertools.product((8, 16, 64, 128), (10, 20, 40), (1, 4, 16, 54, 109, 436), FABRICS):
        times = _faster(*ring)
        first, second, _ = sorted(times.values())
        if second > 1.15 * first:
            found[min(times, key=lambda change: times[change])].append(ring)
    return found


@template(
    level=2,
    seconds=90,
    section="02.7",
    rule="Below N alpha B a ring is bound by latency: fewer, larger messages or fewer ranks help; above it "
    "bandwidth helps.",
)
def what_makes_a_ring_faster(draw: random.Random) -> Choice:
    ranks, latency_us, megabytes, fabric = balanced(draw, _rings())
    rate, times = link(fabric).bytes_per_s, _faster(ranks, latency_us, megabytes, fabric)
    right, worth = min(times, key=lambda change: times[change]), ranks * latency_us * 1e-6 * rate
    return Choice(
        text=f"A ring all-gather of {megabytes:,} MB on {ranks} GPUs: links of {rate / 1e9:g} GB/s "
        f"each way, {latency_us} us of latency in each step. Which change makes it fastest?",
        options=tuple(FASTER),
        wrong={change: f"then it takes {written(took, 's')}" for change, took in times.items() if change != right},
        given={
            "ranks": ranks,
            "latency_us": latency_us,
            "megabytes": megabytes,
            "gbytes_per_s": rate / 1e9,
        },
        why=f"It takes {written(times[right], 's')} then. Latency and bytes cost the same at "
        f"{written(worth, 'bytes')}.",
    )


@template(
    level=2,
    seconds=60,
    section="02.7",
    rule="Bus bandwidth = size / time x (N-1)/N for all-gather and reduce-scatter, x 2 (N-1)/N for all-reduce.",
    source="NVIDIA/nccl-tests doc/PERFORMANCE.md",
)
def bus_bandwidth(draw: random.Random) -> Number:
    op, fabric, ranks = draw.choice(tuple(PASSES)), link(draw.choice(FABRICS)), draw.choice((4, 8, 16))
    gigabytes, reached = draw.choice((1, 2, 4, 8)), draw.choice((0.6, 0.7, 0.8, 0.9))
    time_ms = float(f"{sent_bytes(op, ranks, gigabytes * 1e9) / (reached * fabric.bytes_per_s) * 1e3:.2g}")
    rate = gigabytes * 1e9 / (time_ms * 1e-3)
    answer = sent_bytes(op, ranks, rate)
    other = "all-gather" if op == "all-reduce" else "all-reduce"
    return Number(
        text=f"An {op} of {gigabytes} GB".replace("An r", "A r") + f" on {ranks} GPUs takes {time_ms:g} ms. Which bus "
        "bandwidth, as in nccl-tests, is that: the rate to compare with that of a link?",
        answer=answer,
        unit="bytes/s",
        given={"op": op, "ranks": ranks, "message_bytes": gigabytes * 1e9, "time_s": time_ms * 1e-3},
        mistakes=(
            Mistake(rate, "that is the algorithm bandwidth, size over time: it does not say what a link carries"),
            Mistake(sent_bytes(other, ranks, rate), f"that is the factor of an {other}"),
            Mistake(PASSES[op] * rate, "a GPU sends (N-1)/N of the message in each pass, not all of it"),
            Mistake(answer * ranks, "that is the sum over all GPUs"),
        ),
        why=f"{gigabytes} GB / {time_ms:g} ms = {written(rate, 'bytes/s')}, x "
        f"{'2 x ' * (op == 'all-reduce')}{ranks - 1}/{ranks}.",
    )
