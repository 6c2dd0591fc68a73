"""Batches, learning rates and data over the ranks."""

from __future__ import annotations

import math
import random

from fsdp_sim.learn.drill.question import Mistake, Number
from fsdp_sim.learn.drill.template import template


@template(
    level=1,
    seconds=60,
    section="08.4",
    rule="Global batch = data-parallel ranks x micro-batch x accumulation; to keep it on fewer ranks accumulate more.",
)
def accumulation_for_a_batch(draw: random.Random) -> Number:
    ranks, micro, steps = draw.choice((16, 32, 64, 128)), draw.choice((1, 2, 4)), draw.choice((1, 2, 4, 8))
    seq_len, fewer = draw.choice((2048, 4096, 8192)), draw.choice((1, 2, 4))
    tensor = draw.choice((1, 1, 2, 8))
    batch = ranks * micro * steps * seq_len
    gpus = ranks // fewer * tensor
    answer = steps * fewer
    way = (
        f", in groups of {tensor} with tensor parallelism and FSDP between the groups" if tensor > 1 else ", with FSDP"
    )
    million = f"{batch / 2**20:g} x 2^20" if batch >= 2**20 else f"{batch // 1024:,} x 1,024"
    return Number(
        text=f"A global batch of {million} tokens is wanted, in sequences of {seq_len:,}. You have {gpus} GPUs{way}; "
        f"{micro} sequence{'s' * (micro > 1)} at a time fit{'s' * (micro == 1)} into memory. How many micro-batches "
        "does each rank accumulate per optimizer step?",
        answer=answer,
        unit="micro-batches",
        rel=0,
        given={"batch": batch, "gpus": gpus, "micro": micro, "seq_len": seq_len, "tensor": tensor},
        mistakes=(
            Mistake(
                answer / tensor, "GPUs of a tensor-parallel group share a batch: only the groups are data parallel"
            ),
            Mistake(answer * micro, f"{micro} sequences at a time make a micro-batch"),
            Mistake(answer * gpus // tensor, "the ranks work at the same time, each on its own sequences"),
            Mistake(batch // seq_len, "that is the sequences of the global batch, of all ranks"),
        ),
        why=f"{million} / {seq_len:,} = {batch // seq_len:,} sequences; {gpus // tensor} data-parallel ranks x {micro} "
        f"take {gpus // tensor * micro} at a time.",
    )


@template(
    level=2,
    seconds=60,
    section="08.7",
    rule="The learning rate follows the global batch, not the ranks: x k for SGD, x sqrt(k) for Adam, as a first try.",
    source="Goyal et al., Accurate, Large Minibatch SGD (2017); Malladi et al., On the SDEs ... of Adaptive (2022)",
)
def rate_after_scaling(draw: random.Random) -> Number:
    rate = draw.choice((1e-4, 2e-4, 3e-4, 6e-4))
    before, times = draw.choice((8, 16, 64)), draw.choice((2, 4, 8))
    rule, kept = draw.choice(("linear", "root")), draw.choice(("global", "rank", "rank"))
    grows = times if kept == "rank" else 1
    answer = rate * (grows if rule == "linear" else math.sqrt(grows))
    how = "in proportion to" if rule == "linear" else "with the square root of"
    keeps = {
        "global": "The global batch stays the same: each rank takes fewer sequences",
        "rank": "Each rank takes as many sequences per step as before",
    }[kept]
    return Number(
        text=f"A run on {before} GPUs has a learning rate of {rate:g}; you move it to {before * times} with FSDP2, "
        f"which "
        f"averages gradients. {keeps}. Your rule, for {'SGD' if rule == 'linear' else 'Adam'}: the rate goes {how} "
        f"the "
        "batch that a step sees. Which learning rate do you set?",
        answer=answer,
        unit="",
        given={"rate": rate, "before": before, "after": before * times, "rule": rule, "kept": kept},
        mistakes=(
            Mistake(rate * times, "the number of GPUs does not matter by itself: gradients are averaged"),
            Mistake(rate * math.sqrt(times), "apply the rule that was given, to the global batch"),
            Mistake(rate, "the global batch grows with the ranks here, and the rule goes by it"),
            Mistake(rate / times, "a larger batch has less noise: it is no reason for a smaller rate"),
        ),
        why=f"The global batch grows by a factor of {grows}, the rate by "
        f"{grows if rule == 'linear' else f'sqrt({grows})'}: {answer:.3g}.",
    )


@template(
    level=1,
    seconds=60,
    section="08.5",
    rule="Norm of a sharded gradient: sqrt of the sum of the shards' squared norms; one all-reduce, no gather.",
    source="torch.nn.utils.clip_grad_norm_ on DTensors",
)
def factor_of_clipping(draw: random.Random) -> Number:
    drawn = draw.choice(((1, 2, 2, 4), (2, 4, 5, 6), (1, 1, 3, 5), (2, 2, 4, 5), (3, 4, 12, 84), (1, 4, 8, 12)))
    norms = tuple(draw.sample(drawn, 4))
    most, total = draw.choice((0.5, 1.0, 2.0)), math.sqrt(sum(n * n for n in norms))
    return Number(
        text=f"Four ranks hold shards of the gradient with 2-norms {norms[0]}, {norms[1]}, {norms[2]} and {norms[3]}. "
        f"clip_grad_norm_(..., max_norm={most:g}) of FSDP2 is called on all ranks. By which factor is the gradient "
        "multiplied?",
        answer=most / total,
        unit="",
        given={"norms": norms, "most": most},
        mistakes=(
            Mistake(most / sum(norms), "norms of shards do not add up: their squares do"),
            Mistake(most / sum(n * n for n in norms), "the root of the sum of squares is missing"),
            Mistake(most / max(norms), "that is the largest shard's norm: the gradient has all shards"),
            Mistake(4 * most / sum(norms), "the norm of the whole is no mean of the shards' norms"),
            Mistake(most / math.sqrt(sum(n * n for n in norms) / 4), "squares are added over the ranks, not averaged"),
        ),
        why=f"Norm: sqrt({' + '.join(str(n * n) for n in norms)}) = {total:.4g}; {most:g} / {total:.4g}.",
    )


@template(
    level=2,
    seconds=75,
    section="08.4",
    rule="Loss over all tokens: sum of losses / sum of tokens; so each rank scales its sum by W / all tokens.",
)
def scale_of_a_summed_loss(draw: random.Random) -> Number:
    tokens = tuple(draw.sample((512, 1024, 1536, 2048, 3072, 4096, 6144), 4))
    rank, asked = draw.randrange(4), draw.choice(("weight", "factor"))
    mine, total = tokens[rank], sum(tokens)
    held = (
        f"Four ranks have {tokens[0]:,}, {tokens[1]:,}, {tokens[2]:,} and {tokens[3]:,} tokens that count in a step. "
    )
    mistakes: tuple[Mistake, ...]
    if asked == "factor":
        text = (
            "Each sums the losses of its tokens and multiplies by a factor before backward; FSDP averages gradients "
            "over the ranks. Which factor gives the gradient of the mean over all tokens?"
        )
        answer = 4 / total
        mistakes = (
            Mistake(1 / total, "FSDP divides by the number of ranks once more: multiply by it first"),
            Mistake(1 / mine, "that makes a mean of means, in which tokens of short batches count more"),
            Mistake(4 / mine, "all ranks must divide by the tokens of all ranks"),
        )
        why = f"4 / ({' + '.join(f'{n:,}' for n in tokens)}) = 4 / {total:,}."
    else:
        text = (
            f"Each takes the mean loss of its own tokens, and FSDP averages gradients over the ranks. How many times "
            f"as "
            f"much does a token on rank {rank} count as it would in the mean over all tokens?"
        )
        answer = total / 4 / mine
        mistakes = (
            Mistake(4 * mine / total, "the wrong way round: a token among few counts more"),
            Mistake(total / mine, "the average over ranks gives each rank a quarter"),
            Mistake(1, "that would be so if all ranks had as many tokens"),
            Mistake(mine / total, "that is the share of this rank's tokens"),
        )
        why = f"1 / (4 x {mine:,}) in place of 1 / {total:,}."
    return Number(
        text=held + text,
        answer=answer,
        unit="" if asked == "factor" else "times",
        given={"tokens": tokens, "rank": rank, "asked": asked},
        mistakes=mistakes,
        why=why,
    )


@template(
    level=1,
    seconds=45,
    section="08.8",
    rule="DistributedSampler pads: ceil(N / W) samples per rank, so some come twice; drop_last leaves out N mod W.",
    source="torch.utils.data.DistributedSampler.__init__ (num_samples, total_size)",
)
def samples_of_an_epoch(draw: random.Random) -> Number:
    ranks = draw.choice((4, 6, 8, 12, 16))
    samples = draw.choice([n for n in (10, 50, 103, 250, 997, 1001, 1234) if n % ranks])
    drop = draw.choice((True, False))
    over = -samples % ranks
    asked = "left out of" if drop else "drawn a second time in"
    return Number(
        text=f"A data set of {samples:,} samples, {ranks} ranks, torch's DistributedSampler with drop_last={drop}. How "
        f"many samples are {asked} an epoch?",
        answer=samples % ranks if drop else over,
        unit="samples",
        rel=0,
        given={"samples": samples, "ranks": ranks, "drop": drop},
        mistakes=(
            Mistake(over, "that many would be drawn twice with drop_last=False"),
            Mistake(samples % ranks, "that is what does not divide; the ranks draw until all have as many"),
            Mistake(0, "it is not so that each comes once: all ranks draw as many, so that no rank waits"),
        ),
        why=f"{samples:,} = {samples // ranks:,} x {ranks} + {samples % ranks}"
        + ("." if drop else f", so each rank draws {-(-samples // ranks):,}: {over} more than there are."),
    )
