"""Each level can be won and is not won at its start; its optimum is proven; what is no order is refused."""

import random

import pytest

from fsdp_sim.learn import board, progress, puzzle
from fsdp_sim.learn.in_torch import counterpart
from fsdp_sim.learn.puzzle import levels, load
from fsdp_sim.learn.puzzle.replayed import replay
from fsdp_sim.learn.puzzle.session import PuzzleSession
from tests.learn.puzzle.search import best_order

LARGE = ("micro_batches", "tight")  # whose search takes seconds
SEARCHED = [pytest.param(name, marks=[pytest.mark.tail] if name in LARGE else []) for name in levels()]


@pytest.fixture(scope="module")
def best():
    """The optimum of a level, searched once."""
    found = {}
    return lambda name: found.setdefault(name, best_order(levels()[name]))


def test_there_are_twelve():
    assert len(levels()) == 12


@pytest.mark.parametrize("name", SEARCHED)
def test_the_stored_optimum_is_the_least_of_all_legal_orders_and_the_engine_agrees(name, best):
    level = load(name)
    best_ms, order = best(name)
    played = replay(level, order)

    assert best_ms == pytest.approx(level.best_ms)
    assert 1e3 * played.step_s == pytest.approx(level.best_ms)
    assert (played.stars, played.fits) == (2, True)


@pytest.mark.parametrize("name", levels())
def test_a_level_is_not_won_at_its_start_and_its_goal_can_be_reached(name):
    level = load(name)
    first = replay(level, level.start)

    assert level.best_ms < level.goal_ms
    assert not first.fits or 1e3 * first.step_s > level.goal_ms
    assert not level.torch or counterpart(level.torch).line


@pytest.mark.parametrize("name", SEARCHED)
def test_one_star_can_be_had_and_so_can_the_second(name, best):
    """One move away from an optimum is an order that reaches the goal and is not the fastest."""
    level, (_, order) = load(name), best(name)
    moved = [[*rest[:to], line, *rest[to:]] for n, line in enumerate(order)
             for rest in [[*order[:n], *order[n + 1 :]]] for to in range(len(order))]  # fmt: skip

    assert {1, 2} <= {played(level, one) for one in moved}


def played(level, order):
    """The stars of an order; nothing where it is refused."""
    try:
        return replay(level, order).stars
    except ValueError:
        return None


@pytest.mark.parametrize("name", levels())
def test_no_order_that_the_engine_plays_is_faster_than_the_optimum(name):
    """Drawn orders: moves of one line, each kept where it is legal."""
    level, draw = load(name), random.Random(name)
    order, legal = list(level.start), 0
    for _ in range(120):
        tried = order.copy()
        tried.insert(draw.randrange(len(order)), tried.pop(draw.randrange(len(order))))
        try:
            played = replay(level, tried)
        except ValueError:
            continue
        order, legal = tried, legal + 1
        assert not played.fits or 1e3 * played.step_s >= level.best_ms - 1e-6
    assert legal > 10


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (["FWD 0", "AG 0", "AG 1", "FWD 1", "AG 2", "FWD 2"], "FWD 0 needs unit 0 whole"),
        (["AG 0", "FWD 0", "FWD 1", "AG 1", "AG 2", "FWD 2"], "FWD 1 needs unit 1 whole"),
        (["AG 0", "AG 1", "FWD 1", "FWD 0", "AG 2", "FWD 2"], "FWD 1 comes where FWD 0 must"),
        (["AG 0", "FWD 0", "FWD 1", "AG 2", "FWD 2"], "AG 1 is missing and must be there once"),
        (["AG 0", "AG 0", "FWD 0", "AG 1", "FWD 1", "AG 2", "FWD 2"], "AG 0 is there twice and must be there once"),
        (["AG 7", "FWD 0"], "'AG 7' is no line of this level"),
        (["AG 0"] * 10**6, "this level has 6 lines; you gave 1,000,000"),
        ([0.08, None], "is no line of this level"),
        (42, "an order is a list of lines"),
        ({"step_ms": 1}, "an order is a list of lines"),
    ],
)
def test_what_is_no_order_is_refused_with_a_sentence_and_wins_nothing(order, says):
    turn = puzzle("first_prefetch").play(order)

    assert says.lower() in str(turn).lower()
    assert (turn.won, turn.step_s, progress.puzzles()) == (False, None, {})


