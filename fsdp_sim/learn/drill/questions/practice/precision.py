"""bf16, fp16 and the scaler."""

from __future__ import annotations

import math
import random
import struct

from fsdp_sim.learn.drill.question import Choice, Mistake, Number
from fsdp_sim.learn.drill.template import template

FP16_MAX = 65504


BF16_DIGITS = 8


def bf16(value: float) -> float:
    """The nearest bf16 number, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return float(struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0])


@template(
    level=2,
    seconds=60,
    section="08.2",
    rule="bf16 has 8 binary digits: an update below about 2^-9 (0.2%) of a weight is always rounded away.",
    source="bfloat16: 1 sign, 8 exponent, 7 stored mantissa bits (torch.finfo(torch.bfloat16).eps = 2^-7)",
)
def update_that_arrives(draw: random.Random) -> Choice:
    weights = draw.sample((0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0), 4)
    right = weights[draw.randrange(4)]
    update = right * draw.choice((0.006, 0.007, 0.0075))
    pairs = {}
    for weight in weights:
        own = update if weight == right else weight * draw.choice((0.0005, 0.001, 0.002, 0.003))
        pairs[f"weight {weight:g}, update {float(f'{own:.2g}'):g}"] = (weight, float(f"{own:.2g}"))
    moves = [name for name, (weight, own) in pairs.items() if bf16(weight + own) != weight]
    (right_name,) = moves
    names = tuple(pairs)
    return Choice(
        text="Parameters were loaded in bf16 and are updated in bf16, to the nearest. To which of these weights does "
        "one "
        f"addition of its update make any difference? The weights are {', '.join(f'{w:g}' for w in weights)}.",
        options=names,
        wrong={
            name: f"the next bf16 number above {weight:g} is {weight / 2 ** (BF16_DIGITS - 1):.3g} away, and {own:g} "
            f"is "
            "less than half of that"
            for name, (weight, own) in pairs.items()
            if name != right_name
        },
        given={"pairs": tuple(sorted((name, *pair) for name, pair in pairs.items()))},
        why=f"Above a power of two w the spacing is w / 128; an update must exceed half of it, 0.4% of w: "
        f"{pairs[right_name][1]:g} is {100 * pairs[right_name][1] / pairs[right_name][0]:.2g}% of "
        f"{pairs[right_name][0]:g}.",
    )


@template(
    level=2,
    seconds=45,
    section="08.3",
    rule="fp16 ends at 65,504: scale x largest gradient must stay below. An overflow skips the step and halves the "
    "scale.",
    source="torch.finfo(torch.float16).max; torch.amp.GradScaler (backoff_factor=0.5)",
)
def largest_scale(draw: random.Random) -> Number:
    gradient = draw.choice((0.3, 0.7, 1.5, 3.0, 6.0, 12.0, 20.0, 50.0))
    scale = 2.0 ** math.floor(math.log2(FP16_MAX / gradient))
    return Number(
        text=f"In an fp16 run the largest gradient, unscaled, is {gradient:g}. The loss scale is a power of two. "
        f"What is "
        "the largest at which no gradient overflows? (The gradients of single ranks; the sum over ranks is safe.)",
        answer=scale,
        unit="",
        rel=0,
        given={"gradient": gradient},
        mistakes=(
            Mistake(2 * scale, f"at that {gradient:g} becomes {2 * scale * gradient:,.0f}: fp16 ends at 65,504"),
            Mistake(scale / 2, "twice as much still fits"),
            Mistake(65536, "that is the scale a GradScaler starts with, whatever the gradients"),
        ),
        why=f"65,504 / {gradient:g} = {FP16_MAX / gradient:,.0f}; the power of two below is {scale:,.0f}.",
    )


@template(
    level=3,
    seconds=75,
    section="08.3",
    rule="GradScaler: starts at 65,536, x 1/2 and no step after an overflow, x 2 after 2,000 good steps in a row.",
    source="torch.amp.GradScaler: init_scale 2^16, growth_factor 2, backoff_factor 0.5, growth_interval 2000",
)
def scale_after_steps(draw: random.Random) -> Number:
    first = draw.choice((3, 50, 1000, 1999))
    overflows = tuple(sorted({first, first + draw.choice((1, 2, 500)), first + draw.choice((3, 1500))}))
    steps = overflows[-1] + draw.choice((100, 1999, 2000, 2500, 4100))
    good = steps - overflows[-1]
    answer = 65536 * 2.0 ** (good // 2000 - len(overflows))
    which = ", ".join(f"{n:,}" for n in overflows)
    return Number(
        text=f"A GradScaler with its defaults (it starts at 65,536 and grows after 2,000 good steps in a row). "
        f"Gradients "
        f"overflow in steps {which}, counted from 1, and never else. What is the scale after step {steps:,}?",
        answer=answer,
        unit="",
        rel=0,
        given={"overflows": overflows, "steps": steps},
        mistakes=(
            Mistake(65536 / 2 ** len(overflows), "it doubles after 2,000 good steps in a row"),
            Mistake(65536 * 2.0 ** (steps // 2000 - len(overflows)), "an overflow starts the count of good steps anew"),
            Mistake(65536 / 2, "each overflow halves the scale again"),
            Mistake(65536, "an overflow halves the scale"),
        ),
        why=f"{len(overflows)} overflows: 65,536 / {2 ** len(overflows)}; then {good:,} good steps double it "
        f"{good // 2000} times.",
    )
