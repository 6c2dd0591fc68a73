"""All ranks go on, or all fail: what went wrong on one rank is said on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
NAMED = 3  # ranks whose trouble is told in full


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on all ranks, so that they can go on together without it."""


def together(work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Run ``work`` on every rank of the group and return, on every rank, what each returned. A collective call.

    Args:
        group: a gloo group; None: this process alone.

    Raises:
        CheckpointError: it failed on some rank; names the ranks and their causes, on all ranks.
        RuntimeError: a rank did not come in the group's time, or is gone (from gloo).
    """
    trouble = None
    try:
        mine: tuple[Any, str | None] = (work(), None)
    except Exception as error:
        trouble, mine = error, (None, describe(error))
    answers = [mine]
    if group is not None:
        answers = [mine] * dist.get_world_size(group)
        dist.all_gather_object(answers, mine, group=group)
    failed = {rank: why for rank, (_, why) in enumerate(answers) if why is not None}
    if failed:
        raise CheckpointError(listed(failed)) from trouble
    return [answer for answer, _ in answers]


def listed(failed: Mapping[int, str]) -> str:
    """One line: which ranks failed, and why."""
    sentences = [f"rank {rank}: {why}" for rank, why in sorted(failed.items())[:NAMED]]
    return "; ".join(sentences) + (f"; and {len(failed) - NAMED} ranks more" if len(failed) > NAMED else "")


def describe(error: BaseException) -> str:
    """An error in one line: our own sentences as they are, others with their type."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
