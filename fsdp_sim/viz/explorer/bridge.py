"""`Bridge`: the one part of the explorer that is JavaScript: a button that copies, and what the page looks like."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

HERE = Path(__file__).parent


class Bridge(anywidget.AnyWidget):
    """A button that copies ``text`` to the clipboard; and says whether the page around it is dark."""

    _esm = HERE.parent / "browser.js"
    _css = HERE / "bridge.css"
    text = traitlets.Unicode("").tag(sync=True)
    label = traitlets.Unicode("Copy").tag(sync=True)
    page_is_dark = traitlets.Bool(False).tag(sync=True)
