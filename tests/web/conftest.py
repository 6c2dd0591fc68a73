"""Some pages of the site, built once: whoever needs them first builds them for all workers."""

import fcntl
import os
from collections.abc import Callable, Iterator
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


def once(name: str, make: Callable[[Path], object], factory: pytest.TempPathFactory) -> Path:
    """A folder that one of pytest's workers makes, and the others read."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    out, made = shared / name, shared / f"{name}.made"
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            make(out)
            made.touch()
    return out


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chapters, two rooms of the reference and all else of it, and the start page as it stands still."""
    web = pytest.importorskip("web.pages", reason="needs Sphinx, MyST-NB and Furo: the extra html")

    def make(out: Path) -> None:
        out.mkdir(exist_ok=True)
        web.write(out, NAMES, rooms=["simulation", "spec"])
        start.write(out, False, {page: WORDS[title] for page, title in COURSE.items()})

    return once("site", make, tmp_path_factory)


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
        return once("live", lambda out: build(out, pages=False), tmp_path_factory)
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
