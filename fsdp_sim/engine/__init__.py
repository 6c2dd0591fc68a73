"""When each operation of a program runs, how many bytes are alive, and why."""

from fsdp_sim.engine.contention import Contention
from fsdp_sim.engine.exposure import Exposure, exposure
from fsdp_sim.engine.memory import MemoryProfile, Part, memory
from fsdp_sim.engine.replay import replay, run
from fsdp_sim.engine.run import Run
from fsdp_sim.engine.skew import jitter, slow_node, straggler
from fsdp_sim.engine.states import model_state_bytes, state_bytes

__all__ = [
    "Contention",
    "Exposure",
    "MemoryProfile",
    "Part",
    "Run",
    "exposure",
    "jitter",
    "memory",
    "model_state_bytes",
    "replay",
    "run",
    "slow_node",
    "state_bytes",
    "straggler",
]
