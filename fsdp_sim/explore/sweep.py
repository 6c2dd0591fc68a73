"""`Sweep`: every combination of some lists of values, simulated, row by row into a CSV file.

A row is complete or not there, in the order of the combinations whatever the processes do, so that what an interrupted
sweep has written is good and `Sweep.resume` goes on where it ended.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from fsdp_sim.explore.pareto import MAY_FIT, front_of
from fsdp_sim.explore.processes import HERE, Processes
from fsdp_sim.packages import need
from fsdp_sim.requests import ALIASES, NAMES, request_of_texts, resolve
from fsdp_sim.schedule import NOT_ISSUED
from fsdp_sim.simulation import Fit
from fsdp_sim.timeline import read_text, written
from fsdp_sim.words import did_you_mean

MOST_BYTES = 10**9  # of the rows of a sweep
RESULTS = (
    "step_time_s", "tokens_per_s_per_gpu", "mfu", "exposed_comm_s", "peak_memory_bytes", "memory_limit_bytes", "fit",
    "error",
)  # fmt: skip
MOST_PLAYED = 500  # plans of a sweep over each of which torch's allocator is played, some 10 ms of a core
FEW = 16  # combinations, for which no process is started
LEAST_PROGRAMS = 8  # for each process, where those of a program are simulated by one
SweepRow = dict[str, str]


def combinations(vary: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Every combination, the last name varying fastest.

    Example:
        >>> list(combinations({"gpus": ["8", "16"], "micro_batch": ["1"]}))
        [{'gpus': '8', 'micro_batch': '1'}, {'gpus': '16', 'micro_batch': '1'}]
    """
    for values in itertools.product(*vary.values()):
        yield dict(zip(vary, values, strict=True))


def row_of(texts: Mapping[str, str], played: bool = True) -> SweepRow:
    """Simulate one combination. The row has the request and the results; if it is impossible, ``error`` says why.

    Args:
        played: torch's allocator, where it has to be to tell whether it fits; else that is `MAY_FIT`.
    """
    row = dict(texts) | dict.fromkeys(RESULTS, "")
    try:
        sim = resolve(request_of_texts(texts)).simulate()
        row |= results(
            sim.step_time_s, sim.tokens_per_s_per_gpu, sim.mfu, sim.exposed_comm_s, sim.peak_memory_bytes,
            sim.memory_limit_bytes, sim.fit if played else sim.fit_at_once or MAY_FIT,
        )  # fmt: skip
    except ValueError as error:
        row["error"] = " ".join(str(error).split())  # a row is a line
    return row


def results(
    step_time_s: float, tokens_per_s_per_gpu: float, mfu: float | None, exposed_comm_s: float, peak_memory_bytes: int,
    memory_limit_bytes: float, fit: str,
) -> SweepRow:  # fmt: skip
    """What a plan that is possible was found to do, as the texts of its row (`RESULTS`)."""
    return dict(zip(RESULTS, (
        f"{step_time_s:.9g}", f"{tokens_per_s_per_gpu:.9g}", "" if mfu is None else f"{mfu:.6g}",
        f"{exposed_comm_s:.9g}", str(peak_memory_bytes), str(int(memory_limit_bytes)), str(fit), "",
    ), strict=True))  # fmt: skip


def counted(rows: Sequence[Mapping[str, str]]) -> str:
    """How many of some rows fit, are on the edge of memory, do not fit and are impossible."""
    of = Counter([row["fit"] for row in rows])
    words = {
        Fit.FITS: "fit", Fit.DOES_NOT_FIT: "do not", Fit.EDGE: "on the edge of memory",
        MAY_FIT: "may fit (their tensors do; torch's allocator was played for the front alone)", "": "are impossible",
    }  # fmt: skip
    told = [f"{of[fit]:,} {what}" for fit, what in words.items() if of[fit] or fit in (Fit.FITS, Fit.DOES_NOT_FIT)]
    return f"{len(rows):,} combinations: {', '.join(told)}"


def played_front(rows: Sequence[SweepRow], processes: Processes = HERE) -> list[int]:
    """`front_of` rows of which each on the front is certain: what may fit there is played, and its row says how it
    went."""
    while True:
        front = front_of(rows)
        open_ = [place for place in front if rows[place]["fit"] == MAY_FIT]
        if not open_:
            return front
        for place, played in zip(open_, processes.map(row_of, [_asked(rows[place]) for place in open_]), strict=True):
            rows[place]["fit"] = played["fit"]


