"""The explorer in a page: its controls as data, and what there is to see of a plan, drawn as in a notebook."""

from __future__ import annotations

import math
from array import array
from functools import lru_cache
from typing import Any, NamedTuple

from fsdp_sim.forms import FormState, python_code
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.viz import theme
from fsdp_sim.viz.explorer import composed, drawing, words
from fsdp_sim.viz.explorer.dependencies_of import Operations
from fsdp_sim.viz.explorer.scene import Scene, scene
from fsdp_sim.viz.explorer.settings import CONTROLLED, SETTING, SETTINGS, Control, api_of, chosen, words_of
from fsdp_sim.viz.explorer.starts import GOALS, PRESETS

FIRST = PRESETS["Llama-3-8B on 64 H100"]
NEEDS_NUMPY = ("straggler", "slow_node", "jitter")
"""Words that make ranks differ, which takes arrays over all of them; a page has none."""
AT_HAND = (
    "model", "gpu", "api", "gpus", "bandwidth_gbps", "micro_batch", "seq_len", "forward_prefetch:fsdp2",
    "reshard_after_forward", "precision", "activation_checkpointing",
)  # fmt: skip
"""The controls that are in view; the others unfold."""


class Shown(NamedTuple):
    """A plan that works, and what there is to see of it."""

    state: FormState
    sim: Simulation
    seen: Scene
    operations: Operations


def begin(argument: dict[str, Any]) -> dict[str, Any]:
    """What the page has before Python is there: starts, goals, templates, and the first plan with its controls."""
    return {
        "starts": {name: FormState.read(line).line for name, line in PRESETS.items()},
        "goals": {name: FormState.read(goal.start).line for name, goal in GOALS.items()},
        "templates": theme.TEMPLATES,
        "config": theme.CONFIG | {"displayModeBar": False},
        "first": see({"line": FIRST}) | say({"line": FIRST}),
    }


def see(argument: dict[str, Any]) -> dict[str, Any]:
    """The figure of a plan and its numbers. What there is to say of it takes as long again: `say` says it afterwards.

    Args:
        argument: ``line``: the plan in words. ``moves``: of controls that were moved from there, by key.
            ``ends``: of the axes (milliseconds, GiB) as they are, to be kept where what is shown still fits.
            ``window``: the milliseconds that a reader has zoomed to. ``pinned``: a plan A to compare with, in words.
            ``goal``: what is to be reached. Of an operation to look at one of: ``operation``, as an answer names it;
            ``number``, in the order of issue, from 1; ``clicked``: trace and beginning of a bar.

    Raises:
        ValueError: the line cannot be read, or the plan is impossible or needs more than a page has.
    """
    state = FormState.read(argument["line"])
    for key, option in (argument.get("moves") or {}).items():
        state = moved(state, SETTING[key], option)
    now = shown(state.line)
    a = shown(FormState.read(argument["pinned"]).line) if argument.get("pinned") else None
    pinned = a.seen if a else None
    before = argument.get("ends") or (0.0, 0.0)
    ends = composed.ends(tuple(before), now.seen, pinned)
    asked = argument.get("window") if ends[0] == before[0] else None
    window = (float(asked[0]), float(asked[1])) if asked else (0.0, ends[0])
    row = operation(now, argument, window)
    choice = (now.operations, now.operations.choose(row)) if row is not None else None
    changes = composed.changes(now.seen, window, pinned, choice)
    drawn = [n for n, change in enumerate(changes) if change["visible"]]
    traces = composed.traces(pinned is not None)
    layout = composed.layout(None, now.seen, window, ends[1], pinned, a.state.line if a else "")
    del layout["template"]  # the page's, light or dark
    goal = GOALS.get(argument.get("goal") or "")
    since = words.since_a(now.sim, a.sim) if a else [""] * len(words.quantities(now.sim))
    rows = now.operations.rows
    return {
        "line": now.state.line,
        "pinned": a.state.line if a else None,
        "goal": argument.get("goal") if goal else None,
        "data": [traces[n] | plain(changes[n]) for n in drawn],
        "drawn": drawn,
        "layout": layout,
        "ends": ends,
        "window": window if asked else None,
        "legend": drawing.legend_html(now.seen),
        "numbers": [[q.name, q.text, was] for q, was in zip(words.quantities(now.sim), since, strict=True)],
        "reached": goal.conditions(now.state, now.sim) if goal else [],
        "operations": len(rows),
        "number": 0 if row is None else rows.index(row) + 1,
        "operation": None if row is None else list(now.operations.key(row)),
        "about": choice[1].words if choice else "",
        "controls": controls(now.state),
        "python": python_code(now.state),
    }  # fmt: skip


def say(argument: dict[str, Any]) -> dict[str, Any]:
    """What is said of a plan (``line``), below its figure."""
    now = shown(FormState.read(argument["line"]).line)
    return {
        "fits": now.sim.fit is Fit.FITS,
        "sentences": [
            words.headline(now.sim), words.memory(now.sim), words.because(now.sim.explain()),
            *words.remarks(now.state, now.sim),
        ],
    }  # fmt: skip


@lru_cache(maxsize=4)
def shown(line: str) -> Shown:
    """A plan simulated: the present one is asked for again when something about the figure changes, as A is."""
    state = FormState.read(line)
    if unlike := [word for word in NEEDS_NUMPY if word in state.texts]:
        raise ValueError(
            f"{unlike[0]}={state.texts[unlike[0]]} makes ranks differ, which takes numpy: a notebook has it, a page not"
        )
    sim = state.simulate()
    seen = scene(sim)
    return Shown(state, sim, seen, Operations(sim.run, seen))


def operation(now: Shown, argument: dict[str, Any], window: tuple[float, float]) -> int | None:
    """The row of the operation that is asked for; None for none."""
    rows = now.operations.rows
    if number := argument.get("number"):
        return rows[number - 1] if 0 < number <= len(rows) else None
    if clicked := argument.get("clicked"):
        return drawing.bar_at(now.seen, window, *clicked)
    return now.operations.find(tuple(argument["operation"])) if argument.get("operation") else None


def moved(state: FormState, setting: Control, option: str | None) -> FormState:
    """A state in which a control stands at another option; of another API, only the words that it has."""
    texts: dict[str, str | None] = {**state.texts, **words_of(setting, option)}
    if setting.word == "api":
        suiting = {s.word for s in SETTINGS if s.suits(option or "fsdp2")} | {"param_dtype", "reduce_dtype"}
        texts = {name: text for name, text in texts.items() if name not in CONTROLLED or name in suiting}
    line = FormState({name: text for name, text in texts.items() if text is not None}).line
    return FormState.read(line)


def controls(state: FormState) -> list[dict[str, Any]]:
    """The controls that suit a state, each with what it offers and the number of what is chosen."""
    found = []
    for setting in SETTINGS:
        if not setting.suits(api_of(state.texts)) or setting.word in NEEDS_NUMPY:
            continue
        text = chosen(setting, state.texts)
        offered = setting.offering(text)
        found.append({
            "key": setting.key, "label": setting.label, "form": setting.form, "help": setting.help,
            "options": [[setting.shown(option), option[1]] for option in offered],
            "at": [option for _, option in offered].index(text), "at_hand": setting.key in AT_HAND,
        })  # fmt: skip
    return found


def plain(change: drawing.Change) -> dict[str, Any]:
    """A change as JSON has it: lists, and nothing where there is no number."""
    return {
        name: [None if math.isnan(v) else v for v in value] if isinstance(value, array) else value
        for name, value in change.items()
        if name != "selectedpoints" or value is not None  # else all are as bright as they are
    }
