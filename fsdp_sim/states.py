"""Where a unit of FSDP is: torch's two enums, which the mini and the programs (`fsdp_sim.schedule`) share."""

from enum import Enum, auto


class TrainingState(Enum):
    """Where a unit is in the step (torch: `_fsdp_common.TrainingState`)."""

    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    IDLE = auto()


class ShardedState(Enum):
    """Which of its forms a parameter (and its group) is registered in (torch: `_fsdp_param.ShardedState`)."""

    SHARDED = auto()
    SHARDED_POST_FORWARD = auto()
    UNSHARDED = auto()
