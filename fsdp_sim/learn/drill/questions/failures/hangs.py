"""Jobs that hang or wait: who is missing, since when, and what it costs."""

from __future__ import annotations

import functools
import random

from fsdp_sim.learn.drill.question import Choice, Mistake, Number
from fsdp_sim.learn.drill.template import template
from fsdp_sim.schedule import toy_program
from fsdp_sim.timeline import COLLECTIVES, Op

SHORT = {Op.ALL_GATHER: "AG", Op.REDUCE_SCATTER: "RS"}


@functools.cache
def _issued(blocks: int) -> tuple[tuple[str, int], ...]:
    """The collectives of a step as "AG(3)", with their bytes."""
    ops = [i for i in toy_program(blocks, 8).ops if i.op in COLLECTIVES]
    return tuple((f"{SHORT[i.op]}({i.unit.removeprefix('layers.')})", i.bytes) for i in ops)


@template(
    level=1,
    seconds=45,
    section="12.2",
    rule="A hang: the rank with the smallest sequence number is missing; those that started the next one wait for it.",
    source="TORCH_FR_BUFFER_SIZE and TORCH_FR_DUMP_TEMP_FILE (torch's flight recorder)",
)
def rank_that_never_came(draw: random.Random) -> Choice:
    ranks, blocks = draw.choice((4, 6, 8)), draw.choice((4, 8, 12))
    labels = [label for label, _ in _issued(blocks)]
    step, place, odd = draw.choice((0, 17, 250)), draw.randrange(2, len(labels) - 1), draw.randrange(ranks)
    number = step * len(labels) + place + 1
    last = tuple(number if rank == odd else number + 1 for rank in range(ranks))
    table = "; ".join(
        f"rank {rank}: #{n:,} {labels[(n - 1) % len(labels)]} {'completed' if rank == odd else 'started'}"
        for rank, n in enumerate(last)
    )
    options = tuple(f"rank {r}" for r in (odd, *draw.sample([r for r in range(ranks) if r != odd], 3)))
    return Choice(
        text=f"A job hangs. Each rank's flight recorder ends with (AG is an all-gather, RS a reduce-scatter, in "
        f"parentheses the unit): {table}. All are in one process group. On which rank do you look for the cause?",
        options=options,
        wrong={
            option: f"it has started #{number + 1:,} and waits in it for another rank; its stack shows only the wait"
            for option in options[1:]
        },
        given={"last": last, "options": tuple(sorted(options))},
        why=f"#{number + 1:,} {labels[(number) % len(labels)]} is started on {ranks - 1} of {ranks} ranks; rank {odd} "
        f"has "
        f"completed #{number:,} and never came.",
    )


@template(
    level=2,
    seconds=75,
    section="12.2",
    rule="Read the records of all ranks from the beginning: where they first differ is the fault, not where they wait.",
)
def first_to_part(draw: random.Random) -> Choice:
    labels = [label for label, _ in _issued(draw.choice((4, 6, 8)))]
    start = draw.randrange(1, len(labels) - 8)
    window = labels[start : start + 8]
    how = draw.choice(("leaves out", "swaps", "twice"))
    place = draw.choice([p for p in range(1, 5) if window[p] != window[p + 1]])
    odd, ranks = draw.randrange(4), 4
    spoiled = {
        "leaves out": window[:place] + window[place + 1 :],
        "swaps": [*window[:place], window[place + 1], window[place], *window[place + 2 :]],
        "twice": [*window[: place + 1], *window[place:]],
    }[how]
    parts = place + (how == "twice")
    records = tuple(tuple((spoiled if rank == odd else window)[:7]) for rank in range(ranks))
    first = start + 1 + draw.choice((0, 100, 1000))
    table = "; ".join(f"rank {rank}: {' '.join(of)}" for rank, of in enumerate(records))
    others = [rank for rank in range(ranks) if rank != odd]

    def says(rank: int, at: int) -> str:
        return f"rank {rank}, at #{first + at:,}"

    wrong = {
        says(odd, 6): "that is where the record ends: they parted before",
        says(draw.choice(others), parts): "here three ranks are alike, and another is not",
        says(odd, parts - 1): "there all four are still alike",
    }
    return Choice(
        text=f"A job on 4 ranks hangs. The flight recorders hold, from #{first:,} on (AG is an all-gather, RS a "
        f"reduce-scatter, in parentheses the unit): {table}. Which rank is off, and from which collective on?",
        options=(says(odd, parts), *wrong),
        wrong=wrong,
        given={"records": records, "first": first},
        why=f"#{first + parts:,} is {records[odd][parts]} on rank {odd} and {window[parts]} on the three others; "
        f"before that "
        "all are alike.",
    )


