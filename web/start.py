"""The start page: ``index.html``, and what it shows before Python is there."""

from __future__ import annotations

import json
from pathlib import Path
from string import Template

from web.live import FORMS
from web.live.calls.explorer import begin
from web.live.colours import colours

HERE = Path(__file__).parent
LINKS = {"course.html": "The course", "labs.html": "Labs", "reference/index.html": "Reference", "search.html": "Search"}


def write(out: Path, live: bool, pages: bool) -> None:
    """Write the page; pages that are not there it does not link."""
    there = {f"{name}.html": title for name, title in FORMS.items()} if live else {}
    there |= LINKS if pages else {}
    links = [f'<a href="{to}">{name}</a>' for to, name in there.items()]
    text = Template((HERE / "start.html").read_text(encoding="utf-8"))
    page = text.substitute(colours=colours(), live="yes" if live else "no", links="\n".join(links))
    (out / "index.html").write_text(page, encoding="utf-8")
    (out / "live" / "first.json").write_text(json.dumps(begin({}), separators=(",", ":")), encoding="utf-8")
