"""Runs a learner's function apart from the notebook: in processes of its own, with limits, watched.

Nothing that the function does reaches the notebook but its results, which are data that cannot execute.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_sim.learn.exercise import IS_A_STUB
from fsdp_sim.timeline import Timeline

if TYPE_CHECKING:
    from fsdp_sim.ranks import Limits, Network, RanksError
    from fsdp_sim.ranks.board import Record
    from fsdp_sim.ranks.looks import Look

TIMEOUT_S = 4.0  # in a collective, for a rank that does nothing
OURS = ("call", "encode", "_plain", "main", "shut_off", "refuse", "_made")
"""Functions of ours, in whose lines no learner has anything to look for."""
LAST_LINE = re.compile(r'File "[^"]*", line \d+, in (\S+)\n +(?!File ")(\S.*)')


@dataclass(frozen=True)
class Trial:
    """The calls to be made.

    Attributes:
        each: by rank, its cases: the arguments of one call each. A rank never sees another rank's.
        metered: count the bytes that tensors hold.
        within: makes of the learner's function what is called in its place, because it is a part of something larger.
        issues: for each case, how many times torch's FSDP issues each of its collectives; once where this is empty.
    """

    each: tuple[tuple[tuple[Any, ...], ...], ...]
    network: Network | None = None
    metered: bool = False
    within: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    issues: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.each)

    def called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is called for each case.

        Raises:
            StoppedError: the function cannot be a part of it.
        """
        try:
            return self.within(function) if self.within else function
        except ValueError as error:
            raise StoppedError(f"{error}.", "") from None


@dataclass(frozen=True)
class TrialRun:
    """What came back.

    Attributes:
        answers: by rank and case, what the function returned; tuples have become lists.
        records: by rank, its account: the collectives in the order in which it issued them.
        written_bytes: by rank, what left its process by the kernel's count; None where the kernel does not say.
        peak_bytes: by rank, the most that tensors held at once; 0 if the trial was not metered.
        grown_bytes: by rank, by how much its process grew at most while it was metered, as the parent saw it by the
            kernel's count; None if it was not metered, or where the kernel does not say.
        replaced: names of torch's and the ranks' own functions that the code has replaced.
    """

    answers: list[list[Any]]
    records: list[list[Record]]
    written_bytes: list[int | None]
    peak_bytes: list[int]
    grown_bytes: list[int | None]
    replaced: list[str]
    timeline: Timeline
    printed: str


class StoppedError(Exception):
    """The code did not return; says why, in one paragraph."""

    def __init__(self, message: str, printed: str, cure: str = "") -> None:
        super().__init__(message)
        self.printed, self.cure = printed, cure


def carry_out(trial: Trial, function: Callable[..., Any], limits: Limits | None = None) -> TrialRun:
    """Call a function as a trial says.

    Raises:
        StoppedError: it raised, hung, crashed, or used more than its limits; or it cannot be sent.
    """
    from fsdp_sim.learn.folders import folders_in
    from fsdp_sim.learn.inside import call
    from fsdp_sim.ranks import Limits, RanksError, run
    from fsdp_sim.ranks.launch import NoRoomError, NotStartedError

    limits = limits or Limits()
    if limits.user:
        limits = replace(limits, user=limits.user.lending(folders_in(trial.each)))
    try:
        results = run(
            call, trial.ranks, trial.called(function), trial.metered, trial.issues,
            each=[(cases,) for cases in trial.each], network=trial.network, timeout_s=TIMEOUT_S,
            plain=True, limits=limits, progress=False, show_output=False,
        )  # fmt: skip
        return TrialRun(
            answers=[result["answers"] for result in results],
            records=results.records,
            written_bytes=results.written_bytes,
            peak_bytes=[int(result["peak_bytes"]) for result in results],
            grown_bytes=[_grown(looks) for looks in results.looks],
            replaced=sorted({name for result in results for name in result["replaced"]}),
            timeline=results.timeline,
            printed=_printed(results.output, trial.ranks),
        )
    except RanksError as error:
        why, cure = _why(error, trial.ranks, limits)
        raise StoppedError(why, _printed(error.output, trial.ranks), cure) from None
    except (NoRoomError, NotStartedError, StoppedError):  # no fault of the code; the last has said why
        raise
    except Exception as error:  # whatever it may have sent back, or written where only the ranks' own code writes
        raise StoppedError(_unread(_line(str(error))), "") from None


