"""In a page a timeline answers to click and keys, says what it shows, and follows the reader's colour scheme."""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from fsdp_sim.diagnose.links import Links, critical_path
from fsdp_sim.timeline import Timeline
from fsdp_sim.viz import collective, save_html, theme, timeline

Run = Callable[..., Timeline]
SOURCE = files("fsdp_sim.viz").joinpath("browser.js").read_text(encoding="utf-8")


def test_it_is_one_small_module_that_fetches_nothing() -> None:
    assert len(SOURCE.splitlines()) < 420
    assert not [
        word for word in ("import ", "fetch(", "eval(", "XMLHttp", "</script", "innerHTML +=") if word in SOURCE
    ]


@pytest.fixture
def module(page: Any) -> Any:
    """A page with nothing but the module, its functions in ``lib``."""
    page.goto("about:blank")
    names = "awaitedBy, chainOf, moved, sentence, pathSentence"
    page.add_script_tag(content=f"{SOURCE}\nwindow.lib = {{ {names} }};", type="module")
    page.wait_for_function("window.lib")
    return page


@pytest.mark.browser
def test_chains_lead_back_and_waits_turn_round(module: Any) -> None:
    assert module.evaluate("lib.chainOf([-1, 0, 1, 1], 2)") == [2, 1, 0]
    assert module.evaluate("lib.chainOf([1, 0], 0)") == [0, 1]  # operations of no length may wait for each other
    assert module.evaluate("lib.awaitedBy({cause: [-1, 0, 0], waits: [[], [], [0, 1]]})") == [[1, 2], [2], []]


@pytest.mark.browser
def test_arrows_go_along_a_lane_and_to_the_nearest_in_time_on_the_next(module: Any) -> None:
    bars = [
        {"axis": "y", "row": row, "start": start, "end": start + 1}
        for row, start in [(0.5, 4), (0.5, 0), (1.5, 9), (1.5, 5)]
    ] + [{"axis": "y3", "row": 0.5, "start": 2, "end": 3}]
    move = "([bars, n, key]) => lib.moved(bars, n, key)"
    for n, key, to in [
        (-1, "ArrowRight", 1), (1, "ArrowRight", 0), (0, "ArrowLeft", 1), (0, "ArrowRight", 0), (0, "ArrowDown", 3),
        (3, "ArrowUp", 0), (3, "ArrowDown", 4), (4, "ArrowUp", 3), (1, "ArrowUp", 1),
    ]:  # fmt: skip
        assert module.evaluate(move, [bars, n, key]) == to, (n, key)


@pytest.mark.browser
def test_names_are_read_out_as_text_and_never_as_markup(module: Any) -> None:
    bar = {
        "name": "forward &lt;img src=x onerror=alert(1)&gt;",
        "duration": "3.00 ms",
        "more": ", issued<br>awaited by u",
    }
    assert module.evaluate("bar => lib.sentence(bar)", bar) == (
        "forward <img src=x onerror=alert(1)>, 3.00 ms: issued; awaited by u."
    )


