"""What cannot work is said once, and torchrun does not start it again.

[Note: ending torchrun]  torchrun's agent starts its ranks anew after every exit status but 0, as long as it has
restarts left, and its own status is then 1 (torch 2.13: `SimpleElasticAgent._invoke_run`, `launch_agent`). No status of
a rank says "do not try again", and leaving with 0 would be a lie. What ends an agent for good is a signal: after
SIGTERM it ends its ranks and leaves, with status 1. So a rank that refuses sends that to its agent, its parent.

The agents of other nodes are not told by that, and their ranks wait for this one. So the refusal goes into the store in
which ranks meet, and who reads it there (`labs.cluster.process_group.call_roll`) ends its own agent.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from labs.cluster.process_group import Place, RefusedError, tell_refusal
from labs.loop.run_state import NoGoodCheckpointError

OTHERS_S = 10.0
"""torchrun ends all ranks when one fails: let rank 0 speak. Who is still here after it has a trouble of its own."""
TIMES, HEARS_S = 3, 3.0
"""How often an agent is told, and how long after that it has ended its ranks."""


def refused(error: BaseException, place: Place, agent: int) -> int:
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
