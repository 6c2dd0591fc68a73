"""The watchdog: turns a deadlock, a crash or silently mixed-up collectives into a sentence.

It compares what the ranks wrote on the board. The same collective (group and number) must have the same operation,
unit, size and dtype on every member, and what one rank sends and another receives the same size and dtype; a rank that
waits needs its peers to come. The clock of the time-out runs only while a rank waits inside a collective, and stops
while a rank it waits for is computing or under a debugger; or while a rank is stopped by a signal. Others run while
ranks have not joined yet, and while none of them does anything.
"""

from __future__ import annotations

import linecache
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

from fsdp_sim.ranks.board import BoardError, BoardView, Record
from fsdp_sim.ranks.limits import below
from fsdp_sim.ranks.pairs import Pairs, peer_of

BUSY_FACTOR = 20  # a rank that computes while others wait for it is given this many time-outs
JOIN_S = 30.0  # that ranks may take to find each other; twenty times that while one of them computes
QUIET_SHARE, QUIET_CPU_S = 0.002, 0.05  # of one core, and seconds of it, that ranks use which do nothing
BUSY_SHARE = 0.1  # of one core, to count as computing
MOST_S = 1.0  # that one look adds to a clock: this process may have been stopped itself
MOST_OPEN = 100_000  # collectives that some members have issued and others have not


class RankState(StrEnum):
    RUNNING = "running"
    RETURNED = "returned"
    RAISED = "raised"
    GONE = "gone"


@dataclass
class RankStatus:
    """What the parent knows about one rank."""

    rank: int
    pid: int
    state: RankState = RankState.RUNNING
    exit_code: int | None = None
    error: tuple[str, str, str] | None = None  # type, text, traceback
    records: list[Record] = field(default_factory=list)  # the latest ones
    cpu_s: float = 0.0
    seen_s: float = 0.0

    def awaited(self, board: BoardView) -> Record | None:
        """The record this rank waits for, if it waits and the record is among the latest."""
        index = int(board.status["waiting"][self.rank])
        offset = index - board.issued(self.rank)
        return self.records[offset] if index >= 0 and -len(self.records) <= offset < 0 else None

    def computing(self, now_s: float) -> bool:
        """Whether the process used CPU time since the last look, or would have on a machine with less to do."""
        cpu_s = cpu_seconds(self.pid)
        used_s, wall_s = cpu_s - self.cpu_s, now_s - self.seen_s
        self.cpu_s, self.seen_s = cpu_s, now_s
        return used_s > BUSY_SHARE * wall_s or self.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)

    def status(self) -> str:
        """psutil's word for what the process does: stopped (by a signal), tracing-stop (by a debugger such as gdb)."""
        try:
            return str(psutil.Process(self.pid).status())
        except psutil.Error:
            return ""


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far; 0 when it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


@dataclass(frozen=True)
class EndReason:
    """Why a call was ended: one line, the reason, and what to do."""

    headline: str
    why: str
    fix: str
    ranks: tuple[int, ...] = ()  # the ranks to look at


def listed(ranks: tuple[int, ...] | list[int]) -> str:
    """``rank 2`` or ``ranks 0, 1 and 3``."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def describe(record: Record) -> str:
    """``#7 all_gather(layers.1) of 65,536 float32``."""
    if not record.is_collective:
        return f"{record.op} ({record.detail}) of {record.numel:,} {record.dtype}"
    unit = f"({record.unit})" if record.unit else ""
    size = f" of {record.numel:,} {record.dtype}" if record.numel else ""
    detail = f" [{record.detail}]" if record.detail else ""
    return f"#{record.group_seq} {record.op}{unit}{size}{detail}"


def source_line(source: str) -> str:
    """``train.py:12  loss.backward()``: where a record was issued, with the text of that line."""
    if not source:
        return ""
    path, _, number = source.rpartition(":")
    text = linecache.getline(path, int(number)).strip() if number.isdecimal() else ""
    name = "this cell" if "ipykernel" in path or path.startswith("<ipython") else Path(path).name
    return f"{name}, line {number}" + (f":  {text}" if text else "")