def _asked(row: SweepRow) -> dict[str, str]:
    return {name: text for name, text in row.items() if name not in RESULTS}


def notes_of(
    rows: Sequence[SweepRow], front: Sequence[int], vary: Mapping[str, Sequence[str]], processes: Processes = HERE
) -> list[str]:
    """What `Job.notes_of` says beside the numbers: of the plans of the front, and of the first possible one with each
    value that varies. A note that does not hold for all of these begins with what it is said of.
    """
    looked_at = dict.fromkeys(front)
    for name, values in vary.items():
        seen = {rows[place][name] for place in looked_at}
        first: dict[str, int] = {}
        for place, row in enumerate(rows):
            if row["fit"]:
                first.setdefault(row[name], place)
        looked_at |= dict.fromkeys([first[value] for value in values if value in first and value not in seen])
    said: dict[str, list[int]] = {}
    for place, notes in zip(looked_at, processes.map(_notes, [_asked(rows[p]) for p in looked_at]), strict=True):
        for note in notes:
            said.setdefault(note, []).append(place)
    return [
        note if len(places) == len(looked_at) else f"With {_told([rows[place] for place in places], vary)}: {note}"
        for note, places in said.items()
    ]


def _notes(texts: Mapping[str, str]) -> list[str]:
    job = resolve(request_of_texts(texts))
    return job.notes_of(job.simulate())


def _told(rows: Sequence[SweepRow], varied: Iterable[str]) -> str:
    """The first of some rows by what varies, and how many there are besides."""
    of = " ".join(f"{name}={rows[0][name]}" for name in varied)
    return f"{of}, and {len(rows) - 1} more" if rows[1:] else of


