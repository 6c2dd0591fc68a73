"""What torch's profiler and its log call the steps of a unit: the names of torch's own FSDP.

In a profile ``FSDP::all_gather (layers.3)`` is a range around what issues the unit's all-gather; tools that know
torch's FSDP, such as `fsdp_sim.timeline.read_kineto`, find the mini's units too. ``TORCH_LOGS=+fsdp`` logs the hooks.

[Note: what a range costs]  A `record_function` takes longer than anything else in a hook, whether somebody profiles or
not. While torch's profiler is off a lighter form stands in, which other observers of PyTorch's calls see all the same.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.profiler import record_function

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")  # torch's own: TORCH_LOGS=+fsdp turns it on


def record_step(step: str, fqn: str | None = "") -> AbstractContextManager[object]:
    """A range in the profile; ``fqn`` is the unit's, empty for the root."""
    return record_range(_label(step, fqn))


def record_range(label: str) -> AbstractContextManager[object]:
    """A range with a label of its own, see [Note: what a range costs]."""
    return record_function(label) if profiler._is_profiler_enabled else record_operation(label)


def record_operation(name: str) -> AbstractContextManager[object]:
    """What appears in the profile as if it were one of PyTorch's operations."""
    return _RecordFunctionFast(name)


def record_hook(step: str, fqn: str | None = "") -> AbstractContextManager[object]:
    """The range of a hook, and a line in the log where it begins."""
    log(step, fqn)
    return record_step(step, fqn)


def log(step: str, fqn: str | None = "") -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", _label(step, fqn))


def _label(step: str, fqn: str | None) -> str:
    return f"FSDP::{step} ({fqn})" if fqn else f"FSDP::{step}"
