"""Some pages of the site, built once for all files here that one worker runs."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from web import start
from web.build import COURSE, build
from web.words import WORDS

PATIENCE_MS = 120_000  # Python is loaded first
NAMES = ["00_start_here", "05_overlap"]


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chapters, two rooms of the reference and all else of it, and the start page as it stands still."""
    web = pytest.importorskip("web.pages", reason="needs Sphinx, MyST-NB and Furo: the extra html")
    out = tmp_path_factory.mktemp("site")
    web.write(out, NAMES, rooms=["simulation", "spec"])
    start.write(out, False, {page: WORDS[title] for page, title in COURSE.items()})
    return out


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that says nothing of what it serves."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with suppress(ConnectionError):  # of a browser that has closed its page
            super().copyfile(source, outputfile)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A server of a folder, on this machine alone: its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def served(pages: Path) -> Iterator[str]:
    """The address of these pages on a server: the start page is none to open as a file."""
    with serving(pages) as address:
        yield address


@pytest.fixture(scope="session")
def live_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site without its pages."""
    try:
        return build(tmp_path_factory.mktemp("live") / "site", pages=False)
    except RuntimeError as error:
        pytest.skip(f"needs npm, node and what they fetch: {error}")


@pytest.fixture
def opened(live_site: str, page: Any) -> Iterator[Any]:
    """A page that may open the live parts: whatever it asks of another host fails, and so does the test."""
    elsewhere: list[str] = []

    def only_here(route: Any) -> None:
        if route.request.url.startswith((live_site, "blob:", "data:")) and route.request.method == "GET":
            route.continue_()
        else:
            elsewhere.append(f"{route.request.method} {route.request.url}")
            route.abort()

    page.route("**/*", only_here)
    page.set_default_timeout(PATIENCE_MS)
    yield page
    assert elsewhere == []


@pytest.fixture(scope="session")
def live_site(live_parts: Path) -> Iterator[str]:
    """The address of the site's live parts, on a server."""
    with serving(live_parts) as address:
        yield address
