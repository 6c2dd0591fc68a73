"""``board()``: where the learner stands, chapter by chapter."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from fsdp_sim.learn import progress
from fsdp_sim.learn.find import CHAPTERS, CORE, is_core, load, names
from fsdp_sim.learn.predictions.prediction import CLOSE
from fsdp_sim.learn.progress import Estimate, ExerciseEntry, ExerciseState

SIGNS = {
    ExerciseState.OPEN: "○",
    ExerciseState.TRIED: "◐",
    ExerciseState.PASSED: "✓",
    ExerciseState.OPTIMAL: "★",
    ExerciseState.SEEN: "◎",
}
SOLVED = (ExerciseState.PASSED, ExerciseState.OPTIMAL)
HEADER = ("Exercise", "Core", "Title", "Difficulty", "Minutes", "Tries", "Hints", "State")


@dataclass(frozen=True)
class BoardRow:
    """One exercise on the board."""

    chapter: str
    name: str
    core: bool
    title: str
    difficulty: int
    minutes: int
    entry: ExerciseEntry

    @property
    def cells(self) -> tuple[str, ...]:
        dots = "●" * self.difficulty + "○" * (5 - self.difficulty)
        state = f"{SIGNS[self.entry.state]} {self.entry.state}"
        tries, hints = str(self.entry.tries), f"{self.entry.hints}/3"
        return self.name, "core" * self.core, self.title, dots, str(self.minutes), tries, hints, state


@dataclass(frozen=True, repr=False)
class Board:
    """All exercises and their states, as a table in a notebook and in a terminal."""

    rows: tuple[BoardRow, ...]
    file: str
    estimates: tuple[Estimate, ...] = ()
    puzzles: tuple[int, ...] = ()
    hunts: tuple[ExerciseEntry, ...] = ()

    @property
    def headline(self) -> str:
        """How many are solved, and how many minutes the others will take."""
        solved = [one for one in self.rows if one.entry.state in SOLVED]
        left = sum(one.minutes for one in self.rows) - sum(one.minutes for one in solved)
        return f"{len(solved)} of {len(self.rows)} exercises solved, about {left} minutes left"

    @property
    def calibration(self) -> str:
        """How good the predictions were; empty where there was none."""
        chosen = [e.right for e in self.estimates if e.ratio is None]
        ratios = [e.ratio for e in self.estimates if e.ratio is not None]
        close = sum(e.right for e in self.estimates if e.ratio is not None)
        said = []
        if chosen:
            said.append(f"you chose right in {sum(chosen)} of {len(chosen)} predictions")
        if ratios:
            low, high = sum(r < 1 - CLOSE for r in ratios), sum(r > 1 + CLOSE for r in ratios)
            said.append(f"your estimates are within {CLOSE:.0%} in {close} of {len(ratios)}")
            if max(low, high) > len(ratios) / 2:
                said.append(f"most are too {'low' if low > high else 'high'}")
        return ", and ".join(said).capitalize() + "." * bool(said)

    @property
    def puzzle(self) -> str:
        """How many levels of the schedule puzzle are won; empty where none is."""
        best = sum(stars == 2 for stars in self.puzzles)
        levels = "level" if len(self.puzzles) == 1 else "levels"
        return f"Schedule puzzle: {len(self.puzzles)} {levels} won, {best} of them at the optimum." * bool(self.puzzles)

    @property
    def hunted(self) -> str:
        """Which hunts were tried, how often, and with what success; empty where none was."""
        told = []
        for number, entry in enumerate(self.hunts, 1):
            if entry.tries:
                tries = "1 try" if entry.tries == 1 else f"{entry.tries} tries"
                told.append(f"{number} {'mended' if entry.grade else 'not yet'} in {tries}")
        mended = sum(bool(entry.grade) for entry in self.hunts)
        return f"Hunts: {mended} of {len(self.hunts)} mended ({', '.join(told)})." * bool(told)

    def __str__(self) -> str:
        columns = zip(HEADER, *(one.cells for one in self.rows), strict=True)
        widths = [max(map(len, column)) for column in columns]
        lines = [self.headline, *filter(None, [self.calibration, self.puzzle, self.hunted])]
        for chapter, exercises in self._by_chapter().items():
            lines += ["", chapter, *("  ".join(map(str.ljust, one.cells, widths)).rstrip() for one in exercises)]
        return "\n".join([*lines, "", f"kept in {self.file}; nothing leaves this machine"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from fsdp_sim.viz.table import LEFT, cell, row, table_html  # plotly takes a while

        head = row(cell(text, f' scope="col"{LEFT}', "th") for text in HEADER)
        rows = []
        for chapter, exercises in self._by_chapter().items():
            rows.append(row([cell(escape(chapter), f' scope="rowgroup" colspan="{len(HEADER)}"{LEFT}', "th")]))
            for exercise in exercises:
                first, *rest = map(escape, exercise.cells)
                header = cell(f"<code>{first}</code>", f' scope="row"{LEFT}', "th")
                rows.append(row([header, *(cell(text, LEFT) for text in rest)]))
        caption = "<br>".join(
            escape(text) for text in (self.headline, self.calibration, self.puzzle, self.hunted) if text
        )
        table = table_html(rows, head, f"<caption>{caption}</caption>")
        return f"{table}<p>Kept in <code>{escape(self.file)}</code>; nothing leaves this machine.</p>"

    def _by_chapter(self) -> dict[str, list[BoardRow]]:
        found: dict[str, list[BoardRow]] = {}
        for one in self.rows:
            found.setdefault(one.chapter.replace("_", " "), []).append(one)
        return found


def board(chapter: str = "") -> Board:
    """The progress: of each exercise its difficulty, minutes, tries, hints and state; in a chapter the core first.

    Args:
        chapter: only this one ("memory", "overlap", ...); else all.

    Raises:
        ValueError: there is no such chapter; the message names those that there are.
    """
    if chapter and chapter not in CHAPTERS:
        raise ValueError(f"there is no chapter {chapter!r}; there are {', '.join(CHAPTERS)}")
    from fsdp_sim.learn.hunts import TRAININGS  # they need torch, as exercises do

    kept = progress.read()
    exercises = [load(name) for name, of in names().items() if chapter in ("", of)]
    exercises.sort(key=lambda e: (CHAPTERS.index(e.chapter), (*CORE[e.chapter], e.name).index(e.name)))
    rows = (
        BoardRow(e.chapter, e.name, is_core(e), e.title, e.difficulty, e.minutes, kept.get(e.name, ExerciseEntry()))
        for e in exercises
    )
    won = tuple(progress.puzzles().values())
    hunts = tuple(kept.get(f"hunt_{number}", ExerciseEntry()) for number in range(1, len(TRAININGS) + 1))
    return Board(tuple(rows), str(progress.path()), tuple(progress.estimates().values()), won, hunts)
