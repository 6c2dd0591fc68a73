"""What the explorer says: one sentence about the step, one about memory, why, and what changes between two plans."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from fsdp_sim.diagnose import Explanation, between_steps
from fsdp_sim.forms import FormState
from fsdp_sim.requests import category_name, does_not_fit, on_the_edge
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.words import human_bytes, human_ms, human_rate

RED, GREEN = "#C0392B", "#1E8449"


def headline(sim: Simulation) -> str:
    """How long the step takes, and how much of it is communication that nothing hides."""
    step_s, exposed_s = sim.step_time_s, sim.exposed_comm_s
    share = exposed_s / step_s if step_s else 0.0
    hidden = sim.exposure.overlap
    if not sim.exposure.comm_s:
        comm = "nothing is communicated"
    elif exposed_s < 1e-6 * step_s:
        comm = "all communication is hidden behind compute"
    else:
        comm = f"{human_ms(exposed_s)} ({share:.0%}) is exposed communication, and {hidden:.0%} is hidden"
    loop_s = sim.between_steps_s - sim.checkpoint_s
    between = (
        f" ({human_ms(sim.between_steps_s)} of it between steps, for "
        f"{between_steps(loop_s, sim.checkpoint_s, clips=sim.plan.clip_grad_norm)})"
        if sim.between_steps_s
        else ""
    )
    low, high = map(human_ms, sim.step_time_interval_s)
    return (
        f"A step takes {human_ms(step_s)}{between}, four times in five {low} to {high}; {comm}. That is "
        f"{human_rate(sim.tokens_per_s_per_gpu)} tokens/s per GPU at {sim.mfu:.0%} MFU."
    )


def memory(sim: Simulation) -> str:
    """Whether it fits, and what most of the memory is."""
    if not sim.fits:
        return f"{does_not_fit(sim)}."
    if sim.fit is Fit.EDGE:
        return f"{on_the_edge(sim)}."
    peak, limit = sim.peak_memory_bytes, sim.memory_limit_bytes
    (category, n_bytes), *_ = sim.memory.peak_by_category.items()
    return (
        f"Memory peaks at {human_bytes(peak)}, {peak / limit:.0%} of the {human_bytes(limit)} that a process can use; "
        f"most of it is {category_name(str(category), sim.plan.api)} ({human_bytes(n_bytes)})."
    )


def because(why: Explanation) -> str:
    """What most of the waiting is for; where compute hardly waits, what the step's time consists of."""
    worst = why.culprits[0] if why.culprits else None
    if worst is None or worst.idle_s < 1e-3 * why.step_time_s:
        return f"Compute hardly waits. {why.gains_sentence}"
    return f"{worst.sentence} {why.gains_sentence}"


def remarks(state: FormState, sim: Simulation) -> list[str]:
    """What a reader may not expect: settings that have no effect here, and choices that were made for him."""
    cluster = state.cluster
    found = state.notes_of(sim)
    if state.skews and state.cluster.gpus > 1:
        found.append("What is drawn is rank 0: where nothing runs on it, it waits for a slower rank.")
    if cluster.gpus == 1:
        found.append("One GPU: there is nothing to shard, and nobody to talk to.")
    return found


def finding(state: FormState, sim: Simulation, why: Explanation) -> str:
    """All of it as plain text: the text alternative of the figure."""
    return "\n\n".join([headline(sim), memory(sim), because(why), *remarks(state, sim)])


def words_html(state: FormState, sim: Simulation, why: Explanation) -> str:
    """All of it as HTML."""
    red = "" if sim.fit is Fit.FITS else f" style='color:{RED};font-weight:600'"
    lines = [f"<b>{escape(headline(sim))}</b>", f"<span{red}>{escape(memory(sim))}</span>", escape(because(why))]
    lines += [f"<i>{escape(remark)}</i>" for remark in remarks(state, sim)]
    return _status(lines)


def refused_html(message: str, shown: FormState | None) -> str:
    """What is impossible, the remedy, and which plan the figure still shows."""
    still = f"The figure still shows the last plan that works: <code>{escape(shown.line)}</code>" if shown else ""
    return _status([f"<b style='color:{RED}'>Impossible: {escape(message)}.</b>", still])


def _status(lines: Iterable[str]) -> str:
    text = "<br>".join(line for line in lines if line)
    return f"<div role='status' aria-live='polite' style='line-height:1.45;max-width:52rem'>{text}</div>"


class Quantity(NamedTuple):
    """A number of a plan: its name, how it is read, and itself."""

    name: str
    text: str
    number: float


def quantities(sim: Simulation) -> tuple[Quantity, ...]:
    """The numbers that a plan is judged by."""
    peak, limit = sim.peak_memory_bytes, sim.memory_limit_bytes
    return (
        Quantity("step", human_ms(sim.step_time_s), sim.step_time_s),
        Quantity("exposed communication", human_ms(sim.exposed_comm_s), sim.exposed_comm_s),
        Quantity("tokens/s per GPU", human_rate(sim.tokens_per_s_per_gpu), sim.tokens_per_s_per_gpu),
        Quantity("MFU", f"{sim.mfu:.1%}", sim.mfu),
        Quantity("peak memory", human_bytes(peak), peak),
        Quantity("a process can use", human_bytes(limit), limit),
    )


def since_a(now: Simulation, pinned: Simulation) -> list[str]:
    """Of each number of `quantities` what it is for a pinned plan A, and by how much it has changed."""
    found = []
    for (_, _, number), (_, was, a) in zip(quantities(now), quantities(pinned), strict=True):
        found.append(f"A: {was}, {'the same' if a == number else f'{number / a - 1:+.1%}' if a else 'new'}")
    return found


def numbers_html(now: Simulation, pinned: Simulation | None, reached: Iterable[tuple[str, bool]] = ()) -> str:
    """The numbers of the present plan, under each what a pinned plan A has; and how far one is with a goal."""
    small = "font-size:12px;opacity:.8;white-space:nowrap"
    tiles = []
    since = since_a(now, pinned) if pinned is not None else ()
    for place, (name, text, _) in enumerate(quantities(now)):
        before = f"<div style='{small}'>{since[place]}</div>" if since else ""
        red = f";color:{RED}" if name == "peak memory" and now.fit is not Fit.FITS else ""
        tiles.append(f"<div><div style='{small}'>{name}</div><b style='font-size:17px{red}'>{text}</b>{before}</div>")
    row = "display:flex;flex-wrap:wrap;gap:2px 26px;line-height:1.35"
    goal = "".join(
        f"<span style='white-space:nowrap'><b style='color:{GREEN if holds else RED}'>{'✓' if holds else '✗'}</b> "
        f"{escape(text)}</span>"
        for text, holds in reached
    )
    goal = goal and f"<div role='status' style='{row};font-size:13px;margin-top:4px'><b>goal</b>{goal}</div>"
    return f"<div role='group' aria-label='numbers of the plan' style='{row}'>{''.join(tiles)}</div>{goal}"


def short(line: str, most: int = 80) -> str:
    """A line, cut to where it is drawn."""
    return line if len(line) <= most else line[: most - 1] + "…"
