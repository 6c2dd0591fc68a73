"""`debugger`: step a recorded run forwards and backwards, next to the lines that issued it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fsdp_sim.timeline import Event, Timeline, timeline_of
from fsdp_sim.viz.bundle import widget_bundle
from fsdp_sim.viz.debugger import moments
from fsdp_sim.viz.debugger.moments import Moment, moment
from fsdp_sim.viz.debugger.notable_moments import static_html
from fsdp_sim.viz.debugger.sentences import name, sentence
from fsdp_sim.viz.picture import PNG_VARIABLE

if TYPE_CHECKING:
    from fsdp_sim.viz.debugger.view import View


WITHOUT_KERNEL = "Run this cell to step through the run; without a kernel there are the tables below."


class Debugger:
    """A run, and where in it one is. As the last line of a notebook cell it shows itself.

    Example:
        >>> from fsdp_sim import Cluster, Plan, simulate
        >>> run = simulate("gpt2-124m", Cluster("H100-SXM-80GB", gpus=8), Plan(micro_batch=1, seq_len=128))
        >>> at = debugger(run)
        >>> at.forward().event.label, at.back().event.label
        ('ALL_GATHER(root)', 'ag_copy_in(root)')
    """

    def __init__(self, timeline: Timeline, rank: int, step: int | None) -> None:
        self.timeline = timeline
        self.step = step
        self._view: View | None = None
        self._enter(rank)
        self._seq = next((e for e in self.events if not e.is_memory), self.events[0]).seq

    def __repr__(self) -> str:
        at = self.moment
        return f"Debugger(rank {self.rank}, event {at.event.seq} of {at.events[-1].seq}: {name(at.event)})"

    @property
    def moment(self) -> Moment:
        """The run as it is now."""
        return moment(self.timeline, self.rank, self._seq)

    @property
    def events(self) -> tuple[Event, ...]:
        """What can be stepped through: the events of the rank, or of one step of it, in issue order."""
        return self._events

    @property
    def position(self) -> int:
        """Where in `events` one is."""
        return moments.position_of(self._events, self._seq)

    def go(self, seq: int, rank: int | None = None) -> Moment:
        """Go to an event, of another rank if one is given.

        Raises:
            ValueError: there is no such rank, or it has no such event in what is stepped through.
        """
        events = self._events if rank is None else events_in(self.timeline, rank, self.step)
        moments.position_of(events, seq)
        if rank is not None:
            self._enter(rank)
        self._seq = seq
        if self._view is not None:
            self._view.draw()
        return self.moment

    def first(self) -> Moment:
        return self.go(self.events[0].seq)

    def last(self) -> Moment:
        return self.go(self.events[-1].seq)

    def forward(self, n: int = 1) -> Moment:
        """``n`` events on; stays at the last one."""
        return self.go(self.events[min(max(self.position + n, 0), len(self.events) - 1)].seq)

    def back(self, n: int = 1) -> Moment:
        """``n`` events back; stays at the first one."""
        return self.forward(-n)

    def next_of_unit(self) -> Moment:
        """The next event of the same unit; stays where there is none."""
        return self._to(moments.next_of_unit(self.moment))

    def next_on_lane(self) -> Moment:
        """The next operation on the same lane; stays where there is none."""
        return self._to(moments.next_on_lane(self.moment))

    def same_on(self, rank: int) -> Moment:
        """The counterpart of this event on another rank; stays where there is none.

        Raises:
            ValueError: there is no such rank.
        """
        events_in(self.timeline, rank, self.step)
        there = moments.match(self.timeline, self.moment.event, rank)
        return self.moment if there is None else self.go(there.seq, rank)

    def find(self, text: str) -> Moment:
        """The event of a number, or the next whose name has all the words, from the start again after the last.

        Of several kinds of event the one with the shortest name is meant: "all-gather" is not its copy-in. Allocs and
        frees are found only where one of the words is ``alloc`` or ``free``.
        """
        words = text.lower().split()
        if len(words) == 1 and words[0].isdecimal():
            wanted = int(words[0])
            return self._to(next((e for e in self.events if e.seq == wanted), None))
        here = self.position + 1
        found = [e for e in (*self.events[here:], *self.events[:here]) if words and _has(e, words)]
        return self._to(min(found, key=lambda e: len(name(e).split()), default=None))

    def _to(self, event: Event | None) -> Moment:
        inside = event is not None and any(e.seq == event.seq for e in self.events)
        return self.go(event.seq) if event is not None and inside else self.moment

    def _enter(self, rank: int) -> None:
        self._events = events_in(self.timeline, rank, self.step)
        self.rank = rank

    @property
    def finding(self) -> str:
        """Where one is, in words."""
        at = self.moment
        return f"Rank {self.rank}, event {at.event.seq} of {at.events[-1].seq}: {sentence(at)}"

    def static_html(self) -> str:
        """What a saved notebook shows where no kernel runs: the telling moments, with the events around them."""
        about = (
            f"{len(self.events):,} events of rank {self.rank} of {len(self.timeline.ranks):,}; here are those around "
            "the telling moments. Run the cell to step through all of them."
        )
        return f"<p>{about}</p>{static_html(self.timeline, self.rank, self.events)}"

    def show(self, *, live: bool | None = None) -> None:
        """Display it in a notebook, and below it, folded, what a saved notebook shows.

        Args:
            live: with buttons and a slider; by default unless the environment variable ``FSDP_SIM_PNG`` is 1, as it is
                when saved notebooks are made: a widget shows nothing without its kernel.
        """
        from IPython.display import display

        live = os.environ.get(PNG_VARIABLE) != "1" if live is None else live
        static = self.static_html()
        if live:
            view = widget_bundle(self.widget()) | {"text/plain": f"{WITHOUT_KERNEL} {self.finding}"}
            display(view, raw=True)
            static = f"<details><summary>The telling moments as tables</summary>{static}</details>"
        display({"text/html": static, "text/plain": self.finding}, raw=True)

    def widget(self) -> Any:
        """The ipywidgets view; the same one each time it is asked for."""
        from fsdp_sim.viz.debugger.view import View

        if self._view is None:
            self._view = View(self)
        return self._view.box

    def _ipython_display_(self) -> None:
        self.show()


def debugger(results_or_timeline: Any, *, rank: int = 0, step: int | None = None) -> Debugger:
    """Step a run forwards and backwards through its events, next to the source lines that issued them.

    Args:
        results_or_timeline: what `fsdp_sim.ranks.run` or `fsdp_sim.simulate` returned, or a `Timeline`.
        rank: whose events to step through; it can be changed later.
        step: step through this training step only.

    Raises:
        TypeError: it is none of these, and has no timeline.
        ValueError: the timeline has no such rank or step, or no events at all.
    """
    return Debugger(timeline_of(results_or_timeline), rank, step)


def events_in(timeline: Timeline, rank: int, step: int | None) -> tuple[Event, ...]:
    """What can be stepped through.

    Raises:
        ValueError: there is nothing.
    """
    if not timeline.events:
        raise ValueError(f"{timeline!r} has no events to step through; was it recorded with record=False?")
    if rank not in timeline.ranks:
        raise ValueError(f"the timeline has no rank {rank}; its ranks are {_listed(timeline.ranks)}")
    events = tuple(e for e in moments.events_of(timeline, rank) if step is None or e.step == step)
    if not events:
        raise ValueError(
            f"rank {rank} has no events in step {step}; the timeline's steps are {_listed(timeline.steps)}"
        )
    return events


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]} to {numbers[-1]}"


def _has(event: Event, words: list[str]) -> bool:
    if event.is_memory and not {"alloc", "free"} & set(words):
        return False
    text = f"{name(event)} {event.label} {event.lane}".lower()
    return all(word in text for word in words)