@functools.cache
def _before_the_hang(blocks: int) -> int:
    """Collectives that match by kind and size although one rank leaves out a block."""
    all_ranks, odd = ([(label[:2], size) for label, size in _issued(n)] for n in (blocks, blocks - 1))
    return next(n for n, (usual, other) in enumerate(zip(all_ranks, odd, strict=False)) if usual != other)


@template(
    level=3,
    seconds=120,
    section="12.1",
    rule="Collectives match by order, not by name: a rank that skips a block mixes up data first, and hangs later.",
    source="order of issue in FSDP2: AG(i-1) before RS(i) in backward (_fsdp_param_group.py, _backward_prefetch)",
)
def collectives_before_the_hang(draw: random.Random) -> Number:
    blocks = draw.choice((4, 6, 8, 12, 16, 24))
    skipped, rank = draw.randrange(1, blocks - 1), draw.choice((1, 2, 3, 5))
    answer = _before_the_hang(blocks)
    return Number(
        text=f"FSDP2 with its defaults on 8 ranks: {blocks} blocks of equal size and a root of another size. In one "
        f"step "
        f"rank {rank} skips block {skipped} (blocks are counted from 0), in forward and so in backward. Suppose that a "
        "collective completes when all ranks have issued one of the same kind and size, of whichever block, and that "
        "all wait forever where kind or size differ. How many collectives of this step complete?",
        answer=answer,
        unit="collectives",
        rel=0,
        given={"blocks": blocks, "skipped": skipped},
        mistakes=(
            Mistake(skipped + 1, "names are not compared: the all-gather of one block is met by that of the next"),
            Mistake(
                blocks, "the odd rank is in backward by then, but its first gather there has the same kind and size"
            ),
            Mistake(
                blocks + 1, "backward begins with all-gathers too: one for the last block, one for the block before"
            ),
            Mistake(answer + 1, "at that place one rank reduce-scatters while the others gather"),
        ),
        why=f"Others: AG(root), {blocks} AGs, then AG AG RS; rank {rank}: AG(root), {blocks - 1} AGs, then AG AG RS. "
        f"Number {answer + 1} is its RS and their second AG of backward.",
    )


