"""A figure that is stored in a notebook, before anything is run: as wide as its output, and dark on a dark page."""

import base64
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from plotly.io.json import to_json_plotly

from fsdp_sim.cli.lab import command
from fsdp_sim.viz import timeline
from tests.browser.chromium import CHROMIUM, FLAGS
from tests.browser.lab import lab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.tail,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: sudo apt install chromium)"),
]
WIDTHS = """() => [...document.querySelectorAll(".jp-RenderedPlotly")].map((e) => {
  const drawn = e.querySelector(".main-svg") ?? e.querySelector("img");
  const style = getComputedStyle(e);
  const room = e.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return [room, drawn.getBoundingClientRect().width, e.closest(".jp-Cell").getBoundingClientRect().width];
})"""


COLOURS = """() => [".main-svg", ".gtitle"].map((name) => {
  const style = getComputedStyle(document.querySelector(".jp-RenderedPlotly " + name));
  return name === ".gtitle" ? style.fill : style.backgroundColor;
})"""
LIGHT, DARK = ["rgb(255, 255, 255)", "rgb(26, 26, 26)"], ["rgba(0, 0, 0, 0)", "rgb(230, 237, 243)"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


def test_stored_figures_fill_their_output_in_jupyterlab_and_notebook_7(
    home: Path, training_run: Any, monkeypatch: pytest.MonkeyPatch, chromium: str
) -> None:
    pytest.importorskip("kaleido", reason="kaleido is not installed")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    monkeypatch.setenv("BROWSER_PATH", chromium)
    bundles: list[dict[str, Any]] = []
    monkeypatch.setattr(display, "display", lambda bundle, **_: bundles.append(bundle))
    timeline(training_run(ranks=2)).show(png=True)
    assert {"application/vnd.plotly.v1+json", "image/jpeg"} <= bundles[0].keys()  # for GitHub, which draws no plotly
    bundles[0]["image/jpeg"] = base64.b64encode(bundles[0]["image/jpeg"]).decode()
    cell = nbformat.v4.new_code_cell("picture", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("display_data", data=json.loads(to_json_plotly(bundles[0])))]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, home / "t.ipynb")
    theme = home / "lab/user-settings/@jupyterlab/apputils-extension/themes.jupyterlab-settings"
    theme.parent.mkdir(parents=True)
    theme.write_text(json.dumps({"theme": "JupyterLab Dark"}))
    options = [word for word in command(home, None, False, False) if "custom_css" in word or "tornado_settings" in word]
    with lab(home, "t", *options) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        in_notebook_7 = address.replace("doc/tree", "notebooks")
        for width, where in ((1280, address), (1440, address), (1920, address), (1280, in_notebook_7)):
            page = browser.new_page(viewport={"width": width, "height": 1000})
            page.goto(where)
            page.wait_for_selector(".jp-RenderedPlotly .main-svg", timeout=120_000)
            if where == address:  # the theme comes when it has been fetched, on a busy machine after the figure
                page.wait_for_function("document.body.dataset.jpThemeLight === 'false'", timeout=60_000)
            page.wait_for_timeout(1500)
            ((room, drawn, within),) = page.evaluate(WIDTHS)
            assert drawn == pytest.approx(room, abs=3), (width, where)
            assert 0.7 * within < drawn < within
            if where == address:
                assert page.evaluate(COLOURS) == DARK
                page.evaluate("document.body.dataset.jpThemeLight = 'true'")
                assert page.evaluate(COLOURS) == LIGHT
            page.close()
        browser.close()
