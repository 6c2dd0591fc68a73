"""`fsdp-sim demo`: the main job, headless, on real ranks; and what it says, whichever way the numbers fall."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.cli.demo_words import DIFFERS, PredictionGap, PrefetchGain, order_sentence
from fsdp_sim.cli.main import main
from fsdp_sim.timeline.analysis import step_time_s
from fsdp_sim.viz import compare
from fsdp_sim.words import human_ms
from labs.experiments.prefetch import same_order
from labs.experiments.sleeping_blocks import SleepTimes

DEMO = [sys.executable, "-m", "fsdp_sim.cli.main", "demo"]

MOST_BYTES = 2_000_000
seconds = st.floats(0.005, 20.0)


def demo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, cwd=folder, timeout=300, check=False)


def words(text: str) -> str:
    return " ".join(text.split())


def test_it_sleeps_trains_predicts_and_writes_a_page_that_needs_no_network(tmp_path: Path) -> None:
    done = demo("--ranks", "2", "--steps", "5", "--batch", "4", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = words(done.stdout)
    assert said.startswith("Under a minute on two idle cores.")
    assert "Every rank issued the predicted operations, in the predicted order." in said
    losses = [float(loss) for loss in re.findall(r"step \d+: (\d\.\d+)", said)]
    assert losses[-1] < losses[0]
    page = (tmp_path / "demo.html").read_text()
    assert "trains one model on 2 processes" in page
    gained, gpt, held = re.findall(r"<h2>(.*?)</h2>", page)
    assert gained in said or "the same" in gained
    assert re.search(r"A GPT.*s step: predicted [\d,]+ ms, measured [\d,]+ ms", gpt)
    assert held == "Who holds what, moment by moment"
    for sentence in re.findall(r"The (?:4 measured|prediction is)[^.]*[.:]", said):  # of the same numbers
        assert sentence in words(page)
    assert "Each of 2 ranks holds a half of every unit" in page  # the map, of the run just made
    assert '"frames":[{' in page  # and it moves
    assert len(page) < MOST_BYTES
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?https?:", page)
    assert "make lab" in said


def test_the_first_picture_is_as_long_as_arithmetic_says_and_prefetch_gains_what_it_should() -> None:
    lengths = SleepTimes()
    off, on = (lengths.predict(forward_prefetch=depth) for depth in (None, 1))
    forward, backward, collective, blocks = 0.060, 0.100, 0.050, 4
    both = collective + blocks * backward + collective  # the first gather of backward, and the last reduce-scatter
    assert step_time_s(off, 0) == pytest.approx(blocks * (collective + forward) + both)
    assert step_time_s(on, 0) == pytest.approx(collective + blocks * forward + both)
    gain = PrefetchGain(step_time_s(off, 0), step_time_s(on, 0), lengths.hideable_s)
    assert gain.gained_s == pytest.approx(gain.promised_s) == pytest.approx(0.150)
    title = compare(off, on, titles=("prefetch off", "prefetch on")).figure.layout.title.text
    assert "is 150 ms (16%) shorter" in words(title.replace("<br>", " "))


@pytest.mark.parametrize("depth", [None, 1])
def test_ranks_that_sleep_do_what_arithmetic_says(depth: int | None) -> None:
    """In the order of the program, and never faster: sleep and the modelled wire can only be late."""
    lengths = SleepTimes(world_size=2, blocks=2, forward_s=0.02, backward_s=0.03, collective_s=0.01)
    predicted = lengths.predict(forward_prefetch=depth)
    measured = lengths.run(3, forward_prefetch=depth, progress=False)
    assert same_order(predicted, measured)
    assert min(step_time_s(measured, step) for step in measured.steps) >= step_time_s(predicted, 0) - 1e-3


@given(seconds, seconds, st.floats(0.001, 1.0))
def test_what_is_said_of_prefetch_agrees_with_its_numbers(off_s: float, on_s: float, promised_s: float) -> None:
    gain = PrefetchGain(off_s, on_s, promised_s)
    said, heading = gain.sentence(), gain.heading()
    assert "-" not in re.sub(r"all-gather|each-", "", said.replace("on-", ""))  # no "-272 ms shorter"
    assert f"({human_ms(off_s)} without, {human_ms(on_s)} with)" in said
    told = said.partition("(")[0] + heading
    if abs(off_s - on_s) <= 0.01 * off_s:
        assert "as long as it was" in said
        assert "the same" in heading
    elif on_s < off_s:
        assert f"{human_ms(off_s - on_s)} shorter" in told
        assert "longer" not in told
        near = abs(off_s - on_s - promised_s) <= 0.1 * promised_s
        assert (DIFFERS in said) is not near
    else:
        assert f"{human_ms(on_s - off_s)} longer" in told
        assert "shorter" not in told
        assert "Try again" in said


@given(seconds, st.lists(seconds, min_size=1, max_size=12))
def test_what_is_said_of_the_prediction_agrees_with_its_numbers(predicted_s: float, measured_s: list[float]) -> None:
    close = PredictionGap(predicted_s, measured_s)
    said, noise = close.sentence(), close.noise_sentence()
    low_s, high_s, median_s = min(measured_s), max(measured_s), sorted(measured_s)[len(measured_s) // 2]
    assert f"predicted {human_ms(predicted_s)}, measured {human_ms(median_s)}" in close.heading()
    if len(measured_s) == 1:
        assert "cannot be said" in noise
    else:
        assert f"{human_ms(low_s)} to {human_ms(high_s)}" in noise
        assert ("next to no noise" in noise) == (high_s - low_s <= 0.03 * median_s)
        assert ("that is noise" in noise) != ("next to no noise" in noise)
    if abs(predicted_s / median_s - 1) <= 0.01:
        assert "as long as the median step" in said
        return
    assert ("longer than the median" in said) == (predicted_s > median_s)
    assert ("within the noise" in said) == (low_s <= predicted_s <= high_s)
    assert ("every step took longer" in said) == (predicted_s < low_s)
    assert ("every step was shorter" in said) == (predicted_s > high_s)


def test_another_order_than_the_predicted_one_is_no_small_print() -> None:
    assert "NOT" in order_sentence(False)
    assert "NOT" not in order_sentence(True)


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
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
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
