"""torch's own FSDP2 under the names that `fsdp_sim.mini` gives: the import that a test changes to try the other one."""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

__all__ = [
    "CPUOffloadPolicy", "FSDPModule", "FSDPParam", "FSDPParamGroup", "FSDPState", "MixedPrecisionPolicy",
    "OffloadPolicy", "ShardedState", "TrainingState", "UnshardHandle", "fully_shard", "register_fsdp_forward_method",
    "share_comm_ctx",
]  # fmt: skip
