"""Prefetch: issuing an all-gather before the unit that needs it, so that it runs beside the compute of another.

[Note: who issues the next all-gather]

    forward, default     nobody: unit i+1 issues its own. On a GPU the CPU runs ahead of the compute stream, so that is
                         early enough. On CPU the thread that would issue it is busy computing unit i
    forward, explicit    unit i, as soon as its own parameters are there: ``set_modules_to_forward_prefetch``
    backward, default    unit i, for the unit whose forward ended before its own: the reverse post-forward order
    backward, explicit   unit i, for the modules of ``set_modules_to_backward_prefetch``, instead of the default
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_sim.mini.labels import record_range
from fsdp_sim.states import TrainingState

if TYPE_CHECKING:
    from fsdp_sim.mini.group import FSDPParamGroup


def prefetch_unshard(group: FSDPParamGroup | None, training_state: TrainingState) -> None:
    """Issue a unit's all-gather on behalf of another one, on the streams of forward or of backward."""
    if group is None:
        return
    name = "forward" if training_state is TrainingState.FORWARD else "backward"
    with record_range(f"FSDP::{name}_prefetch for {group._module_fqn}"):
        before, group._training_state = group._training_state, training_state
        group.unshard(group.unshard_async_op)
        group._training_state = before


def backward_prefetch(group: FSDPParamGroup) -> None:
    """The default: prefetch the unit that ended its forward before this one. A unit used k times has k places."""
    if group._post_forward_indices:  # empty after a backward, if there is a second one
        index = group._post_forward_indices.pop()
        if index > 0:
            prefetch_unshard(group.comm_ctx.post_forward_order[index - 1], TrainingState.PRE_BACKWARD)
