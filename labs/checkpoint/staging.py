"""What a save writes: DCP's plan of a state, and the tensors of this rank, or their copies."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from labs.checkpoint.state import State


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
