"""The frame of the pages that are not Sphinx's: head, links to the rest of the site, light and dark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template

from web.colours import colours
from web.words import WORDS

HERE = Path(__file__).parent


def page(name: str, title: str, main: str, links: Mapping[str, str], head: str = "", about: str = "") -> str:
    """A page as HTML.

    Args:
        name: of its file, without the ending.
        main: what is in it, HTML.
        links: to other pages, by their files; its own is marked.
        head: more for its head, HTML.
        about: one sentence, for whoever finds the page elsewhere.
    """
    listed = [
        f'<a href="{to}"{" aria-current=page" * (to == f"{name}.html")}>{escape(text)}</a>'
        for to, text in links.items()
    ]
    style = "\n".join([colours(), *((HERE / sheet).read_text(encoding="utf-8") for sheet in ("site.css", "own.css"))])
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        name=name, title=escape(title), main=main, links="\n".join(listed), head=head, style=style, about=escape(about),
        brand=WORDS["title"], skip=WORDS["skip"], site=WORDS["site"],
        theme_names=json.dumps({kind: WORDS[f"theme_{kind}"] for kind in ("auto", "light", "dark")}),
    )  # fmt: skip
