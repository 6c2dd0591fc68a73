"""How a run ends that cannot begin or go on: what it says, what torchrun is told, and the exit status.

What cannot work is said once, and torchrun does not start it again.

[Note: ending torchrun]  torchrun's agent starts its ranks anew after every exit status but 0, as long as it has
restarts left, and its own status is then 1 (torch 2.13: `SimpleElasticAgent._invoke_run`, `launch_agent`). No status of
a rank says "do not try again", and leaving with 0 would be a lie. What ends an agent for good is a signal: after
SIGTERM it ends its ranks and leaves, with status 1. So a rank that refuses sends that to its agent, its parent.

The agents of other nodes are not told by that, and their ranks wait for this one. So the refusal goes into the store in
which ranks meet, and who reads it there (`labs.cluster.process_group.call_roll`) ends its own agent.

[Note: a whole error file]  When a rank dies, torchrun ends the others, which may be writing down at that moment that
they lost a neighbour. torch's own handler writes in place, and torchrun gives up ("Expecting value: line 1 column 1")
where it finds a file half written, instead of starting the ranks again (``ProcessFailure.__post_init__``, torch 2.13).
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from labs.checkpoint import CheckpointError
from labs.cluster.process_group import RankPlace, RefusedError, tell_refusal
from labs.loop.nonfinite import NotFiniteError
from labs.loop.run_state import NoGoodCheckpointError

OTHERS_S = 10.0
"""torchrun ends all ranks when one fails: let rank 0 speak. Who is still here after it has a trouble of its own."""
TIMES, HEARS_S = 3, 3.0
"""How often an agent is told, and how long after that it has ended its ranks."""


def refused(error: BaseException, place: RankPlace, agent: int) -> int:
    """Say why a run is refused, and end torchrun; returns the exit status.

    In a later attempt the same command has trained before. So what the machine refuses then (a file system, the lock of
    a rank that is not dead yet) may pass, and torchrun may try again.

    Args:
        agent: the process that started this one, as `os.getppid` said early on.
    """
    if isinstance(error, SystemExit) and not error.code:
        return 0  # --help
    known = isinstance(error, (RefusedError, NoGoodCheckpointError))  # to all ranks
    if place.rank and not (known and place.local_rank == 0):
        time.sleep(OTHERS_S)
    if not isinstance(error, SystemExit) and not (known and place.rank):
        print(f"labs.train: {f'rank {place.rank}: ' * (place.rank > 0)}{error}", file=sys.stderr, flush=True)
    if not known:
        tell_refusal(place)
    may_pass = place.restarts > 0 and isinstance(error, OSError)
    if place.restarts_left and not may_pass and os.getppid() == agent:
        print(
            f"labs.train: torchrun is told to leave (SIGTERM) and not to try {place.restarts_left} times more; what it "
            "prints now is only how it leaves",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        _end(agent)
    return 2


def _end(agent: int) -> None:
    """Tell the agent to leave, and be ended by it. Again if it has not heard: what a signal handler raises is lost
    where Python ignores exceptions, as in what it calls after a fork."""
    for _ in range(TIMES):
        if os.getppid() == agent:
            with suppress(OSError):
                os.kill(agent, signal.SIGTERM)
            time.sleep(HEARS_S)


def failed(error: Exception, place: RankPlace) -> int:
    """Say what went wrong: once where all ranks know the same, with the rank where they do not. Returns the status."""
    on_all_ranks = isinstance(error, (NotFiniteError, CheckpointError))
    if on_all_ranks or (isinstance(error, ValueError) and place.rank == 0):
        text = "" if place.rank else str(error)
    elif _is_of_a_collective(error):
        text = f"rank {place.rank}: another rank is gone or stuck ({str(error).splitlines()[0][:200]})"
    else:
        whole = "".join(traceback.format_exception(error))
        text = f"rank {place.rank}: {type(error).__name__}: {error}\n{whole}"
    if text:
        print(f"labs.train: {text}", file=sys.stderr, flush=True)
    return 1


def _is_of_a_collective(error: Exception) -> bool:
    """Whether a collective failed because another rank did not take part."""
    texts = ("gloo", "Connection closed", "Connection reset", "Timed out", "pair closure", "NCCL")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


class WholeErrorFile(ErrorHandler):
    """torch's handler for ``record``, which renames the file into its place once it is written."""

    def _get_error_file_path(self) -> str | None:
        path = super()._get_error_file_path()
        return f"{path}.tmp" if path else None

    def record_exception(self, e: BaseException) -> None:
        """Write the error to ``TORCHELASTIC_ERROR_FILE``, where torchrun set one."""
        super().record_exception(e)
        if written := self._get_error_file_path():
            os.replace(written, written.removesuffix(".tmp"))
