"""Figures of the pages that answer the mouse: a file for each, which is loaded when a reader looks closer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.viz import plotly_js, theme

MIME = "application/vnd.plotly.v1+json"
FOLDER = "figures"
"""Of the site's static files."""


class Figures:
    """The figures of a site, collected while its pages are prepared."""

    def __init__(self, static: Path) -> None:
        self.folder = static / FOLDER
        self.folder.mkdir()
        self.seen: list[go.Figure] = []

    def add(self, page: str, stored: dict[str, Any]) -> str:
        """Keep a figure as a notebook stores it, and return its file, relative to the static files."""
        layout = {name: value for name, value in stored["layout"].items() if name != "template"}
        name = f"{page}-{len(self.seen)}.js"
        text = json.dumps({"data": stored["data"], "layout": layout, "config": stored.get("config", {})})
        (self.folder / name).write_text(f"drawFigure({text});\n", encoding="utf-8")
        self.seen.append(go.Figure({"data": stored["data"]}))
        return f"{FOLDER}/{name}"

    def finish(self) -> None:
        """Write what draws them: plotly.js, and the light and the dark template."""
        if not self.seen:
            return
        text = f"const TEMPLATES = {json.dumps(theme.TEMPLATES)};\n{plotly_js.source(self.seen)}"
        (self.folder / "plotly.js").write_text(text, encoding="utf-8")
