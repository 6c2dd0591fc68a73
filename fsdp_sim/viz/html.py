"""Getting figures in front of people: `show` in a notebook, `save_html` for a page that needs no network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.offline import get_plotlyjs

from fsdp_sim.viz import theme
from fsdp_sim.viz.summary import Table, Timelines, describe, step_views, summary_table
from fsdp_sim.viz.timeline_figure import timeline_figure

PNG_VARIABLE = "FSDP_SIM_PNG"
PNG_WIDTH = 900
PNG_SCALE = 1.5

# The browser itself refuses anything the page would fetch; plotly.js and the figures are inline.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)
_STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #fff; color: {theme.INK}; font: 17px/1.55 {theme.FONT}; }}
main {{ max-width: 1200px; margin: 0 auto; padding: 32px 24px 64px; }}
h1 {{ font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }}
h2 {{ font-size: 1.35rem; line-height: 1.3; margin: 2.75rem 0 .25rem; }}
p {{ max-width: 46rem; margin: .5rem 0; }}
figure {{ margin: 1rem 0; }}
figcaption {{ color: {theme.MUTED}; font-size: .9rem; max-width: 46rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; line-height: 1.35; margin: 1rem 0;
  font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; font-weight: 600; padding: .35rem 0; }}
td, tbody th {{ white-space: nowrap; }}
th, td {{ padding: .35rem .8rem .35rem 0; text-align: right; vertical-align: bottom;
  border-bottom: 1px solid {theme.RULE}; }}
th {{ font-weight: 600; }}
tbody th {{ font-weight: 400; }}
th:first-child {{ text-align: left; }}
@media print {{ main {{ padding: 0; }} h2, figure {{ break-inside: avoid; }} }}
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
    def of(cls, timelines: Timelines, heading: str = "", text: str = "", **which: Any) -> Section:
        """A section with the figure of ``timelines``, a sentence for each, and the table of the same numbers.

        Args:
            which: the keyword arguments of `timeline_figure`.
        """
        numbers = {name: which[name] for name in ("ranks", "step", "titles") if name in which}
        caption = "\n\n".join(_sentences(timelines, **numbers))
        return cls(heading, text, timeline_figure(timelines, **which), caption, (summary_table(timelines, **numbers),))


def save_html(
    path: str | Path,
    figures: go.Figure | Section | Iterable[go.Figure | Section] | Mapping[str, go.Figure],
    *,
    title: str,
    intro: str = "",
    tables: Sequence[Table] = (),
) -> Path:
    """Write one HTML file that holds everything it needs and asks the network for nothing.

    Args:
        path: the file to write.
        figures: a figure or a `Section`, several of them, or a dict of heading to figure; shown in that order.
        title: the heading of the page and the name of its tab.
        intro: plain text below the title, paragraphs separated by blank lines.
        tables: tables below the intro, before the first figure.

    Returns:
        the path, as a `Path`.

    Raises:
        ValueError: there is nothing to write, or an entry is neither a figure nor a section.
    """
    if isinstance(figures, (go.Figure, Section)):
        figures = [figures]
    entries: list[Any] = (
        [Section(heading=h, figure=f) for h, f in figures.items()] if isinstance(figures, Mapping) else list(figures)
    )
    if not entries:
        raise ValueError(f"no figure was given for {path}; pass a plotly figure, a Section, or a list of them")
    for entry in entries:
        if not isinstance(entry, (go.Figure, Section)):
            raise ValueError(f"{entry!r} is a {type(entry).__name__}; a page is made of plotly figures and Sections")
    sections = [entry if isinstance(entry, Section) else Section(figure=entry) for entry in entries]
    body = "\n".join(_section(section, number) for number, section in enumerate(sections))
    target = Path(path)
    target.write_text(
        f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
<script>window.PlotlyConfig = {{MathJaxConfig: "local"}};</script>
<script>{get_plotlyjs()}</script>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{_paragraphs(intro)}
{_tables(tables)}
{body}
</main>
</body>
</html>
""",
        encoding="utf-8",
    )
    return target


def show(timelines: Timelines, *, png: bool | None = None, **which: Any) -> None:
    """Display the figure of ``timelines`` in a notebook, and below it, folded, the table of its numbers.

    Args:
        timelines: as for `timeline_figure`.
        png: also store a picture in the notebook, which is what GitHub and other viewers without JavaScript show.
            It takes a browser and about two seconds, so the default is whether the environment variable
            ``FSDP_SIM_PNG`` is 1, as it is when saved notebooks are made.
        which: the keyword arguments of `timeline_figure`.

    Raises:
        ValueError: as `timeline_figure`.
        RuntimeError: a picture was asked for and kaleido or its browser is missing.
    """
    from IPython.display import display

    section = Section.of(timelines, **which)
    assert section.figure is not None
    content = section.figure.to_plotly_json()
    bundle: dict[str, Any] = {
        "application/vnd.plotly.v1+json": {
            "data": content["data"],
            "layout": content["layout"],
            "config": theme.CONFIG,
        },
        "text/plain": section.caption,
    }
    if os.environ.get(PNG_VARIABLE) == "1" if png is None else png:
        bundle["image/png"] = to_png(section.figure)
    display(bundle, raw=True)
    table = "".join(table.to_html() for table in section.tables)
    details = f"<details><summary>The numbers of this figure as a table</summary>{table}</details>"
    display({"text/html": _paragraphs(section.caption) + details, "text/plain": section.caption}, raw=True)


def to_png(figure: go.Figure, width: int = PNG_WIDTH) -> bytes:
    """A picture of a figure, sharp enough for a dense screen, for places that run no JavaScript.

    Raises:
        RuntimeError: kaleido or the browser it draws with is missing.
    """
    try:
        return figure.to_image(format="png", width=width, scale=PNG_SCALE)
    except (ValueError, RuntimeError, ImportError) as error:
        raise RuntimeError(
            f"no picture could be made ({str(error).strip().splitlines()[0]}); it takes `pip install kaleido` and a "
            "Chromium or Chrome, whose path can be given in the environment variable BROWSER_PATH"
        ) from error


def _sentences(timelines: Timelines, **which: Any) -> list[str]:
    views = step_views(timelines, **which)
    told = [describe(view.timeline, step=view.step) for view in views]
    return told if len(views) == 1 else [f"{view.name}: {text}" for view, text in zip(views, told, strict=True)]


def _paragraphs(text: str) -> str:
    return "\n".join(f"<p>{escape(paragraph.strip())}</p>" for paragraph in text.split("\n\n") if paragraph.strip())


def _tables(tables: Iterable[Table]) -> str:
    return "\n".join(f'<div class="scroll">{table.to_html()}</div>' for table in tables)


def _section(section: Section, number: int) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>" if section.heading else "", _paragraphs(section.text)]
    if section.figure is not None:
        drawn = pio.to_html(
            section.figure,
            config=theme.CONFIG,
            include_plotlyjs=False,
            full_html=False,
            div_id=f"figure-{number}",
            default_width="100%",
        )
        caption = f"<figcaption>{_paragraphs(section.caption)}</figcaption>" if section.caption else ""
        parts.append(f"<figure>{drawn}{caption}</figure>")
    parts.append(_tables(section.tables))
    return "<section>\n" + "\n".join(part for part in parts if part) + "\n</section>"
