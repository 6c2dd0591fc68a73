"""Jobs that train on with wrong numbers: from the numbers to the fault."""

from __future__ import annotations

import random

from fsdp_sim.learn.drill.question import Choice, Mistake, Number
from fsdp_sim.learn.drill.template import template

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
    where = " and ".join(
        f"on rank {r} in step{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for r, of in enumerate(overflows)
    )
    answer = 65536 / 2**halvings
    return Number(
        text=f"FSDP1 in fp16 on two ranks, with {scaler}; the scale starts at 65,536 and 30 steps are too few for it "
        f"to "
        f"grow. Shards of gradients overflow {where}. What is the scale on rank {rank} after step 30?",
        answer=answer,
        unit="",
        rel=0,
        given={"overflows": overflows, "agree": agree, "rank": rank},
        mistakes=(
            Mistake(65536 / 2 ** len(together), "the plain one looks at this rank's shards only"),
            Mistake(65536 / 2 ** len(overflows[rank]), "the sharded one halves wherever any rank overflows"),
            Mistake(65536 / 2 ** len(overflows[1 - rank]), "that is the other rank's"),
            Mistake(65536 / 2 ** sum(map(len, overflows)), "a step in which both overflow halves once"),
            Mistake(65536, "each overflow halves the scale"),
        ),
        why=f"{'Any rank' if agree else f'Rank {rank}'} overflows in {halvings} of the steps: 65,536 / "
        f"{2**halvings:,}.",
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
