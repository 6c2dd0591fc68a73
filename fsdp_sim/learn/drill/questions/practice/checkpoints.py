"""Checkpoints, what they cost, and what a resumed run must find in them."""

from __future__ import annotations

import math
import random

from fsdp_sim.learn.drill.draws import a_model, billions
from fsdp_sim.learn.drill.question import Mistake, Number
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written

MODELS = ("llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b", "gpt3-175b", "llama3-405b")


YOUNG = "Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974)"


LLAMA3 = "Grattafiori et al., The Llama 3 Herd of Models (2024), section 3.3.4: 419 unexpected interruptions in 54 days"


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
        mistakes=(
            Mistake(answer * 16 / each, "gradients are not saved: the next step makes new ones"),
            Mistake(answer * 4 / each, "that is 4 B per parameter: the fp32 weights alone"),
            Mistake(answer * 14 / each, "no bf16 copy is saved: it is made from the fp32 shards in each gather"),
            Mistake(answer * 6 / each, "Adam's moments are fp32 too, as the parameters are that they belong to"),
            Mistake(each * parameters / ranks, "that is what one rank writes"),
            Mistake(each * parameters, "that is everything: each rank writes its shards"),
        ),
        why=f"{each} B x {billions(parameters)} = {written(each * parameters, 'bytes')}"
        + (f", a part of 1/{ranks} from each rank." if kind == "the file of one rank" else "."),
    )


@template(
    level=2,
    seconds=60,
    section="14.3",
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
        mistakes=(
            Mistake(math.sqrt(cost_s * mtbf_s), "the 2 is missing: a failure costs half an interval on average"),
            Mistake(math.sqrt(2 * cost_s * mtbf_h), "hours and seconds are mixed: bring both to seconds"),
            Mistake(mtbf_s / 2, "that is half the MTBF: the cost of a checkpoint is left out"),
            Mistake(2 * cost_s * mtbf_s, "the root is missing"),
        ),
        why=f"sqrt(2 x {cost_s} s x {mtbf_s:,} s) = {best_s:,.0f} s.",
    )


@template(
    level=2,
    seconds=75,
    section="14.3",
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
        mistakes=(
            Mistake(100 * saving, "that is the checkpoints alone"),
            Mistake(100 * (saving + again), "the time to restart is missing"),
            Mistake(100 * (saving + starting), "what was trained since the last checkpoint is lost, and done again"),
            Mistake(100 * (saving + 2 * again + starting), "on average half an interval is lost, not all of it"),
            Mistake(100 * (again + starting), "writing checkpoints stops training too"),
        ),
        why=f"{100 * saving:.2f}% ({cost_s} s in {every_min} min) + {100 * again:.2f}% ({every_min / 2:g} min in "
        f"{mtbf_h} h) + {100 * starting:.2f}% ({restart_min} min in {mtbf_h} h).",
    )


@template(
    level=1,
    seconds=45,
    section="14.3",
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
            mistakes=(
                Mistake(3600 * one_h, f"that is the time on {of:,} GPUs"),
                Mistake(3600 * one_h * gpus / of, "the wrong way round: more GPUs fail more often"),
                Mistake(150 * one_h * of / gpus, "days and hours are mixed"),
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
        mistakes=(
            Mistake(failures * job_days / days, f"that is on {of:,} GPUs"),
            Mistake(failures * gpus / of, f"that is in {days} days"),
            Mistake(failures * job_days / days * of / gpus, "the wrong way round: more GPUs fail more often"),
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
        mistakes=(
            Mistake(total / (node_gb_s * 1e9), "that is one node writing everything: a full state dict"),
            Mistake(min(by_nodes_s, by_files_s), "the slower of the two limits decides"),
            Mistake(total / (8 * nodes * node_gb_s * 1e9), "that gives every GPU a node's bandwidth"),
        ),
        why=f"{written(total, 'bytes')} / min({nodes} x {node_gb_s}, {total_gb_s}) GB/s = {written(total, 'bytes')} / "
        f"{min(nodes * node_gb_s, total_gb_s)} GB/s.",
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
        mistakes=(
            Mistake(step * after * micro * accumulated + rank * micro, "the steps so far were taken by the old ranks"),
            Mistake(step * batch, "that is where rank 0 goes on"),
            Mistake(step * batch + rank, f"each rank before this one takes {micro}"),
            Mistake(step * before * micro + rank * micro, "a step has all its micro-batches"),
            Mistake(step * micro * accumulated, "that is what one rank has read"),
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
        mistakes=(
            Mistake(
                rate if counted else rate * (1 - b1) / math.sqrt(1 - b2),
                "that would need the bias correction of a first step, whose count is 1"
                if counted
                else "a count of 1 corrects the bias of both moments exactly",
            ),
            Mistake(rate * (1 - b1), "the second moment begins at zero too"),
            Mistake(rate * (1 - b1) / (1 - b2), "the update divides by the root of the second moment"),
        ),
        why=f"m = {1 - b1:.2g} g and v = {1 - b2:.2g} g^2; "
        + (
            "at this count the corrections are 1: m / sqrt(v)." if counted else "corrected by 1 - b1 and 1 - b2: g / g."
        ),
    )
