"""The pages ``fit.html`` and ``trace.html``: forms whose answers come from the worker."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

from fsdp_sim.spec import Model, gpu_names
from fsdp_sim.viz import theme
from web.live import FORMS
from web.live.colours import colours

HERE = Path(__file__).parent / "pages"


def write(out: Path) -> None:
    """Write both pages into the folder of a site that has the live parts."""
    outer = Template((HERE / "page.html").read_text(encoding="utf-8"))
    memory = {str(category): [kind.color, kind.hatched] for category, kind in theme.MEMORY.items()}
    words = {
        "gpus": _options(gpu_names(), "H100-SXM-80GB"),
        "models": _options(Model.presets()),
        "memory": json.dumps(memory),
        "colours": colours(),
    }
    for name, title in FORMS.items():
        inner = Template((HERE / f"{name}.html").read_text(encoding="utf-8")).substitute(words)
        text = outer.substitute(words, name=name, title=title, main=inner)
        (out / f"{name}.html").write_text(text, encoding="utf-8")


def _options(names: Iterable[str], chosen: str = "") -> str:
    return "".join(f"<option{' selected' * (name == chosen)}>{escape(name)}</option>" for name in names)
