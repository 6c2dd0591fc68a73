"""The core path of each chapter: what its opening says of it is what stands in the notebook."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_sim.learn.classroom.sections import NotebookSection, sections
from fsdp_sim.learn.find import CHAPTERS, CORE, load

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FIGURES = {"image/png", "image/svg+xml", "application/vnd.plotly.v1+json"}
OPENING = re.compile(r"\*\*Core path, about (\d+) minutes:\*\* sections ([^,]+(?:, \d+)*(?: and \d+)?), with")
HEADING = re.compile(r"^## (\d+(?=\. )|.+)|^### (Optional)\b", re.MULTILINE)
OPENING_AND_END = {"", "What you have seen"}


@pytest.fixture(params=range(1, len(CHAPTERS) + 1), ids=CHAPTERS)
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def said(number: int) -> tuple[int, set[str]]:
    """The minutes and the sections that a chapter's opening names."""
    found = OPENING.search(whole(number).text)
    assert found, "the chapter says what its core path is"
    parts = re.findall(r"(\d+)(?: to (\d+))?", found[2])
    return int(found[1]), {str(n) for a, b in parts for n in range(int(a), int(b or a) + 1)}


def whole(number: int) -> NotebookSection:
    return sections()[f"{number:02}"]


def cells_of(number: int, folder: Path = NOTEBOOKS) -> dict[str, list[dict[str, Any]]]:
    """Cells by the number of their section, or by its heading if it has none; those of the opening by nothing.

    What stands under "### Optional: ..." is on nobody's core path, up to the next section.
    """
    notebook = json.loads((folder / f"{whole(number).notebook}.ipynb").read_text())
    here, found = "", dict[str, list[dict[str, Any]]]()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown" and (heading := HEADING.search("".join(cell["source"]))):
            here = heading[1] or heading[2]
        found.setdefault(here, []).append(cell)
    return found


def minutes(cells: list[dict[str, Any]]) -> float:
    """To read and run them: 180 words and 20 lines of code a minute, and one for a prediction.

    Without what an exercise asks, and its check: its own estimate has those minutes.
    """
    total = 0.0
    for cell in cells:
        if is_of_exercise(cell):
            continue
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            total += len(text.split()) / 180
        elif not cell["metadata"].get("jupyter", {}).get("source_hidden"):
            total += len(text.splitlines()) / 20 + text.count("predict(")
    return total


def is_of_exercise(cell: dict[str, Any]) -> bool:
    """Whether it asks or checks. A stub is none of them: of a seeded fault it is all the code there is to read."""
    check = "cause" in cell["metadata"] or "check" in cell["metadata"].get("tags", [])
    return check or "".join(cell["source"]).startswith("### Exercise: ")


def test_its_three_exercises_stand_in_its_sections(number: int) -> None:
    _, parts = said(number)
    on_it = [cell for part, cells in cells_of(number).items() if part in parts for cell in cells]
    core = CORE[CHAPTERS[number - 1]]

    assert len(core) == 3
    assert set(core) <= {cell["metadata"].get("exercise") for cell in on_it}


def test_it_has_at_most_eight_figures(number: int) -> None:
    """The whole chapter, what is optional too."""
    cells = [cell for some in cells_of(number, NOTEBOOKS / "solutions").values() for cell in some]

    assert sum(bool(FIGURES & set(out.get("data", {}))) for cell in cells for out in cell.get("outputs", [])) <= 8


def test_the_first_notebook_shows_its_point_in_ten_minutes_and_takes_a_quarter_of_an_hour_more() -> None:
    cells = cells_of(0)
    point = sum(minutes(cells[part]) for part in ("", "1", "2"))
    rest = sum(minutes(some) for part, some in cells.items() if part not in ("", "1", "2"))
    asked = [
        load(c["metadata"]["exercise"]).minutes for some in cells.values() for c in some if "exercise" in c["metadata"]
    ]

    assert "In ten minutes, with sections 1 and 2, you know" in " ".join("".join(cells[""][0]["source"]).split())
    assert point == pytest.approx(10, abs=1)
    assert rest + sum(asked) == pytest.approx(15, abs=3)


def test_its_minutes_are_those_of_reading_it_and_of_its_exercises(number: int) -> None:
    """What an exercise takes is its own estimate; nobody's pass was timed."""
    told, parts = said(number)
    read = sum(minutes(cells) for part, cells in cells_of(number).items() if part in parts | OPENING_AND_END)
    solve = sum(load(name).minutes for name in CORE[CHAPTERS[number - 1]])

    assert abs(read + solve - told) <= 3
