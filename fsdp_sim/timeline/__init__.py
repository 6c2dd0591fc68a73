"""The record every part of the project speaks: a table of operations in time, and what is computed from it."""

from fsdp_sim.timeline.kinds import COLLECTIVES, COMM_LANES, Lane, Memory, Op, Phase, dtype_name, lane_of
from fsdp_sim.timeline.recorder import RECORDER, Recorder
from fsdp_sim.timeline.timeline import Event, Header, Timeline

__all__ = [
    "COLLECTIVES",
    "COMM_LANES",
    "RECORDER",
    "Event",
    "Header",
    "Lane",
    "Memory",
    "Op",
    "Phase",
    "Recorder",
    "Timeline",
    "dtype_name",
    "lane_of",
]
