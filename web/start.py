"""The start page: ``index.html``, with what it shows before Python is there, and where there is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template

from web.live.calls.explorer import begin
from web.live.drawn import drawn
from web.page import page
from web.words import WORDS

HEAD = """<link rel="modulepreload" href="live/python.js">
<link rel="preload" href="live/first.json" as="fetch" crossorigin>
<script type="module" src="live/explorer.js"></script>
<script>window.PlotlyConfig = {MathJaxConfig: "local"};</script>
<script async src="live/plotly.js" id="plotly"></script>"""
HERE = Path(__file__).parent


def write(out: Path, live: bool, links: Mapping[str, str]) -> None:
    """Write the page.

    Args:
        live: Python runs in it; else the figure stands still.
        links: the pages that there are besides, by their files.
    """
    begun = begin({})
    first = begun["first"]
    headline, memory, why, *remarks = first["sentences"]
    cards = "".join(
        f'<li><a href="{to}"><b>{escape(name)}</b> {escape(WORDS[about])}</a></li>'
        for to, name in links.items()
        if (about := f"card_{to.partition('.')[0].replace('/', '_')}") in WORDS
    )
    main = Template((HERE / "start.html").read_text(encoding="utf-8")).substitute(
        heading=WORDS["heading"], lead=WORDS["lead_live" if live else "lead_still"], live="yes" if live else "no",
        picture=drawn(first), legend=first["legend"], cards=f'<ul class="cards">{cards}</ul>' if cards else "",
        numbers="".join(f"<div><dt>{escape(n)}</dt><dd>{escape(text)}</dd></div>" for n, text, _ in first["numbers"]),
        words=f"<p><b>{escape(headline)}</b></p>" + "".join(f"<p>{escape(t)}</p>" for t in (memory, why, *remarks)),
    )  # fmt: skip
    links = {"index.html": WORDS["start"], **links}
    text = page("index", WORDS["heading"], main, links, HEAD if live else "", WORDS["about"])
    (out / "index.html").write_text(text, encoding="utf-8")
    if live:
        (out / "live" / "first.json").write_text(json.dumps(begun, separators=(",", ":")), encoding="utf-8")
