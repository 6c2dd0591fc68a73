"""`fsdp-sim demo`: the main job, headless, on real ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fsdp_sim.cli.main import main

DEMO = [sys.executable, "-m", "fsdp_sim.cli.main", "demo"]

MOST_BYTES = 8_000_000  # a page that can be sent to someone; plotly.js is 4.5 MB of it


def demo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, cwd=folder, timeout=300, check=False)


def test_it_trains_predicts_and_writes_a_page_that_needs_no_network(tmp_path: Path) -> None:
    done = demo("--ranks", "2", "--steps", "5", "--batch", "4", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" yes ") == 2  # the issue order of both runs is the program's
    losses = [float(loss) for loss in re.findall(r"step \d+: (\d\.\d+)", done.stdout)]
    assert losses[-1] < losses[0]
    page = (tmp_path / "demo.html").read_text()
    assert "On this machine 2 processes train one GPT" in page
    headings = re.findall(r"<h2>(.+?):? .*?</h2>", page)
    assert headings == ["Prefetch", "Prefetch", "Prefetch", "Who"]
    assert "Each of 2 ranks holds a half of every unit" in page  # the map, of the run just made
    assert "Plotly.addFrames" in page  # and it moves
    assert len(page) < MOST_BYTES
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?https?:", page)
    assert "make lab" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1"], "--ranks"),
        (["--ranks", "5"], "32"),
        (["--data", "nothing-here"], "nothing-here"),
        (["--out", "no/folder/demo.html"], "there is no folder"),
        (["--step", "9"], "--steps"),
    ],
)
def test_bad_input_is_one_sentence_and_starts_nothing(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["demo", *arguments])
    assert done.exit_code != 0
    assert words in done.output
    assert "Traceback" not in done.output


def test_an_empty_corpus_and_a_file_that_is_not_text_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "noise.bin").write_bytes(b"\x00\xff\xfe\x80" * 1000)
    for name in ("empty.txt", "noise.bin"):
        done = CliRunner().invoke(main, ["demo", "--data", name])
        assert done.exit_code != 0
        assert name in done.output
        assert "Traceback" not in done.output
