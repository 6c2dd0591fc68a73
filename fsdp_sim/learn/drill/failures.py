"""Failures: jobs that hang, that die, and that train on with wrong numbers; from what is seen to the cause."""

from __future__ import annotations

import functools
import random

from fsdp_sim.learn.drill.draws import NAMES
from fsdp_sim.learn.drill.question import Choice, Number, Slip
from fsdp_sim.learn.drill.template import template
from fsdp_sim.schedule import toy_program
from fsdp_sim.spec import Model, block_shapes, gpu
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
        slips=(
            Slip(skipped + 1, "names are not compared: the all-gather of one block is met by that of the next"),
            Slip(blocks, "the odd rank is in backward by then, but its first gather there has the same kind and size"),
            Slip(blocks + 1, "backward begins with all-gathers too: one for the last block, one for the block before"),
            Slip(answer + 1, "at that place one rank reduce-scatters while the others gather"),
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
        slips=(
            Slip(max(batches), "that is the rank with most: the others have left by then"),
            Slip(min(batches) + 1, "that is the step in which it hangs, it does not complete"),
            Slip(min(-(-n // batch) if drop else n // batch for n in samples), "what becomes of the last batch?"),
            Slip(sum(samples) // (4 * batch), "that would be so if samples were shared out evenly"),
        ),
        why=f"Batches: {', '.join(map(str, batches))}; with the shortest done, its rank comes to no further gather.",
    )


STALE, SUM, TWICE, EARLY, LOCAL = (
    "one rank does not step its shard",
    "gradients are summed over the ranks, not averaged",
    "gradients are divided by the number of ranks twice",
    "the optimizer was made before fully_shard",
    "gradients are not reduced: each shard takes its own rank's",
)


def _updates(gradients: list[list[int]], fault: str, rank: int) -> tuple[float, ...]:
    """What a step of rate 1 takes off four weights, of which each of four ranks keeps one."""
    seen = []
    for row in range(4):
        total = sum(of_rank[row] for of_rank in gradients)
        update = {SUM: float(total), TWICE: total / 16, EARLY: 0.0, LOCAL: float(gradients[row][row])}
        update[STALE] = 0.0 if row == rank else total / 4
        seen.append(update.get(fault, total / 4))
    return tuple(seen)


@template(
    level=2,
    seconds=75,
    section="12.4",
    rule="Compare with one process. One rank's rows off: its shard. All off by W: division. Nothing moves: optimizer.",
)
def fault_behind_the_update(draw: random.Random) -> Choice:
    fault, rank = draw.choice((STALE, SUM, TWICE, EARLY, LOCAL)), draw.randrange(4)
    while True:
        gradients = [[4 * draw.randrange(1, 9) for _ in range(4)] for _ in range(4)]
        ratios = {round(gradients[row][row] / sum(of[row] for of in gradients), 3) for row in range(4)}
        if len(ratios) == 4:
            break
    right, seen = _updates(gradients, "", rank), _updates(gradients, fault, rank)
    show = ", ".join(f"{n:g}" for n in right), ", ".join(f"{n:g}" for n in seen)
    faults = (STALE, SUM, TWICE, EARLY, LOCAL)

    def would(fault: str) -> str:
        if fault == LOCAL:
            return "that would make the rows wrong by different factors"
        return f"with that the changes would be {', '.join(f'{n:g}' for n in _updates(gradients, fault, rank))}"

    return Choice(
        text=f"A weight of four rows on four ranks with plain SGD. In the first step one process, with all the data, "
        f"changes the rows by {show[0]} (in units of 0.001); the FSDP job, same seed and same data, by {show[1]}. "
        "Which fault is it?",
        options=faults,
        wrong={other: would(other) for other in faults if other != fault},
        given={"right": right, "seen": seen},
        why=f"Seen over right, row by row: {', '.join(f'{b / a:.2g}' for a, b in zip(right, seen, strict=True))}: "
        f"{fault}.",
    )


@template(
    level=2,
    seconds=60,
    section="12.4",
    rule="Gradient norm off by M: divide by micro-batches; off by W: FSDP averages over ranks by itself, once.",
)
def missed_division(draw: random.Random) -> Choice:
    ranks, micro_batches = draw.choice([(w, m) for w in (4, 8, 16) for m in (2, 4, 8, 16) if m != w])
    norm = draw.choice((0.25, 0.4, 0.8, 1.2))
    single = [norm] * (ranks * micro_batches)  # of each rank's micro-batches, all alike
    faults = {
        "the losses of micro-batches are not divided by their number": sum(single) / ranks,
        "gradients are summed over the ranks": sum(single) / micro_batches,
        "each rank divides its loss by the number of ranks": sum(single) / micro_batches / ranks / ranks,
        "losses are divided by the number of micro-batches twice": sum(single) / ranks / micro_batches**2,
    }
    right = draw.choice(tuple(faults))
    seen = faults[right]
    return Choice(
        text=f"FSDP on {ranks} ranks, {micro_batches} micro-batches per step, SGD without clipping. On the same data "
        f"one "
        f"process has a gradient norm of {norm:g} in the first step, the job {seen:.4g}. Nothing else is odd. What "
        f"is the "
        "likeliest fault?",
        options=tuple(faults),
        wrong={fault: f"that would make it {value:.4g}" for fault, value in faults.items() if fault != right},
        given={"ranks": ranks, "micro_batches": micro_batches, "norm": norm, "seen": round(seen, 9)},
        why=f"{seen:.4g} / {norm:g} = {seen / norm:.4g}, with {ranks} ranks and {micro_batches} micro-batches: "
        f"{right}.",
    )


CURES = {  # a part of the peak, and the change that takes most of it away
    "shards and optimizer states": "train on twice as many GPUs",
    "gathered parameters": "give each block to fully_shard, not the model alone",
    "whole gradients": "reduce the gradients of every micro-batch",
    "activations": "compute the activations of each block again in backward",
    "logits and their gradients": "compute the loss in pieces of a few hundred tokens",
}


@functools.cache
def _too_large() -> tuple[tuple[str, str, int, tuple[float, ...], float, str], ...]:
    """Jobs that do not fit, of which one change alone makes one that does."""
    found = []
    for key in ("llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b", "gpt3-175b"):
        model = Model.preset(key)
        block = sum(rows * columns for _, rows, columns in block_shapes(model))
        root = model.param_count - model.n_layer * block
        for device in ("A100-SXM-40GB", "A100-SXM-80GB", "H100-SXM-80GB"):
            limit = round(0.92 * gpu(device).mem_bytes / 1e9, 1)
            for ranks in (8, 16, 24, 32, 48, 64, 128, 256):
                for tokens in (2048, 4096, 8192, 16384, 32768):
                    for off in range(5):  # what is set badly, if anything; 0 is nothing
                        hidden = 2 * tokens * model.d_model * model.n_layer
                        parts = (
                            16 * model.param_count / ranks,
                            4.0 * model.param_count if off == 1 else 2.0 * (4 * block + 2 * root),
                            4.0 * model.param_count if off == 2 else 0.0,
                            17.0 * hidden if off == 3 else 1.0 * hidden,
                            10.0 * tokens * model.vocab if off == 4 else 10.0 * 512 * model.vocab,
                        )
                        shown = tuple(round(part / 1e9, 1) for part in parts)
                        over = sum(shown) - limit
                        saves = (shown[0] / 2, *shown[1:])
                        enough = [n for n, saved in enumerate(saves) if saved > over]
                        if over > 1 and len(enough) == 1 and saves[enough[0]] > 1.3 * over:
                            cure = tuple(CURES.values())[enough[0]]
                            found.append((NAMES[key], device, ranks, shown, limit, cure))
    return tuple(found)


@template(
    level=2,
    seconds=60,
    section="12.7",
    rule="Out of memory: first ask what the peak is made of; the change must shrink the part that is too large.",
    source="activations: Korthikanti et al. (2022), 34 s b h per layer; memory of GPUs: fsdp_sim/spec/gpus.toml",
)
def change_that_fits(draw: random.Random) -> Choice:
    cases = _too_large()
    cure = draw.choice(sorted({case[-1] for case in cases}))
    name, device, ranks, parts, limit, _ = draw.choice([case for case in cases if case[-1] == cure])
    cures = tuple(CURES.values())
    account = ", ".join(f"{part} {size:g} GB" for part, size in zip(CURES, parts, strict=True))
    over = sum(parts) - limit
    causes = {
        change: f"that takes {size / (1 + (change == cures[0])):.1f} GB away at most, and {over:.1f} GB are too much"
        for change, size in zip(cures, parts, strict=True)
    }
    return Choice(
        text=f"{name} on {ranks} GPUs ({device}, of which a job can use {limit:g} GB) runs out of memory. Counted "
        f"per "
        f"GPU, the peak would be: {account}. Which one change makes it fit?",
        options=tuple(CURES.values()),
        wrong={change: cause for change, cause in causes.items() if change != cure},
        given={"parts": parts, "limit_gb": limit},
        why=f"In all {sum(parts):.1f} GB, {over:.1f} GB too much; only one of the parts can give so much: {cure}.",
    )


@template(
    level=2,
    seconds=60,
    section="09.3",
    rule="Rank r's file holds rows r x c to (r + 1) x c - 1 of each weight, c = ceil(rows / W): lose it, lose them.",
    source="torch.chunk; torch.distributed.checkpoint metadata (offsets and sizes of chunks)",
)
def rows_that_are_lost(draw: random.Random) -> Choice:
    ranks = draw.choice((4, 6, 8))
    rows = draw.choice([n for n in (10, 21, 50, 101, 250, 500, 1003) if n % ranks and -(-n // ranks) * (ranks - 1) < n])
    rank = draw.randrange(1, ranks - 1)
    each, least, extra = -(-rows // ranks), rows // ranks, rows % ranks

    def span(first: int, count: int) -> str:
        return f"rows {first:,} to {min(first + count, rows) - 1:,}"

    right = span(rank * each, each)
    start = rank * least + min(rank, extra)
    wrong = {
        span((rank - 1) * each, each): "ranks are counted from 0",
        span(rank * least, least): "pieces are rounded up, not down",
        span(start, least + (rank < extra)): "the remainder is not spread over the first ranks: pieces are of one size",
        span((rank + 1) * each, each): "that is the next rank's",
    }
    wrong.pop(right, None)
    return Choice(
        text=f"{ranks} ranks save an FSDP2 model with DCP, one file per rank. A weight has {rows:,} rows, counted "
        f"from 0. "
        f"The file of rank {rank} is lost (ranks are counted from 0). Which rows of the weight are gone?",
        options=(right, *wrong),
        wrong=wrong,
        given={"rows": rows, "ranks": ranks, "rank": rank},
        why=f"ceil({rows:,} / {ranks}) = {each} rows each; rank {rank} begins at {rank} x {each} = {rank * each:,}.",
    )


@template(
    level=1,
    seconds=45,
    section="09.6",
    rule="A checkpoint counts if it has all files, DCP's .metadata (written last) and its final name; 'latest' "
    "proves none.",
    source="torch/distributed/checkpoint/filesystem.py (FileSystemWriter.finish)",
)
def checkpoint_that_counts(draw: random.Random) -> Choice:
    ranks, every = draw.choice((8, 16, 64)), draw.choice((100, 250, 500))
    first = every * draw.randrange(4, 20)
    states = ["whole", *(draw.choice(("whole", "no index", "a file less", "not renamed")) for _ in range(2))]
    states.append(draw.choice(("no index", "a file less", "not renamed")))
    contents = {
        "whole": f"{ranks} files, .metadata",
        "no index": f"{ranks} files",
        "a file less": f"{ranks - 1} files, .metadata",
        "not renamed": f"{ranks} files",
    }
    causes = {
        "whole": "it can be loaded, and there is a newer one",
        "no index": "it has no .metadata, which DCP writes last: the save was not finished",
        "a file less": "a rank's file is missing, and with it its rows of every weight",
        "not renamed": "it has not its final name: not all ranks were done",
    }
    steps = [first + n * every for n in range(4)]
    listing = tuple(
        f"step-{step}{'.tmp' if state == 'not renamed' else ''} ({contents[state]})"
        for step, state in zip(steps, states, strict=True)
    )
    newest = max(step for step, state in zip(steps, states, strict=True) if state == "whole")
    return Choice(
        text=f"{ranks} ranks, one file each, with DCP. One script saves straight into step-N; another into step-N.tmp, "
        f"which it renames when all ranks are done; a clean-up has deleted files too. The folder holds: "
        f"{'; '.join(listing)}; and a file `latest` that says step-{steps[3]}. After which step does the job go on?",
        options=tuple(f"after step {step}" for step in steps),
        wrong={f"after step {s}": causes[state] for s, state in zip(steps, states, strict=True) if s != newest},
        given={"listing": listing, "ranks": ranks},
        why=f"step-{newest} is the newest with {ranks} files, .metadata and its final name.",
    )


@template(
    level=2,
    seconds=60,
    section="12.5",
    rule="A plain GradScaler under FSDP1 decides per rank and scales part; all ranks must agree that a step is "
    "skipped.",
    source="torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler; torch.amp.GradScaler (backoff_factor=0.5)",
)
def scale_of_one_rank(draw: random.Random) -> Number:
    first, *more = (tuple(sorted(draw.sample(range(2, 30), draw.choice((1, 2, 3))))) for _ in range(2))
    overflows = (first, *more)
    agree, rank = draw.choice((True, False)), draw.randrange(2)
    together = set(first) | set(overflows[1])
    halvings = len(together) if agree else len(overflows[rank])
    scaler = "ShardedGradScaler" if agree else "the plain GradScaler, in place of the sharded one"
    said = " and ".join(
        f"on rank {r} in step{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for r, of in enumerate(overflows)
    )
    answer = 65536 / 2**halvings
    return Number(
        text=f"FSDP1 in fp16 on two ranks, with {scaler}; the scale starts at 65,536 and 30 steps are too few for it "
        f"to "
        f"grow. Shards of gradients overflow {said}. What is the scale on rank {rank} after step 30?",
        answer=answer,
        unit="",
        rel=0,
        given={"overflows": overflows, "agree": agree, "rank": rank},
        slips=(
            Slip(65536 / 2 ** len(together), "the plain one looks at this rank's shards only"),
            Slip(65536 / 2 ** len(overflows[rank]), "the sharded one halves wherever any rank overflows"),
            Slip(65536 / 2 ** len(overflows[1 - rank]), "that is the other rank's"),
            Slip(65536 / 2 ** sum(map(len, overflows)), "a step in which both overflow halves once"),
            Slip(65536, "each overflow halves the scale"),
        ),
        why=f"{'Any rank' if agree else f'Rank {rank}'} overflows in {halvings} of the steps: 65,536 / "
        f"{2**halvings:,}.",
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


@template(
    level=3,
    seconds=60,
    section="12.5",
    rule="A NaN from one rank reaches the rank that owns that row; after clip_grad_norm_ it is everywhere (norm NaN).",
    source="torch.nn.utils.clip_grad_norm_ (error_if_nonfinite=False multiplies by a NaN coefficient)",
)
def where_nan_goes(draw: random.Random) -> Choice:
    ranks, each = draw.choice((4, 8, 16)), draw.choice((2, 3, 16, 128))
    made, owner = draw.sample(range(ranks), 2)
    row, clips = owner * each + draw.randrange(each), draw.choice((True, False))
    other = draw.choice([r for r in range(ranks) if r not in (made, owner)])
    causes = {
        f"on rank {owner} "
        f"only": "the norm is NaN on all ranks, and all gradients are multiplied by a factor made of it",
        f"on rank {made} "
        f"only": "gradients do not stay where they are made: they are reduced, and each rank keeps its rows",
        f"on rank {other} only": "that rank neither made it nor keeps that row",
        "on all ranks": "a reduce-scatter gives each rank its own rows, and the NaN is in one row",
        "on no rank": "a mean with a NaN in it is NaN",
    }
    right = "on all ranks" if clips else f"on rank {owner} only"
    return Choice(
        text=f"FSDP2 on {ranks} ranks; a weight has {ranks * each:,} rows, counted from 0, as ranks are. In backward "
        f"rank "
        f"{made} alone computes a NaN, in row {row:,} of this weight's gradient. "
        f"{'clip_grad_norm_ is called' if clips else 'There is no clipping'}, and no loss scaler. On which ranks do "
        "gradient shards hold a NaN when optimizer.step() begins?",
        options=tuple(causes),
        wrong={option: cause for option, cause in causes.items() if option != right},
        given={"ranks": ranks, "each": each, "made": made, "row": row, "clips": clips, "other": other},
        why=f"Row {row:,} belongs to rank {row // each} ({each} rows each)"
        + ("; then the norm is NaN, and with it every clipped gradient." if clips else ", and nothing spreads it."),
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
        slips=(
            Slip(gpus * timeout_min / 60, "the time since the checkpoint and the restart are lost too"),
            Slip(gpus * (timeout_min + restart_min) / 60, "what was trained since the checkpoint is done again"),
            Slip(minutes / 60, "all GPUs wait, not one"),
            Slip(gpus * minutes, "those are GPU-minutes"),
        ),
        why=f"{gpus:,} x ({since_min} + {timeout_min} + {restart_min}) min / 60.",
    )
