"""Practice: batches, learning rates, precision, data, checkpoints, and what machines that fail cost."""

from __future__ import annotations

import math
import random
import struct

from fsdp_sim.learn.drill.draws import a_model, billions
from fsdp_sim.learn.drill.question import Choice, Number, Slip
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written

MODELS = ("llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b", "gpt3-175b", "llama3-405b")
YOUNG = "Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974)"
LLAMA3 = "Grattafiori et al., The Llama 3 Herd of Models (2024), section 3.3.4: 419 unexpected interruptions in 54 days"
FP16_MAX = 65504
BF16_DIGITS = 8


@template(
    level=1,
    seconds=45,
    section="09.2",
    rule="A checkpoint to go on from: 12 B per parameter (fp32 weight and Adam's two moments); bf16 weights: 2 B.",
)
def bytes_of_a_checkpoint(draw: random.Random) -> Number:
    name, model = a_model(draw, *MODELS)
    ranks = draw.choice((64, 128, 256, 512))
    kind = draw.choice(("all files together", "the file of one rank", "an export"))
    parameters = model.param_count
    each = 2 if kind == "an export" else 12
    answer = each * parameters / (ranks if kind == "the file of one rank" else 1)
    asked = {
        "all files together": "A sharded checkpoint to go on from: how many bytes are all files together?",
        "the file of one rank": "A sharded checkpoint to go on from: how many bytes does each rank write?",
        "an export": "Its weights alone are exported in bf16, in one file: of how many bytes?",
    }[kind]
    return Number(
        text=f"{name} ({billions(parameters)} parameters) is trained with AdamW and FSDP on {ranks} ranks; parameters "
        f"are kept in fp32, computed in bf16. {asked}",
        answer=answer,
        unit="bytes",
        given={"model": name, "ranks": ranks, "kind": kind},
        slips=(
            Slip(answer * 16 / each, "gradients are not saved: the next step makes new ones"),
            Slip(answer * 4 / each, "that is 4 B per parameter: the fp32 weights alone"),
            Slip(answer * 14 / each, "no bf16 copy is saved: it is made from the fp32 shards in each gather"),
            Slip(answer * 6 / each, "Adam's moments are fp32 too, as the parameters are that they belong to"),
            Slip(each * parameters / ranks, "that is what one rank writes"),
            Slip(each * parameters, "that is everything: each rank writes its shards"),
        ),
        why=f"{each} B x {billions(parameters)} = {written(each * parameters, 'bytes')}"
        + (f", a part of 1/{ranks} from each rank." if kind == "the file of one rank" else "."),
    )


@template(
    level=2,
    seconds=60,
    section="09.7",
    rule="Young: checkpoint every sqrt(2 x C x MTBF) of training, C the time that a checkpoint stops training.",
    source=YOUNG,
)
def checkpoint_interval(draw: random.Random) -> Number:
    cost_s, mtbf_h = draw.choice((10, 20, 30, 60, 90, 120, 180, 300)), draw.choice((2, 3, 4, 6, 8, 12, 24, 48))
    mtbf_s = 3600 * mtbf_h
    best_s = math.sqrt(2 * cost_s * mtbf_s)
    return Number(
        text=f"A checkpoint stops training for {cost_s} s, and something interrupts the job every {mtbf_h} hours on "
        "average, at random. After how much training should each checkpoint be taken, so that least time is lost? "
        "(First "
        "order: neglect failures during a checkpoint. The time to restart does not matter.)",
        answer=best_s,
        unit="s",
        rel=0.05,
        given={"cost_s": cost_s, "mtbf_s": mtbf_s},
        slips=(
            Slip(math.sqrt(cost_s * mtbf_s), "the 2 is missing: a failure costs half an interval on average"),
            Slip(math.sqrt(2 * cost_s * mtbf_h), "hours and seconds are mixed: bring both to seconds"),
            Slip(mtbf_s / 2, "that is half the MTBF: the cost of a checkpoint is left out"),
            Slip(2 * cost_s * mtbf_s, "the root is missing"),
        ),
        why=f"sqrt(2 x {cost_s} s x {mtbf_s:,} s) = {best_s:,.0f} s.",
    )


