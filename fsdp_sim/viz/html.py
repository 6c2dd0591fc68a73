"""`save_html`: figures, words and tables as one page that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

import plotly.graph_objects as go
from plotly.io.json import to_json_plotly

from fsdp_sim.timeline import written
from fsdp_sim.viz import plotly_js, theme
from fsdp_sim.viz.picture import Picture, paragraphs
from fsdp_sim.viz.table import Table

# The browser itself refuses anything the page would fetch; plotly.js and the figures are in it.
LONG_TABLE = 20  # rows
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)
_STYLE = f"""
:root {{ color-scheme: light dark; --ink: light-dark({theme.INK}, {theme.DARK_INK});
  --paper: light-dark(#fff, {theme.DARK_PAPER}); --muted: light-dark({theme.MUTED}, #9DA7B1);
  --rule: light-dark({theme.RULE}, #30363D); --focus: light-dark(#0072B2, #56B4E9); }}
:root[data-scheme=light] {{ color-scheme: light; }}
:root[data-scheme=dark] {{ color-scheme: dark; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.55 {theme.FONT}; }}
main {{ max-width: 1200px; margin: 0 auto; padding: 56px 24px 64px; position: relative;
  overflow-wrap: break-word; }}
#scheme {{ position: absolute; top: 14px; right: 24px; font: inherit; font-size: .8rem; color: var(--muted);
  background: none; border: 1px solid var(--rule); border-radius: 999px; padding: .15rem .8rem; cursor: pointer; }}
#scheme:hover {{ color: var(--ink); }}
:focus-visible {{ outline: 2px solid var(--focus); outline-offset: 3px; }}
.said {{ color: var(--muted); font-size: .9rem; min-height: 3.1em; }}
h1 {{ font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }}
h2 {{ font-size: 1.35rem; line-height: 1.3; margin: 2.75rem 0 .25rem; }}
p {{ max-width: 46rem; margin: .5rem 0; }}
figure {{ margin: 1rem 0; }}
.title {{ font-weight: 600; line-height: 1.3; }}
.notes, .legend {{ font-size: .85rem; line-height: 1.4; color: var(--muted); }}
.legend {{ display: flex; flex-wrap: wrap; gap: 0 .9rem; max-width: none; }}
.legend i {{ display: inline-block; width: 1em; height: 1em; margin-right: .4em; vertical-align: -.12em; }}
figcaption {{ color: var(--muted); font-size: .9rem; max-width: 46rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; line-height: 1.35; margin: 1rem 0;
  font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; font-weight: 600; padding: .35rem 0; }}
td, tbody th {{ white-space: nowrap; }}
th, td {{ padding: .35rem .8rem .35rem 0; text-align: right; vertical-align: bottom;
  border-bottom: 1px solid var(--rule); }}
th {{ font-weight: 600; }}
tbody th {{ font-weight: 400; }}
th:first-child {{ text-align: left; }}
@media (max-width: 560px) {{ main {{ padding: 56px 14px 48px; }} body {{ font-size: 16px; }} h1 {{ font-size: 1.6rem; }}
  #scheme {{ right: 14px; }} }}
@media (max-width: 820px) {{ caption {{ display: none; }} thead {{ position: absolute; clip-path: inset(50%); }}
  .scroll {{ position: relative; overflow: hidden; }} table, tbody, tr, td, tbody th {{ display: block; }}
  tbody th, td {{ white-space: normal; border: 0; text-align: left; }} tr {{ border-bottom: 1px solid var(--rule); }}
  tbody th {{ font-weight: 600; padding-top: .8rem; }}
  td {{ display: grid; grid-template-columns: 1fr 1fr; gap: .6rem; padding: .1rem 0; }}
  td::before {{ content: attr(data-name); color: var(--muted); }} }}
@media print {{ #scheme, .said {{ display: none; }} main {{ padding: 0; }} h2, figure {{ break-inside: avoid; }} }}
"""


@dataclass(frozen=True)
class Section:
    """One part of a page: a heading, text, a figure, tables; each may be left out. All text is escaped.

    Attributes:
        text: paragraphs, separated by blank lines.
        caption: what the figure shows in words, below it.
    """

    heading: str = ""
    text: str = ""
    figure: go.Figure | None = None
    caption: str = ""
    tables: tuple[Table, ...] = ()

    @classmethod
    def of(cls, picture: Picture, heading: str = "", text: str = "") -> Section:
        """A section with a picture, what it shows below it, and the tables of its numbers."""
        return cls(heading, text, picture.figure, picture.finding, picture.tables)


Entry: TypeAlias = go.Figure | Picture | Section


def save_html(
    path: str | Path,
    figures: Entry | Iterable[Entry] | Mapping[str, go.Figure | Picture],
    *,
    title: str,
    intro: str = "",
    tables: Sequence[Table] = (),
) -> Path:
    """Write one HTML file that holds everything it needs and asks the network for nothing.

    Args:
        path: the file to write.
        figures: a figure, a `Picture` or a `Section`, several of them, or a dict of heading to figure or picture; shown
            in that order.
        title: the heading of the page and the name of its tab.
        intro: plain text below the title, paragraphs separated by blank lines.
        tables: tables below the intro, before the first figure.

    Returns:
        the path, as a `Path`.

    Raises:
        ValueError: there is nothing to write, or an entry is none of these.
    """
    if isinstance(figures, Mapping):
        sections = [_as_section(figure, heading) for heading, figure in figures.items()]
    elif isinstance(figures, (go.Figure, Picture, Section)):
        sections = [_as_section(figures)]
    else:
        sections = [_as_section(entry) for entry in figures]
    if not sections:
        raise ValueError(f"no figure was given for {path}; pass a Picture, a figure, a Section, or several")
    body = "\n".join(_section(section, number) for number, section in enumerate(sections))
    figures = [section.figure for section in sections if section.figure is not None]
    target = Path(path)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
<script>window.PlotlyConfig = {{MathJaxConfig: "local"}};</script>
</head>
<body>
<main>
<button id="scheme" type="button" hidden>Dark page</button>
<h1>{escape(title)}</h1>
{paragraphs(intro)}
{_tables(tables)}
{body}
</main>
<script type="text/plain" id="plotly">{plotly_js.packed(figures)}</script>
<script type="application/json" id="templates">{_templates()}</script>
<script type="module">
{_script("browser.js")}
{_script("page.js")}
start(document);
</script>
</body>
</html>
"""
    with written(target) as new:
        new.write_text(page, encoding="utf-8")
    return target


def _as_section(entry: object, heading: str = "") -> Section:
    if isinstance(entry, Section):
        return entry
    if isinstance(entry, Picture):
        return Section.of(entry, heading)
    if isinstance(entry, go.Figure):
        return Section(heading, figure=entry)
    raise ValueError(f"{entry!r} is a {type(entry).__name__}; a page is made of Pictures, plotly figures and Sections")


def _script(name: str) -> str:
    return files("fsdp_sim.viz").joinpath(name).read_text(encoding="utf-8")


def _templates() -> str:
    """The looks of figures on a light and on a dark page."""
    looks = {"light": theme.LIGHT, "dark": theme.DARK}
    return _data({name: look.to_plotly_json() for name, look in looks.items()})


def _data(content: dict[str, Any]) -> str:
    """JSON for a page; no text of it can end a script."""
    return to_json_plotly(content).replace("<", "\\u003c")


def _tables(tables: Iterable[Table]) -> str:
    return "\n".join(_folded(table) for table in tables)


def _folded(table: Table) -> str:
    """A table, folded where it is long."""
    shown = f'<div class="scroll">{table.to_html()}</div>'
    if len(table.rows) <= LONG_TABLE:
        return shown
    return f"<details><summary>{escape(table.caption)}: {len(table.rows)} rows</summary>{shown}</details>"


def _section(section: Section, number: int) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>" if section.heading else "", paragraphs(section.text)]
    if section.figure is not None:
        content = section.figure.to_plotly_json()
        layout = {
            key: value for key, value in content["layout"].items() if key != "template"
        }  # the page's scheme has it
        data = _data(content | {"layout": layout, "config": theme.CONFIG})
        drawn = f'<div class="drawing" id="figure-{number}"></div><script type="application/json">{data}</script>'
        caption = f"<figcaption>{paragraphs(section.caption)}</figcaption>" if section.caption else ""
        parts.append(f"<figure>{drawn}{caption}</figure>")
    parts.append(_tables(section.tables))
    return "<section>\n" + "\n".join(part for part in parts if part) + "\n</section>"
