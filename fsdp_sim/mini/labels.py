"""What torch's profiler and its log call the steps of a unit: the names of torch's own FSDP.

In a profile ``FSDP::all_gather (layers.3)`` is a range around what issues the unit's all-gather; tools that know
torch's FSDP, such as `fsdp_sim.timeline.read_kineto`, find the mini's units too. ``TORCH_LOGS=+fsdp`` logs the hooks.
"""

from __future__ import annotations

import logging

from torch.profiler import record_function

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")  # torch's own: TORCH_LOGS=+fsdp turns it on


def ranged(step: str, fqn: str | None = "") -> record_function:
    """A range in the profile; ``fqn`` is the unit's, empty for the root."""
    return record_function(_label(step, fqn))


def logged(step: str, fqn: str | None = "") -> record_function:
    """The same, and a line in the log: the begin of a hook."""
    log(step, fqn)
    return ranged(step, fqn)


def log(step: str, fqn: str | None = "") -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", _label(step, fqn))


def _label(step: str, fqn: str | None) -> str:
    return f"FSDP::{step} ({fqn})" if fqn else f"FSDP::{step}"
