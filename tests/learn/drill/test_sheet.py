"""The cheat sheet: made of the templates' rules, on one page."""

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
def test_it_prints_on_one_side_of_a_sheet(page: Any) -> None:
    page.set_content(as_html())
    pdf = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1


def test_in_a_notebook_it_is_folded_by_topic() -> None:
    assert sheet()._repr_html_().count("<details>") == len(TOPICS)
    assert str(sheet()) == as_markdown()
