"""`Picture`: a figure, what it shows in words, and its numbers; shown in a notebook, saved as a page or an image.

The words are the text alternative: they state the finding ("all-gather of layers.3 is exposed for 4.1 ms"), so that
someone who cannot see the figure, or reads where no JavaScript runs, learns the same.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.packages import remedy
from fsdp_sim.timeline import written
from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.present import shown
from fsdp_sim.viz.table import Table

PNG_VARIABLE = "FSDP_SIM_PNG"
PNG_WIDTH = 900
PNG_SCALE = 1.5


@dataclass(frozen=True)
class Picture:
    """A figure with its words and numbers. As the last line of a notebook cell it shows itself.

    Attributes:
        figure: without a width, so that it fills the place it is shown in; it may have frames.
        finding: what it shows, in a sentence or a few; paragraphs are separated by blank lines.
        tables: the same numbers as text.
        still: what an image shows where the figure moves; the figure itself where it does not.
    """

    figure: go.Figure = field(repr=False)
    finding: str
    tables: tuple[Table, ...] = field(default=(), repr=False)
    still: go.Figure | None = field(default=None, repr=False)

    def dark(self) -> Picture:
        """The same picture for a dark page."""
        still = theme.dark(self.still) if self.still is not None else None
        return replace(self, figure=theme.dark(self.figure), still=still)

    def titled(self, title: str) -> Picture:
        """The same picture under a headline of one's own; what was found is still in its words."""
        still = chart.retitled(self.still, title) if self.still is not None else None
        finding = f"{title.rstrip('.')}. {self.finding}"
        return replace(self, figure=chart.retitled(self.figure, title), still=still, finding=finding)

    def to_image(self, format: str = "png", width: int = PNG_WIDTH) -> bytes:
        """An image, for places that run no JavaScript: ``png`` or ``jpeg``, sharp on a dense screen, or ``svg``.

        Raises:
            RuntimeError: kaleido or the browser it draws with is missing.
        """
        figure = self.figure if self.still is None else self.still
        scale = 1 if format == "svg" else PNG_SCALE
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The kopts argument is ignored")  # of a browser that is kept
                return figure.to_image(format=format, width=width, scale=scale)
        except (ValueError, RuntimeError, ImportError) as error:
            raise RuntimeError(
                f"no picture could be made ({str(error).strip().splitlines()[0]}); it takes kaleido "
                f"({remedy('kaleido')}) and a Chromium or Chrome, whose path can be given in the environment variable "
                "BROWSER_PATH"
            ) from error

    def save(self, path: str | Path, *, title: str = "", width: int = PNG_WIDTH) -> Path:
        """Write a page (``.html``, which needs no network) or an image (``.png``, ``.svg``).

        Raises:
            ValueError: the name ends in something else.
            RuntimeError: an image cannot be made.
        """
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        if kind == "html":
            from fsdp_sim.viz.html import save_html

            return save_html(path, self, title=title or self.finding.partition(". ")[0])
        if kind not in ("png", "svg"):
            raise ValueError(f"a picture is saved as .html, .png or .svg, not as {path.name!r}")
        image = self.to_image(kind, width)
        with written(path) as new:
            new.write_bytes(image)
        return path

    def show(self, *, png: bool | None = None) -> None:
        """Display the figure in a notebook, and below it, folded, the finding and the tables.

        [Note: the image is a JPEG]  Where an ``image/png`` lies beside a stored figure, JupyterLab's plotly extension
        shows it in the figure's place, in the image's own size: cut, or narrower than the output. It leaves other
        images alone, and draws the figure as wide as there is room.

        Args:
            png: also store an image in the notebook, which is what GitHub and other viewers without JavaScript show.
                It takes a browser and about two seconds, so the default is whether the environment variable
                ``FSDP_SIM_PNG`` is 1, as it is when saved notebooks are made.

        Raises:
            RuntimeError: an image was asked for and kaleido or its browser is missing.
        """
        from IPython.display import display

        content = shown(self.figure.to_plotly_json())
        plotly = {"data": content["data"], "layout": content["layout"], "config": theme.CONFIG}
        if content.get("frames"):
            plotly["frames"] = content["frames"]
        bundle: dict[str, Any] = {"application/vnd.plotly.v1+json": plotly, "text/plain": self.finding}
        if os.environ.get(PNG_VARIABLE) == "1" if png is None else png:
            _keep_browser()
            bundle["image/jpeg"] = self.to_image("jpeg")
        display(bundle, metadata={"image/jpeg": {"width": PNG_WIDTH}}, raw=True)
        tables = "".join(table.to_html() for table in self.tables)
        told = (
            f"<details><summary>This figure in words and numbers</summary>{paragraphs(self.finding)}{tables}</details>"
        )
        words = {"text/html": told, "text/plain": self.finding}
        display(words, raw=True)

    def _ipython_display_(self) -> None:
        self.show()


def _keep_browser() -> None:
    """Draw the images of this process with one browser: to start one takes longer than to draw."""
    try:
        import kaleido
    except ImportError:
        return  # `Picture.to_image` says what is missing
    kaleido.start_sync_server(silence_warnings=True)


def paragraphs(text: str) -> str:
    """Plain text as escaped HTML paragraphs."""
    return "\n".join(f"<p>{escape(paragraph.strip())}</p>" for paragraph in text.split("\n\n") if paragraph.strip())