@pytest.mark.parametrize(
    ("level", "moved", "before", "says"),
    [
        ("backward_too", "RS 2", "BWD 2", "RS 2 needs the gradients of unit 2"),
        ("hsdp", "AR 2", "RS 2", "AR 2 adds up what RS 2 leaves"),
        ("reach_245", "RESHARD 2", "FWD 2", "RESHARD 2 frees unit 2 before anything has used"),
    ],
)
def test_a_line_before_what_it_needs_is_refused(level, moved, before, says):
    order = list(load(level).start)
    order.remove(moved)
    order.insert(order.index(before), moved)

    with pytest.raises(ValueError, match=says):
        replay(load(level), order)


def test_a_unit_must_not_be_whole_under_the_optimizer():
    order = list(load("reach_245").start)
    for _ in range(2):
        order.remove("RESHARD 2")

    with pytest.raises(ValueError, match="unit 2 is still whole at the end"):
        replay(load("reach_245"), ["RESHARD 2", "RESHARD 2", *order])


def test_a_gather_of_a_whole_unit_sends_nothing():
    order = [line for line in load("reach_245").start if line != "RESHARD 2"]
    at = order.index("RS 2")
    order[at:at] = ["RESHARD 2", "RESHARD 2"]
    played = replay(load("reach_245"), order)

    assert [e.unit for e in played.timeline.ops if e.op == "ALL_GATHER"].count("unit 2") == 1


def test_a_learner_wins_and_the_board_says_so():
    turn = puzzle("first_prefetch").play("AG 0\nag 1\nFWD 0\nAG  2\nFWD 1\nFWD 2")

    assert (turn.stars, round(1e3 * turn.step_s)) == (2, 85)
    assert progress.puzzles() == {"first_prefetch": 2}
    assert puzzle().level.name == list(levels())[1]
    assert "Schedule puzzle: 1 level won, 1 of them at the optimum." in str(board())


def test_fewer_stars_take_nothing_away():
    puzzle("first_prefetch").play(["AG 0", "AG 1", "FWD 0", "AG 2", "FWD 1", "FWD 2"])
    assert puzzle("first_prefetch").play(["AG 0", "AG 1", "FWD 0", "FWD 1", "AG 2", "FWD 2"]).stars == 1
    assert progress.puzzles() == {"first_prefetch": 2}


def test_an_order_over_the_limit_is_fast_and_not_won():
    played = replay(load("two_whole"), load("two_whole").start)

    assert (round(1e3 * played.step_s), played.whole, played.stars) == (285, 3, 0)
    assert "3 units are whole at once; 2 may be." in str(played)


@pytest.mark.parametrize(
    "message",
    [
        {"step_ms": 1, "stars": 2},
        {"order": ["AG 0"], "stars": 2},
        {"level": "../levels"},
        {"button": "take"},
        {"order": "AG 0"},
        {"order": [["AG 0"]]},
        "won",
        None,
    ],
)
def test_a_message_that_claims_a_result_or_makes_no_sense_changes_nothing_but_the_sentence(message):
    session = PuzzleSession("first_prefetch")
    before = session.state
    after = session.take(message)

    assert after["refused"]
    assert after | {"refused": ""} == before
    assert progress.puzzles() == {}


def test_undo_reset_hint_and_next_level():
    session = PuzzleSession("first_prefetch")
    session.take({"order": ["AG 0", "AG 1", "FWD 0", "FWD 1", "AG 2", "FWD 2"]})
    assert session.take({"button": "undo"})["step_ms"] == 105
    assert session.take({"button": "hint"})["hint"] == load("first_prefetch").hint
    assert session.take({"button": "reset"})["hint"] == ""
    assert session.take({"button": "next"})["level"] == "backward_too"


def test_text_where_no_widget_runs_says_goal_lines_and_how_to_play():
    text = str(puzzle("two_whole"))
    assert "Level" in text
    assert "at most 2 allowed" in text
    assert 'puzzle("two_whole").play(' in text


def test_in_a_notebook_it_is_a_widget_with_the_text_beside_it():
    bundle = puzzle("two_whole")._repr_mimebundle_()

    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"] == str(puzzle("two_whole"))


def test_what_a_browser_writes_into_the_state_wins_nothing():
    widget = puzzle("first_prefetch").widget()
    widget.set_state({"state": {"stars": 2, "step_ms": 1}})
    widget._handle_custom_msg({"order": list(load("first_prefetch").start)}, [])

    assert (widget.state["stars"], widget.state["step_ms"]) == (0, 105)
    assert progress.puzzles() == {}
