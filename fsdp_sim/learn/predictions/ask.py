"""``predict(name)``: asks, and after the learner has committed to an answer draws it beside the truth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from msgspec import structs

from fsdp_sim.learn import progress
from fsdp_sim.learn.find import cases
from fsdp_sim.learn.predictions import causes
from fsdp_sim.learn.predictions.prediction import Committed, Prediction, load
from fsdp_sim.learn.verdict import with_code

if TYPE_CHECKING:
    import ipywidgets

RIGHT, WRONG, TRUTH = "#009E73", "#D55E00", "#0072B2"


@dataclass(frozen=True, repr=False)
class Asked:
    """A prediction on the page: radio buttons or a box in a live notebook, text elsewhere."""

    prediction: Prediction

    def __str__(self) -> str:
        return f"{self.prediction.question}\n{self.below}"

    __repr__ = __str__

    @property
    def below(self) -> str:
        """What stands below the question where no widget runs."""
        name = self.prediction.name
        return f'{self.prediction.how}\nRun the cell to answer, or write it in:\npredict("{name}", "your answer")'

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        from fsdp_sim.viz.bundle import widget_bundle

        return {**widget_bundle(self.widget()), "text/plain": self.below}  # the question stands above the cell

    def widget(self) -> ipywidgets.Widget:
        """By keyboard: Tab to the answers, arrows between them, Tab to Commit, space; in the box, Enter."""
        import ipywidgets as W

        asked, said = self.prediction, W.HTML()
        entry: Any
        if asked.choices:
            entry = W.RadioButtons(
                options=[(text.replace("`", ""), text) for text in asked.choices], value=None, layout={"width": "auto"}
            )
        else:
            entry = W.Text(placeholder=asked.how, layout={"width": "24em"}, continuous_update=False)
        button = W.Button(description="Commit", layout={"width": "7em"})

        def commit(_: object) -> None:
            if not entry.value:
                said.value = "<p>Answer first; a guess is fine.</p>"
                return
            try:
                committed = settled(asked, entry.value)
            except ValueError as error:
                said.value = f"<p>{escape(str(error))}</p>"
                return
            entry.disabled = button.disabled = True
            said.value = committed._repr_html_()

        button.on_click(commit)
        if not asked.choices:
            entry.on_submit(commit)
        row = W.VBox if asked.choices else W.HBox
        return W.VBox([row([entry, button]), said])


@dataclass(frozen=True, repr=False)
class Settled:
    """A committed answer beside the truth."""

    committed: Committed
    trouble: str = ""

    def __str__(self) -> str:
        return f"{self.committed.sentence} {self.committed.to.why} {self.trouble}".strip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        c = self.committed
        colour, sign = (RIGHT, "✓") if c.right else (WRONG, "✗")
        return (
            f'<div role="status" style="border-left:5px solid {colour};padding:.4em .8em;max-width:60em">'
            f"<b>{sign} {escape(c.sentence)}</b>{bars(c)}"
            f"<div>{with_code(c.to.why)} {escape(self.trouble)}</div></div>"
        )


def bars(committed: Committed) -> str:
    """The guess drawn above the truth, to scale; nothing for a choice."""
    if committed.ratio is None or committed.ratio <= 0:
        return ""
    longest = max(committed.ratio, 1.0)
    return "".join(
        f'<div style="display:flex;align-items:center;gap:.6em;margin:.15em 0"><span style="width:7em">{who}</span>'
        f'<span style="background:{colour};height:.9em;width:{max(28 * length / longest, 0.15):.2f}em"></span>'
        f"<span>{escape(text)}</span></div>"
        for who, length, colour, text in (
            ("your estimate", committed.ratio, RIGHT if committed.right else WRONG, committed.answer),
            ("the truth", 1.0, TRUTH, committed.to.answer),
        )
    )


def settled(prediction: Prediction, answer: str) -> Settled:
    """Commit to an answer. The first one counts: what one says after the truth was on the page is no prediction.

    Raises:
        ValueError: it cannot be read as an answer; nothing has been committed.
    """
    committed = prediction.commit(answer)
    if prediction.name in cases() and progress.entry(prediction.name).grade:
        committed = structs.replace(committed, to=structs.replace(prediction, why="You have mended it already."))
    kept = progress.Estimate(committed.right, committed.ratio)
    return Settled(committed, progress.keep_estimate(prediction.name, kept))


def predict(name: str, answer: str | float | None = None) -> Asked | Settled:
    """Ask for a prediction, or commit to one.

    Args:
        name: of the prediction, or of a case or a hunt: ``case_07``, ``hunt_1``, whose cause is asked for.
        answer: a choice (its number or its text), or a quantity with its unit; where widgets do not run. Without, it
            is asked for on the page.

    Raises:
        ValueError: there is no such prediction, or the answer cannot be read.

    Example:
        >>> predict("rows_of_a_rank", "384 × 32").committed.right
        False
    """
    if hunted := re.fullmatch(r"hunt_(\d+)", name):
        from fsdp_sim.learn.hunts.hunting import question  # a hunt is asked about as anything else is

        prediction = question(int(hunted[1]))
    else:
        prediction = causes.question(name) if name in cases() else load(name)
    return Asked(prediction) if answer is None else settled(prediction, str(answer))
