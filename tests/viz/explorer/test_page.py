"""Without a kernel: the page moves with its sliders and asks nobody; the picture says what it shows."""

import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_sim.viz.explorer import explorer, explorer_page
from fsdp_sim.viz.explorer.page import MOST_BYTES

STATE = "model=gpt2-124m gpu=A100 gpus=16 micro_batch=4 bandwidth_gbps=50"
VARY = {"forward_prefetch": [None, 1, 2], "bandwidth_gbps": [10, 50, 400], "gpus": [16, 12]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return explorer_page(tmp_path_factory.mktemp("page") / "page.html", STATE, VARY)


def test_it_holds_all_it_needs_and_little_more(saved: Path) -> None:
    html = re.sub(r"<script>.{1000000,}?</script>", "", saved.read_text(), flags=re.DOTALL)
    assert len(html) < MOST_BYTES
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://""", html)


@pytest.mark.parametrize(("state", "vary", "said"), [
    (STATE, {}, "vary is {}"),
    (STATE, {"gpus": []}, "each with its values"),
    (STATE, {"gpu_count": [8]}, "there is no gpu_count"),
    (STATE, {"micro_batch": range(1, 21), "seq_len": range(64, 85)}, "420 combinations"),
    (STATE.replace("gpus=16", "gpus=12"), {"micro_batch": [1]}, "take 8 or 16"),
])  # fmt: skip
def test_what_makes_no_page_is_said_and_nothing_written(
    state: str, vary: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        explorer_page(tmp_path / "page.html", state, vary)
    assert not (tmp_path / "page.html").exists()


def test_the_picture_of_an_explorer_says_what_it_shows() -> None:
    made = explorer(state=STATE)
    picture = made.picture
    assert f"{made.shown.sim.mfu:.0%} MFU" in picture.finding
    assert "Memory peaks at" in picture.finding
    assert "<" not in picture.finding
    names = {trace.name for trace in picture.figure.data}
    assert {"forward", "all-gather", "activations"} <= names
    assert made.shown.state.line == picture.tables[0].caption


@pytest.mark.browser
def test_a_key_on_a_slider_of_the_page_moves_the_figure_and_the_words(saved: Path, page: Any) -> None:
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.set_viewport_size({"width": 900, "height": 900})
    page.goto(saved.as_uri())
    page.wait_for_selector(".barlayer path", state="attached")
    bars = "document.querySelector('.js-plotly-plot')._fullData.find(t => t.name === 'all-gather')"
    length = f"{bars}.x.reduce((sum, x) => sum + x)"
    before, words = page.evaluate(length), page.inner_text("#words")
    page.focus("#vary-bandwidth_gbps")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(f"before => {length} > 2 * before", arg=before)
    assert page.inner_text("#words") != words
    assert "bandwidth_gbps=10" in page.inner_text("#state")
    page.focus("#vary-gpus")
    page.keyboard.press("ArrowRight")
    assert "take 8 or 16" in page.inner_text("#words")
    assert page.locator("main.stale").count() == 1
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "blob:", "data:"))] == []


@pytest.mark.browser
def test_a_bar_that_is_pointed_at_says_how_long_it_is_and_when_it_ran(tmp_path: Path, page: Any) -> None:
    made = explorer(state=STATE)
    page.goto(made.picture.save(tmp_path / "still.html").as_uri())
    page.wait_for_selector(".bars .point path")
    names = [trace.name for trace in made.picture.figure.data]
    for name in ("all-gather", "exposed communication"):
        bars = made.picture.figure.data[names.index(name)]
        base, length = float(bars.base[-1]), float(bars.x[-1])
        page.evaluate(
            "at => Plotly.Fx.hover('figure-0', [at])",
            {"curveNumber": names.index(name), "pointNumber": len(bars.x) - 1},
        )
        text = f", {length:.3f} ms{base:,.3f} to {base + length:,.3f} ms"
        # plotly shows a second bar's text up to 50 ms after it was asked for: the first one's stands until then
        page.locator(".hoverlayer .hovertext").filter(has_text=text).first.wait_for()
        assert base > 2 * length  # else an end would pass for a duration
