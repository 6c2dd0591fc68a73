"""The pages ``puzzle.html``, ``fit.html`` and ``trace.html``, whose answers come from the worker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from string import Template

from fsdp_sim.learn.puzzle import levels
from fsdp_sim.learn.puzzle.session import PuzzleSession, of_the_learner
from fsdp_sim.learn.puzzle.widget import HERE as PUZZLE
from fsdp_sim.learn.puzzle.widget import css
from fsdp_sim.spec import Model, gpu_names
from fsdp_sim.viz import theme
from web.live import PAGES
from web.page import page
from web.words import WORDS

HERE = Path(__file__).parent / "pages"
SCRIPTS = {"fit": "fit.js", "trace": "trace.js", "puzzle": "puzzle_page.js"}
PYTHON = '<link rel="modulepreload" href="live/python.js">'
PLOTLY = '<script async src="live/plotly.js" id="plotly"></script>'


def write(out: Path, links: Mapping[str, str]) -> None:
    """Write them into the folder of a site that has the live parts.

    Args:
        links: the pages of the site, by their files.
    """
    words = {
        "gpus": _options(gpu_names(), "H100-SXM-80GB"),
        "models": _options(Model.presets()),
        "memory": json.dumps({str(category): [kind.color, kind.hatched] for category, kind in theme.MEMORY.items()}),
        "templates": json.dumps(theme.TEMPLATES),
        "begun": json.dumps(_puzzle()).replace("</", "<\\/"),
    }
    for name in PAGES:
        inner = Template((HERE / f"{name}.html").read_text(encoding="utf-8")).substitute(words)
        head = f'{PYTHON}<script type="module" src="live/{SCRIPTS[name]}"></script>'
        head += PLOTLY if name == "trace" else f"<style>{css()}</style>" if name == "puzzle" else ""
        title = WORDS[PAGES[name]]
        text = page(name, title, f"<h1>{escape(title)}</h1>\n{inner}", links, head, WORDS[f"card_{name}"])
        (out / f"{name}.html").write_text(text, encoding="utf-8")
    (out / "live" / "puzzle.js").write_bytes((PUZZLE / "puzzle.js").read_bytes())


def _puzzle() -> dict[str, object]:
    """What the puzzle's page has before Python is there: the first level, and where torch decides what levels ask."""
    record = of_the_learner()
    nobody = type(record)(dict, record.keep, record.in_torch)
    symbols = {level.torch for level in levels().values() if level.torch}
    return {
        "first": PuzzleSession(next(iter(levels())), nobody).state,
        "in_torch": {symbol: found for symbol in sorted(symbols) if (found := record.in_torch(symbol))},
    }


def _options(names: Iterable[str], chosen: str = "") -> str:
    return "".join(f"<option{' selected' * (name == chosen)}>{escape(name)}</option>" for name in names)
