"""A real browser for the tests that look at figures and notebooks."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium."""
    names = ("/usr/bin/chromium", "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no Chromium: none of {', '.join(names)} is there (on Debian: apt install chromium)")
    return found


@pytest.fixture
def page(chromium: str) -> Iterator[Any]:
    """A page of a headless Chromium, 1280 by 900 pixels."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield browser.new_page(viewport={"width": 1280, "height": 900})
        browser.close()
