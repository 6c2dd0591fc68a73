"""The pages of the site: of two notebooks, with predictions, figures and a search that needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from fsdp_sim.learn.predictions import load, names
from tests.web.conftest import NAMES

pages_of = pytest.importorskip("web.pages", reason="needs Sphinx, MyST-NB and Furo: the extra html")
NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
MADE = [*NAMES, *(f"solutions/{name}" for name in NAMES)]
# What makes a browser fetch something when the page is opened.
FETCHED = re.compile(r"""<(?:script|img|link|iframe|source|video)\b[^>]*?\b(?:src|href)=["'](?:https?:)?//""")


@pytest.mark.parametrize("name", MADE)
def test_a_page_has_its_pictures_with_words_and_its_notebook_to_download(pages: Path, name: str) -> None:
    text = (pages / f"{name}.html").read_text()
    pictures = re.findall(r'<img[^>]*alt="([^"]*)"[^>]*src="([^"]*_images/[^"]+)"', text)

    assert len(pictures) >= 2
    assert all(len(words) > 40 for words, _ in pictures)
    assert all((pages / name).parent.joinpath(path).resolve().is_file() for _, path in pictures)
    notebooks = set(re.findall(r'href="([^"]+\.ipynb)"[^>]*download', text))
    assert [(pages / name).parent.joinpath(path).resolve() for path in notebooks] == [
        pages / "notebooks" / f"{name}.ipynb"
    ]
    assert "text/plain" not in text


def test_chapters_follow_each_other_between_the_start_and_what_comes_after(pages: Path) -> None:
    def beside(name: str) -> list[str]:
        return re.findall(r'<a class="(?:prev|next)-page" href="([^"]+)"', (pages / f"{name}.html").read_text())

    assert beside("course") == ["00_start_here.html", "./index.html"]
    assert beside("00_start_here") == ["05_overlap.html", "course.html"]
    assert beside("05_overlap") == ["labs.html", "00_start_here.html"]
    course = (pages / "course.html").read_text()
    assert re.search(r">05 · Overlap[^<]*(</?[^>]+>\s*)+FSDP sends", course)


def test_an_answer_is_nowhere_on_a_page_but_where_it_is_judged(pages: Path) -> None:
    text = (pages / "05_overlap.html").read_text()
    asked = re.findall(r'id="predict-(\w+)" data-asked="([^"]*)"', text)

    assert {name for name, _ in asked if name in names()} == {n for n, p in names().items() if p.file == "05_overlap"}
    assert load("step_of_three_blocks").why in unescape(dict(asked)["step_of_three_blocks"])
    shown = re.sub(r'data-asked="[^"]*"', "", text)
    assert not any(load(name).why in unescape(shown) for name, _ in asked if name in names())
    place = shown[shown.index('id="predict-step_of_three_blocks"') :]
    assert 0 < place.index("<details") < place.index("<img")  # the figure that answers is folded
    assert 0 < place.index("Read on when you have run it") < place.index("Look at the two pale red boxes")


def test_terms_of_the_glossary_have_the_anchors_that_notebooks_link_to(pages: Path) -> None:
    from notebooks.masters.glossary_links import terms

    anchors = set(re.findall(r'\bid="([^"]+)"', (pages / "glossary.html").read_text()))
    assert set(terms().values()) <= anchors


def test_no_page_fetches_anything_from_another_host_or_names_this_machine(pages: Path) -> None:
    for page in pages.rglob("*.html"):
        text = page.read_text()
        assert FETCHED.findall(text) == [], page
        assert str(Path(__file__).parents[2]) not in text
    assert "https://" not in "".join(re.findall(r"url\([^)]*\)|@import[^;]*", "".join(
        sheet.read_text() for sheet in pages.rglob("*.css")
    )))  # fmt: skip


def test_every_link_within_the_site_leads_to_a_page_and_a_place_on_it(pages: Path) -> None:
    texts = {page: re.sub(r'data-(?:asked|copy)="[^"]*"', "", page.read_text()) for page in pages.rglob("*.html")}
    places = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    others = {path.stem for path in NOTEBOOKS.glob("*.ipynb")} - set(NAMES)  # which this site was made without
    followed = 0
    for page, text in texts.items():
        for url in map(urlsplit, re.findall(r'(?:href|src)="([^"]+)"', text)):
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            if not url.scheme and target.stem not in others:
                assert target.exists(), (page, url)
                assert not url.fragment or target not in places or unquote(url.fragment) in places[target], (page, url)
                followed += 1
    assert followed > 1000


def test_a_notebook_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no notebook '99_cooking'"):
        pages_of.write(tmp_path, ["99_cooking"])


