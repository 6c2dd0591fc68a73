"""WCAG 2.2 AA, by axe-core in a browser: what a machine can see of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python: make dev")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
NOT_HELD = {"region": {"enabled": False}}  # no success criterion: the switches of Furo's drawers stand before all else
WIDTHS = {"phone": 390, "desktop": 1440}


def violations(page: Any) -> list[str]:
    """What axe finds on a page as it is drawn, with everything unfolded: the rule, the element, what is wrong."""
    page.evaluate("document.querySelectorAll('details').forEach(folded => folded.open = true)")
    page.wait_for_timeout(400)  # until what unfolds has come into sight, which its contrast depends on
    options = {"runOnly": {"type": "tag", "values": RULES}, "rules": NOT_HELD, "resultTypes": ["violations"]}
    found = axe.Axe().run(page, options=options).response["violations"]
    return [f"{rule['id']}: {node['html'][:200]}: {node['failureSummary']}" for rule in found for node in rule["nodes"]]


LOOKED_AT = [
    ("00_start_here", "phone", "dark"),
    pytest.param("index", "desktop", "dark", marks=pytest.mark.tail),
    pytest.param("reference/commands", "desktop", "light", marks=pytest.mark.tail),
]


@pytest.mark.browser
@pytest.mark.parametrize(("name", "width", "scheme"), LOOKED_AT)
def test_axe_finds_nothing(served: str, page: Any, name: str, width: str, scheme: str) -> None:
    page.set_viewport_size({"width": WIDTHS[width], "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{served}/{name}.html")
    if name == "00_start_here":  # as it is once one has answered
        page.locator(".prediction input").first.click()
        page.keyboard.type("30%")
        page.locator(".prediction button").first.click()
        page.locator(".prediction .sentence").first.wait_for()

    assert violations(page) == []


@pytest.mark.browser
@pytest.mark.tail
def test_no_page_is_wider_than_a_phone_and_axe_finds_nothing_on_every_third(
    served: str, pages: Path, page: Any
) -> None:
    """Every second of these in the dark: the style is one."""
    page.set_viewport_size({"width": WIDTHS["phone"], "height": 844})
    found: dict[str, list[str]] = {}
    for number, path in enumerate(sorted(pages.rglob("*.html"))):
        page.emulate_media(color_scheme="dark" if number % 2 else "light")
        name = path.relative_to(pages).as_posix()
        page.goto(f"{served}/{name}")
        wide = page.evaluate("document.documentElement.scrollWidth")
        found[name] = ["wider than the window"] if wide > WIDTHS["phone"] else []
        found[name] += violations(page) if number % 3 == 1 else []
    assert {name: some for name, some in found.items() if some} == {}


def test_an_output_is_mended_where_a_notebook_may_show_what_a_page_may_not() -> None:
    from web.pages.course import accessible

    markup = '<summary><b>torch</b> <a href="x">f</a>, 16 lines</summary><h4>Hunt 1</h4><th scope="col"></th><th>a</th>'
    assert accessible(markup) == (
        '<summary><b>torch</b> f, 16 lines</summary><a href="x">f</a><p><b>Hunt 1</b></p><td></td><th>a</th>'
    )


@pytest.mark.browser
def test_axe_sees_a_picture_without_words(pages: Path, page: Any) -> None:
    page.goto((pages / "course.html").as_uri())
    page.evaluate("document.querySelector('article').append(new Image())")
    assert any(found.startswith("image-alt: <img>") for found in violations(page))


@pytest.mark.browser
def test_on_a_phone_the_list_of_pages_opens_by_keyboard_and_is_out_of_reach_before(pages: Path, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto((pages / "course.html").as_uri())
    chapter = page.locator(".sidebar-drawer").get_by_role("link", name="05 · Overlap")
    assert chapter.count() == 0
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    chapter.click()
    page.wait_for_url("**/05_overlap.html")


@pytest.mark.browser
def test_by_keyboard_one_skips_what_stands_before_the_text(pages: Path, page: Any) -> None:
    page.goto((pages / "05_overlap.html").as_uri())
    for _ in range(3):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == "Skip to content":
            break
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('article') !== null")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