@template(
    level=2,
    seconds=75,
    section="09.7",
    rule="Time lost: C / T for checkpoints every T, + (T / 2 + restart) / MTBF for failures.",
    source=YOUNG,
)
def time_lost(draw: random.Random) -> Number:
    cost_s, every_min = draw.choice((10, 30, 60, 120)), draw.choice((10, 15, 20, 30, 60))
    mtbf_h, restart_min = draw.choice((3, 4, 6, 8, 12)), draw.choice((3, 5, 10, 15))
    saving, again = cost_s / (60 * every_min), every_min / 2 / (60 * mtbf_h)
    starting = restart_min / (60 * mtbf_h)
    return Number(
        text=f"Every {every_min} minutes of training a checkpoint is written, for which training stops {cost_s} s. "
        f"The job "
        f"fails every {mtbf_h} hours on average, at random times; each time {restart_min} minutes go by before it "
        f"trains "
        "again, from the last checkpoint. What percentage of training time do checkpoints, restarts and work done "
        "twice "
        "add? (First order: add the three.)",
        answer=100 * (saving + again + starting),
        unit="%",
        rel=0.05,
        given={"cost_s": cost_s, "every_s": 60 * every_min, "mtbf_s": 3600 * mtbf_h, "restart_s": 60 * restart_min},
        slips=(
            Slip(100 * saving, "that is the checkpoints alone"),
            Slip(100 * (saving + again), "the time to restart is missing"),
            Slip(100 * (saving + starting), "what was trained since the last checkpoint is lost, and done again"),
            Slip(100 * (saving + 2 * again + starting), "on average half an interval is lost, not all of it"),
            Slip(100 * (again + starting), "writing checkpoints stops training too"),
        ),
        why=f"{100 * saving:.2f} % ({cost_s} s in {every_min} min) + {100 * again:.2f} % ({every_min / 2:g} min in "
        f"{mtbf_h} h) + {100 * starting:.2f} % ({restart_min} min in {mtbf_h} h).",
    )


@template(
    level=1,
    seconds=45,
    section="09.6",
    rule="Failures add up: the MTBF of a job is that of one GPU divided by their number (Llama 3: 3.1 h on 16,384).",
    source=LLAMA3,
)
def mtbf_of_a_job(draw: random.Random) -> Number:
    failures, days, of = 419, 54, 16384
    gpus, asked = draw.choice((256, 512, 1024, 2048, 4096, 8192, 32768)), draw.choice(("time", "count"))
    job_days = draw.choice((10, 30, 60, 90))
    one_h = days * 24 / failures
    began = (
        f"The training of Llama 3 405B had {failures} unexpected interruptions in {days} days, on {of:,} GPUs. At the "
        "same rate per GPU, "
    )
    if asked == "time":
        return Number(
            text=f"{began}what is the mean time between interruptions of a job on {gpus:,} GPUs?",
            answer=3600 * one_h * of / gpus,
            unit="s",
            rel=0.03,
            given={"failures": failures, "days": days, "of": of, "gpus": gpus, "job_days": 0},
            slips=(
                Slip(3600 * one_h, f"that is the time on {of:,} GPUs"),
                Slip(3600 * one_h * gpus / of, "the wrong way round: more GPUs fail more often"),
                Slip(150 * one_h * of / gpus, "days and hours are mixed"),
            ),
            why=f"{days} x 24 h / {failures} = {one_h:.2f} h on {of:,} GPUs; times {of:,} / {gpus:,}.",
        )
    expected = failures * job_days / days * gpus / of
    return Number(
        text=f"{began}how many interruptions does a job of {job_days} days on {gpus:,} GPUs expect?",
        answer=expected,
        unit="interruptions",
        rel=0.05,
        given={"failures": failures, "days": days, "of": of, "gpus": gpus, "job_days": job_days},
        slips=(
            Slip(failures * job_days / days, f"that is on {of:,} GPUs"),
            Slip(failures * gpus / of, f"that is in {days} days"),
            Slip(failures * job_days / days * of / gpus, "the wrong way round: more GPUs fail more often"),
        ),
        why=f"{failures} x {job_days} / {days} x {gpus:,} / {of:,} = {expected:.3g}.",
    )


