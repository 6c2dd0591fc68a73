"""The cheat sheet: made of the templates' rules, on one sheet that can be read in print."""

import re
from typing import Any

import pytest

from fsdp_sim.learn.drill import sheet
from fsdp_sim.learn.drill.sheet import HARDEST, as_html, as_markdown
from fsdp_sim.learn.drill.template import TOPICS, templates


def test_it_has_the_rules_of_all_that_is_asked_up_to_its_level() -> None:
    text, page = as_markdown(), as_html()
    for template in templates().values():
        assert (template.rule in text) == (template.level <= HARDEST), template.name
    assert [line[3:].lower() for line in text.splitlines() if line.startswith("## ")] == list(TOPICS)
    assert page.count("<li>") == text.count("\n- ")


@pytest.mark.browser
def test_it_prints_on_two_sides_of_a_sheet_in_at_least_8_points(page: Any) -> None:
    page.set_content(as_html())
    page.emulate_media(media="print")
    sizes_px = page.evaluate(
        "[...document.body.querySelectorAll('*')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes_px) >= 8 * 96 / 72 - 0.01
    pdf = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 2


def test_in_a_notebook_it_is_folded_by_topic() -> None:
    assert sheet()._repr_html_().count("<details>") == len(TOPICS)
    assert str(sheet()) == as_markdown()
