"""Prefetch: issuing an all-gather before the unit that needs it, so that it runs beside the compute of another.

[Note: who issues the next all-gather]

    forward, default     nobody: unit i+1 issues its own. On a GPU the CPU runs ahead of the compute stream, so that is
                         early enough. On CPU the thread that would issue it is busy computing unit i
    forward, explicit    unit i, as soon as its own parameters are there: ``set_modules_to_forward_prefetch``
    backward, default    unit i, for the unit whose forward ended before its own: the reverse post-forward order
    backward, explicit   unit i, for the modules of ``set_modules_to_backward_prefetch``, instead of the default
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sim.mini.labels import labelled
from fsdp_sim.mini.streams import TrainingState

if TYPE_CHECKING:
    from fsdp_sim.mini.group import FSDPParamGroup
    from fsdp_sim.mini.state import FSDPState


def prefetch_unshard(group: FSDPParamGroup | None, training_state: TrainingState) -> None:
    """Issue a unit's all-gather on behalf of another one, on the streams of forward or of backward."""
    if group is None:
        return
    name = "forward" if training_state is TrainingState.FORWARD else "backward"
    with labelled(f"FSDP::{name}_prefetch for {group._module_fqn}"):
        before, group._training_state = group._training_state, training_state
        group.unshard(group.unshard_async_op)
        group._training_state = before


def backward_prefetch(group: FSDPParamGroup) -> None:
    """The default: prefetch the unit that ended its forward before this one. A unit used k times has k places."""
    if group._post_forward_indices:  # empty after a backward, if there is a second one
        index = group._post_forward_indices.pop()
        if index > 0:
            prefetch_unshard(group.comm_ctx.post_forward_order[index - 1], TrainingState.PRE_BACKWARD)


class PrefetchMethods:
    """The methods of `FSDPModule` that order all-gathers."""

    if TYPE_CHECKING:

        def _get_fsdp_state(self) -> FSDPState: ...
        def _set_on_groups(self, recurse: bool, **values: Any) -> None: ...

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """In forward, issue the all-gathers of these modules as soon as this module's parameters are there.

        On CPU this is what makes forward overlap: without it an all-gather is issued by the thread that has to wait
        for it next. Two modules ahead hide more and need one more gathered buffer.

        Raises:
            ValueError: a module that `fully_shard` was not applied to.
        """
        self._get_fsdp_state()._states_to_forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """The same in backward, instead of the default: the unit whose forward ended before this one's."""
        self._get_fsdp_state()._states_to_backward_prefetch = _states_of(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False if this module's backward does not read its parameters (an embedding): backward gathers nothing."""
        self._set_on_groups(False, unshard_in_backward=unshard_in_backward)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Gather on the process group's own stream, from and into memory of the compute stream (torch's name)."""
        self._set_on_groups(True, unshard_async_op=async_op)


def _states_of(modules: list[Any]) -> list[FSDPState]:
    for m in modules:
        if not isinstance(m, PrefetchMethods):
            raise ValueError(f"only modules given to fully_shard can be prefetched, but got {type(m).__name__}: {m}")
    return [m._get_fsdp_state() for m in modules]