def _grown(looks: list[Look | None]) -> int | None:
    """By how much a process grew at most between two looks; where the second did not come, beyond all bounds."""
    if not looks or looks[0] is None:
        return None
    last = looks[-1] if len(looks) > 1 else None
    return last.most_bytes - looks[0].size_bytes if last else sys.maxsize


def tensor_bytes(given: Any) -> int:
    """Of the tensors in what a function is given: alone, in lists, or in modules."""
    if isinstance(given, list | tuple):
        return sum(map(tensor_bytes, given))
    if hasattr(given, "parameters"):
        return sum(map(tensor_bytes, given.parameters()))
    return int(getattr(given, "nbytes", 0))


def _unread(text: str) -> str:
    """About code that could not be sent, or whose results cannot be read."""
    if "cannot be sent to the ranks: " in text:
        return f"your function cannot be sent to a process of its own: {text.partition('ranks: ')[2]}."
    return f"what your code sent back cannot be read ({text})."


def _printed(output: list[str], ranks: int) -> str:
    return output[0] if ranks == 1 and output else str(output) if any(output) else ""


def _why(error: RanksError, ranks: int, limits: Limits) -> tuple[str, str]:
    """One paragraph about code that did not return, in two parts: what happened, and what mends a hang."""
    found, text = error.verdict, str(error)
    headline = _line(found.headline)
    if "raised NotImplementedError" in headline:
        return f"it {IS_A_STUB}; write your code in its place.", ""
    if "SIGXCPU" in headline:
        headline = headline.replace("was killed by SIGXCPU", f"was still running after {limits.cpu_s} s of computing")
        return f"{_whose(headline, ranks)}; is there a loop that does not end?", ""
    if any(words in headline for words in ("still running after", "threads and processes", "memory with all it")):
        return f"{_whose(headline, ranks)}; {found.fix}.", ""
    who = headline.partition(" raised")[0]
    if "raised MemoryError" in headline or "can't allocate memory" in headline:
        return f"{_whose(who, ranks)} wanted more than {limits.memory_bytes / 2**30:g} GiB of memory{_where(text)}.", ""
    if "can't start new thread" in headline:
        return f"{_whose(who, ranks)} started more threads than it has memory for{_where(text)}.", ""
    if "Invariant encountered" in headline and "_init_sharding_spec_tp" in text:  # torch takes it for a tensor parallel
        what = f"{_whose(who, ranks)} called fully_shard on a module whose parameters are in a unit already."
        return what, " To mend it, go bottom-up: the inner modules first, the model last."
    if " raised " in headline:
        return f"{_whose(headline.rstrip(': '), ranks)}{_where(text)}.", ""
    fix = _line(found.fix).partition("; if this wait is honest")[0]
    return f"{_whose(headline, ranks)}: {_line(found.why)}.", f" To mend it, {fix}."


def _whose(headline: str, ranks: int) -> str:
    """Of one rank alone "it": a learner has not started any."""
    return re.sub("^rank 0\\b", "it", headline) if ranks == 1 else headline


def _where(text: str) -> str:
    found = LAST_LINE.findall(text)
    sent = next((n for n, place in enumerate(found) if place[0] in ("encode", "_plain")), len(found))
    own = [place for place in found[:sent] if place[0] not in OURS]  # below that nothing is the learner's
    return f", in {own[-1][0]}, at `{_line(own[-1][1])}`" if own else ""


def _line(text: str) -> str:
    """A text as part of a paragraph."""
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:400]}..."
