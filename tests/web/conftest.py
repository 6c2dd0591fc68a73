"""Some pages of the site, built once for all files here that one worker runs."""

from pathlib import Path

import pytest

from web import start

NAMES = ["00_start_here", "05_overlap"]


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chapters, two rooms of the reference and all else of it, and the start page without what runs in it."""
    web = pytest.importorskip("web.pages", reason="needs Sphinx, MyST-NB and Furo: the extra html")
    out = tmp_path_factory.mktemp("site")
    web.write(out, NAMES, rooms=["simulation", "spec"])
    start.write(out, live=False, pages=True)
    return out
