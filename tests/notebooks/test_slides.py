"""The decks: each section, figure, question and exercise has a slide, all is large enough, and there are notes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from fsdp_sim import Cluster, Plan, simulate, viz
from fsdp_sim.learn.classroom.plans import Homework, LessonPlan, LessonSlot, plans
from fsdp_sim.learn.classroom.sections import sections
from fsdp_sim.learn.find import load, names
from tests.browser.chromium import CHROMIUM, FLAGS

pytest.importorskip("sphinx_revealjs", reason="needs sphinx-revealjs: the extra html")
from notebooks.masters import build
from notebooks.masters.slides import chapters, figures, page, pdf, words
from notebooks.masters.slides import plans as of_plans
from notebooks.masters.slides.__main__ import chosen, main, make
from notebooks.masters.slides.deck import Deck, Slide
from tests.some import some

CHAPTERS, PLAN = ["00_start_here", "05_overlap"], "45-minutes"
FETCHED = re.compile(r"""<(?:script|img|link|iframe|source|video)\b[^>]*?\b(?:src|href)=["'](?:https?:)?//""")
SMALLEST_TYPE_PX, LEAST_FIGURE = 20, 0.6  # at 1080 lines; a part of the slide's height

# Of the slide that is shown: its smallest type, what sticks out of it or of its box, and the height of its figure.
MEASURE = """() => {
  const slide = document.querySelector("section.present"), sheet = slide.querySelector(".sheet");
  const all = sheet.getBoundingClientRect(), scale = all.width / 1920, out = [], sizes = [];
  for (const e of sheet.querySelectorAll("*")) {
    const box = e.getBoundingClientRect(), look = getComputedStyle(e);
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!text || !box.width || !box.height || e.tagName === "SCRIPT" || /^rgba.*, 0\\)$/.test(look.fill)) continue;
    if (look.visibility === "hidden" || look.fillOpacity === "0") continue;
    sizes.push([parseFloat(look.fontSize), e.textContent.trim().slice(0, 40)]);
    if (box.left < all.left - 1 || box.right > all.right + 1 || box.top < all.top - 1 || box.bottom > all.bottom + 1)
      out.push(e.textContent.trim().slice(0, 40));
  }
  for (const e of sheet.querySelectorAll(".body, pre, .fit"))
    if (e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1) out.push(`${e.className} overflows`);
  const plot = sheet.querySelector(".plot"), at = plot && plot.getBoundingClientRect();
  if (at && (at.bottom > all.bottom - 20 * scale || at.right > all.right)) out.push("the figure");
  const words = sheet.innerText.trim(), drawn = !plot || !!plot.querySelector(".main-svg");
  return { out, sizes, words, drawn, plot: at ? at.height / all.height : 1 };
}"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Deck]]:
    """The folder and the decks that one command makes."""
    out = tmp_path_factory.mktemp("slides")
    return out, {deck.name: deck for deck in make([*CHAPTERS, PLAN], out)}


@pytest.fixture(params=CHAPTERS)
def chapter(request: pytest.FixtureRequest, written: tuple[Path, dict[str, Deck]]) -> Deck:
    return written[1][request.param]


@pytest.fixture
def plan(written: tuple[Path, dict[str, Deck]]) -> Deck:
    return written[1][PLAN]


def saved(name: str) -> nbformat.NotebookNode:
    return nbformat.read(build.STUDENTS / f"{name}.ipynb", as_version=4)


def made(*cells: nbformat.NotebookNode) -> list[Slide]:
    """The slides of a chapter of a title, a section and these cells; without these two."""
    first = new_markdown_cell("# The title\n\nWhat it is about.\n\n## 1. A section\n\nWhy.")
    return list(chapters.slides_of([first, *cells], "00"))[2:]


def printed(code: str, text: str, **metadata: Any) -> nbformat.NotebookNode:
    return new_code_cell(code, outputs=[new_output("stream", name="stdout", text=text)], metadata=metadata)


# What becomes a slide.


def test_a_chapter_begins_with_its_title_and_ends_with_what_to_remember(chapter: Deck) -> None:
    first, last = chapter.slides[0], chapter.slides[-1]
    assert (first.kind, words.plain(first.title)) == ("title", sections()[chapter.name[:2]].heading)
    assert (last.kind, last.title) == ("list", "What you have seen")
    assert last.body.count("<li>") >= 3


def test_every_section_has_a_slide_with_its_heading(chapter: Deck) -> None:
    of = {name: section for name, section in sections().items() if section.notebook == chapter.name and "." in name}
    for name, section in of.items():
        heading = words.plain(words.inline(re.sub(r"^Lab: ", "", section.heading))).casefold()
        assert any(s.kind == "section" and words.plain(s.title).casefold() == heading for s in chapter.slides), name


def test_every_slide_has_something_to_say(chapter: Deck, plan: Deck) -> None:
    for slide in (*chapter.slides, *plan.slides):
        assert any(len(note) > 15 for note in slide.notes), slide


def test_every_figure_is_a_slide_of_its_own_with_a_headline_and_words(chapter: Deck) -> None:
    outputs = [output for cell in build.told(chapter.name).cells for output in cell.get("outputs", ())]
    drawn = [slide for slide in chapter.slides if slide.figure]
    assert len(drawn) == sum(figures.MIME in output.get("data", {}) for output in outputs)
    for slide in drawn:
        assert slide.title
        assert len(slide.alt) > 40
        assert slide.figure
        assert "title" not in slide.figure["layout"]


def test_every_question_of_the_chapter_is_asked_on_a_slide(chapter: Deck) -> None:
    text = "\n".join(cell.source for cell in saved(chapter.name).cells if cell.cell_type == "markdown")
    assert sum(slide.kind == "question" for slide in chapter.slides) == text.count("**Predict.**") > 3


def test_an_exercise_says_what_to_do_and_the_notes_say_what_goes_wrong(chapter: Deck) -> None:
    names = build.exercises(build.MASTERS / f"{chapter.name}.py")
    slides = [slide for slide in chapter.slides if slide.kind == "exercise"]
    for name, slide in zip(names, slides, strict=True):
        exercise = load(name)
        assert slide.over == f"Your turn: {exercise.minutes} minutes"
        assert words.plain(slide.title) == words.plain(words.inline(exercise.title))
        assert words.plain(words.html(exercise.contract)) in words.plain(slide.body)
        assert len(re.findall(r"^- ", "\n".join(slide.notes), re.MULTILINE)) == len(exercise.wrong)


def test_code_is_shown_with_what_it_printed_and_without_plumbing() -> None:
    code = "import torch\n\n\ndef kept():\n    return 1\n\n\nassert kept() == 1\nprint(kept())"
    (slide,) = made(printed(code, "1 <b>row</b>\n"))
    assert ">def<" in slide.body
    assert "import" not in slide.body
    assert "assert" not in slide.body
    assert "print" not in words.plain(slide.body)
    assert "1 &lt;b&gt;row&lt;/b&gt;" in slide.body  # text is text


def test_what_only_prepares_is_left_out() -> None:
    assert made(new_code_cell("import torch"), new_code_cell("a = 3\nassert a == 3")) == []


def test_long_code_is_left_out_and_long_output_is_cut() -> None:
    code = "def long():\n" + "    x = 1\n" * 20 + "print(1)"
    (slide,) = made(printed(code, "\n".join(f"line {n}" for n in range(40))))
    assert "def" not in slide.body
    assert "line 5" in slide.body
    assert "line 39" not in slide.body


def test_a_long_line_of_output_is_cut_after_a_sentence() -> None:
    line = f"{'It takes 909 ms; ' * 9}and {'a word ' * 40}"
    (slide,) = made(printed("print(1)", line))
    assert "takes 909 ms." in slide.body
    assert "a word" not in slide.body


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("{'DDP': 16.6, 'FSDP': 15.3}", "DDP: 16.6\nFSDP: 15.3"),
        ("{8: [7, 7], 1024: {'a': 2}} saved", "8 7, 7, 1024 a 2 saved"),
        ("it loses {'saving': '5%'} and {'restarts': '6%'}", "it loses saving 5% and restarts 6%"),
        ("{x} and {} stay", "{x} and {} stay"),
    ],
)
def test_no_slide_shows_the_repr_of_a_dict(printed: str, shown: str) -> None:
    assert words.of_dicts(printed) == shown


def test_the_sentence_after_what_was_printed_is_its_headline() -> None:
    slides = made(printed("print(1)", "1"), new_markdown_cell("The same, up to rounding. FSDP changes no number."))
    assert slides[0].title == "The same, up to rounding"
    assert "FSDP changes no number." in slides[0].notes[0]


def test_a_sentence_that_leads_on_is_no_headline() -> None:
    slides = made(printed("print(1)", "1"), new_markdown_cell("Now with a network."))
    assert slides[0].title == "A section"


def test_a_drawing_and_a_table_in_the_prose_are_shown_and_paragraphs_are_said() -> None:
    slides = made(
        new_markdown_cell("It is so.\n\n    rank 0  ██··\n    rank 1  ··██\n\n| a | b |\n| - | - |\n| 1 | 2 |")
    )
    assert [slide.kind for slide in slides] == ["text", "table"]
    assert "rank 1  ··██" in slides[0].body
    assert "<td>2</td>" in slides[1].body


def test_what_people_say_is_shown_and_the_truth_is_in_the_notes() -> None:
    markup = "<p>…</p><details><summary>“Faster.”</summary><p><b>In truth:</b> Not <em>so</em>.</p></details>"
    cell = new_code_cell("misconceptions('x')", outputs=[new_output("display_data", data={"text/html": markup})])
    (slide,) = made(cell)
    assert "“Faster.”" in slide.body
    assert "so" not in words.plain(slide.body)
    assert slide.notes == ("“Faster.” In truth: Not so .",)


@pytest.mark.parametrize(("how", "kinds"), [("skip", []), ("notes", []), ("slide", ["output"]), ("", [])])
def test_a_cell_of_a_master_can_overrule_the_rule(how: str, kinds: list[str]) -> None:
    cell = new_code_cell("a = 3", metadata={"slideshow": {"slide_type": how}})
    assert [slide.kind for slide in made(cell)] == kinds


def test_a_paragraph_can_be_shown_as_it_is() -> None:
    (slide,) = made(new_markdown_cell("Order is **all**.", metadata={"slideshow": {"slide_type": "slide"}}))
    assert "<strong>all</strong>" in slide.body


def test_a_notebook_that_is_older_than_its_master_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = saved("00_start_here")
    other.cells[1].source += "\nx = 1"
    nbformat.write(other, tmp_path / "00_start_here.ipynb")
    monkeypatch.setattr(build, "STUDENTS", tmp_path)
    with pytest.raises(ValueError, match=r"the code of 00_start_here\.ipynb has changed.*make notebooks"):
        chapters.chapter(build.MASTERS / "00_start_here.py")


# What a plan shows.


def test_the_notes_of_a_plan_begin_with_its_minutes_row_by_row(plan: Deck) -> None:
    rows = plans()[PLAN].row
    said = [slide.notes[0] for slide in plan.slides if re.match(r"\*\*\d", slide.notes[0])]
    begun = [note for note in said if "Goes on." not in note]
    assert len(begun) == len(rows)
    for row, note in zip(rows, begun, strict=True):
        assert note.startswith(of_plans.mark(row))
        assert row.what in note
        assert row.say in note
        assert row.run in note
        assert ("May be skipped when late." in note) == row.skip_when_late


def test_a_live_row_shows_the_question_and_what_its_cell_shows(plan: Deck) -> None:
    begins = next(n for n, slide in enumerate(plan.slides) if slide.notes[0].startswith("**0:17 to 0:27, live.**"))
    question, figure, *_ = plan.slides[begins:]
    assert (question.kind, question.section) == ("section", "00.3")
    assert figure.figure
    assert figure.notes[0] == "**0:17 to 0:27, live.** Goes on."


def test_what_a_row_has_just_shown_the_next_one_does_not_show_again(plan: Deck) -> None:
    of = [(slide.section, slide.cell, slide.kind) for slide in plan.slides if slide.kind in ("output", "figure")]
    assert len(set(of)) == len(of)


def test_a_plan_begins_and_ends_with_what_one_can_do(plan: Deck) -> None:
    outcomes = plans()[PLAN].outcomes
    for slide in (plan.slides[1], plan.slides[-1]):
        assert all(words.inline(outcome) in slide.body for outcome in outcomes)


def test_homework_is_no_longer_than_a_slide(written: tuple[Path, dict[str, Deck]]) -> None:
    exercises = tuple(names())[:20]
    row = LessonSlot(0, 20, "Draw", "talk", section="00.1", say="A piece each.")
    long = LessonPlan("x", "X", "All.", 20, ("count",), "Nothing.", (row,), homework=(Homework(1, ("00",), exercises),))
    slides = [s for s in of_plans.deck(long, written[1]).slides if words.plain(s.title).startswith("To go on")]
    assert [slide.body.count("<li>") for slide in slides] == [1, 7, 7, 6]


def test_a_break_says_when_it_ends(written: tuple[Path, dict[str, Deck]]) -> None:
    rows = (
        LessonSlot(0, 20, "Draw four ranks", "talk", section="00.1", say="A piece each."),
        LessonSlot(20, 10, "Break", "break"),
        LessonSlot(30, 5, "Count", "exercise", section="00.5", exercises=("all_gathers_per_step",), say="Count."),
    )
    small = LessonPlan("x", "X", "All.", 35, ("count",), "Nothing.", rows)
    slides = of_plans.deck(small, written[1]).slides
    assert [slide.kind for slide in slides] == ["title", "list", "section", "break", "exercise", "list"]
    assert "we go on at 0:30" in slides[3].body
    assert slides[3].notes[0].startswith("**0:20 to 0:30, break.**")


# Words and figures.


def test_a_sentence_does_not_end_within_what_is_quoted_or_emphasised() -> None:
    assert words.sentences('"38 collectives? No." Then show it.') == ['"38 collectives? No."', "Then show it."]
    assert words.sentences("*Not yet. Later.* So go on.") == ["*Not yet. Later.*", "So go on."]


def test_what_only_the_one_at_the_notebook_wants_to_know_is_on_no_slide() -> None:
    assert made(printed("print(x)", "Right after 3 of 12 minutes. In time.")) == []
    (slide,) = made(printed("print(x)", "It agrees with <your answer>"))
    assert "agrees with your answer" in slide.body


def test_markdown_is_rendered_and_html_in_it_is_text() -> None:
    (block,) = words.blocks("A `unit` is [sharded](glossary.md#unit) **here** <script>x</script>.")
    assert words.html(block) == (
        "<p>A <code>unit</code> is sharded <strong>here</strong> &lt;script&gt;x&lt;/script&gt;.</p>\n"
    )


def test_several_timelines_go_without_their_memory_so_that_their_rows_can_be_read() -> None:
    cluster = Cluster("A100-SXM-80GB", gpus=8)
    steps = {api: simulate("gpt2-124m", cluster, Plan(api=api)).timeline for api in ("fsdp2", "fsdp1", "zero2")}
    crowded = json.loads(viz.timeline(steps).figure.to_json())
    assert crowded["layout"]["height"] > 900

    figure = figures.for_slide(crowded, 850)

    assert not any(trace.get("legend") == "legend2" for trace in figure["data"])
    domains = sorted(axis["domain"] for key, axis in figure["layout"].items() if key.startswith("yaxis"))
    assert len(domains) == 3
    assert domains[0][0] >= 0
    assert domains[-1][1] <= 1
    assert all(below[1] < above[0] for below, above in itertools.pairwise(domains))
    assert not any("live memory" in note["text"] for note in figure["layout"]["annotations"])


# Files.


def test_a_page_is_in_a_language_has_a_title_and_names_its_figures(written: tuple[Path, dict[str, Deck]]) -> None:
    out, decks = written
    for name, deck in decks.items():
        text = (out / f"{name}.html").read_text()
        assert '<html lang="en">' in text
        assert f"<title>{deck.title}</title>" in unescape(text)
        labels = re.findall(r'<div class="plot" role="figure" aria-label="([^"]+)"', text)
        assert len(labels) == sum(slide.figure is not None for slide in deck.slides) > 0
        assert text.count("<section ") == len(deck.slides)
        assert str(build.STUDENTS.parent) not in text


def test_a_page_needs_no_other_host(written: tuple[Path, dict[str, Deck]]) -> None:
    for path in written[0].glob("*.html"):
        assert FETCHED.findall(path.read_text()) == [], path
    sheets = "".join(sheet.read_text() for sheet in written[0].glob("assets/*.css"))
    assert "http" not in "".join(re.findall(r"url\([^)]*\)|@import[^;]*", sheets))
    assert all((written[0] / "assets" / name).stat().st_size for name in ("reveal.js", "notes.js", "plotly.min.js"))


def test_no_text_of_a_figure_can_end_the_script_it_stands_in() -> None:
    slide = Slide("figure", "A", figure={"data": [{"name": "</script>"}], "layout": {"width": 10, "height": 10}})
    text = page.html(Deck("x", "X", (slide,)))
    (content,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert json.loads(content)["data"] == [{"name": "</script>"}]


def test_the_notes_are_a_page_to_print_with_a_part_for_each_slide(written: tuple[Path, dict[str, Deck]]) -> None:
    for name, deck in written[1].items():
        text = (written[0] / f"{name}.notes.md").read_text()
        assert len(re.findall(r"^## \d+\. \S", text, re.MULTILINE)) == len(deck.slides)
        assert all(note in text for slide in deck.slides for note in slide.notes)


# The command.


@pytest.mark.parametrize(("name", "near"), [("05_overlop", "05_overlap"), ("45-minute", "45-minutes")])
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert f"there is no chapter or plan {name!r}; did you mean {near!r}?" in capsys.readouterr().err


def test_without_names_every_chapter_and_every_plan_is_made() -> None:
    names = chosen([])
    assert [name[:2] for name in names[:16]] == [f"{number:02d}" for number in range(16)]
    assert names[16:] == list(plans())


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "slides 45-minutes --pdf" in capsys.readouterr().out


def test_a_pdf_without_a_browser_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pdf.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="printing takes Chromium"):
        make(["00_start_here"], tmp_path / "out", with_pdf=True)
    assert not (tmp_path / "out").exists()


# In a browser.


@pytest.fixture
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: sudo apt install chromium)")


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("name", some([PLAN, "05_overlap"], first=1))
def test_nothing_is_cut_or_tiny_and_figures_fill_the_slide(
    written: tuple[Path, dict[str, Deck]], browser: Any, name: str
) -> None:
    tab = browser.new_page(viewport={"width": 1920, "height": 1080})
    asked: list[str] = []
    complaints: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    tab.goto((written[0] / f"{name}.html").as_uri())
    slides = written[1][name].slides
    assert tab.evaluate("Reveal.getTotalSlides()") == len(slides)

    for number, slide in enumerate(slides):
        tab.evaluate(f"Reveal.slide({number})")
        tab.wait_for_selector("section.present.ready")
        seen = tab.evaluate(MEASURE)
        place = f"slide {number + 1}, {words.plain(slide.title)}"
        assert seen["words"], place
        assert seen["out"] == [], place
        assert min(seen["sizes"])[0] >= SMALLEST_TYPE_PX, (place, min(seen["sizes"]))
        assert seen["drawn"], place
        assert seen["plot"] >= LEAST_FIGURE, place

    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert complaints == []
    tab.close()


@pytest.mark.browser
@needs_chromium
def test_key_s_opens_the_notes_of_the_slide(written: tuple[Path, dict[str, Deck]], browser: Any) -> None:
    tab = browser.new_page()
    tab.goto(f"{(written[0] / f'{PLAN}.html').as_uri()}#/slide-3")
    tab.wait_for_selector("section.present.ready")
    with tab.expect_popup() as opened:
        tab.keyboard.press("s")
    notes = opened.value.locator(".speaker-controls-notes .value")
    notes.get_by_text("0:00 to 0:06, talk.").wait_for(timeout=30_000)
    tab.close()


@pytest.mark.tail
@pytest.mark.browser
@needs_chromium
def test_a_deck_is_printed_a_page_for_each_slide(written: tuple[Path, dict[str, Deck]], tmp_path: Path) -> None:
    slides = written[1]["00_start_here"].slides
    figure = next(slide for slide in slides if slide.figure)
    (path,) = page.write([Deck("small", "Small", (slides[0], figure, slides[-1]))], tmp_path)
    (printed_to,) = pdf.write_pdfs([path])
    content = printed_to.read_bytes()
    assert content.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", content)) == 3
    assert len(content) > 50_000  # the figure is in it
