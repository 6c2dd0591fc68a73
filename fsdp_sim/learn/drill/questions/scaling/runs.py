"""What a run takes: tokens, days, failures."""

from __future__ import annotations

import math
import random

from fsdp_sim.learn.drill.draws import a_gpu, a_model, billions
from fsdp_sim.learn.drill.question import Mistake, Number
from fsdp_sim.learn.drill.questions.scaling.common import DAY_S, HOUR_S
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written

FLOP = "6 FLOP per parameter and token: Kaplan et al. 2020, arXiv 2001.08361, section 2.1"


MFU = "MFU: Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B; peaks: fsdp_sim/spec/gpus.toml"


@template(
    level=1,
    seconds=75,
    section="14.2",
    rule="MFU = 6 x parameters x tokens/s per GPU / dense peak FLOP/s; recomputation is not counted.",
    source=f"{FLOP}; {MFU}",
)
def utilisation_of_tokens(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    gpu, parameters = a_gpu(draw, "A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM-180GB"), model.param_count
    peak = gpu.peak_flops("bf16")
    exact = draw.uniform(0.25, 0.55) * peak / 6 / parameters
    tokens = round(exact, 1 - int(math.log10(exact)))
    checkpointed = draw.choice((True, False))
    answer = 100 * 6 * parameters * tokens / peak
    also = ", with full activation checkpointing" if checkpointed else ""
    return Number(
        text=f"{name} ({billions(parameters)} parameters) trains at {tokens:,.0f} tokens/s per GPU{also}, on GPUs of "
        f"{written(peak, 'FLOP/s')} dense bf16 peak. What is the model FLOPs utilisation (MFU)? Leave attention's own "
        "FLOPs out.",
        answer=answer,
        unit="%",
        given={"model": name, "tokens": tokens, "peak": peak},
        mistakes=(
            Mistake(answer / 3, "2 FLOP per parameter and token are forward alone; backward has 4 more"),
            Mistake(answer * 4 / 3, "8 counts the recomputation: that is hardware utilisation, not MFU"),
            Mistake(answer / 2, "that divides by the peak with sparsity, twice the dense one"),
            Mistake(answer * 2 / 3, "4 FLOP are backward alone"),
        ),
        why=f"6 x {billions(parameters)} x {tokens:,.0f} = {written(answer / 100 * peak, 'FLOP/s')} of "
        f"{written(peak, 'FLOP/s')}.",
    )


@template(
    level=2,
    seconds=90,
    section="14.3",
    rule="Days of a run = 6 x parameters x tokens / (GPUs x peak x MFU) / 86,400 s.",
    source=f"{FLOP}; {MFU}",
)
def days_of_a_run(draw: random.Random) -> Number:
    name, model = a_model(draw, "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
    gpu, gpus = a_gpu(draw, "A100-SXM-80GB", "H100-SXM-80GB"), draw.choice((256, 512, 1024, 2048))
    tokens, share = draw.choice((1, 2, 5, 15)), draw.choice((30, 35, 40, 45))
    peak, parameters = gpu.peak_flops("bf16"), model.param_count
    answer = 6 * parameters * tokens * 1e12 / (gpus * peak * share / 100) / DAY_S
    return Number(
        text=f"{name} ({billions(parameters)} parameters) is to see {tokens} trillion tokens on {gpus:,} GPUs of "
        f"{written(peak, 'FLOP/s')} (dense bf16) at an MFU of {share}%. How many days is that, if nothing fails?",
        answer=answer,
        unit="days",
        rel=0.03,
        given={"model": name, "gpus": gpus, "tokens": tokens, "share": share, "peak": peak},
        mistakes=(
            Mistake(answer / 3, "2 FLOP per parameter and token are forward alone"),
            Mistake(answer * share / 100, "that is at the full peak: divide by the utilisation"),
            Mistake(answer * (share / 100) ** 2, "a lower utilisation makes it longer: divide by it"),
            Mistake(answer * 24, "those are hours"),
            Mistake(answer * gpus, "that is on one GPU"),
        ),
        why=f"6 x {billions(parameters)} x {tokens} trillion / ({gpus:,} x {written(peak, 'FLOP/s')} x {share / 100}) "
        f"= {written(answer * DAY_S, 's')}, over 86,400 s.",
    )


@template(
    level=1,
    seconds=60,
    section="10.5",
    rule="Weak scaling efficiency: tokens/s per GPU on many GPUs over that on few, with the same work per GPU.",
)
def weak_scaling(draw: random.Random) -> Number:
    few, more = draw.choice((8, 16, 64)), draw.choice((128, 256, 512, 1024))
    before = few * draw.randrange(2000, 14000, 500)
    after = round(before * more / few * draw.uniform(0.55, 0.93) / 1e4) * 10**4
    answer = 100 * after / before * few / more
    return Number(
        text=f"The same micro-batch per GPU: {few} GPUs train {before / 1e3:,.0f} thousand tokens/s in all, {more:,} "
        f"GPUs {after / 1e6:.2f} million. What is the weak scaling efficiency?",
        answer=answer,
        unit="%",
        given={"few": few, "more": more, "before": before, "after": after},
        mistakes=(
            Mistake(100 * after / before, "that is the speed-up; divide it by how many times more GPUs there are"),
            Mistake(1e4 / answer, "that is the other way round: more than all is not possible here"),
            Mistake(100 - answer, "that is what is lost"),
            Mistake(100 * few / more, "that compares the GPUs alone"),
        ),
        why=f"{before / few:,.0f} tokens/s per GPU before, {after / more:,.0f} after.",
    )


@template(
    level=2,
    seconds=90,
    section="10.5",
    rule="Strong scaling: the global batch stays, compute per GPU shrinks, exposed communication does not.",
)
def strong_scaling(draw: random.Random) -> Number:
    few, factor = draw.choice((8, 16, 32, 64)), draw.choice((2, 4, 8))
    compute, exposed = draw.choice((800, 1200, 1600, 2400)), draw.choice((50, 80, 100, 150))
    after = compute / factor + exposed
    answer = 100 * (compute + exposed) / (factor * after)
    return Number(
        text=f"On {few} GPUs a step computes for {compute} ms and waits for {exposed} ms of exposed communication. On "
        f"{factor * few} GPUs the global batch stays the same, compute divides evenly, and the exposed {exposed} ms "
        f"stay. What is the strong scaling efficiency from {few} to {factor * few} GPUs?",
        answer=answer,
        unit="%",
        given={"few": few, "factor": factor, "compute": compute, "exposed": exposed},
        mistakes=(
            Mistake(
                answer * factor, "that is the speed-up; efficiency divides it by how many times more GPUs there are"
            ),
            Mistake(100.0, "only compute divides; what is exposed stays as long as it was"),
            Mistake(100 * (compute / factor) / after, "that is the share of compute in the new step"),
        ),
        why=f"{compute + exposed} ms before; {compute}/{factor} + {exposed} = {after:.0f} ms after, where {factor} "
        f"times the GPUs should take {(compute + exposed) / factor:g} ms.",
    )


@template(
    level=1,
    seconds=60,
    section="10.6",
    rule="One rank x slower makes every step x longer: all others wait, and x / (1 + x) of the cluster is lost.",
)
def one_slow_rank(draw: random.Random) -> Number:
    gpus, slower = draw.choice((8, 64, 512, 1024, 4096)), draw.choice((10, 15, 20, 25, 30, 50))
    answer = 100 * (1 - 1 / (1 + slower / 100))
    return Number(
        text=f"One of {gpus:,} ranks takes {slower}% longer for every computation. The step is bound by compute, FSDP "
        "reduces in every step. By how many per cent do the tokens per second of the whole job fall?",
        answer=answer,
        unit="%",
        given={"gpus": gpus, "slower": slower},
        mistakes=(
            Mistake(slower, "that is how much longer a step takes; of the rate 1 / (1 + x) is left"),
            Mistake(slower / gpus, "the others cannot go on without it: every collective waits for its last rank"),
            Mistake(answer / gpus, "the others cannot go on without it: every collective waits for its last rank"),
            Mistake(100 / gpus, "that is the rank's share of the GPUs, as if it did nothing and nobody waited"),
        ),
        why=f"Every step takes {1 + slower / 100:.2f} times as long for all: 1 - 1/{1 + slower / 100:.2f}.",
    )


@template(
    level=2,
    seconds=75,
    section="08.7",
    rule="Tokens per step = GPUs x micro-batch x sequence x accumulation: every GPU of FSDP and HSDP has its own rows.",
    source="torch FSDP2: every rank of the mesh (replicate, shard) computes on its own input",
)
def steps_of_a_run(draw: random.Random) -> Number:
    gpus, rows, length = draw.choice((64, 128, 256, 512)), draw.choice((2, 4, 8)), draw.choice((2048, 4096, 8192))
    accumulated, tokens, hsdp = draw.choice((2, 4, 8)), draw.choice((0.3, 1, 2)), draw.choice((True, False))
    per_step = gpus * rows * length * accumulated
    answer = tokens * 1e12 / per_step
    how = f"HSDP with {gpus // 8} copies of 8 shards" if hsdp else "FSDP over all of them"
    mistakes = [
        Mistake(answer * accumulated, "a step takes all accumulated micro-batches"),
        Mistake(answer * gpus, "that is one GPU's share; every GPU has rows of its own"),
        Mistake(answer * length, "count tokens: every sequence has its length"),
    ]
    if hsdp:
        mistakes.append(
            Mistake(answer * 8, "the 8 GPUs that share one copy have different rows: they share parameters, not data")
        )
    return Number(
        text=f"{tokens:g} trillion tokens on {gpus} GPUs, {how}: {rows} sequences of {length:,} tokens per GPU and "
        f"micro-batch, {accumulated} micro-batches per optimizer step. How many optimizer steps is that?",
        answer=answer,
        unit="steps",
        given={
            "gpus": gpus,
            "rows": rows,
            "length": length,
            "accumulated": accumulated,
            "tokens": tokens,
            "hsdp": hsdp,
        },
        mistakes=tuple(mistakes),
        why=f"A step takes {gpus} x {rows} x {length:,} x {accumulated} = {per_step / 1e6:.3g} million tokens.",
    )


@template(
    level=2,
    seconds=60,
    section="14.4",
    rule="Pipeline bubble: (p - 1) / (m + p - 1) of the time for p stages and m micro-batches.",
    source="Huang et al. 2019 (GPipe), arXiv 1811.06965, section 2.3",
)
def pipeline_bubble(draw: random.Random) -> Number:
    stages, micro_batches = draw.choice((2, 4, 8, 16)), draw.choice((4, 8, 16, 32, 64))
    answer = 100 * (stages - 1) / (micro_batches + stages - 1)
    return Number(
        text=f"Beyond FSDP: a pipeline of {stages} equal stages takes {micro_batches} micro-batches per step, all "
        "forwards and then all backwards, with no interleaving and free sends. What share of the step is each "
        "stage idle (the bubble)?",
        answer=answer,
        unit="%",
        given={"stages": stages, "micro_batches": micro_batches},
        mistakes=(
            Mistake(100 * (stages - 1) / micro_batches, "that is the idle time over the busy time, not over the whole"),
            Mistake(
                100 * stages / (micro_batches + stages),
                "the first micro-batch passes p - 1 stages before the last works",
            ),
            Mistake(100 / stages, "that is the share of one stage with one micro-batch"),
            Mistake(100 - answer, "that is when it works"),
        ),
        why=f"{stages - 1} of {micro_batches} + {stages - 1} slots, in forward as in backward.",
    )


@template(
    level=2,
    seconds=75,
    section="14.3",
    rule="Failures per day grow with the GPUs: mean time between failures of a job = that of one GPU / GPUs.",
    source="Grattafiori et al. 2024 (Llama 3), arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions in 54 "
    "days on 16,384 GPUs",
)
def time_between_failures(draw: random.Random) -> Number:
    days, failures, gpus, wanted = 54, 419, 16_384, draw.choice((512, 1024, 2048, 4096, 8192, 32_768, 65_536))
    once_s = days * DAY_S / failures
    answer = once_s * gpus / wanted
    return Number(
        text=f"The training of Llama 3 405B on {gpus:,} GPUs counted {failures} unexpected interruptions in {days} "
        f"days. With the same rate per GPU, how long runs a job of {wanted:,} GPUs between two of them, on average?",
        answer=answer,
        unit="s",
        rel=0.03,
        given={"days": days, "failures": failures, "gpus": gpus, "wanted": wanted},
        mistakes=(
            Mistake(once_s, "that is with their number of GPUs"),
            Mistake(once_s * wanted / gpus, "more GPUs fail more often: divide by their number"),
            Mistake(days * DAY_S * gpus / wanted, "divide by the number of interruptions"),
            Mistake(days * DAY_S * gpus / failures, "that is the time of a single GPU"),
        ),
        why=f"{days} days / {failures} = {once_s / HOUR_S:.2f} h on {gpus:,} GPUs; x {gpus:,} / {wanted:,}.",
    )


@template(
    level=3,
    seconds=120,
    section="14.3",
    rule="Time lost: save / interval for saving, and per failure half an interval of work plus the restart.",
    source="first order, as in Young 1974, CACM 17(9)",
)
def goodput(draw: random.Random) -> Number:
    days, interval, save = draw.choice((10, 20, 30)), draw.choice((20, 30, 60, 120)), draw.choice((15, 30, 60, 90))
    failures, restart = days * draw.choice((1, 2, 4, 6)), draw.choice((10, 15, 20, 30))
    saving = save / 60 / interval
    failing = failures * (interval / 2 + restart) / (days * 24 * 60)
    answer = 100 * (1 - saving - failing)
    return Number(
        text=f"A job of {days} days stops {save} s for a checkpoint every {interval} minutes of wall time. {failures} "
        f"failures hit it; each costs {restart} minutes of restart and, on average, half of the work between two "
        "checkpoints. Which share of the time is training that counts (goodput)?",
        answer=answer,
        unit="%",
        rel=0.01,
        given={"days": days, "interval": interval, "save": save, "failures": failures, "restart": restart},
        mistakes=(
            Mistake(100 * (1 - saving), "you forgot the failures"),
            Mistake(100 * (1 - failing), "you forgot the time of saving"),
            Mistake(
                100 * (1 - saving - failures * restart / (days * 1440)), "work since the last checkpoint is lost too"
            ),
            Mistake(
                100 * (1 - saving - failures * (interval + restart) / (days * 1440)),
                "a failure comes halfway between two checkpoints on average, not at the end",
            ),
            Mistake(100 - answer, "that is what is lost"),
        ),
        why=f"Saving {100 * saving:.2g}%; failures {failures} x ({interval / 2:g} + {restart}) min of {days * 1440:,} "
        f"min = {100 * failing:.2g}%.",
    )