@template(
    level=1,
    seconds=45,
    section="12.1",
    rule="Ranks with different numbers of batches hang at the end of the shortest: agree on the least, or drop the "
    "rest.",
)
def steps_before_the_hang(draw: random.Random) -> Number:
    batch, drop = draw.choice((4, 8, 16, 32)), draw.choice((True, False))
    base, batches = draw.randrange(20, 120), [0]
    while len(set(batches)) == 1:
        samples = tuple(batch * (base + draw.randrange(4)) + draw.randrange(batch) for _ in range(4))
        batches = [n // batch if drop else -(-n // batch) for n in samples]
    shown = ", ".join(f"{n:,}" for n in samples[:3]) + f" and {samples[3]:,}"
    return Number(
        text=f"Four ranks of an FSDP job have {shown} samples, and each steps through its own in batches of {batch}; "
        f"{'an incomplete last batch is dropped' if drop else 'an incomplete last batch counts as one'}. Nobody agrees "
        "on a number of steps. How many steps complete before the job hangs?",
        answer=min(batches),
        unit="steps",
        rel=0,
        given={"samples": samples, "batch": batch, "drop": drop},
        mistakes=(
            Mistake(max(batches), "that is the rank with most: the others have left by then"),
            Mistake(min(batches) + 1, "that is the step in which it hangs, it does not complete"),
            Mistake(min(-(-n // batch) if drop else n // batch for n in samples), "what becomes of the last batch?"),
            Mistake(sum(samples) // (4 * batch), "that would be so if samples were shared out evenly"),
        ),
        why=f"Batches: {', '.join(map(str, batches))}; with the shortest done, its rank comes to no further gather.",
    )


@template(
    level=2,
    seconds=45,
    section="10.6",
    rule="Straggler: it comes last, so its collectives are shortest; the others' show waiting, not a slow network.",
)
def slow_rank(draw: random.Random) -> Choice:
    transfer_ms = draw.choice((4, 6, 10))
    comes_ms = [draw.randrange(100, 108) for _ in range(4)]
    slow = draw.randrange(4)
    comes_ms[slow] = 100 + draw.randrange(30, 70)
    shown_ms = tuple(max(comes_ms) - came + transfer_ms for came in comes_ms)
    options = tuple(f"rank {r}" for r in range(4))
    table = ", ".join(f"rank {r} {ms} ms" for r, ms in enumerate(shown_ms))
    return Choice(
        text=f"A step of an FSDP job is slower than it should be. In the profile the kernel of the same all-gather "
        f"lasts: "
        f"{table}. Which rank do you look at first?",
        options=options,
        wrong={
            option: f"its {ms} ms are mostly waiting for the last to come: it was there early"
            for option, ms in zip(options, shown_ms, strict=True)
            if ms != min(shown_ms)
        },
        given={"shown_ms": shown_ms},
        why=f"All end together; rank {slow} began last and spends {shown_ms[slow]} ms, about what the transfer takes.",
    )


LOOKS = {  # a symptom, and what to look at first
    "all ranks stand in step {step}, and nobody prints "
    "anything": "each rank's last collective, and who has not issued it",
    "the job dies before step 1, at exactly the time-out": "what the rank is doing that is not in the barrier",
    "it runs out of memory in the first step": "what the peak is made of, part by part",
    "from step 1 on losses differ from those of one "
    "process": "the first tensor that differs, with the same seed and batch",
    "a step takes twice as long since step {step}, on all ranks": "which rank waits least in its collectives",
    "after a resume at step {step} the loss is higher for a "
    "while": "whether the optimizer's state was saved and loaded",
}


@template(
    level=1,
    seconds=30,
    section="12.9",
    rule="Symptom first: hang: who is missing; OOM: what the peak is made of; wrong loss: the first number that "
    "differs.",
    source="fsdp_sim's chapter 12; torch.distributed.distributed_c10d default_pg_timeout",
)
def first_look(draw: random.Random) -> Choice:
    symptom, ranks, step = draw.choice(tuple(LOOKS)), draw.choice((8, 64, 256)), draw.choice((40, 1200, 7500))
    right = LOOKS[symptom]
    others = draw.sample([other for other in LOOKS if other != symptom], 3)
    shown = symptom.format(step=f"{step:,}")
    return Choice(
        text=f"An FSDP job on {ranks} GPUs: {shown}. What do you look at first?",
        options=(right, *(LOOKS[other] for other in others)),
        wrong={LOOKS[other]: f"that is for another symptom: {other.format(step=f'{step:,}')}" for other in others},
        given={"symptom": symptom, "options": tuple(sorted((right, *(LOOKS[other] for other in others))))},
        why=f"Symptom: {shown}. First: {right}; only then change anything.",
    )


@template(
    level=1,
    seconds=60,
    section="12.1",
    rule="A hang costs GPUs x (time-out + restart + training since the last checkpoint).",
)
def cost_of_a_hang(draw: random.Random) -> Number:
    gpus, timeout_min = draw.choice((64, 256, 512, 1024, 4096)), draw.choice((10, 10, 30))
    since_min, restart_min = draw.choice((5, 12, 20, 45)), draw.choice((4, 6, 15))
    minutes = timeout_min + since_min + restart_min
    return Number(
        text=f"{gpus:,} GPUs train, and one rank stops {since_min} minutes after the last checkpoint. The others "
        f"wait in an "
        f"all-gather until the process group's time-out of {timeout_min} minutes ends the job; {restart_min} minutes "
        f"later "
        "it trains again, from that checkpoint. How many GPU-hours are lost?",
        answer=gpus * minutes / 60,
        unit="GPU-hours",
        rel=0.03,
        given={"gpus": gpus, "minutes": (since_min, timeout_min, restart_min)},
        mistakes=(
            Mistake(gpus * timeout_min / 60, "the time since the checkpoint and the restart are lost too"),
            Mistake(gpus * (timeout_min + restart_min) / 60, "what was trained since the checkpoint is done again"),
            Mistake(minutes / 60, "all GPUs wait, not one"),
            Mistake(gpus * minutes, "those are GPU-minutes"),
        ),
        why=f"{gpus:,} x ({since_min} + {timeout_min} + {restart_min}) min / 60.",
    )