class Figure:
    """A timeline in an open page."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.drawn = page.locator("#figure-0")
        self.said = page.locator(".said")

    def lit(self) -> list[int] | None:
        """The numbers of the bars that are not faint; None when none is."""
        return self.page.evaluate("""() => {
            const traces = document.querySelector("#figure-0")._fullData.filter((t) => t.meta?.op !== undefined);
            if (traces.every((t) => t.selectedpoints === undefined)) return null;
            let first = 0;
            return traces.flatMap((t) => {
                const some = [...t.selectedpoints].map((n) => first + n);
                first += t.x.length;
                return some;
            }).sort((a, b) => a - b);
        }""")  # type: ignore[no-any-return]

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.page.wait_for_timeout(150)


@pytest.fixture
def figure(tmp_path: Path, page: Any, training_run: Run) -> Figure:
    path = save_html(tmp_path / "page.html", [timeline(training_run(ranks=2), step=1), go.Figure()], title="A lesson")
    page.goto(path.as_uri())
    page.wait_for_selector(".bars .point path")
    page.wait_for_selector(".said")
    return Figure(page)


@pytest.mark.browser
def test_a_timeline_can_be_reached_by_tab_and_has_a_name_and_a_role(figure: Figure) -> None:
    assert figure.drawn.get_attribute("role") == "application"
    label = figure.drawn.get_attribute("aria-label")
    assert label.startswith("The reduce-scatter of") or label.startswith("The all-gather of")
    assert "arrow keys" in label
    assert figure.said.get_attribute("aria-live") == "polite"
    figure.press("Tab", "Tab")  # the first is the button of the page
    assert figure.page.evaluate("document.activeElement.id") == "figure-0"
    other = figure.page.locator("#figure-1")
    assert (other.get_attribute("role"), other.get_attribute("aria-label")) == ("group", "figure")
    assert figure.page.locator(".said").count() == 1


@pytest.mark.browser
def test_keys_select_an_operation_and_light_up_what_it_depends_on(figure: Figure, training_run: Run) -> None:
    figure.drawn.focus()
    assert figure.lit() is None
    figure.press("ArrowDown", *["ArrowRight"] * 3)  # any arrow begins with the first operation of all
    assert figure.said.text_content().startswith("all-gather layers.2, 3.00 ms: ")
    meta = figure.page.evaluate("document.querySelector('#figure-0').layout.meta.timeline")
    names = figure.page.evaluate("""() => document.querySelector("#figure-0")._fullData
        .filter((t) => t.meta?.op !== undefined)
        .flatMap((t) => [...t.x].map((_, i) => [t.meta.op, t.customdata[i][0], t.y[i]]))""")
    run = training_run(ranks=2)
    gather = next(e for e in run.select(step=1, rank=0).ops if e.label == "ALL_GATHER(layers.2)")
    chain = Links(run, 1).chain((0, gather.seq))
    n = names.index(next(row for row in names if row[:2] == ["all-gather", "layers.2"]))
    lit = figure.lit()
    assert n in lit
    assert set(meta["waits"][n]) <= set(lit)
    assert len(lit) == 1 + len(set(chain.before) | set(chain.waited_for)) + len(set(chain.after) - set(chain.before))
    figure.press("Escape")
    assert figure.lit() is None
    assert "arrow keys" in figure.said.text_content()


@pytest.mark.browser
@pytest.mark.parametrize("key", ["c", "Enter"])
def test_a_key_shows_the_critical_path(figure: Figure, training_run: Run, key: str) -> None:
    figure.drawn.focus()
    figure.press(key)
    expected = {piece.key for piece in critical_path(training_run(ranks=2), 1) if not piece.cpu}
    assert len(figure.lit()) == len(expected)
    assert figure.said.text_content().startswith(
        f"The critical path of this step of 133 ms: {len(expected)} operations drawn here take 115 ms of it: "
        "backward 48 ms, all-gather 36 ms, "
    )
    shapes = figure.page.evaluate("document.querySelector('#figure-0').layout.shapes.filter((s) => s.name).length")
    assert shapes >= 1
    figure.press("Escape")
    assert figure.page.evaluate("document.querySelector('#figure-0').layout.shapes.filter((s) => s.name).length") == 0


@pytest.mark.browser
def test_a_click_selects_and_a_second_one_clears(figure: Figure) -> None:
    box = figure.page.locator(".bars .point text", has_text="head").locator("visible=true").first.bounding_box()
    place = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for lit in (True, False):
        figure.page.mouse.move(place[0] - 3, place[1])
        figure.page.mouse.move(*place, steps=3)
        figure.page.mouse.click(*place)
        figure.page.wait_for_timeout(500)
        assert (figure.lit() is not None) == lit
        assert figure.said.text_content().startswith("forward head, 4.00 ms: waited for its all-gather") == lit


@pytest.mark.browser
def test_zoom_is_shared_by_lanes_and_memory_and_stays_within_the_step(figure: Figure) -> None:
    zoomed = figure.page.evaluate("""async () => {
        const gd = document.querySelector("#figure-0");
        await Plotly.relayout(gd, {"xaxis.range": [-500, 90000]});
        return [gd._fullLayout.xaxis.range, Object.keys(gd._fullLayout).filter((key) => key.startsWith("xaxis"))];
    }""")
    assert zoomed[1] == ["xaxis"]
    assert zoomed[0][0] >= 0
    assert zoomed[0][1] <= 133 * 1.02


@pytest.mark.browser
def test_names_that_do_not_fit_appear_when_zoomed_in(tmp_path: Path, page: Any, training_run: Run) -> None:
    path = save_html(tmp_path / "page.html", timeline(training_run(ranks=1, blocks=60), step=1), title="t")
    page.goto(path.as_uri())
    page.wait_for_selector(".bars .point path")
    label = page.locator(".bars .point text", has_text="31").locator("visible=true")
    assert label.count() == 0
    page.evaluate("Plotly.relayout(document.querySelector('#figure-0'), {'xaxis.range': [300, 400]})")
    page.wait_for_timeout(300)
    assert label.count() > 0


@pytest.mark.browser
def test_the_page_and_its_figures_follow_the_scheme_of_the_system_and_a_button(figure: Figure) -> None:
    def looks() -> tuple[str, str]:
        page = figure.page
        page.wait_for_timeout(200)
        body = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return body, page.evaluate("document.querySelector('#figure-0')._fullLayout.paper_bgcolor")

    light = ("rgb(255, 255, 255)", "#FFFFFF")
    dark = ("rgb(17, 20, 24)", theme.DARK_PAPER)
    assert looks() == light
    button = figure.page.locator("#scheme")
    assert button.text_content() == "Dark page"
    button.click()
    assert looks() == dark
    assert button.text_content() == "Light page"
    button.click()
    assert looks() == light
    figure.page.emulate_media(color_scheme="dark")
    assert looks() == dark


@pytest.mark.browser
def test_a_figure_that_moves_steps_and_plays_by_keys_and_says_where_it_is(tmp_path: Path, page: Any) -> None:
    page.goto(collective("all-gather", ranks=3).save(tmp_path / "page.html").as_uri())
    page.wait_for_selector("#scheme:not([hidden])")
    page.focus("#figure-0")
    said, slider = page.locator(".said"), "document.getElementById('figure-0').layout.sliders[0]"
    labels = page.evaluate(f"{slider}.steps.map((step) => step.label)")
    assert "Arrow keys step" in said.inner_text()

    for key, at in (("ArrowRight", 1), ("End", len(labels) - 1), ("ArrowRight", len(labels) - 1), ("Home", 0)):
        page.keyboard.press(key)
        page.wait_for_timeout(400)
        assert page.evaluate(f"{slider}.active") == at, key
        assert said.text_content() == labels[at]
    page.keyboard.press("Space")
    for _ in range(40):
        page.wait_for_timeout(250)
        if page.evaluate(f"{slider}.active") > 0:
            break
    assert page.evaluate(f"{slider}.active") > 0
