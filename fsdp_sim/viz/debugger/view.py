"""The debugger in a notebook: buttons, a slider and the panes. ipywidgets alone; every move is one message each way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from fsdp_sim.timeline import Event
from fsdp_sim.viz import theme
from fsdp_sim.viz.debugger import moments
from fsdp_sim.viz.debugger.moments import Moment
from fsdp_sim.viz.debugger.panes import panes
from fsdp_sim.viz.debugger.stepping import events_in
from fsdp_sim.viz.debugger.style import STYLE

if TYPE_CHECKING:
    from fsdp_sim.viz.debugger.stepping import Debugger


class View:
    """The controls and the panes. Callbacks may come from several threads, so drawing is locked."""

    def __init__(self, debugger: Debugger) -> None:
        self.debugger = debugger
        self._lock = threading.RLock()
        self._drawing = False
        wide = w.Layout(width="auto")
        at = debugger

        def button(text: str, icon: str, tooltip: str, act: Any) -> Any:
            made = w.Button(description=text, icon=icon, tooltip=tooltip, layout=wide)
            made.on_click(lambda _: act())
            return made

        self.slider = w.IntSlider(
            description="event", min=0, max=max(1, len(at.events) - 1), layout=w.Layout(width="100%"), readout=False,
            style={"description_width": "initial"},
            tooltip="The event, in issue order: left and right arrow keys step back and forward",
        )  # fmt: skip
        self.slider.observe(self._slid, "value")
        self.rank = w.Dropdown(
            options=[(f"rank {r}", r) for r in at.timeline.ranks], value=at.rank,
            tooltip="Whose events to step through", layout=w.Layout(width="100px"),
        )  # fmt: skip
        self.rank.observe(self._chosen, "value")
        self.unit = button("Next of unit", "", "The next event of the same unit", at.next_of_unit)
        self.lane = button("Next on lane", "", "The next operation on the same lane", at.next_on_lane)
        self.same = button("Same on another rank", "", "The same operation on the next rank", self._other_rank)
        self.search = w.Text(
            placeholder="find: reduce layers.1, or 42", tooltip="Words of an event's name, or its number; then Enter",
            continuous_update=False, layout=w.Layout(width="210px"),
        )  # fmt: skip
        self.search.observe(lambda change: at.find(change["new"]), "value")
        self.panes = w.HTML()
        row = w.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px")
        moves = w.HBox(
            [
                button("First", "fast-backward", "The first event", at.first),
                button("Back", "step-backward", "One event back", at.back),
                button("Next", "step-forward", "One event on", at.forward),
                button("Last", "fast-forward", "The last event", at.last),
                self.unit, self.lane, self.same, self.rank, self.search,
            ],
            layout=row,
        )  # fmt: skip
        self.box = w.VBox([w.HTML(STYLE), moves, self.slider, self.panes])
        self.draw()

    def draw(self) -> None:
        """Show the moment the debugger is at."""
        with self._lock:
            self._drawing = True
            try:
                at = self.debugger.moment
                last = len(self.debugger.events) - 1
                self.slider.disabled = last < 1
                with self.slider.hold_trait_notifications():
                    self.slider.max = max(1, last)
                    self.slider.value = self.debugger.position
                self.rank.value = self.debugger.rank
                self._label(at)
                self.panes.value = panes(at, self.debugger.timeline)
            finally:
                self._drawing = False

    def _label(self, at: Moment) -> None:
        """Buttons say where they go."""
        event = at.event
        self.unit.description = f"Next of {event.unit[-20:] or 'no unit'}"
        self.unit.disabled = moments.next_of_unit(at) is None
        self.lane.description = f"Next on {theme.LANE_NAMES[event.lane]}"
        self.lane.disabled = moments.next_on_lane(at) is None
        there = self._match(at)
        self.same.description = f"Same on rank {there.rank}" if there else "Same on another rank"
        self.same.disabled = there is None

    def _match(self, at: Moment) -> Event | None:
        """The counterpart on the next rank that has one, in turn."""
        ranks = [o.match for o in at.others if o.match is not None]
        return next((e for e in ranks if e.rank > self.debugger.rank), ranks[0] if ranks else None)

    def _other_rank(self) -> None:
        there = self._match(self.debugger.moment)
        if there is not None:
            self.debugger.go(there.seq, there.rank)

    def _slid(self, change: Any) -> None:
        if not self._drawing:
            events = self.debugger.events
            self.debugger.go(events[min(change["new"], len(events) - 1)].seq)

    def _chosen(self, change: Any) -> None:
        """To the same event on the chosen rank; where it has none, to what it had issued by then."""
        if self._drawing:
            return
        here, there = self.debugger.moment.event, events_in(self.debugger.timeline, change["new"], self.debugger.step)
        same = moments.match(self.debugger.timeline, here, change["new"])
        by_then = [e for e in there if e.issue_s <= here.issue_s]
        goal = same or (by_then[-1] if by_then else there[0])
        self.debugger.go(goal.seq if any(e.seq == goal.seq for e in there) else there[0].seq, change["new"])
