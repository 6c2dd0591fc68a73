"""What a rank writes in a save: its part of a state, DCP's plan of that, and the tensors or their copies."""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from labs.checkpoint.state import State


def shared_out(state: State, rank: int, world_size: int) -> State:
    """The tensors that a rank plans to write: those that are sharded, and its share of those that every rank has.

    DCP would share these out as well, but when the copies for a save in the background are made already: of DDP's
    state each rank would copy all. (What only some ranks have alike, in HSDP, is left to DCP.) The largest go first,
    each to the rank that has the fewest bytes so far.
    """
    whole = sorted((-tensor.nbytes, name) for name, tensor in state.items() if not isinstance(tensor, DTensor))
    writes = [(0, writer) for writer in range(world_size)]  # a heap: bytes so far, rank
    others = set()
    for negative_bytes, name in whole:
        n_bytes, writer = writes[0]
        heapq.heapreplace(writes, (n_bytes - negative_bytes, writer))
        if writer != rank:
            others.add(name)
    return {name: tensor for name, tensor in state.items() if name not in others}


class Buffers:
    """Copies of tensors in host memory (pinned, if they come from a GPU), in memory that each save uses again."""

    def __init__(self) -> None:
        self.tensors: State = {}

    def copy(self, tensors: State) -> State:
        """Copies by the same names; those of the last call are overwritten."""
        buffers: State = {}
        on_gpu = False
        for name, tensor in tensors.items():
            buffer, cuda = self.tensors.get(name), tensor.device.type == "cuda"
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=cuda)
            buffers[name] = buffer.copy_(tensor, non_blocking=cuda)
            on_gpu = on_gpu or cuda
        if on_gpu:
            torch.cuda.synchronize()
        self.tensors = buffers
        return buffers


class Planner(DefaultSavePlanner):
    """DCP's planner, for tensors that may lie elsewhere than those that are planned: it keeps none of the state."""

    def __init__(self, state: State, tensors: State) -> None:
        """``tensors``: what this rank has of each tensor of the state, or a copy of it."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.mine = create_default_local_save_plan(state, is_coordinator=False)
        self.tensors = tensors

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        return self.mine

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.tensors[write_item.index.fqn]