class Watchdog:
    """Looks at the board every few milliseconds; `check` returns a `EndReason` when the call cannot go on."""

    def __init__(self, board: BoardView, views: list[RankStatus], timeout_s: float) -> None:
        self.board, self.views, self.timeout_s = board, views, timeout_s
        self._open: dict[tuple[int, int], dict[int, Record]] = defaultdict(dict)  # collectives not yet issued by all
        self._idle_s: dict[int, float] = defaultdict(float)  # seconds each rank has waited for idle peers
        self._busy_s: dict[int, float] = defaultdict(float)  # ... and for computing ones
        self._stopped_s: dict[int, float] = {}  # how long each stopped rank has been
        self._joining_s = 0.0  # how long some have not joined; the time in which they compute counts for less
        self._quiet_s = self._quiet_cpu_s = 0.0  # how long no rank has done anything, and what they had computed before
        self._waited_for: dict[int, int] = {}
        self._pairs = Pairs()
        self._last_look_s = time.monotonic()

    def check(self) -> EndReason | None:
        return self._board_is_broken() or self._mismatch() or self._dead_end() or self._overdue()

    def final(self) -> EndReason | None:
        """When all ranks have returned: nothing may be mixed up or left over."""
        if verdict := self._board_is_broken() or self._mismatch():
            return verdict
        for by_rank in self._open.values():
            record = next(iter(by_rank.values()))
            absent = tuple(r for r in record.members if r not in by_rank)
            if absent:
                return self._never_came(record, tuple(by_rank), absent)
        return None

    def _board_is_broken(self) -> EndReason | None:
        """Look at the board anew."""
        try:
            self.board.refresh()
        except BoardError as error:
            return EndReason(
                headline=str(error),
                why="the ranks' own code writes there, and nothing else may",
                fix="look for code that writes into files or memory that it did not create",
            )
        return None

    # ------------------------------------------------------------------ the same collective, or not

    def _mismatch(self) -> EndReason | None:
        """Read the new records and compare each collective across its members, and each receive with its send."""
        for view in self.views:
            new = self.board.take(view.rank)
            view.records = (view.records + new)[-64:]
            for record in new:
                if not record.is_collective:
                    if pair := self._pairs.add(view.rank, record):
                        return self._pair_mismatch(*pair)
                    continue
                key = (record.group, record.group_seq)
                by_rank = self._open[key]
                by_rank[view.rank] = record
                if len({r.signature for r in by_rank.values()}) > 1:
                    return self._signature_mismatch(by_rank)
                if len(by_rank) == len(record.members):
                    del self._open[key]
        if len(self._open) > MOST_OPEN:
            ranks = sorted({rank for by_rank in self._open.values() for rank in by_rank})
            return EndReason(
                headline=f"{listed(ranks)} issued {MOST_OPEN:,} collectives that other members did not",
                why="a collective can only finish when every member issues it",
                fix="wait for the collectives that are issued, and let every rank issue the same number",
                ranks=tuple(ranks),
            )
        return None

    def _pair_mismatch(self, source: int, sent: Record, target: int, received: Record) -> EndReason:
        """About a send and the receive that gets it."""
        if sent.numel != received.numel:
            what = "of another size"
            cost = "too small a tensor ends the process, of one too large the rest is not written"
        else:
            what, cost = "of another dtype", "its bits are taken for numbers of the other dtype"
        places = [f" ({source_line(record.source)})" if record.source else "" for record in (sent, received)]
        return EndReason(
            headline=f"rank {target} receives into a tensor {what} than rank {source} sends",
            why=f"rank {source} sends {sent.numel:,} {sent.dtype} to rank {target}{places[0]}, "
            f"and rank {target} receives {received.numel:,} {received.dtype} from rank {source}{places[1]}: {cost}",
            fix=f"give recv a tensor of {sent.numel:,} {sent.dtype}, the shape and dtype of what is sent",
            ranks=(source, target),
        )

    def _signature_mismatch(self, by_rank: dict[int, Record]) -> EndReason:
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, record in by_rank.items():
            groups[record.signature].append(rank)
        (_, many), *rest = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
        few = [rank for _, ranks in rest for rank in ranks]
        usual, odd = by_rank[many[0]], by_rank[few[0]]
        if usual.op != odd.op:
            what, fix = "a different collective", "issue the same collectives in the same order on every rank"
        elif usual.unit != odd.unit:
            what = "the same collective for another unit"
            fix = "run the units in the same order on every rank; equal sizes would mix their numbers up silently"
        elif usual.numel != odd.numel:
            what, fix = "a different size", "give every rank tensors of the same shape (pad the last shard)"
        elif usual.dtype != odd.dtype:
            what, fix = "a different dtype", "use one dtype on all ranks"
        else:
            what, fix = f"{odd.detail} instead of {usual.detail}", "use the same reduce op, root and group on all ranks"
        return EndReason(
            headline=f"{listed(few)} called {what}",
            why=f"{describe(usual)} on {listed(many)}, but {describe(odd)} on {listed(few)}",
            fix=fix,
            ranks=tuple(few),
        )

    # ------------------------------------------------------------------ someone will never come

    def _waiting(self) -> dict[int, Record]:
        """The record each waiting rank waits for."""
        running = [view for view in self.views if view.state is RankState.RUNNING]
        awaited = {view.rank: view.awaited(self.board) for view in running}
        return {rank: record for rank, record in awaited.items() if record is not None}

    def _absent(self, rank: int, record: Record) -> tuple[int, ...]:
        """The members that have not issued what ``rank`` waits for."""
        if record.is_collective:
            present = self._open.get((record.group, record.group_seq))
            return tuple(r for r in record.members if present is not None and r not in present)
        peer = peer_of(record)
        return () if peer is None else (peer,)  # any rank may be the one that it receives from

    def _dead_end(self) -> EndReason | None:
        """A rank waits for one that has already returned."""
        for rank, record in self._waiting().items():
            gone = tuple(r for r in self._absent(rank, record) if self.views[r].state is RankState.RETURNED)
            if gone and record.is_collective:
                return self._never_came(record, tuple(self._open[record.group, record.group_seq]), gone)
        return None

    def _never_came(self, record: Record, waiting: tuple[int, ...], absent: tuple[int, ...]) -> EndReason:
        return EndReason(
            headline=f"{listed(absent)} returned without calling {describe(record)}",
            why=f"{listed(waiting)} issued it, and it can only finish when every member does: "
            f"{listed(absent)} called one collective too few",
            fix="let every rank issue the same number of collectives (an `if rank == 0` around one is the usual cause)",
            ranks=absent,
        )

    def _overdue(self) -> EndReason | None:
        """A rank has waited, or has been stopped, longer than the time-out."""
        now_s = time.monotonic()
        passed_s, waiting = min(now_s - self._last_look_s, MOST_S), self._waiting()
        if passed_s < 0.1:
            return None
        self._last_look_s = now_s
        statuses = {view.rank: view.status() for view in self.views if view.state is RankState.RUNNING}
        if verdict := self._stopped(statuses, passed_s):
            return verdict
        joining = [rank for rank in statuses if not self.board.status["ready_s"][rank]]
        computing = {view.rank: view.computing(now_s) for view in self.views}
        for rank in list(self._idle_s):
            if self._waited_for.get(rank) != int(self.board.status["waiting"][rank]):
                self._idle_s.pop(rank)
                self._busy_s.pop(rank, None)
        held = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        looked_at = any(self.board.status["debugged"][rank] or statuses[rank] in held for rank in statuses)
        if waiting or joining or looked_at or any(computing.values()):
            self._quiet_s = 0.0
        elif verdict := self._quiet([view for view in self.views if view.rank in statuses], passed_s):
            return verdict
        if joining and not any(statuses[rank] in held for rank in joining):
            self._joining_s += passed_s / (BUSY_FACTOR if any(computing[rank] for rank in joining) else 1)
            if self._joining_s > max(JOIN_S, self.timeout_s):
                return self._not_joined(joining)
        for rank, record in waiting.items():
            self._waited_for[rank] = int(self.board.status["waiting"][rank])
            chain = self._chain(rank, waiting)
            if any(self.board.status["debugged"][r] or statuses.get(r) in held for r in chain):
                continue  # somebody is looking at it, or it is stopped: no clock of a wait runs
            busy = any(computing[r] for r in (chain[1:] or record.members))  # on its way: not a hang
            self._idle_s[rank] += 0.0 if busy else passed_s
            self._busy_s[rank] += passed_s if busy else 0.0
            if self._idle_s[rank] > self.timeout_s or self._busy_s[rank] > BUSY_FACTOR * self.timeout_s:
                last = [r for r in chain if r in waiting][-1]
                if busy:
                    return self._hang(last, waiting, self._busy_s[rank], {r for r in computing if computing[r]})
                return self._hang(last, waiting, self.timeout_s)
        return None

    def _stopped(self, statuses: dict[int, str], passed_s: float) -> EndReason | None:
        """A signal has stopped a rank, and nothing lets it go on."""
        ranks = [rank for rank, status in statuses.items() if status == psutil.STATUS_STOPPED]
        self._stopped_s = {rank: self._stopped_s.get(rank, 0.0) + passed_s for rank in ranks}
        if max(self._stopped_s.values(), default=0.0) <= self.timeout_s:
            return None
        pids = " ".join(str(self.views[rank].pid) for rank in ranks)
        return EndReason(
            headline=f"{listed(ranks)} stopped at a signal (SIGSTOP) and did not go on for {self.timeout_s:g} s",
            why="a stopped process does nothing until it gets SIGCONT",
            fix=f"look for what sends the signal; to go on with a process that you stopped yourself: kill -CONT {pids}",
            ranks=tuple(ranks),
        )

    def _quiet(self, running: list[RankStatus], passed_s: float) -> EndReason | None:
        """No rank computes, nor does what it has started, and none waits for another."""
        cpu_s = sum(cpu_seconds(pid) for view in running for pid in (view.pid, *below(view.pid)))
        if not self._quiet_s or cpu_s - self._quiet_cpu_s > QUIET_SHARE * self._quiet_s + QUIET_CPU_S:
            self._quiet_s, self._quiet_cpu_s = 0.0, cpu_s
        self._quiet_s += passed_s
        if self._quiet_s <= BUSY_FACTOR * self.timeout_s or not running:
            return None
        ranks = tuple(view.rank for view in running)
        return EndReason(
            headline=f"{listed(ranks)} did nothing for {BUSY_FACTOR * self.timeout_s:g} s, outside any collective",
            why="not computing, and waiting for no other rank: asleep, or waiting for input, a file or a lock",
            fix="look at what they call; if this wait is honest, pass a larger timeout_s",
            ranks=ranks,
        )

    def _not_joined(self, joining: list[int]) -> EndReason:
        if absent := [rank for rank in joining if not self.board.status["began_s"][rank]]:
            what = f"{listed(absent)} did not begin"
            why = "the process is there and does nothing: it waits for something of this machine, such as a disk"
        else:
            absent, what = joining, f"{listed(joining)} did not join the others"
            why = "ranks meet over a file in TMPDIR and over this machine's own network; one of these does not answer"
        return EndReason(
            headline=f"{what} for {max(JOIN_S, self.timeout_s):g} s",
            why=why,
            fix="call again; if it stays so, set TMPDIR to a folder on a disk of this machine, and see that nothing "
            "blocks the network interface lo (GLOO_SOCKET_IFNAME names another)",
            ranks=tuple(absent),
        )

    def _chain(self, rank: int, waiting: dict[int, Record]) -> list[int]:
        """A rank, those it waits for, those that they wait for, and so on."""
        chain = [rank]
        for link in chain:
            if link in waiting:
                chain += [r for r in self._absent(link, waiting[link]) if r not in chain]
        return chain

    def _hang(
        self, rank: int, waiting: dict[int, Record], waited_s: float, computing: frozenset[int] | set[int] = frozenset()
    ) -> EndReason:
        record = waiting[rank]
        absent = self._absent(rank, record)
        key = (record.group, record.group_seq)
        together = [r for r, other in waiting.items() if (other.group, other.group_seq) == key and r not in absent]
        returned = [r for r in absent if self.views[r].state is RankState.RETURNED]
        elsewhere = [r for r in absent if r in waiting]
        fix = "make every rank reach the same collective; if this wait is honest, pass a larger timeout_s"
        if returned:
            doing = f"{listed(returned)} returned before that"
        elif elsewhere:
            doing = f"{listed(elsewhere[:1])} waits in {describe(waiting[elsewhere[0]])} instead"
        elif busy := [r for r in absent if r in computing]:
            doing = f"computing all that time, outside any collective: {listed(busy)}"
            fix = "look for a loop that does not end; if the computing is honest, pass a larger timeout_s"
        elif absent:
            doing = f"outside any collective, and not computing (asleep, or waiting for input): {listed(absent)}"
        elif record.is_collective:
            doing = "every member has issued it, but it does not finish"
        else:
            doing = "no rank has sent anything to it"
        return EndReason(
            headline=f"{listed(together if record.is_collective else [rank])} waited {waited_s:.3g} s "
            f"in {describe(record)}" + (f" for {listed(absent)}" if absent else ""),
            why=doing,
            fix=fix,
            ranks=absent,
        )


