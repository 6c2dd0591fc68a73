"""`PuzzleWidget`: the front end in a notebook: ``puzzle.js`` draws `PuzzleSession.state`, sends what a learner does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from fsdp_sim.learn.puzzle.session import PuzzleSession
from fsdp_sim.timeline import Memory
from fsdp_sim.viz import theme

HERE = Path(__file__).parent
KINDS = {
    "AG": theme.ALL_GATHER, "RS": theme.REDUCE_SCATTER, "AR": theme.ALL_REDUCE, "FWD": theme.FORWARD,
    "BWD": theme.BACKWARD, "WHOLE": theme.MEMORY[Memory.UNSHARDED],
}  # fmt: skip


@cache
def css() -> str:
    """``puzzle.css``, with the colours of all figures of the course."""
    colours = "".join(f"--{name.lower()}:{k.color};--{name.lower()}-text:{k.text_color};" for name, k in KINDS.items())
    pages = f"--font:{theme.FONT};--limit:{theme.LIMIT};--won:{theme.OPTIMIZER.color};"
    light = f"--ink:{theme.INK};--paper:#FFFFFF;--muted:{theme.MUTED};--rule:{theme.RULE};"
    dark = f"--ink:{theme.DARK_INK};--paper:{theme.DARK_PAPER};--muted:#9AA6B2;--rule:#3A434D;"
    return (
        f".puzzle{{{colours}{pages}{light}}}.puzzle.dark{{{dark}}}\n{(HERE / 'puzzle.css').read_text(encoding='utf-8')}"
    )


class PuzzleWidget(anywidget.AnyWidget):
    """Answers the front end's messages with what to draw; what a browser writes into ``state`` is not read."""

    _esm = HERE / "puzzle.js"
    _css = css()
    state = traitlets.Dict().tag(sync=True)

    def __init__(self, session: PuzzleSession) -> None:
        self.session, self._turn = session, 0
        super().__init__(state=session.state | {"turn": 0})
        self.on_msg(self._take)

    def _take(self, _: object, message: object, buffers: list[Any]) -> None:
        self._turn += 1
        self.state = self.session.take(message) | {"turn": self._turn}
