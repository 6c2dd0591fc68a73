"""`explorer_page`: the explorer as one page that needs no kernel and no network; its frames are computed beforehand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio

from fsdp_sim.forms import WORDS, FormState
from fsdp_sim.spec import text_of
from fsdp_sim.timeline import written
from fsdp_sim.viz import plotly_js, theme
from fsdp_sim.viz.explorer import layout_of, words
from fsdp_sim.viz.explorer.drawing import lane_changes, lane_traces, legend_html, memory_changes, memory_traces
from fsdp_sim.viz.explorer.figure_of import arrays, trace
from fsdp_sim.viz.explorer.scene import Scene, scene
from fsdp_sim.viz.explorer.settings import SETTING, Control
from fsdp_sim.words import did_you_mean

MOST_FRAMES, MOST_BYTES = 400, 6_000_000  # of which the second is without plotly.js
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE = f"""
body {{ margin: 0; background: #fff; color: {theme.INK}; font: 16px/1.5 {theme.FONT}; }}
main {{ max-width: 1100px; margin: 0 auto; padding: 24px; }}
h1 {{ font-size: 1.6rem; margin: 0 0 .5rem; }}
label {{ display: grid; grid-template-columns: 11rem 1fr 9rem; gap: 12px; align-items: center; max-width: 48rem; }}
input {{ width: 100%; accent-color: #0072B2; }}
#words {{ min-height: 8.5rem; max-width: 52rem; }}
#words p {{ margin: .35rem 0; }}
.stale #figure {{ opacity: .35; }}
"""
_SCRIPT = """
const { keys, values, sentences, start } = JSON.parse(document.getElementById("frames").textContent);
const inputs = keys.map((key) => document.getElementById("vary-" + key));
const figure = document.getElementById("figure").querySelector(".plotly-graph-div");
function show() {
  const at = inputs.map((input) => Number(input.value));
  inputs.forEach((input, n) => {
    const text = values[n][at[n]];
    input.setAttribute("aria-valuetext", text);
    document.getElementById("now-" + keys[n]).textContent = text;
  });
  const name = at.join(","), words = sentences[name];
  const paragraphs = words.text.split("\\n\\n").map((text) => {
    const p = document.createElement("p");
    p.textContent = text;
    return p;
  });
  document.getElementById("words").replaceChildren(...paragraphs);
  document.getElementById("state").textContent = words.state;
  document.querySelector("main").classList.toggle("stale", !words.possible);
  if (words.possible) {
    const now = { mode: "immediate", transition: { duration: 0 }, frame: { duration: 0, redraw: true } };
    Plotly.animate(figure, [name], now);
  }
}
inputs.forEach((input) => input.addEventListener("input", show));
"""


def explorer_page(
    path: str | Path, state: str, vary: Mapping[str, Sequence[Any]], *, title: str = "", dark: bool = False
) -> Path:
    """Write a page with a slider for each word that varies, the figure and the words.

    Args:
        path: the file to write.
        state: where it begins, as the explorer writes it.
        vary: for each word of the state the values it may take, in order; None leaves it at torch's default. Every
            combination is computed now.
        title: the heading.
        dark: a dark figure.

    Raises:
        ValueError: nothing varies, a word does not exist, the state one begins at is impossible, or the page would be
            larger than a few megabytes.
    """
    begun = FormState.read(state)
    if not vary or not all(vary.values()):
        raise ValueError(
            f"vary is {dict(vary)!r}; give one word or more, each with its values: {{'gpus': [8, 16, 64]}}"
        )
    if unknown := [key for key in vary if key not in WORDS]:
        raise ValueError(f"there is no {unknown[0]}; {did_you_mean(unknown[0], WORDS)}")
    count = int(np.prod([len(values) for values in vary.values()]))
    if count > MOST_FRAMES:
        raise ValueError(f"{count} combinations are to be computed; a page has up to {MOST_FRAMES}: vary less")
    texts = [[None if value is None else text_of(value) for value in values] for values in vary.values()]
    scenes: dict[str, Scene] = {}
    sentences: dict[str, dict[str, Any]] = {}
    for places in itertools.product(*(range(len(values)) for values in texts)):
        name = ",".join(map(str, places))
        chosen = {key: values[at] for key, values, at in zip(vary, texts, places, strict=True)}
        now = FormState.read(begun.with_texts(chosen).line)
        try:
            sim = now.simulate()
            scenes[name] = scene(sim)
            sentence = words.finding(now, sim, sim.explain())
        except ValueError as error:
            sentence = f"Impossible: {error}. The figure still shows the last plan that works."
        sentences[name] = {"text": sentence, "state": now.line, "possible": name in scenes}
    at = [values.index(text) if (text := begun.texts.get(key)) in values else 0
          for key, values in zip(vary, texts, strict=True)]  # fmt: skip
    first = ",".join(map(str, at))
    if first not in scenes:
        raise ValueError(
            f"the page begins at {sentences[first]['state']!r}: {sentences[first]['text'].removeprefix('Impossible: ')}"
        )
    shown = [[_read(key, text) for text in values] for key, values in zip(vary, texts, strict=True)]
    data = {"keys": list(vary), "values": shown, "sentences": sentences, "start": at}
    figure = _figure(scenes, first, dark)
    body = _body(figure, scenes[first], data, title or f"Explore {begun.model.name}")
    if len(body) > MOST_BYTES:
        raise ValueError(
            f"the page would take {len(body) / 1e6:.1f} MB beside plotly.js; {MOST_BYTES / 1e6:.0f} are its most: "
            f"vary less, or a model of fewer layers"
        )
    target = Path(path)
    page = body.replace("<!-- plotly.js -->", f"<script>{plotly_js.source([figure])}</script>")
    with written(target) as new:
        new.write_text(page, encoding="utf-8")
    return target


def _read(key: str, text: str | None) -> str:
    """A value as the explorer's control has it."""
    setting: Control | None = SETTING.get(key) or SETTING.get(f"{key}:fsdp2")
    return next(setting.shown(o) for o in setting.offering(text) if o[1] == text) if setting else str(text)


def _figure(scenes: Mapping[str, Scene], first: str, dark: bool) -> go.Figure:
    """The first scene, and every scene as a frame; all on the same axes, so that they can be compared."""
    longest = max(seen.span_ms for seen in scenes.values())
    highest = max(map(layout_of.needed_gib, scenes.values()))
    layout = layout_of.layout(theme.DARK if dark else theme.LIGHT)
    layout["xaxis"] |= {"range": [0, longest * 1.02 or 1.0]}
    layout["yaxis2"] |= {"range": [0, highest * 1.04]}
    layout["yaxis"] |= scenes[first].places.axis()
    frames = [
        go.Frame(name=name, data=_traces(seen), layout={"yaxis": layout["yaxis"] | seen.places.axis()})
        for name, seen in scenes.items()
    ]
    drawn = [trace(t, c) for t, c in zip([*lane_traces(), *memory_traces()], _traces(scenes[first]), strict=True)]
    return go.Figure(drawn, layout, frames)


def _traces(seen: Scene) -> list[dict[str, Any]]:
    window = (0.0, seen.span_ms)
    kinds = [t["type"] for t in (*lane_traces(), *memory_traces())]
    changes = [*lane_changes(seen, window), *memory_changes(seen, window)]
    for change in changes:
        change.pop("selectedpoints", None)
    return [{"type": kind} | arrays(change) for kind, change in zip(kinds, changes, strict=True)]


def _body(figure: go.Figure, seen: Scene, data: dict[str, Any], title: str) -> str:
    first = data["sentences"][",".join(map(str, data["start"]))]
    sliders = "\n".join(
        f'<label for="vary-{escape(key)}">{escape(key)}'
        f'<input type="range" id="vary-{escape(key)}" min="0" max="{len(values) - 1}" step="1" value="{at}" '
        f'aria-valuetext="{escape(values[at])}"><output id="now-{escape(key)}">{escape(values[at])}</output></label>'
        for key, values, at in zip(data["keys"], data["values"], data["start"], strict=True)
    )
    drawn = pio.to_html(
        figure, config=theme.CONFIG, include_plotlyjs=False, full_html=False, auto_play=False, default_width="100%",
        div_id="explorer",
    )  # fmt: skip
    frames = json.dumps(data).replace("</", "<\\/")
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in first["text"].split("\n\n"))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
<script>window.PlotlyConfig = {{MathJaxConfig: "local"}};</script>
<!-- plotly.js -->
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{sliders}
<div id="words" role="status" aria-live="polite">{paragraphs}</div>
<div id="figure">{drawn}</div>
{legend_html(seen)}
<p><small>The plan in words: <code id="state">{escape(first["state"])}</code></small></p>
</main>
<script type="application/json" id="frames">{frames}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""