def test_what_a_figure_copies_is_what_it_needs_and_runs_by_itself(pages: Path) -> None:
    codes = [unescape(code) for code in re.findall(r'data-copy="([^"]*)"', (pages / "05_overlap.html").read_text())]
    assert len(codes) >= 4
    first = codes[0]

    assert first.rstrip().endswith('viz.timeline(fsdp2).titled("Only the two ends stick out")')
    assert "import torch\n" not in first  # which this figure does not need
    run = subprocess.run([sys.executable, "-c", f"{first}\nprint(fsdp2.span_s)"], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("0.245\n", 0), run.stderr


@pytest.mark.browser
def test_in_a_browser_answers_are_judged_as_in_a_notebook(pages: Path, page: Any) -> None:
    """Texts of all kinds, by the page's script and by Python: the same sentence, or both refuse."""
    from web.pages.predictions import judged_by

    page.goto((pages / "05_overlap.html").as_uri())

    def in_python(name: str, text: str) -> str | None:
        try:
            return load(name).commit(text).sentence
        except ValueError:
            return None

    texts = {
        "s": [
            "0.245s",
            "246ms",
            "300 ms",
            "1 h",
            "5",
            "-3 ms",
            "1e-3 s",
            "12,000 us",
            "0.4 us",
            "2 GB",
            "soon",
            "90 s",
        ],
        "bytes": ["2 GB", "1.9GiB", "7", "100 bytes", "2,000 MB", "1e12 B", "3 PB"],
        "%": ["40%", "3 %", "0.5%", "12", "400%"],
        "": ["2", "1", "1.5k", "12,345", "0.25", "1e9", "2 apples"],
    }
    for prediction in names().values():
        if prediction.choices:
            continue
        tried = [prediction.answer, *texts.get(prediction.unit, texts[""]), f"3 {prediction.unit}"]
        said = page.evaluate(
            "([asked, texts]) => texts.map(text => judged(asked, text).sentence ?? null)",
            [judged_by(prediction), tried],
        )
        assert dict(zip(tried, said, strict=True)) == {text: in_python(prediction.name, text) for text in tried}


@pytest.mark.browser
def test_in_a_browser_one_predicts_by_keyboard_and_the_figure_unfolds(pages: Path, page: Any) -> None:
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)

    page.goto((pages / "05_overlap.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    place = page.locator("#predict-step_of_three_blocks")
    figure = page.locator("#predict-step_of_three_blocks ~ .cell .cell_output img").first
    assert not figure.is_visible()
    place.get_by_label("Your prediction").first.focus()
    page.keyboard.press("Enter")
    assert "a guess is fine" in place.get_by_role("status").inner_text()
    page.keyboard.type("315 ms")
    page.keyboard.press("Enter")

    assert "You said 315 ms; it is 245 ms: your estimate is 29% too high." in place.get_by_role("status").inner_text()
    figure.wait_for(state="visible")
    assert page.get_by_text("Look at the two pale red boxes").is_visible()
    choices = page.locator("#predict-gathers_hidden_on_a_cpu")
    choices.get_by_role("radio").last.focus()
    page.keyboard.press("Space")
    choices.get_by_role("button").press("Enter")
    assert "none: right." in choices.get_by_role("status").inner_text()

    page.reload()  # what one has answered is remembered, until one wants to be asked again
    assert "29% too high" in place.get_by_role("status").inner_text()
    assert place.locator("input").input_value() == "315 ms"
    assert choices.get_by_role("radio").last.is_checked()
    place.get_by_role("button", name="Ask me again").press("Enter")
    assert place.get_by_role("status").inner_text() == ""
    page.reload()
    assert not figure.is_visible()

    page.keyboard.press("Control+Home")
    box = page.locator("input[name=q]").first
    box.focus()
    box.type("reduce-scatter")
    page.keyboard.press("Enter")
    found = page.locator("#search-results li a").first
    found.wait_for(timeout=30_000)
    page.wait_for_function("document.querySelector('#search-results p')?.textContent.includes('found')")
    assert found.inner_text() == "Glossary > reduce-scatter"
    assert page.locator("article input[name=q]").input_value() == "reduce-scatter"  # a phone has this field alone
    assert page.locator("#search-results").get_by_text("with solutions").count() == 0
    found.click()
    page.wait_for_url(re.compile(r"glossary\.html.*#reduce-scatter"), timeout=30_000)

    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert complaints == []


@pytest.mark.browser
def test_looked_at_closely_a_figure_answers_the_mouse_in_the_scheme_of_the_page(pages: Path, page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.emulate_media(color_scheme="dark")
    page.goto((pages / "00_start_here.html").as_uri())
    assert not any("figures/" in url for url in asked)  # not before one wants it
    button = page.get_by_role("button", name="Look closer").first
    button.focus()
    page.keyboard.press("Enter")

    plot = page.locator("dialog .js-plotly-plot")
    plot.locator(".barlayer .point").first.wait_for(timeout=30_000)
    assert plot.evaluate("plot => plot._fullLayout.paper_bgcolor") == "#111418"
    assert len(plot.get_attribute("aria-label") or "") > 40
    plot.locator(".nsewdrag").first.hover()
    plot.locator(".hoverlayer .hovertext").first.wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert page.evaluate("document.activeElement.textContent") == "Look closer"
    assert all(url.startswith(("file:", "data:")) for url in asked)
