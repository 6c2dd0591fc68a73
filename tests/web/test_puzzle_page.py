"""The schedule puzzle in a page: the notebook's front end, on the engine in the browser."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fsdp_sim.learn.puzzle import levels, puzzle

pytestmark = pytest.mark.browser


def lines(page: Any) -> list[str]:
    return [str(text) for text in page.locator(".puzzle .line code").all_inner_texts()]


def drawn(page: Any, times: int) -> None:
    page.wait_for_function(f"document.body.dataset.drawn >= {times}")


def test_a_level_is_won_by_keyboard_remembered_and_linked_to(opened: Any, live_site: str) -> None:
    page = opened
    page.goto(f"{live_site}/puzzle.html")
    assert lines(page) == list(levels()["first_prefetch"].start)  # before Python is there
    drawn(page, 1)
    assert page.locator(".puzzle .dot").count() == len(levels())
    page.locator(".puzzle .line").nth(2).focus()
    page.keyboard.press("[")
    drawn(page, 2)

    order = ["AG 0", "AG 1", "FWD 0", "FWD 1", "AG 2", "FWD 2"]
    assert lines(page) == order
    turn = puzzle("first_prefetch").play(order)
    assert f"{1e3 * turn.step_s:g} ms" in page.locator(".puzzle .number").first.inner_text()
    assert turn.won
    assert "goal 95 ms, best known 85 ms" in page.locator(".puzzle .number").first.inner_text()
    assert page.locator(".puzzle .won a").get_attribute("href").startswith("https://github.com/pytorch/pytorch/")
    assert parse_qs(urlsplit(page.url).fragment) == {"level": ["first_prefetch"], "order": [",".join(order)]}
    address = page.url
    page.locator(".puzzle .next").press("Enter")
    drawn(page, 3)
    assert page.locator(".puzzle h3").inner_text() == levels()["backward_too"].title
    assert page.locator(".puzzle .dot.s1").count() == 1

    page.goto("about:blank")
    page.goto(address)
    drawn(page, 1)
    assert lines(page) == order
    page.goto("about:blank")
    page.goto(f"{live_site}/puzzle.html")  # the first that is not won
    drawn(page, 1)
    assert page.locator(".puzzle h3").inner_text() == levels()["backward_too"].title


def test_a_line_is_dragged_and_what_cannot_be_is_refused_with_a_sentence(opened: Any, live_site: str) -> None:
    page = opened
    page.goto(f"{live_site}/puzzle.html")
    drawn(page, 1)

    def drag(row: int, to: int) -> None:
        one, other = (page.locator(".puzzle .line").nth(n).bounding_box() for n in (row, to))
        page.mouse.move(one["x"] + 60, one["y"] + 11)
        page.mouse.down()
        page.mouse.move(other["x"] + 60, other["y"] + 11, steps=4)
        page.mouse.up()

    drag(4, 2)
    drawn(page, 2)
    assert lines(page) == ["AG 0", "FWD 0", "AG 2", "AG 1", "FWD 1", "FWD 2"]
    drag(0, 1)
    drawn(page, 3)
    assert "FWD 0 needs unit 0 whole" in page.locator(".puzzle .refused").inner_text()
    page.locator(".puzzle .undo").click()
    drawn(page, 4)
    assert lines(page) == list(levels()["first_prefetch"].start)


@pytest.mark.tail
def test_the_puzzle_is_accessible_and_no_wider_than_a_phone(opened: Any, live_site: str) -> None:
    from tests.web.test_accessible import violations  # skips where axe is not installed

    page = opened
    page.set_viewport_size({"width": 390, "height": 900})
    page.emulate_media(color_scheme="dark")
    page.goto(f"{live_site}/puzzle.html#level=one_queue")
    drawn(page, 1)
    page.locator(".puzzle .hint").first.click()
    drawn(page, 2)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(page) == []
