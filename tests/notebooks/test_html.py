"""The pages of the course: of two notebooks, with pictures, folds and glossary, and a search that needs no network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

html = pytest.importorskip("notebooks.masters.html", reason="needs Sphinx, MyST-NB and Furo: the extra html")
NAMES = ["00_start_here", "04_the_life_of_a_unit"]
# What makes a browser fetch something when the page is opened.
FETCHED = re.compile(r"""<(?:script|img|link|iframe|source|video)\b[^>]*?\b(?:src|href)=["'](?:https?:)?//""")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("html")
    made = html.build(out, NAMES)
    assert made == [*NAMES, "glossary", *(f"solutions/{name}" for name in NAMES)]
    return out


@pytest.mark.parametrize("name", [*NAMES, *(f"solutions/{name}" for name in NAMES)])
def test_a_page_has_its_pictures_with_words_and_what_was_folded(pages: Path, name: str) -> None:
    text = (pages / f"{name}.html").read_text()
    pictures = re.findall(r'<img[^>]*alt="([^"]*)"[^>]*src="([^"]*_images/[^"]+)"', text)

    assert len(pictures) >= 2
    assert all(len(words) > 40 for words, _ in pictures)
    assert all((pages / name).parent.joinpath(path).resolve().is_file() for _, path in pictures)
    assert "<details" in text
    assert ">Show code" not in text  # code is there to be read
    assert "text/plain" not in text


def test_titles_have_numbers_and_the_index_lists_every_page_under_its_heading(pages: Path) -> None:
    index = (pages / "index.html").read_text()

    assert re.search(r">00 · \w[^<]*</a>", index)
    assert re.search(r">04 · \w[^<]* \(with solutions\)</a>", index)
    assert all(f'href="{name}.html"' in index for name in (*NAMES, "glossary", *(f"solutions/{n}" for n in NAMES)))


def test_terms_of_the_glossary_have_the_anchors_that_notebooks_link_to(pages: Path) -> None:
    from notebooks.masters.glossary_links import terms

    anchors = set(re.findall(r'\bid="([^"]+)"', (pages / "glossary.html").read_text()))
    assert set(terms().values()) <= anchors


def test_no_page_fetches_anything_from_another_host_or_names_this_machine(pages: Path) -> None:
    for page in pages.rglob("*.html"):
        text = page.read_text()
        assert FETCHED.findall(text) == [], page
        assert str(html.NOTEBOOKS.parent) not in text
    assert "https://" not in "".join(re.findall(r"url\([^)]*\)|@import[^;]*", "".join(
        sheet.read_text() for sheet in pages.rglob("*.css")
    )))  # fmt: skip


def test_a_notebook_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no notebook '99_cooking'"):
        html.build(tmp_path, ["99_cooking"])


@pytest.mark.browser
def test_in_a_browser_the_search_finds_a_word_and_nobody_is_asked_for_anything(pages: Path, page: Any) -> None:
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)

    page.goto((pages / "04_the_life_of_a_unit.html").as_uri())
    pictures = page.locator(".cell_output img")
    assert pictures.count() >= 2
    pictures.last.scroll_into_view_if_needed()
    page.wait_for_function("[...document.images].every(i => i.complete && i.naturalWidth > 0)", timeout=30_000)
    summary = page.locator("article details:not([open]) > summary").first.element_handle()
    summary.focus()
    page.keyboard.press("Enter")
    assert summary.evaluate("summary => summary.parentElement.open")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    page.keyboard.press("Control+Home")
    box = page.locator("input[name=q]").first
    box.focus()
    box.type("reduce-scatter")
    page.keyboard.press("Enter")
    found = page.locator("#search-results li a", has_text="Glossary > reduce-scatter")
    found.wait_for(timeout=30_000)
    found.click()
    page.wait_for_url(re.compile(r"glossary\.html.*#reduce-scatter"), timeout=30_000)

    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert complaints == []
