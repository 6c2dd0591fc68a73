"""A prediction is committed to once, judged, kept, and stands in exactly one notebook."""

from __future__ import annotations

import re
from collections import Counter

import jupytext
import pytest

from fsdp_sim.learn import board, predict
from fsdp_sim.learn.predictions import Prediction, load, names
from fsdp_sim.learn.predictions.ask import Asked, settled
from fsdp_sim.learn.predictions.prediction import WIDTH, off
from notebooks.masters import build

BYTES = Prediction("How much?", "16 GB", "Because.", unit="bytes", name="how_much")
CHOICE = Prediction("Which?", "96 × 128", "Rows.", choices=("384 × 32", "96 × 128"), name="which")


@pytest.fixture(autouse=True)
def own_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("FSDP_SIM_PROGRESS", str(tmp_path / "progress.json"))


def test_every_prediction_is_asked_for_in_one_notebook_of_its_own_chapter():
    asked: Counter[str] = Counter()
    for master in build.masters():
        for cell in jupytext.read(master).cells:
            if name := cell.metadata.get("predict"):
                asked[name] += 1
                assert load(name).file == master.stem, name
    assert asked == Counter(list(names()))


def test_every_prediction_can_be_answered_right():
    for prediction in names().values():
        assert prediction.commit(prediction.answer).right
        assert prediction.why
        assert len(prediction.question) > 15


def test_the_right_choice_is_not_always_at_the_same_place():
    places = Counter(p.choices.index(p.answer) for p in names().values() if p.choices)
    assert max(places.values()) <= 0.6 * sum(places.values()), places


@pytest.mark.parametrize("text", ["2", "96 × 128", "96x128", " 96 X 128 "])
def test_a_choice_is_given_by_its_number_or_as_one_would_type_it(text):
    assert CHOICE.commit(text).right


@pytest.mark.parametrize(
    ("text", "right", "says"),
    [
        ("16 GB", True, "and so it is"),
        ("16.02 GB", True, "and so it is"),
        ("14 GB", True, "12% too low"),
        ("8 GB", False, "2 times too low"),
        ("64 GB", False, "4 times too high"),
        ("16 MB", False, "1000 times too low"),
    ],
)
def test_an_estimate_is_close_within_a_fifth_and_is_told_how_far_off_it_is(text, right, says):
    committed = BYTES.commit(text)
    assert committed.right is right
    assert says in committed.sentence


@pytest.mark.parametrize(
    ("asked", "text"),
    [(BYTES, "16"), (BYTES, "much"), (BYTES, "16 ms"), (BYTES, "1e400 GB"), (CHOICE, "3"), (CHOICE, "?")],
)
def test_what_is_no_answer_is_refused_and_nothing_is_committed(asked, text):
    with pytest.raises(ValueError, match=r"unit|quantity|choices|answer|farther"):
        settled(asked, text)
    assert not board("memory").calibration


def test_an_estimate_in_percent_is_written_as_the_truth_is():
    share = Prediction("Which part?", "63%", "Because.", unit="%", name="share")
    assert share.commit("65 %").sentence == "You said 65%; it is 63%: your estimate is 3% too high."


def test_the_first_answer_counts_for_the_board():
    for text in ("8 GB", "16 GB"):
        settled(BYTES, text)
    settled(CHOICE, "2")
    assert board("memory").calibration == (
        "You chose right in 1 of 1 predictions, and your estimates are within 20% in 0 of 1, and most are too low."
    )


def test_the_guess_is_drawn_to_scale_beside_the_truth():
    html = settled(BYTES, "8 GB")._repr_html_()
    assert "width:14.00em" in html
    assert "width:28.00em" in html


def test_text_of_a_learner_is_no_html():
    odd = Prediction("Which?", "a", "<b>", choices=("a", "<script>"), name="odd")
    assert "<script>" not in settled(odd, "<script>")._repr_html_()


def test_without_a_widget_a_line_fits_its_output_and_each_choice_has_lines_of_its_own():
    for name, prediction in names().items():
        lines = predict(name).below.splitlines()
        assert max(map(len, lines)) <= WIDTH, name
        assert sum(bool(re.match(r"\(\d\) ", line)) for line in lines) == len(prediction.choices), name


@pytest.mark.parametrize(
    ("ratio", "says"), [(0.75, "25% too low"), (2, "2 times too high"), (1 / 3, "3 times too low"), (-1, "sign")]
)
def test_how_far_off(ratio, says):
    assert says in off(ratio)


def test_by_mouse_or_keyboard_one_commits_and_cannot_change_it():
    name = next(name for name, prediction in names().items() if prediction.choices)
    entry_and_button, said = Asked(load(name)).widget().children
    entry, button = entry_and_button.children
    button.click()
    assert "Answer first" in said.value
    entry.value = load(name).answer
    button.click()
    assert "✓" in said.value
    assert entry.disabled
    assert button.disabled


def test_a_wrong_name_gets_the_nearest():
    with pytest.raises(ValueError, match="rows_of_a_rank"):
        predict("row_of_a_rank")
