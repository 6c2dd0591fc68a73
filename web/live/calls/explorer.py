"""The explorer in a page: its controls as data, and what there is to see of a plan, drawn as in a notebook."""

from __future__ import annotations

import math
from array import array
from typing import Any

from fsdp_sim.forms import FormState, python_code
from fsdp_sim.simulation import Fit
from fsdp_sim.viz import theme
from fsdp_sim.viz.explorer import drawing, layout_of, words
from fsdp_sim.viz.explorer.scene import scene
from fsdp_sim.viz.explorer.settings import CONTROLLED, SETTING, SETTINGS, Control, api_of, chosen, words_of
from fsdp_sim.viz.explorer.starts import PRESETS

FIRST = PRESETS["Llama-3-8B on 64 H100"]
NEEDS_NUMPY = ("straggler", "slow_node", "jitter")
"""Words that make ranks differ, which takes arrays over all of them; a page has none."""
AT_HAND = (
    "model", "gpu", "api", "gpus", "bandwidth_gbps", "micro_batch", "seq_len", "forward_prefetch:fsdp2",
    "reshard_after_forward", "precision", "activation_checkpointing",
)  # fmt: skip
"""The controls that are in view; the others unfold."""


def begin(argument: dict[str, Any]) -> dict[str, Any]:
    """What the page has before Python is there: starts, templates, and the first plan with its controls."""
    return {
        "starts": {name: FormState.read(line).line for name, line in PRESETS.items()},
        "templates": theme.TEMPLATES,
        "config": theme.CONFIG | {"displayModeBar": False},
        "first": see({"line": FIRST}),
    }


def see(argument: dict[str, Any]) -> dict[str, Any]:
    """The figure, the numbers and the words of a plan.

    Args:
        argument: ``line``: the plan in words. ``key`` and ``option``: of a control that was moved from there.
            ``ends``: of the axes (milliseconds, GiB) as they are, to be kept where what is shown still fits.

    Raises:
        ValueError: the line cannot be read, or the plan is impossible or needs more than a page has.
    """
    state = FormState.read(argument["line"])
    if key := argument.get("key"):
        state = moved(state, SETTING[key], argument["option"])
    if unlike := [word for word in NEEDS_NUMPY if word in state.texts]:
        raise ValueError(
            f"{unlike[0]}={state.texts[unlike[0]]} makes ranks differ, which takes numpy: a notebook has it, a page not"
        )
    sim = state.simulate()
    seen = scene(sim)
    why = sim.explain()
    before = argument.get("ends") or (0.0, 0.0)
    ends = (layout_of.kept(before[0], seen.span_ms), layout_of.kept(before[1], layout_of.needed_gib(seen)))
    window = (0.0, ends[0])
    traces = [*drawing.lane_traces(), *drawing.memory_traces()]
    changes = [*drawing.lane_changes(seen, window), *drawing.memory_changes(seen, window)]
    layout = layout_of.layout(None)
    del layout["template"]  # the page's, light or dark
    layout["xaxis"] |= {"range": list(window)}
    layout["yaxis"] |= seen.places.axis()
    layout["yaxis2"] |= {"range": [0.0, ends[1]]}
    return {
        "line": state.line,
        "data": [t | plain(c) for t, c in zip(traces, changes, strict=True) if c["visible"]],
        "layout": layout,
        "ends": ends,
        "legend": drawing.legend_html(seen),
        "numbers": [[q.name, q.text] for q in words.quantities(sim)],
        "fits": sim.fit is Fit.FITS,
        "sentences": [
            words.headline(sim), words.memory(sim), words.because(why), *words.remarks(state, sim)
        ],
        "controls": controls(state),
        "python": python_code(state),
    }  # fmt: skip


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
        if name != "selectedpoints"
    }
