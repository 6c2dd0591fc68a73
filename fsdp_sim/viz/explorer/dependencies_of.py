"""What one operation waits for and what waits for it: its numbers to light up, and the same in words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fsdp_sim.diagnose import RunCauses, critical_path_of_run
from fsdp_sim.engine import Run
from fsdp_sim.schedule import Instruction
from fsdp_sim.viz.theme import OP_NAMES
from fsdp_sim.words import human_bytes, human_ms

Key = tuple[object, ...]
WAITS = {
    "lane": "it follows {on} on its stream", "communicator": "{on} occupied its communicator until then",
    "event": "it waits for {on}", "CPU": "the CPU had not issued it earlier", "unknown": "nothing holds it back",
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """An operation and its neighbours, by number.

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

    def __init__(self, run: Run) -> None:
        self.run = run
        last = len(run.step_ends_s) - 1
        self.numbers = [k for k, i in enumerate(run.ops) if i.step == last]
        self._starts = run.of_rank(run.columns.start_s, 0)
        self._ends = run.of_rank(run.columns.end_s, 0)

    @cached_property
    def causes(self) -> RunCauses:
        return RunCauses(self.run)

    @cached_property
    def _after(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for k in self.numbers:
            for on in self._before(k):
                found.setdefault(on, []).append(k)
        return found

    def _before(self, k: int) -> tuple[int, ...]:
        before = self.causes.before[k]
        return tuple(
            sorted({op for op in (before.stream, before.communicator, *before.events, *before.cpu) if op >= 0})
        )

    @cached_property
    def _on_path_s(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for piece in critical_path_of_run(self.run, causes=self.causes):
            if not piece.cpu:
                found[piece.key[1]] = found.get(piece.key[1], 0.0) + piece.seconds
        return found

    def key(self, k: int) -> Key:
        """What an operation is, whatever its number: the same in another plan."""
        what = _what(self.run.ops[k])
        return (*what, self._of(what).index(k))

    def find(self, key: Key) -> int | None:
        """The number of the operation of that key; None where there is none."""
        *what, nth = key
        found = self._of(tuple(what))
        return found[nth] if isinstance(nth, int) and nth < len(found) else None

    def _of(self, what: Key) -> list[int]:
        return [k for k in self.numbers if _what(self.run.ops[k]) == what]

    def choose(self, k: int) -> Choice:
        """An operation with what it waits for and what waits for it."""
        before, after = self._before(k), tuple(self._after.get(k, ()))
        on_path_s = self._on_path_s.get(k, 0.0)
        return Choice(k, before, after, on_path_s, self._words(k, before, after, on_path_s))

    def _words(self, k: int, before: tuple[int, ...], after: tuple[int, ...], on_path_s: float) -> str:
        run, i = self.run, self.run.ops[k]
        begin = run.step_ends_s[-1] - run.step_time_s()
        start, end = self._starts[k] - begin, self._ends[k] - begin
        cause = self.causes.cause((0, k))
        why = WAITS["unknown" if cause.why == "CPU" and self._starts[k] == 0 else cause.why]
        on = said(run.ops[cause.key[1]]) if cause.key else ""
        if cause.rank != 0 and on:
            on += f" of rank {cause.rank}"
        carries = f" and carries {human_bytes(i.bytes)}" if i.bytes else ""
        among = f" among {i.group_size} ranks" if i.group_size > 1 else ""
        path = (
            f"{human_ms(on_path_s)} of it are on the critical path"
            if on_path_s > 0
            else "It is not on the critical path: somewhat slower, it would cost nothing"
        )
        return (
            f"{said(i)[0].upper()}{said(i)[1:]} runs from {human_ms(start)} to {human_ms(end)} "
            f"({human_ms(end - start)}){carries}{among}. It starts then because {why.format(on=on)}. "
            f"It comes after {self._named(before)}; {self._named(after)} wait{'s' * (len(after) < 2)} for it. {path}."
        )

    def _named(self, ks: tuple[int, ...]) -> str:
        if not ks:
            return "nothing"
        named = [said(self.run.ops[k]) for k in ks[:4]]
        return ", ".join(named) + (f" and {len(ks) - 4} more" if len(ks) > 4 else "")

    def arrows(self, choice: Choice) -> list[tuple[int, int]]:
        """Pairs of an operation and the one that waits for it."""
        return [(k, choice.op) for k in choice.before] + [(choice.op, k) for k in choice.after]


def said(i: Instruction) -> str:
    return f"{OP_NAMES[i.op]} {i.unit}".rstrip()


def _what(i: Instruction) -> Key:
    return i.op, i.unit, i.phase, i.micro_batch
