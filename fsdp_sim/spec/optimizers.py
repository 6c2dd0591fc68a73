"""`OPTIMIZERS`: what each optimizer keeps beside a parameter, and what one step of it moves."""

from __future__ import annotations

from typing import NamedTuple


class Optimizer(NamedTuple):
    """Of one parameter; numbers are of its dtype.

    Attributes:
        states: how many numbers are kept beside it.
        state_bytes: of one of them, where it has a dtype of its own; None is the parameter's.
        least: a smaller shard keeps its states as they would be.
        foreach_moves: numbers that torch's foreach implementation reads and writes in a step; None: it has none.
        foreach_temporary: numbers that it needs for a moment.
    """

    states: int
    state_bytes: float | None = None
    least: int = 0
    foreach_moves: int | None = None
    foreach_temporary: int = 0

    def moved_bytes(self, param_bytes: int, impl: str) -> float:
        """What a step reads and writes of one parameter.

        ``fused`` reads the gradient, and reads and writes the parameter and what is kept beside it, once.
        """
        if impl == "foreach" and self.foreach_moves is not None:
            return float(self.foreach_moves * param_bytes)
        return 3 * param_bytes + 2 * self.states * (self.state_bytes or param_bytes)


# torch 2.13, optim/adam.py and sgd.py: the _foreach_ operators of a step, each with its reads and writes. AdamW:
# decay 2, first moment 3, second moment 2 and 3, its root 2, scaled 2, plus eps 2, parameter 4. With momentum: 2, 3, 3.
# 8 bits: torchao 0.18 (optim/subclass_8bit.py) and bitsandbytes: a byte, and an fp32 scale for each block of 256;
# of 4,096 numbers at least (torchao's optim/adam.py, as bitsandbytes).
# Master weights: deepspeed 0.19.8 (runtime/zero/stage_1_and_2.py): both moments and the parameter once more, in fp32.
# Muon: torch.optim.Muon for the matrices of the blocks, AdamW for the rest (see `fsdp_sim.schedule.optimizer`).
OPTIMIZERS = {
    "adamw": Optimizer(2, foreach_moves=20, foreach_temporary=1),
    "adamw_8bit": Optimizer(2, state_bytes=1 + 4 / 256, least=4096),
    "adamw_master_weights": Optimizer(3, state_bytes=4),
    "muon": Optimizer(1),
    "sgd_momentum": Optimizer(1, foreach_moves=8),
    "sgd": Optimizer(0, foreach_moves=3),
}
OPTIMIZER_STATES = {name: optimizer.states for name, optimizer in OPTIMIZERS.items()}
