"""The defence: three questions that the simulator answers for the learner's own plan; and the plan, said in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec

from fsdp_sim import Plan, simulate
from fsdp_sim.learn.drill.design import Design, designs
from fsdp_sim.spec import Link
from fsdp_sim.viz import Table
from labs.experiments.capstone.choice import Choice
from labs.experiments.capstone.guess import Interval, checked

LIKE = "dense_70b"
"""The design question whose risks and first measurements a defence is listened to for."""
QUESTIONS = {
    "slow_link": "All links carry half as much. How many times as long does a step take?",
    "twice_gpus": "Twice as many GPUs, each with as many tokens as before. How many times as long does a step take?",
    "twice_tokens": "Twice as many sequences in each micro-batch. How many times the peak memory?",
}
CLOSE = 0.1
"""How far an answer may be from the simulator's."""


def truths(choice: Choice, plan: Plan) -> dict[str, float]:
    """What the simulator says to each question, as a factor of the plan as it is."""
    base, cluster = choice.simulate(plan), choice.cluster
    intra, inter = _half(cluster.intra_link), _half(cluster.inter_link)
    half = dataclasses.replace(cluster, intra=intra, inter=inter, bandwidth_gbps=None, latency_us=None)
    slow = simulate(choice.model, half, plan)
    more = simulate(choice.model, dataclasses.replace(cluster, gpus=2 * cluster.gpus), plan)
    large = choice.simulate(dataclasses.replace(plan, micro_batch=2 * plan.micro_batch))  # whether it fits or not
    return {
        "slow_link": slow.step_time_s / base.step_time_s,
        "twice_gpus": more.step_time_s / base.step_time_s,
        "twice_tokens": large.peak_memory_bytes / base.peak_memory_bytes,
    }


def _half(link: Link) -> Link:
    return dataclasses.replace(link, bytes_per_s=link.bytes_per_s / 2)


def defence(choice: Choice, plan: Plan, answers: Mapping[str, Interval]) -> Table:
    """Judge the answers: right where the interval holds the simulator's number, or comes within a tenth of it.

    Raises:
        ValueError: an answer that is missing or no interval.
    """
    if answers.keys() != QUESTIONS.keys():
        raise ValueError(f"you answer {', '.join(answers) or 'nothing'}; answer each of {', '.join(QUESTIONS)}")
    rows = []
    for name, truth in truths(choice, plan).items():
        low, high = checked(name, answers[name])
        right = low * (1 - CLOSE) <= truth <= high * (1 + CLOSE)
        rows.append((QUESTIONS[name], f"{low:g} to {high:g}", f"{truth:.2f}", "✓" if right else "✗"))
    return Table("your defence", ("question", "you", "the simulator", ""), tuple(rows))


def in_words(choice: Choice, said: str) -> Design:
    """The plan in the learner's words, reviewed as a design question is: numbers by simulation, risks by ear."""
    cluster, days = choice.cluster, choice.budget["days"]
    question = msgspec.structs.replace(
        designs()[LIKE], name="capstone", model=choice.model, gpu=cluster.gpu.name, gpus=cluster.gpus,
        inter=cluster.inter or "", days=0 if days == float("inf") else days,
        question=f"Train {choice.model.name} on {cluster.gpus} {cluster.gpu.name}.",
    )  # fmt: skip
    design = Design(question)
    design.say(said)
    return design
