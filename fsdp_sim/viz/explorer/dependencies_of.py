"""What one operation waits for and what waits for it: its numbers to light up, and the same in words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fsdp_sim.diagnose import RunCauses, critical_path_of_run
from fsdp_sim.engine import Run
from fsdp_sim.timeline import MEMORY
from fsdp_sim.viz.explorer.scene import Scene
from fsdp_sim.viz.theme import OP_NAMES
from fsdp_sim.words import human_bytes, human_ms

Key = tuple[object, ...]
WAITS = {
    "lane": "it follows {on} on its stream", "communicator": "{on} occupied its communicator until then",
    "event": "it waits for {on}", "CPU": "the CPU had not issued it earlier", "unknown": "nothing holds it back",
}  # fmt: skip


@dataclass(frozen=True)
class ChosenOperation:
    """An operation and its neighbours, by their rows in the timeline.

    Attributes:
        before: the operations it comes after. ``after``: those that come after it.
        on_path_s: its part of the critical path.
        words: all of it as text.
    """

    op: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    on_path_s: float
    words: str

    @property
    def lit(self) -> set[int]:
        return {self.op, *self.before, *self.after}


class Operations:
    """The operations of a run's last step on rank 0, which may be looked at one by one."""

    def __init__(self, run: Run, seen: Scene) -> None:
        self.run, self.seen = run, seen
        self.columns = seen.timeline.columns

    @property
    def rows(self) -> list[int]:
        """Their rows in the timeline, in issue order."""
        return self.seen.rows

    @cached_property
    def _row_of(self) -> list[int]:
        """Of each operation of the run, whatever its step, its row."""
        return [row for row, op in enumerate(self.columns["op"]) if op not in MEMORY]

    @cached_property
    def _number_of(self) -> dict[int, int]:
        """Of each row the number of its operation in the run."""
        return {row: k for k, row in enumerate(self._row_of)}

    @cached_property
    def causes(self) -> RunCauses:
        return RunCauses(self.run)

    @cached_property
    def _after(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for row in self.rows:
            for on in self._before(row):
                found.setdefault(on, []).append(row)
        return found

    def _before(self, row: int) -> tuple[int, ...]:
        before = self.causes.before[self._number_of[row]]
        numbers = {k for k in (before.stream, before.communicator, *before.events, *before.cpu) if k >= 0}
        return tuple(self._row_of[k] for k in sorted(numbers))

    @cached_property
    def _on_path_s(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for piece in critical_path_of_run(self.run, causes=self.causes):
            if not piece.cpu:
                row = self._row_of[piece.key[1]]
                found[row] = found.get(row, 0.0) + piece.seconds
        return found

    def key(self, row: int) -> Key:
        """What an operation is, whatever its row: the same in another plan."""
        what = self._what(row)
        return (*what, self._of(what).index(row))

    def find(self, key: Key) -> int | None:
        """The row of the operation of that key; None where there is none."""
        *what, nth = key
        found = self._of(tuple(what))
        return found[nth] if isinstance(nth, int) and nth < len(found) else None

    def _of(self, what: Key) -> list[int]:
        return [row for row in self.rows if self._what(row) == what]

    def _what(self, row: int) -> Key:
        return tuple(self.columns[name][row] for name in ("op", "unit", "phase", "micro_batch"))

    def name(self, row: int) -> str:
        """An operation in words: ``forward layers.3``."""
        return f"{OP_NAMES[self.columns['op'][row]]} {self.columns['unit'][row]}".rstrip()

    def choose(self, row: int) -> ChosenOperation:
        """An operation with what it waits for and what waits for it."""
        before, after = self._before(row), tuple(self._after.get(row, ()))
        on_path_s = self._on_path_s.get(row, 0.0)
        return ChosenOperation(row, before, after, on_path_s, self._words(row, before, after, on_path_s))

    def _words(self, row: int, before: tuple[int, ...], after: tuple[int, ...], on_path_s: float) -> str:
        start, end = (self.columns[name][row] - self.seen.origin_s for name in ("start_s", "end_s"))
        n_bytes, group_size = self.columns["bytes"][row], self.columns["group_size"][row]
        cause = self.causes.cause((0, self._number_of[row]))
        why = WAITS["unknown" if cause.why == "CPU" and self.columns["start_s"][row] == 0 else cause.why]
        on = self.name(self._row_of[cause.key[1]]) if cause.key else ""
        if cause.rank != 0 and on:
            on += f" of rank {cause.rank}"
        carries = f" and carries {human_bytes(n_bytes)}" if n_bytes else ""
        among = f" among {group_size} ranks" if group_size > 1 else ""
        path = (
            f"{human_ms(on_path_s)} of it are on the critical path"
            if on_path_s > 0
            else "It is not on the critical path: somewhat slower, it would cost nothing"
        )
        return (
            f"{self.name(row)[0].upper()}{self.name(row)[1:]} runs from {human_ms(start)} to {human_ms(end)} "
            f"({human_ms(end - start)}){carries}{among}. It starts then because {why.format(on=on)}. "
            f"It comes after {self._named(before)}; {self._named(after)} wait{'s' * (len(after) < 2)} for it. {path}."
        )

    def _named(self, rows: tuple[int, ...]) -> str:
        if not rows:
            return "nothing"
        named = [self.name(row) for row in rows[:4]]
        return ", ".join(named) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")

    def arrows(self, choice: ChosenOperation) -> list[tuple[int, int]]:
        """Pairs of an operation and the one that waits for it."""
        return [(row, choice.op) for row in choice.before] + [(choice.op, row) for row in choice.after]
