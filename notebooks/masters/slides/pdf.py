"""A deck printed by Chromium: a page for each slide."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdp_sim.cli.doctor_system import BROWSERS
from notebooks.masters.slides.deck import HEIGHT_PX, WIDTH_PX

FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


def browser_path() -> str:
    """The path of Chromium or Chrome.

    Raises:
        RuntimeError: there is none.
    """
    found = next((path for name in BROWSERS if (path := shutil.which(name))), "")
    if not found:
        raise RuntimeError("printing takes Chromium or Chrome, and there is none (Debian: sudo apt install chromium)")
    return found


def write_pdfs(pages: Iterable[Path]) -> Iterator[Path]:
    """Print decks, and give the path of each file when it is written.

    Raises:
        RuntimeError: there is no browser.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=list(FLAGS))
        for path in pages:
            page = browser.new_page(viewport={"width": WIDTH_PX, "height": HEIGHT_PX})
            page.goto(f"{path.resolve().as_uri()}?print-pdf")
            page.wait_for_selector("body.printable", timeout=120_000)
            target = path.with_suffix(".pdf")
            page.pdf(path=target, width=f"{WIDTH_PX}px", height=f"{HEIGHT_PX}px", print_background=True)
            page.close()
            yield target
        browser.close()
