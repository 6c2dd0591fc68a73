"""Will it fit, and why is my step slow, in a browser that reaches no other host."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_sim.diagnose import diagnose
from fsdp_sim.timeline import read_timeline
from fsdp_sim.viz import theme
from tests.web.test_calls import CONFIG, RECORDED, asked, form

pytestmark = pytest.mark.browser


def answered(page: Any) -> None:
    page.wait_for_function("document.querySelector('#result p') && !document.querySelector('#form button').disabled")


def refused(page: Any) -> str:
    page.wait_for_function("!document.querySelector('#form button').disabled && document.querySelector('.refused')")
    return str(page.inner_text("#status"))


def test_a_pasted_config_is_answered_by_keyboard_with_memory_as_a_bar_and_a_table(opened: Any, live_site: str) -> None:
    page = opened
    page.goto(f"{live_site}/fit.html")
    page.focus("#config")
    page.keyboard.insert_text(json.dumps(CONFIG))
    page.fill("#micro_batch", "3")
    page.keyboard.press("Enter")
    answered(page)

    expected = asked("fit", form(micro_batch="3", grad_accum="1", api="fsdp2"))["answer"]
    assert page.locator("#result p").all_inner_texts()[:2] == [expected["answer"], expected["why"]]
    rows = page.locator("table").first.locator("tbody tr").all()
    assert [row.locator("td").all_inner_texts() for row in rows] == [
        [part["name"], part["text"]] for part in expected["memory"]
    ]
    widths = page.locator(".parts span").evaluate_all("all => all.map(one => parseFloat(one.style.width))")
    assert [width / widths[0] for width in widths] == pytest.approx(
        [part["bytes"] / expected["memory"][0]["bytes"] for part in expected["memory"]], rel=1e-4
    )
    colours = page.locator(".parts span").evaluate_all("all => all.map(one => one.style.getPropertyValue('--colour'))")
    assert colours == [theme.MEMORY[part["category"]].color for part in expected["memory"]]
    told = page.locator("#result li").all_inner_texts()
    assert any("activation_checkpointing=selective" in line for line in told)

    page.fill("#config", json.dumps(CONFIG | {"model_type": "lama"}))
    page.click("#form button")
    assert "model_type is 'lama'; the nearest known is llama" in refused(page)
    assert page.locator("#result").is_hidden()

    page.fill("#config", "")
    page.click("#form button")
    assert refused(page) == "Paste a config.json, or choose a model."


def test_a_dropped_trace_is_answered_in_the_sentences_of_the_command(opened: Any, live_site: str) -> None:
    page = opened
    page.goto(f"{live_site}/trace.html")
    assert "the file never leaves this computer" in page.inner_text("main")
    path = RECORDED / "fsdp2.rank0.json.gz"
    page.evaluate(
        """([name, bytes]) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([new Uint8Array(bytes)], name));
          document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
        }""",
        [path.name, list(path.read_bytes())],
    )
    answered(page)
    found = diagnose(read_timeline(path))
    text = page.inner_text("#result")
    assert text.startswith(found.headline)
    drawn = page.evaluate("document.querySelector('#result .figure').data.map(trace => trace.name)")
    assert {"forward", "backward", "all-gather", "reduce-scatter"} <= set(drawn)
    assert all(blame.sentence in text for blame in found.culprits[:2])
    assert all(f"Try: {tip}" in text for blame in found.culprits[:2] for tip in blame.advice)

    page.set_input_files("#files", [RECORDED / f"fsdp2.rank{rank}.json.gz" for rank in (0, 1)])
    page.fill("#rank", "1")
    page.click("#form button")
    answered(page)
    assert "of rank 1" in page.inner_text("#status")


def test_what_a_trace_says_is_text_and_what_is_no_trace_is_refused(opened: Any, live_site: str, tmp_path: Path) -> None:
    page = opened
    page.goto(f"{live_site}/trace.html")
    text = gzip.decompress((RECORDED / "fsdp2.rank0.json.gz").read_bytes()).decode()
    attack = tmp_path / "attack.json"
    attack.write_text(text.replace("layers.1", "<img src=x onerror=document.title=1>"))
    page.set_input_files("#files", attack)
    page.click("#form button")
    answered(page)
    assert "REDUCE_SCATTER(<img src=x onerror=document.title=1>)" in page.inner_text("#result")
    assert page.locator("#result img").count() == 0
    assert page.title() == "Why is my step slow?"

    cut = tmp_path / "cut.json.gz"
    cut.write_bytes((RECORDED / "fsdp2.rank0.json.gz").read_bytes()[:20_000])
    page.set_input_files("#files", cut)
    page.click("#form button")
    assert refused(page).startswith("cut.json.gz is a broken gzip file after")


def test_reading_is_cancelled_and_begun_anew_and_what_is_too_large_is_refused_before(
    opened: Any, live_site: str
) -> None:
    page = opened
    page.goto(f"{live_site}/trace.html")
    page.set_input_files("#files", RECORDED / "fsdp2.rank0.json.gz")
    page.click("#form button")
    page.get_by_role("button", name="Cancel").click()  # Python is not there yet
    assert refused(page) == "Cancelled; nothing was kept."
    page.click("#form button")
    answered(page)
    assert page.locator("progress").count() == 0

    page.evaluate("Object.defineProperty(File.prototype, 'size', { get: () => 3e8 })")
    page.click("#form button")
    assert refused(page).startswith("fsdp2.rank0.json.gz is 300 MB; this page reads traces of up to 200 MB each")


LOOKED_AT = [("fit", 390, "dark"), pytest.param("trace", 390, "light", marks=pytest.mark.tail)]


@pytest.mark.parametrize(("name", "width", "scheme"), LOOKED_AT)
def test_the_forms_are_accessible_and_no_wider_than_a_phone(
    opened: Any, live_site: str, name: str, width: int, scheme: str
) -> None:
    from tests.web.test_accessible import violations  # skips where axe is not installed

    page = opened
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{live_site}/{name}.html")
    if name == "fit":
        page.select_option("#model", "llama3.2-1b")
    else:
        page.set_input_files("#files", RECORDED / "fsdp2.rank0.json.gz")
    page.click("#form button")
    answered(page)

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []
