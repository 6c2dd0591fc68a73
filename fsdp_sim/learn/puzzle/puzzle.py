"""``puzzle()``: the schedule puzzle in a notebook; ``puzzle(name).play(lines)`` where no widget runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_sim.learn.puzzle.level import Level, levels, load

if TYPE_CHECKING:
    import anywidget


@dataclass(frozen=True, repr=False)
class PuzzleTurn:
    """What became of an order that was typed.

    Attributes:
        won: the goal is reached.
        stars: 0, 1 for the goal, 2 where no order is faster.
        step_s: of the order; None where it was refused.
        refused: why it was; else empty.
    """

    stars: int
    step_s: float | None
    refused: str
    text: str

    @property
    def won(self) -> bool:
        return self.stars > 0

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Puzzle:
    """A level: drawn where widgets run, else text."""

    level: Level

    def play(self, order: Sequence[str]) -> PuzzleTurn:
        """Play an order of the level's lines, such as ``["AG 0", "FWD 0", ...]``; a string with a line each will do.

        A legal order that reaches the goal is kept in the learner's progress.
        """
        from fsdp_sim.learn.puzzle.session import PuzzleSession  # the engine, which ranks do not need

        session = PuzzleSession(self.level.name)
        session.play(order.splitlines() if isinstance(order, str) else order)  # type: ignore[arg-type]
        if session.refused:
            return PuzzleTurn(0, None, session.refused, f"Refused: {session.refused}")
        played = session.played
        text = "\n".join(filter(None, [str(played), session.trouble]))
        return PuzzleTurn(played.stars, played.step_s, "", text)

    def hint(self) -> str:
        """What to look at."""
        return self.level.hint

    def __str__(self) -> str:
        from fsdp_sim.learn.puzzle.session import PuzzleSession, sentence  # the engine, which ranks do not need

        number = list(levels()).index(self.level.name) + 1
        first = PuzzleSession(self.level.name).played
        lines = "\n".join(f"  {line}" for line in first.order)
        return (
            f"Level {number} of {len(levels())}: {self.level.title}. {self.level.goal}\n{lines}\n{first.numbers}\n"
            f"{sentence(first.waits)}\nRun the cell to move lines with mouse or keys, or type an order: "
            f'puzzle("{self.level.name}").play(["{self.level.start[0]}", ...])'
        )

    __repr__ = __str__

    def widget(self) -> anywidget.AnyWidget:
        """The front end, on a session of its own."""
        from fsdp_sim.learn.puzzle.session import PuzzleSession
        from fsdp_sim.learn.puzzle.widget import PuzzleWidget  # anywidget takes a while

        return PuzzleWidget(PuzzleSession(self.level.name))

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        from fsdp_sim.viz.bundle import widget_bundle

        return {**widget_bundle(self.widget()), "text/plain": str(self)}


def puzzle(name: str | None = None) -> Puzzle:
    """A level of the schedule puzzle; without a name the first that is not won.

    Raises:
        ValueError: there is no such level; the message names the nearest.

    Example:
        >>> puzzle("first_prefetch").play(["AG 0", "AG 1", "FWD 0", "FWD 1", "AG 2", "FWD 2"]).stars
        1
    """
    from fsdp_sim.learn.puzzle.session import first_unwon

    return Puzzle(load(first_unwon() if name is None else name))
