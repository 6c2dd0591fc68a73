"""Every row of what the course is to teach has a place in a notebook, and every place names a row that there is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fsdp_sim.learn.coverage import Lesson, lessons, masters, rows
from fsdp_sim.learn.find import CHAPTERS, load_all
from fsdp_sim.learn.statements import WITH_STATEMENTS, misconceptions

ROWS = {row.name: row for row in rows()}
HEADER = (masters() / "00_start_here.py").read_text().partition("\n\n")[0] + "\n\n"
MASTER = """\
# %% [markdown] covers=["coverage 000.1", "pitfall 4"]
# # A title
#
# ## 1. A section

# %%
1 + 1

# %% [markdown]
# ## 2. Another
#
# Text.

# %% exercise="case_26"

# %%
misconceptions("bug_hunt")
"""


@pytest.fixture(scope="module")
def taught() -> list[Lesson]:
    return lessons(masters())


def test_every_row_has_a_place(taught: list[Lesson]) -> None:
    missing = sorted(ROWS.keys() - {place.row for place in taught}, key=list(ROWS).index)

    assert not missing, f"{len(missing)} of {len(ROWS)} rows are taught nowhere (`fsdp-sim coverage --missing`): " + (
        ", ".join(f"{name} ({ROWS[name].teach_in or 'said'})" for name in missing)
    )


def test_every_place_names_a_row_that_there_is(taught: list[Lesson]) -> None:
    assert [str(place) for place in taught if place.row not in ROWS] == []


def test_every_exercise_and_every_statement_names_rows_that_there_are() -> None:
    assert {e.name: row for e in load_all() for row in e.covers if row not in ROWS} == {}
    assert {
        e.statement: row
        for c in WITH_STATEMENTS
        for e in misconceptions(c).entries
        for row in e.covers
        if row not in ROWS
    } == {}


def test_the_rows_are_all_there_and_told_apart() -> None:
    assert len(ROWS) == len(rows())
    assert Counter(row.kind for row in rows()) == {"coverage": 275, "pitfall": 54, "misconception": 37 + 261}
    assert {row.status for row in rows()} == {"true", "partly true", "false", "outdated", "unsourced"}
    assert {row.teach_in for row in rows()} <= {*CHAPTERS, ""}
    assert all(row.covers for row in rows() if row.kind != "misconception")


def test_places_are_read_from_text_exercises_and_statements(tmp_path: Path) -> None:
    (tmp_path / "01_a.py").write_text(HEADER + MASTER)

    found = lessons(tmp_path)

    assert found[:2] == [
        Lesson("coverage 000.1", "01_a", "1. A section", "text"),
        Lesson("pitfall 4", "01_a", "1. A section", "text"),
    ]
    assert {place.by for place in found} == {"text", "exercise case_26", "what people say"}
    assert {place.section for place in found[2:]} == {"2. Another"}
    assert Lesson("misconception 35", "01_a", "2. Another", "what people say") in found


def test_an_exercise_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "01_a.py").write_text(HEADER + '# %% exercise="no_such_exercise"\n')

    with pytest.raises(ValueError, match="no_such_exercise"):
        lessons(tmp_path)