def report(verdict: EndReason, views: list[RankStatus], board: BoardView) -> str:
    """The whole message: the verdict, then what each rank was doing, then how to mend it."""
    lines = [verdict.headline, ""]
    for view in views:
        mark = "->" if view.rank in verdict.ranks else "  "
        lines.append(f"{mark} rank {view.rank}  {_doing(view, board)}")
    tracebacks = {view.error[2] for view in views if view.error}
    lines += ["", f"why: {verdict.why}.", f"fix: {verdict.fix}."]
    lines += [f"\n{text.rstrip()}" for text in sorted(tracebacks)[:2]]
    return "\n".join(lines)


def _doing(view: RankStatus, board: BoardView) -> str:
    last = view.records[-1] if view.records else None
    where = f"   ({source_line(last.source)})" if last is not None and last.source else ""
    after = f"after {describe(last)}{where}" if last is not None else "before its first collective"
    if view.state is RankState.RAISED and view.error:
        return f"raised {view.error[0]} {after}"
    if view.state is RankState.GONE:
        return f"{how_it_ended(view.exit_code)} {after}"
    if view.state is RankState.RETURNED:
        return f"returned {after}"
    if (record := view.awaited(board)) is not None:
        where = f"   ({source_line(record.source)})" if record.source else ""
        return f"waits in {describe(record)}{where}"
    return f"runs outside collectives, {after}"


def how_it_ended(exit_code: int | None) -> str:
    """``exited with code 3`` or ``was killed by SIGKILL``."""
    if exit_code is not None and exit_code < 0:
        known = {int(number): number.name for number in signal.Signals}
        name = known.get(-exit_code, f"signal {-exit_code}")  # a real-time signal may have no name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"exited with code {exit_code}"
