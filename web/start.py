"""The start page: ``index.html``."""

from __future__ import annotations

from pathlib import Path
from string import Template

HERE = Path(__file__).parent


def write(out: Path, live: bool, pages: bool) -> None:
    """Write the page; what is not live, and pages that are not there, it does not mention."""
    text = Template((HERE / "start.html").read_text(encoding="utf-8"))
    (out / "index.html").write_text(text.substitute(live="yes" if live else "no"), encoding="utf-8")