@template(
    level=2,
    seconds=60,
    section="09.7",
    rule="Sharded checkpoint: all ranks write at once; the slower of each node's link and the file system decides.",
)
def seconds_to_write(draw: random.Random) -> Number:
    name, model = a_model(draw, *MODELS)
    nodes = draw.choice((8, 16, 32, 64))
    node_gb_s, total_gb_s = draw.choice((1, 2, 5)), draw.choice((20, 40, 100))
    total = 12 * model.param_count
    by_nodes_s, by_files_s = total / (nodes * node_gb_s * 1e9), total / (total_gb_s * 1e9)
    return Number(
        text=f"{name} ({billions(model.param_count)} parameters, 12 B each in a checkpoint) is trained on {nodes} "
        f"nodes "
        f"of 8 GPUs and saved sharded, all ranks at once. A node writes at most {node_gb_s} GB/s, the shared file "
        f"system "
        f"takes at most {total_gb_s} GB/s. How long does a save take at least?",
        answer=max(by_nodes_s, by_files_s),
        unit="s",
        given={"model": name, "nodes": nodes, "node_gb_s": node_gb_s, "total_gb_s": total_gb_s},
        slips=(
            Slip(total / (node_gb_s * 1e9), "that is one node writing everything: a full state dict"),
            Slip(min(by_nodes_s, by_files_s), "the slower of the two limits decides"),
            Slip(total / (8 * nodes * node_gb_s * 1e9), "that gives every GPU a node's bandwidth"),
        ),
        why=f"{written(total, 'bytes')} / min({nodes} x {node_gb_s}, {total_gb_s}) GB/s = {written(total, 'bytes')} / "
        f"{min(nodes * node_gb_s, total_gb_s)} GB/s.",
    )


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
        slips=(
            Slip(answer / tensor, "GPUs of a tensor-parallel group share a batch: only the groups are data parallel"),
            Slip(answer * micro, f"{micro} sequences at a time make a micro-batch"),
            Slip(answer * gpus // tensor, "the ranks work at the same time, each on its own sequences"),
            Slip(batch // seq_len, "that is the sequences of the global batch, of all ranks"),
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
    said = "in proportion to" if rule == "linear" else "with the square root of"
    keeps = {
        "global": "The global batch stays the same: each rank takes fewer sequences",
        "rank": "Each rank takes as many sequences per step as before",
    }[kept]
    return Number(
        text=f"A run on {before} GPUs has a learning rate of {rate:g}; you move it to {before * times} with FSDP2, "
        f"which "
        f"averages gradients. {keeps}. Your rule, for {'SGD' if rule == 'linear' else 'Adam'}: the rate goes {said} "
        f"the "
        "batch that a step sees. Which learning rate do you set?",
        answer=answer,
        unit="",
        given={"rate": rate, "before": before, "after": before * times, "rule": rule, "kept": kept},
        slips=(
            Slip(rate * times, "the number of GPUs does not matter by itself: gradients are averaged"),
            Slip(rate * math.sqrt(times), "apply the rule that was given, to the global batch"),
            Slip(rate, "the global batch grows with the ranks here, and the rule goes by it"),
            Slip(rate / times, "a larger batch has less noise: it is no reason for a smaller rate"),
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
        slips=(
            Slip(most / sum(norms), "norms of shards do not add up: their squares do"),
            Slip(most / sum(n * n for n in norms), "the root of the sum of squares is missing"),
            Slip(most / max(norms), "that is the largest shard's norm: the gradient has all shards"),
            Slip(4 * most / sum(norms), "the norm of the whole is no mean of the shards' norms"),
            Slip(most / math.sqrt(sum(n * n for n in norms) / 4), "squares are added over the ranks, not averaged"),
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
    slips: tuple[Slip, ...]
    if asked == "factor":
        text = "Each sums the losses of its tokens and multiplies by a factor before backward; FSDP averages "
        "gradients over the ranks. Which factor gives the gradient of the mean over all tokens?"
        answer = 4 / total
        slips = (
            Slip(1 / total, "FSDP divides by the number of ranks once more: multiply by it first"),
            Slip(1 / mine, "that makes a mean of means, in which tokens of short batches count more"),
            Slip(4 / mine, "all ranks must divide by the tokens of all ranks"),
        )
        why = f"4 / ({' + '.join(f'{n:,}' for n in tokens)}) = 4 / {total:,}."
    else:
        text = (
            f"Each takes the mean loss of its own tokens, and FSDP averages gradients over the ranks. How many times "
            f"as "
            f"much does a token on rank {rank} count as it would in the mean over all tokens?"
        )
        answer = total / 4 / mine
        slips = (
            Slip(4 * mine / total, "the wrong way round: a token among few counts more"),
            Slip(total / mine, "the average over ranks gives each rank a quarter"),
            Slip(1, "that would be so if all ranks had as many tokens"),
            Slip(mine / total, "that is the share of this rank's tokens"),
        )
        why = f"1 / (4 x {mine:,}) in place of 1 / {total:,}."
    return Number(
        text=held + text,
        answer=answer,
        unit="" if asked == "factor" else "times",
        given={"tokens": tokens, "rank": rank, "asked": asked},
        slips=slips,
        why=why,
    )


def bf16(value: float) -> float:
    """The nearest bf16 number, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return float(struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0])


@template(
    level=2,
    seconds=60,
    section="08.2",
    rule="bf16 has 8 binary digits: an update below about 2^-9 (0.2 %) of a weight is always rounded away.",
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
        why=f"Above a power of two w the spacing is w / 128; an update must exceed half of it, 0.4 % of w: "
        f"{pairs[right_name][1]:g} is {100 * pairs[right_name][1] / pairs[right_name][0]:.2g} % of "
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
        slips=(
            Slip(2 * scale, f"at that {gradient:g} becomes {2 * scale * gradient:,.0f}: fp16 ends at 65,504"),
            Slip(scale / 2, "twice as much still fits"),
            Slip(65536, "that is the scale a GradScaler starts with, whatever the gradients"),
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
        slips=(
            Slip(65536 / 2 ** len(overflows), "it doubles after 2,000 good steps in a row"),
            Slip(65536 * 2.0 ** (steps // 2000 - len(overflows)), "an overflow starts the count of good steps anew"),
            Slip(65536 / 2, "each overflow halves the scale again"),
            Slip(65536, "an overflow halves the scale"),
        ),
        why=f"{len(overflows)} overflows: 65,536 / {2 ** len(overflows)}; then {good:,} good steps double it "
        f"{good // 2000} times.",
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
        slips=(
            Slip(over, "that many would be drawn twice with drop_last=False"),
            Slip(samples % ranks, "that is what does not divide; the ranks draw until all have as many"),
            Slip(0, "it is not so that each comes once: all ranks draw as many, so that no rank waits"),
        ),
        why=f"{samples:,} = {samples // ranks:,} x {ranks} + {samples % ranks}"
        + ("." if drop else f", so each rank draws {-(-samples // ranks):,}: {over} more than there are."),
    )


@template(
    level=2,
    seconds=60,
    section="09.5",
    rule="Save the samples seen, not batches or epochs of a rank: next = steps x global batch, whatever the ranks.",
)
def sample_after_a_resume(draw: random.Random) -> Number:
    before, after = draw.sample((4, 8, 16, 32), 2)
    micro, accumulated, step = draw.choice((2, 4)), draw.choice((1, 2, 4)), draw.choice((100, 250, 1000, 1200))
    rank = draw.randrange(1, after)
    batch = before * micro * accumulated
    answer = step * batch + rank * micro
    return Number(
        text=f"{before} ranks trained {step:,} steps of {accumulated} micro-batch{'es' * (accumulated > 1)} of {micro} "
        f"sequences per rank. A micro-batch takes the next sequences of the stream: rank 0 the first {micro}, rank 1 "
        f"the "
        f"next {micro}, and so on. Sequences are counted from 0. The run goes on with {after} ranks and "
        f"micro-batches of "
        f"{micro}. Which is the first sequence that rank {rank} must read?",
        answer=answer,
        unit="",
        rel=0,
        given={
            "before": before,
            "after": after,
            "micro": micro,
            "accumulated": accumulated,
            "step": step,
            "rank": rank,
        },
        slips=(
            Slip(step * after * micro * accumulated + rank * micro, "the steps so far were taken by the old ranks"),
            Slip(step * batch, "that is where rank 0 goes on"),
            Slip(step * batch + rank, f"each rank before this one takes {micro}"),
            Slip(step * before * micro + rank * micro, "a step has all its micro-batches"),
            Slip(step * micro * accumulated, "that is what one rank has read"),
        ),
        why=f"{step:,} x {before} x {micro} x {accumulated} = {step * batch:,} were read, and {rank} ranks x {micro} "
        f"come "
        "before.",
    )


@template(
    level=3,
    seconds=90,
    section="09.5",
    rule="Adam without its moments but with its step count: the first update is (1 - b1) / sqrt(1 - b2) x rate.",
    source="Kingma and Ba, Adam (2015), algorithm 1; torch.optim.Adam",
)
def update_without_moments(draw: random.Random) -> Number:
    rate, b1 = draw.choice((1e-4, 3e-4, 6e-4)), draw.choice((0.9, 0.9, 0.95))
    b2, counted = draw.choice((0.95, 0.99, 0.999)), draw.choice((True, True, False))
    answer = rate * ((1 - b1) / math.sqrt(1 - b2) if counted else 1)
    says = "the step count of 100,000 was restored" if counted else "the step count begins at 0 again"
    return Number(
        text=f"A run with Adam (betas {b1:g} and {b2:g}, rate {rate:g}, no weight decay) goes on from a checkpoint. "
        f"Adam's two moments were lost and are zero; {says}. How large is the first update of a weight, whatever its "
        "gradient? (Neglect epsilon.)",
        answer=answer,
        unit="",
        given={"rate": rate, "b1": b1, "b2": b2, "counted": counted},
        slips=(
            Slip(
                rate if counted else rate * (1 - b1) / math.sqrt(1 - b2),
                "that would need the bias correction of a first step, whose count is 1"
                if counted
                else "a count of 1 corrects the bias of both moments exactly",
            ),
            Slip(rate * (1 - b1), "the second moment begins at zero too"),
            Slip(rate * (1 - b1) / (1 - b2), "the update divides by the root of the second moment"),
        ),
        why=f"m = {1 - b1:.2g} g and v = {1 - b2:.2g} g^2; "
        + (
            "at this count the corrections are 1: m / sqrt(v)." if counted else "corrected by 1 - b1 and 1 - b2: g / g."
        ),
    )
