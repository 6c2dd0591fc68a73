"""Judges many answers to one exercise on ranks that start once.

`fsdp_sim.learn.check.judge` starts ranks of their own for every answer, as a learner's answer deserves. Here the
answers are the course's own, and ranks take them one after the other. An answer that raises gets no verdict here; one
that hangs or ends its rank gets none either, and those after it get other ranks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fsdp_sim.learn.apart import StoppedError, Trial, TrialRun
from fsdp_sim.learn.check import judge
from fsdp_sim.learn.exercise import Exercise
from fsdp_sim.learn.verdict import Verdict
from fsdp_sim.ranks import Limits, RanksError, run
from fsdp_sim.timeline import Header, Timeline

Answer = Callable[..., Any]
LIMITS = Limits(cpu_s=60)  # for all answers of an exercise
BRIEF_S = 1.0  # in a collective, for a rank that does nothing: many of these answers hang


def verdicts(exercise: Exercise, answers: Sequence[Answer]) -> list[Verdict | None]:
    """The verdict on each answer; None for one that has to be judged alone."""
    with patch.object(sys.modules[judge.__module__], "carry_out", lambda trial, function, limits: ran[function]):
        found: list[Verdict | None] = []
        while len(found) < len(answers):
            rest = answers[len(found) :]
            ran: dict[Answer, TrialRun] = {}
            for answer, result in zip(rest, results(exercise, rest), strict=False):
                if result is not None:
                    ran[answer] = result
                found.append(judge(exercise, answer, told=True) if result else None)
            if len(found) < len(answers):
                found.append(None)
    return found


def results(exercise: Exercise, answers: Sequence[Answer]) -> list[TrialRun | None]:
    """What came back from the answers, up to the first that ended the ranks; None for one that raised."""
    trial = exercise.judge.trial(int(os.environ["FSDP_SIM_SEED"]))
    called = [_called(trial, answer) for answer in answers]
    with tempfile.TemporaryDirectory(prefix="fsdp_sim-") as folder:
        with contextlib.suppress(RanksError, TypeError):  # TypeError: one of them cannot be sent
            run(
                each_in_turn, trial.ranks, called, trial.metered, trial.issues, folder,
                each=[(own,) for own in trial.each], network=trial.network, timeout_s=BRIEF_S, limits=LIMITS,
                progress=False, show_output=False,
            )  # fmt: skip
        files = [sorted(Path(folder).glob(f"*-of-rank-{rank}")) for rank in range(trial.ranks)]
        by_rank = [[pickle.loads(path.read_bytes()) for path in of_rank] for of_rank in files]
    return [None if None in of_ranks else together(trial, of_ranks) for of_ranks in zip(*by_rank, strict=False)]


def _called(trial: Trial, answer: Answer) -> Answer:
    try:
        return trial.called(answer)
    except StoppedError:
        return _refused


def _refused(*given: Any) -> None:
    raise ValueError("it cannot be called as the trial would have it")


def together(trial: Trial, of_ranks: tuple[dict[str, Any], ...]) -> TrialRun:
    """As `fsdp_sim.learn.apart.carry_out` puts together what came from the ranks."""
    header = Header(producer="mini", clock="measured", world_size=trial.ranks)
    return TrialRun(
        answers=[of["answers"] for of in of_ranks],
        records=[of["records"] for of in of_ranks],
        written_bytes=[of["written_bytes"] for of in of_ranks],
        peak_bytes=[int(of["peak_bytes"]) for of in of_ranks],
        grown_bytes=[None] * trial.ranks,  # of all answers together
        replaced=sorted({name for of in of_ranks for name in of["replaced"]}),
        timeline=Timeline(header, [event for of in of_ranks for event in of["events"]]),
        printed="",
    )


# ---- In a rank ------------------------------------------------------------------------------------------------------


def each_in_turn(
    answers: list[Answer], metered: bool, issues: tuple[int, ...], folder: str, cases: tuple[tuple[Any, ...], ...]
) -> None:
    """Call every answer for each case, and write into a file of its own what is to be known about it."""
    import torch.distributed as dist

    from fsdp_sim.learn import inside
    from fsdp_sim.ranks import plain
    from fsdp_sim.ranks.limits import written_bytes
    from fsdp_sim.ranks.work import Context
    from fsdp_sim.timeline import RECORDER

    rank, board, pid = Context.rank, Context.board, os.getpid()
    originals = inside._originals()
    for number, answer in enumerate(answers):
        dist.barrier()
        first, before = board.issued(rank), written_bytes(pid)
        RECORDER.start(rank)
        result = None
        with contextlib.suppress(Exception):
            result = plain.decode(plain.encode(inside.call(answer, metered, issues, deepcopy(cases))))
        after, events = written_bytes(pid), RECORDER.stop()
        if result is not None:
            result["events"] = events
            result["records"] = board.read(rank, first, board.issued(rank))
            result["written_bytes"] = None if before is None or after is None else after - before
        for owner, key, value in originals.values():
            if vars(owner).get(key) is not value:
                setattr(owner, key, value)
        path = Path(folder, f"{number:02}-of-rank-{rank}")
        path.with_suffix(".new").write_bytes(pickle.dumps(result))
        path.with_suffix(".new").rename(path)
