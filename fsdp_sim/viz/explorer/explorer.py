"""`Explorer`: the controls, the figure and the words, and what happens between them when something moves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

import ipywidgets as W

from fsdp_sim.cost import Workload
from fsdp_sim.forms import FORMS, FormState, state_of
from fsdp_sim.simulation import Simulation
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.viz import theme
from fsdp_sim.viz.explorer import words
from fsdp_sim.viz.explorer.bridge import Bridge
from fsdp_sim.viz.explorer.canvas import Canvas
from fsdp_sim.viz.explorer.controls import Controls
from fsdp_sim.viz.explorer.dependencies_of import ChosenOperation, Key, Operations
from fsdp_sim.viz.explorer.drawing import legend_html
from fsdp_sim.viz.explorer.latest_call import LatestCall
from fsdp_sim.viz.explorer.scene import Scene, scene
from fsdp_sim.viz.explorer.starts import GOALS, PRESETS
from fsdp_sim.viz.explorer.still import still
from fsdp_sim.viz.picture import PNG_VARIABLE, Picture

NO_OPERATION = "Click a bar, or step through the operations here: what one waits for and what waits for it lights up."


class ShownPlan(NamedTuple):
    """A plan that works, and what there is to see of it."""

    state: FormState
    sim: Simulation
    seen: Scene


class Explorer:
    """Sliders and menus for a training step; its timeline, memory and explanation follow as they move.

    As the last line of a cell it shows itself.

    Attributes:
        controls: by name: the widgets that move it (``explorer.controls.widgets["gpus"].value = "64"``).
        canvas: the figure.
        numbers: those of the plan, of the pinned one and of the goal; or what is impossible, as HTML.
        words: the sentences, as HTML.
        shown: the last plan that works, which is what the figure shows.
        pinned: the plan A, if one is.
        message: what is impossible about the present state; empty if nothing is.
    """

    def __init__(self, state: FormState, dark: bool | None = None) -> None:
        sim = state.simulate()
        self.shown = ShownPlan(state, sim, scene(sim))
        self.pinned: ShownPlan | None = None
        self.message = ""
        self._selected: Key | None = None
        self._operations = Operations(sim.run, self.shown.seen)
        self._quiet = False
        self._draw = LatestCall(self._serve)
        self.controls = Controls(self._draw)
        self.controls.show(state)
        self.canvas = Canvas(self.select, self.shown.seen, theme.DARK if dark else theme.LIGHT)
        self.bridge = Bridge(label="Copy")
        self._make(dark)
        self._say(None)

    @property
    def state(self) -> FormState:
        """What the controls say, possible or not."""
        return self.controls.state

    @property
    def picture(self) -> Picture:
        """The last plan that works as a picture that stands still."""
        picture = still(*self.shown)
        return picture.dark() if self.dark.value else picture

    def go(self, line: str) -> None:
        """Go to the state that a line describes; what is wrong with it is said in place of the words."""
        try:
            state = FormState.read(line)
        except ValueError as error:
            self._refuse(str(error))
            return
        self.controls.show(state)
        self._draw(state)

    def pin(self) -> None:
        """Pin the plan that is shown as A: its timeline stays above, its numbers beside those of what comes next."""
        self.pinned = self.shown
        self.canvas.pin(self.shown.seen, self.shown.state.line)
        self._compare()

    def unpin(self) -> None:
        """Compare no longer."""
        self.pinned = None
        self.canvas.pin(None)
        self._compare()

    def select(self, row: int | None) -> None:
        """Light up an operation (by its row in the timeline) and what it depends on; None for none."""
        choice = self._operations.choose(row) if row in self._operations.rows else None
        self._selected = self._operations.key(choice.op) if choice else None
        self.canvas.show(self.shown.seen, (self._operations, choice) if choice else None)
        self._tell(choice)

    # -- a move

    def _serve(self, state: FormState) -> None:
        try:
            sim = state.simulate()
            seen = scene(sim)
        except (ValueError, TypeError) as error:
            self._refuse(str(error), state)
            return
        self.shown = ShownPlan(state, sim, seen)
        self._operations, choice = Operations(sim.run, seen), None
        if self._selected is not None and (row := self._operations.find(self._selected)) is not None:
            choice = self._operations.choose(row)
        self.canvas.show(seen, (self._operations, choice) if choice else None)
        if not self._draw.waiting:  # else these would be words of a plan that nobody will see
            self._say(choice)

    def _say(self, choice: ChosenOperation | None) -> None:
        """All that is beside the figure, which the browser draws meanwhile."""
        state, sim, seen = self.shown
        self.message = ""
        self.figure_box.remove_class("fsdp-stale")
        self.words.value = words.words_html(state, sim, sim.explain())
        self._write_line(state.line)
        if self.legend.value != (legend := legend_html(seen)):
            self.legend.value = legend
        self._tell(choice)
        self._compare()
        self._write_code()

    def _refuse(self, message: str, state: FormState | None = None) -> None:
        self.message = message
        self.numbers.value = words.refused_html(message, self.shown.state)
        self.figure_box.add_class("fsdp-stale")
        if state is not None:
            self._write_line(state.line)

    def _write_line(self, line: str) -> None:
        self._quiet = True
        self.line.value = line
        self._quiet = False

    # -- an operation

    def _step(self, by: int) -> None:
        found = self._operations.find(self._selected) if self._selected else None
        rows = self._operations.rows
        if rows:
            self.select(rows[(rows.index(found) + by) % len(rows) if found is not None else 0])

    def _on_operation(self, change: dict[str, Any]) -> None:
        rows = self._operations.rows
        if not self._quiet:
            self.select(rows[change["new"] - 1] if 0 < change["new"] <= len(rows) else None)

    def _tell(self, choice: ChosenOperation | None) -> None:
        rows = self._operations.rows
        self._quiet = True
        self.operation.max = max(len(rows), 1)
        self.operation.value = rows.index(choice.op) + 1 if choice else 0
        self._quiet = False
        sentence = escape(choice.words) if choice else NO_OPERATION
        self.about.value = (
            f"<div role='status' style='line-height:1.4;opacity:{1 if choice else 0.75}'>{sentence}</div>"
        )

    # -- beside it

    def _compare(self) -> None:
        goal, (state, sim, _) = GOALS.get(self.goal.value), self.shown
        pinned = self.pinned.sim if self.pinned else None
        self.numbers.value = words.numbers_html(sim, pinned, goal.conditions(state, sim) if goal else ())
        for button in (self.back, self.unpin_button):
            button.layout.display = None if pinned else "none"

    def _write_code(self, _: Any = None) -> None:
        form = self.form.value
        text = FORMS[form](self.shown.state) if form else ""
        self.code.layout.display = None if form else "none"
        self.code.value = text
        self.bridge.text = text or self.shown.state.line

    def _set_dark(self, change: dict[str, Any]) -> None:
        self.canvas.dark(change["new"])

    def _make(self, dark: bool | None) -> None:
        wide = {"width": "auto", "min_width": "0"}
        self.start = _menu("start from", ("this plan", ""), PRESETS, "A plan to begin with")
        self.goal = _menu("goal", ("none", ""), {name: name for name in GOALS}, "Something to reach; it sets the start")
        self.numbers = W.HTML(layout=W.Layout(min_height="48px", margin="0 0 2px 4px"))
        self.words = W.HTML(layout=W.Layout(margin="4px 0 4px 4px"))
        self.legend = W.HTML(layout=W.Layout(margin="0"))
        self.figure_box = W.VBox([self.canvas.view])
        self.line = W.Text(
            description="state", continuous_update=False, style={"description_width": "96px"},
            tooltip="This plan in words; paste another's here, or give it to explorer(state=...).",
            layout=W.Layout(flex="1 1 auto", min_width="0"),
        )  # fmt: skip
        self.dark = W.ToggleButton(
            value=bool(dark), description="dark", tooltip="A dark figure", layout=W.Layout(width="70px")
        )
        self.operation = W.IntSlider(
            value=0, min=0, max=1, description="operation", style={"description_width": "96px"},
            tooltip="Operations in the order in which the CPU issues them; 0 is none.",
            layout=W.Layout(flex="1 1 auto", min_width="0"),
        )  # fmt: skip
        self.previous = _button("◀ previous", "The operation issued before", lambda: self._step(-1))
        self.next = _button("next ▶", "The operation issued after", lambda: self._step(1))
        self.about = W.HTML(f"<div style='opacity:.7'>{NO_OPERATION}</div>", layout=W.Layout(margin="0 0 6px 4px"))
        self.pin_button = _button("Pin as A", "Keep this plan above, to compare with what comes next", self.pin)
        self.back = _button("Back to A", "Set the controls to the pinned plan", self._go_back)
        self.unpin_button = _button("Unpin", "Compare no longer", self.unpin)
        self.back.layout.display = self.unpin_button.layout.display = "none"
        self.form = W.Dropdown(
            options=[("no code: copies the state", ""), *((name, name) for name in FORMS)],
            description="as code", style={"description_width": "56px"}, layout=W.Layout(width="270px"),
        )  # fmt: skip
        self.code = W.Textarea(rows=18, layout=W.Layout(display="none", **wide))
        self.start.observe(self._begin, "value")
        self.goal.observe(self._begin, "value")
        self.line.observe(self._on_line, "value")
        self.operation.observe(self._on_operation, "value")
        self.form.observe(self._write_code, "value")
        self.dark.observe(self._set_dark, "value")
        if dark is None:
            self.bridge.observe(lambda change: setattr(self.dark, "value", change["new"]), "page_is_dark")
        row = {"flex_flow": "row wrap", "align_items": "center"}
        self.controls.box.add_class("fsdp-controls")
        seen = W.VBox([self.numbers, self.figure_box, self.legend]).add_class("fsdp-seen")
        self.widget = W.VBox([
            W.HBox([self.start, self.goal, self.dark], layout=W.Layout(**row)),
            W.HBox([self.controls.box, seen]).add_class("fsdp-beside"),
            self.words,
            W.HBox([self.operation, self.previous, self.next]),
            self.about,
            W.HBox([self.pin_button, self.back, self.unpin_button, self.form, self.bridge], layout=W.Layout(**row)),
            self.line,
            self.code,
        ])  # fmt: skip
        self.widget.add_class("fsdp-explorer")

    def _begin(self, change: dict[str, Any]) -> None:
        """A start or a goal was chosen; without one nothing moves, but what is said of a goal goes."""
        chosen = change["new"]
        if chosen:
            self.go(GOALS[chosen].start if chosen in GOALS else chosen)
        else:
            self._compare()

    def _on_line(self, change: dict[str, Any]) -> None:
        if not self._quiet:
            self.go(change["new"])

    def _go_back(self) -> None:
        if self.pinned is not None:
            self.go(self.pinned.state.line)

    def __repr__(self) -> str:
        return f"explorer(state={self.state.line!r})"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if os.environ.get(PNG_VARIABLE) == "1":
            # A saved notebook has no kernel, and widgets do not show without one.
            self.picture.show()
            return
        display(self.widget)
        display({"text/html": _behind(self.shown), "text/plain": repr(self)}, raw=True)


def _behind(shown: ShownPlan) -> str:
    """What a saved notebook shows where widgets do not: the words, and how to have the explorer back."""
    return (
        f"<div class='fsdp-explorer-still'>{words.words_html(shown.state, shown.sim, shown.sim.explain())}"
        f"<p>The explorer lives while its notebook runs: run the cell again, or "
        f"<code>explorer(state={escape(repr(shown.state.line))})</code>.</p></div>"
    )


def _menu(name: str, first: tuple[str, str], options: Mapping[str, str], tooltip: str) -> W.Dropdown:
    return W.Dropdown(
        options=[first, *options.items()], description=name, tooltip=tooltip,
        style={"description_width": "72px" if " " in name else "40px"}, layout=W.Layout(width="auto", flex="1 1 300px"),
    )  # fmt: skip


def _button(name: str, tooltip: str, pressed: Any) -> W.Button:
    button = W.Button(description=name, tooltip=tooltip, layout=W.Layout(width="auto"))
    button.on_click(lambda _: pressed())
    return button


def explorer(
    model: str | Model | Workload = "gpt2-124m",
    cluster: Cluster | str | None = None,
    plan: Plan | None = None,
    *,
    state: str | None = None,
    dark: bool | None = None,
) -> Explorer:
    """Sliders and menus for a training step: its timeline, its memory and why it takes so long follow as they move.

    Args:
        model: a name of the catalogue, or dimensions.
        cluster: GPUs and links, the name of a GPU, or a cluster file; 8 GPUs of one node if not given.
        plan: how it is trained; bf16 with reductions in fp32 if not given.
        state: all of it in one line, as the explorer writes it; then the three above are not looked at.
        dark: for a dark page; by default as the page is.

    Raises:
        ValueError: the state cannot be read, is impossible to begin with, or the model or cluster has no words.

    Example:
        >>> e = explorer(state="model=gpt2-124m gpu=A100-SXM-80GB gpus=8 micro_batch=8 forward_prefetch=2")
        >>> e.shown.sim.plan.forward_prefetch
        2
    """
    begun = FormState.read(state) if state is not None else state_of(model, cluster, plan)
    return Explorer(begun, dark)
