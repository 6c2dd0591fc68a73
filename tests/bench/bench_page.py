"""How long the start page takes, in Chromium, from a server on this machine with every other host blocked.

    python -m tests.bench.bench_page [build/site] [--moves 30] [--plans 30 80]

"drawn" is the first paint of the figure that was drawn beforehand, "live" the moment at which the simulator answers in
the page: on a cold profile, then on the same profile again. A move is one key on a slider, until the frame after
plotly.js has drawn is on the screen, simulation included, and until the words are; plans of 30 and 80 units. Targets:
1 s drawn; live within 10 s cold and 4 s warm; 25 MB; a move in 150 ms at 30 units and 300 ms at 80 (medians, two idle
cores).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.bench.bench_explorer import STATES
from tests.browser.chromium import CHROMIUM, FLAGS
from tests.web.conftest import serving

SLIDERS = ("bandwidth_gbps", "micro_batch", "seq_len")
WATCH = """
window.pressed = 0; window.moves = []; window.said = [];
addEventListener("keydown", () => { window.pressed = performance.now(); }, true);
const since = (times) => requestAnimationFrame(() => setTimeout(() => times.push(performance.now() - window.pressed)));
addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  if (!window.watched) document.getElementById("figure").on("plotly_afterplot", () => since(window.moves));
  window.watched = true;
  since(window.said);
}).observe(document.body, { attributeFilter: ["data-drawn"] }));
"""
DRAWN = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
LIVE = "Live: the simulator runs in this page."


def opened(context: Any, address: str) -> tuple[Any, float, float, float]:
    """The page, when its figure stood, when it was live, and how many MB came."""
    page = context.new_page()
    page.add_init_script(WATCH)
    sizes: list[int] = []
    page.on("response", lambda response: sizes.append(int(response.headers.get("content-length", 0))))
    page.route(lambda url: not url.startswith((address, "blob:", "data:")), lambda route: route.abort())
    begun = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.get_by_text(LIVE).wait_for(timeout=120_000)
    live_s = time.perf_counter() - begun
    return page, page.evaluate(DRAWN) / 1e3, live_s, sum(sizes) / 1e6


def moves(page: Any, address: str, line: str, count: int) -> tuple[int, list[float], list[float]]:
    """Moves of sliders at a plan: how many bars its figure has, and the ms of each until figure and words stand."""
    page.goto("about:blank")
    page.goto(f"{address}#plan={quote(line)}")
    page.wait_for_function("document.body.dataset.drawn >= 1", timeout=120_000)
    page.wait_for_timeout(1000)
    page.evaluate("window.moves.length = window.said.length = 0")
    for number in range(count):
        if number % 10 == 0:
            name = SLIDERS[number // 10 % len(SLIDERS)]
            page.locator(f"input[type=range][data-key={name}]").focus()
        page.keyboard.press("ArrowRight" if number % 10 < 5 else "ArrowLeft")
        page.wait_for_function(f"window.said.length > {number}", timeout=60_000)
        page.wait_for_timeout(150)
    bars = page.evaluate(
        "document.getElementById('figure').data.reduce((sum, { base }) => sum + (base?.length ?? 0), 0)"
    )
    return bars, sorted(page.evaluate("window.moves")), sorted(page.evaluate("window.said"))


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, nargs="?", default=Path("build/site"), help="made by `make site`")
    parser.add_argument("--moves", type=int, default=30)
    parser.add_argument("--plans", type=int, nargs="*", default=[30, 80], choices=sorted(STATES), help="their units")
    asked = parser.parse_args()
    if CHROMIUM is None or not (asked.site / "index.html").exists():
        raise SystemExit(f"needs Chromium, and {asked.site}/index.html: `make site` makes it")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    with tempfile.TemporaryDirectory() as profile, serving(asked.site) as address, sync_playwright() as playwright:
        for cache in ("cold", "warm"):
            context = playwright.chromium.launch_persistent_context(
                profile, executable_path=CHROMIUM, args=FLAGS, viewport={"width": 1440, "height": 900}
            )
            page, drawn_s, live_s, megabytes = opened(context, address)
            print(f"{cache} cache: drawn {drawn_s:.2f} s, live {live_s:.1f} s, {megabytes:.1f} MB answered", flush=True)
            if cache == "warm":
                for units in asked.plans:
                    bars, times, said = moves(page, address, STATES[units], asked.moves)
                    print(
                        f"{units} units, {bars} bars, {len(times)} moves: median {statistics.median(times):.0f} ms, "
                        f"95% within {times[int(0.95 * len(times))]:.0f} ms; words {statistics.median(said):.0f} ms",
                        flush=True,
                    )
            context.close()
    print(f"load {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
