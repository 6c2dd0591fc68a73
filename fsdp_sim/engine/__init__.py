"""When each operation of a program runs, how many bytes are alive, and why."""

from fsdp_sim.engine.allocator import Allocator, Pools
from fsdp_sim.engine.contention import Contention
from fsdp_sim.engine.dependencies import Before, dependencies, shown_lane
from fsdp_sim.engine.exposure import Exposure, exposure
from fsdp_sim.engine.groups import group_of
from fsdp_sim.engine.kinds import Alike
from fsdp_sim.engine.memory import MemoryProfile, Part, memory
from fsdp_sim.engine.replay import replay, run
from fsdp_sim.engine.run import Run, at_rank
from fsdp_sim.engine.seconds import Given, Seconds, later
from fsdp_sim.engine.skew import jitter, slow_node, straggler
from fsdp_sim.engine.states import model_state_bytes

__all__ = [
    "Alike",
    "Allocator",
    "Before",
    "Contention",
    "Exposure",
    "Given",
    "MemoryProfile",
    "Part",
    "Pools",
    "Run",
    "Seconds",
    "at_rank",
    "dependencies",
    "exposure",
    "group_of",
    "jitter",
    "later",
    "memory",
    "model_state_bytes",
    "replay",
    "run",
    "shown_lane",
    "slow_node",
    "straggler",
]
