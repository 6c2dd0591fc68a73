"""``fsdp-sim puzzle``: the levels, the page's server and who it answers."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading

import pytest

from fsdp_sim.learn import progress
from fsdp_sim.learn.puzzle import load
from fsdp_sim.learn.puzzle.page import MOST_BYTES, Server
from fsdp_sim.learn.puzzle.session import PuzzleSession
from tests.cli.commands import call
from tests.learn.conftest import record  # noqa: F401

JSON = {"Content-Type": "application/json"}
BEST = ["AG 0", "AG 1", "FWD 0", "AG 2", "FWD 1", "FWD 2"]


@pytest.fixture
def server():
    with Server(PuzzleSession("first_prefetch")) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server, method, path, body=None, headers=None):
    """Status and text of an answer; a path without a leading slash stands behind the token."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path if path[:1] == "/" else f"/{server.token}/{path}", body, headers or {})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_a_learner_plays_over_the_page(server):
    status, text = ask(server, "POST", "take", json.dumps({"order": BEST}), JSON)

    assert (status, json.loads(text)["stars"]) == (200, 2)
    assert progress.puzzles() == {"first_prefetch": 2}


@pytest.mark.parametrize("file", ["", "page.js", "puzzle.js", "puzzle.css", "state"])
def test_the_page_and_its_files_are_served(server, file):
    assert ask(server, "GET", file)[0] == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {}),
        ("/state", {}),
        ("/" + "x" * 32 + "/state", {}),
        ("state", {"Host": "evil.example"}),
        ("state", {"Host": "127.0.0.1:1"}),
    ],
)
def test_without_token_or_under_another_name_nothing_is_said(server, path, headers):
    status, text = ask(server, "GET", path, headers=headers)

    assert status == 403
    assert server.token not in text


@pytest.mark.parametrize("path", ["../levels.toml", "levels.toml", "%2e%2e/level.py", "puzzle.js/../level.py"])
def test_no_other_file_is_served(server, path):
    assert ask(server, "GET", path)[0] == 404


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ("{}", {"Content-Type": "text/plain"}, 404),
        ("{}", {}, 404),
        ("x" * (MOST_BYTES + 1), JSON, 413),
        ("{", JSON, 200),
        ("[" * 60000, JSON, 200),
        ('{"order": ["AG 0"], "step_ms": 1}', JSON, 200),
        ('{"stars": 2}', JSON, 200),
    ],
)
def test_what_is_no_message_wins_nothing(server, body, headers, status):
    answer, text = ask(server, "POST", "take", body, headers)

    assert answer == status
    assert answer != 200 or json.loads(text)["refused"]
    assert progress.puzzles() == {}
    assert ask(server, "GET", "state")[0] == 200


def command(*arguments):
    return [sys.executable, "-m", "fsdp_sim.cli.main", "puzzle", *arguments]


@pytest.mark.slow
def test_ctrl_c_ends_it_cleanly():
    with subprocess.Popen(
        command("--no-browser"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=30)

    assert (process.returncode, errors) == (0, "")
    assert "Ended" in said


def test_an_unknown_level_is_refused():
    done = call("puzzle", "two_hole")

    assert done.exit_code == 2
    assert "did you mean 'two_whole'" in done.stderr


TWICE = """[...Array(2)].forEach(() => document.querySelector('.line[data-place="2"]').dispatchEvent(
    new KeyboardEvent("keydown", { key: "[", bubbles: true })))"""


@pytest.mark.slow
@pytest.mark.browser
def test_lines_are_moved_by_keyboard_and_bars_by_mouse(server, page):
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.url)
    page.locator(".line", has_text="AG 1").focus()
    page.keyboard.press("[")
    page.get_by_text("95 ms", exact=True).wait_for()
    assert page.evaluate("document.activeElement.textContent").startswith("AG 1")
    bar = page.locator(".bar.ag").nth(2)
    page.wait_for_timeout(400)  # until it has slid
    box = bar.bounding_box()
    page.mouse.move(box["x"] + 8, box["y"] + 8)
    page.mouse.down()
    page.mouse.move(box["x"] - 120, box["y"] + 8, steps=4)
    page.mouse.up()
    page.get_by_text("85 ms", exact=True).wait_for()
    assert page.locator(".line code").all_inner_texts() == BEST
    page.locator(".line", has_text="AG 0").focus()
    for _ in range(2):  # below AG 1, then below its compute line
        page.keyboard.press("]")
        page.wait_for_timeout(300)
    assert "FWD 0 needs unit 0 whole" in page.locator(".refused").inner_text()

    page.get_by_role("button", name="Reset").click()
    page.get_by_text("105 ms", exact=True).wait_for()
    page.evaluate(TWICE)  # faster than the engine answers
    page.locator(".line code").first.get_by_text("AG 1").wait_for()

    assert errors == []
    assert progress.puzzles() == {"first_prefetch": 2}
    assert load("first_prefetch").best_ms == 85
