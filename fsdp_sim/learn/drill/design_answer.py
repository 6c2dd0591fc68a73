"""``design(name)``: an open design question in a notebook; the simulator judges the numbers of your own plan."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fsdp_sim.learn.drill.ask import question_html
from fsdp_sim.learn.drill.design import Design, designs
from fsdp_sim.words import nearest

if TYPE_CHECKING:
    from fsdp_sim.viz import Picture

HOW = "Free text, with numbers and units."


class DesignAnswer:
    """An open design question: `answer` it, and what is asked next; then read the review and look at `picture`."""

    def __init__(self, design: Design) -> None:
        self.design = design

    def answer(self, said: str) -> DesignAnswer:
        """Say your plan, or what was asked for."""
        self.design.say(said)
        return self

    def picture(self) -> Picture:
        """The step of your plan.

        Raises:
            ValueError: it cannot be simulated.
        """
        from fsdp_sim import viz

        return viz.timeline({"your plan": self.design.simulate().timeline})

    @property
    def lines(self) -> list[str]:
        """What is asked, or the review."""
        return [self.design.asks] if self.design.asks else self.design.review()

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_html_(self) -> str:
        if self.design.asks:
            return question_html(self.design.asks, [], HOW)
        return f'<div role="status"><p>{"<br>".join(map(escape, self.lines))}</p></div>'


def design(name: str = "dense_70b") -> DesignAnswer:
    """An open design question.

    Raises:
        ValueError: there is no such question; the message names the nearest.
    """
    if name not in designs():
        near = nearest(name, designs()) or list(designs())[:1]
        raise ValueError(f"there is no design question {name!r}; did you mean {near[0]!r}? All: {', '.join(designs())}")
    return DesignAnswer(Design(designs()[name]))