@dataclass
class Sweep:
    """A sweep over every combination of some values.

    Attributes:
        fixed: what all combinations share, as texts by name.
        vary: names and the texts they take.
        processes: how many simulate at a time. More than one may be started anew (`Processes`), so a script that calls
            this needs its ``if __name__ == "__main__"``.
        done: rows that are there already.

    Raises:
        ValueError: a name that does not exist, given twice, or without values.
    """

    fixed: Mapping[str, str]
    vary: Mapping[str, Sequence[str]]
    processes: int = 1
    done: list[SweepRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in (*self.fixed, *self.vary):
            if name not in NAMES:
                raise ValueError(f"there is no {name} to vary; {did_you_mean(name, NAMES)}")
        for name, values in self.vary.items():
            if name in self.fixed:
                raise ValueError(f"{name} is both fixed ({self.fixed[name]}) and varied; give it once")
            if not values:
                raise ValueError(f"{name} varies over no values; write {name}=1,2")
        fields = [ALIASES.get(name, name) for name in (*self.fixed, *self.vary)]
        if twice := [name for name in fields if fields.count(name) > 1]:
            raise ValueError(f"{twice[0]} is given under two names; give it once")
        if self.processes < 1:
            raise ValueError(f"{self.processes} processes cannot do anything; take 1 or more")

    def __len__(self) -> int:
        """Combinations in all, those done included."""
        size = 1
        for values in self.vary.values():
            size *= len(values)
        return size

    @property
    def columns(self) -> list[str]:
        return [*self.vary, *self.fixed, *RESULTS]

    def resume(self, path: str | Path) -> None:
        """Take over the rows of a file that an earlier run of the same sweep has begun.

        Raises:
            ValueError: the file is of another sweep; says where it differs.
        """
        columns, rows = read_rows(path)
        if columns and columns != self.columns:
            raise ValueError(
                f"{path} is of another sweep: its columns are {', '.join(columns)}; this sweep's are "
                f"{', '.join(self.columns)}"
            )
        for number, (row, texts) in enumerate(zip(rows, self._texts(0), strict=False), start=2):
            for name, text in texts.items():
                if row[name] != text:
                    raise ValueError(
                        f"{path}, line {number}, is of another sweep: {name} is {row[name]} there and {text} here; "
                        f"take another file"
                    )
        if len(rows) > len(self):
            raise ValueError(f"{path} has {len(rows)} rows, more than the {len(self)} of this sweep; take another file")
        self.done = rows

    def start(self) -> Processes:
        """The processes that it needs."""
        return Processes(self.processes if len(self) - len(self.done) > FEW else 1)

    def rows(self, processes: Processes | None = None) -> Generator[SweepRow, None, None]:
        """The rows that are not done, in order, as they come. In a sweep of more than `MOST_PLAYED` some only may fit:
        see `played_front`.

        Args:
            processes: those of `start`, entered.
        """
        if processes is None:
            with self.start() as processes:
                yield from self.rows(processes)
            return
        start, count = len(self.done), processes.count
        own = replace(self, done=[])
        streams = processes.streams(own._results, [(start, MOST_PLAYED, place, count) for place in range(count)])
        for texts, owner in zip(self._texts(start), self.owners(start, count), strict=True):
            yield {**texts, **dict(zip(RESULTS, next(streams[owner]), strict=True))}

    def _results(self, start: int, most_played: int, process: int, processes: int) -> Iterator[tuple[str, ...]]:
        """What a process finds of its combinations: the end of each row."""
        played = len(self) <= most_played
        for texts, owner in zip(self._texts(start), self.owners(start, processes), strict=True):
            if owner == process:
                row = row_of(texts, played)
                yield tuple([row[name] for name in RESULTS])

    def owners(self, start: int, processes: int) -> Iterator[int]:
        """Of each combination from a place on the process that simulates it.

        Those that issue the same program all have one, which builds the program once, if possible for all numbers of
        GPUs; unless there are too few programs to share them out evenly.
        """
        sizes = [len(values) for values in self.vary.values()]
        for alike in (NOT_ISSUED | {"gpus"}, NOT_ISSUED, frozenset[str]()):
            issued = [name not in alike for name in self.vary]
            if math.prod(itertools.compress(sizes, issued)) >= LEAST_PROGRAMS * processes:
                break
        for places in itertools.islice(itertools.product(*map(range, sizes)), start, None):
            program = turn = 0  # the number of the program, and with each carry one more: no field decides alone
            for place, size in itertools.compress(zip(places, sizes, strict=True), issued):
                program = program * size + place
                turn += program
            yield turn % processes

    def to_csv(self, path: str | Path, processes: Processes | None = None) -> Generator[SweepRow, None, None]:
        """The same, writing each row as soon as it is computed. If there are ``done`` rows, continues their file."""
        if self.done:
            write_rows(path, self.columns, self.done)  # without what a broken run may have left of a last line
        with open(path, "a" if self.done else "w", newline="") as file:
            cells, writer = itemgetter(*self.columns), csv.writer(file, lineterminator="\n")
            if not self.done:
                writer.writerow(self.columns)
            with closing(self.rows(processes)) as rows:
                for row in rows:
                    writer.writerow(cells(row))
                    file.flush()
                    yield row

    def _texts(self, start: int) -> Iterator[dict[str, str]]:
        for varied in itertools.islice(combinations(self.vary), start, None):
            yield {**varied, **self.fixed}


def write_rows(path: str | Path, columns: Sequence[str], rows: Sequence[SweepRow]) -> None:
    """Replace a sweep's file in one go."""
    with written(path) as new, new.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(map(itemgetter(*columns), rows))


def read_rows(path: str | Path) -> tuple[list[str], list[SweepRow]]:
    """Columns and complete rows of a sweep's file; none where there is no file. A last line cut short is left out.

    Raises:
        ValueError: it cannot be read, or a line in the middle has not as many cells as the header.
    """
    try:
        text = read_text(path, MOST_BYTES)
    except FileNotFoundError:
        return [], []
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    complete = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(complete.splitlines())
    rows = []
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"{path}, line {reader.line_num}, has not as many cells as the header")
        rows.append(row)
    return list(reader.fieldnames or ()), rows


def table(rows: Sequence[SweepRow]) -> Any:
    """The rows as a pandas table: numbers as numbers, with `pareto` as a column."""
    need("a table of a sweep", "pandas")
    import pandas as pd

    frame = pd.DataFrame(list(rows))
    for name in RESULTS[:6]:
        frame[name] = pd.to_numeric(frame[name])
    return frame
