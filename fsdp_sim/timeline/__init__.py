"""The record every part of the project speaks: a table of operations in time, and what is computed from it."""

from fsdp_sim.timeline.chrome import write_chrome
from fsdp_sim.timeline.comparison import Comparison, compare
from fsdp_sim.timeline.files import read_timeline
from fsdp_sim.timeline.frame import from_pandas, to_pandas, to_parquet
from fsdp_sim.timeline.kinds import COLLECTIVES, COMM_LANES, Lane, Memory, Op, Phase, dtype_name, lane_of
from fsdp_sim.timeline.links import chain, critical_path
from fsdp_sim.timeline.recorder import RECORDER, Recorder
from fsdp_sim.timeline.ring import ring_share
from fsdp_sim.timeline.timeline import Event, Header, Timeline

__all__ = [
    "COLLECTIVES",
    "COMM_LANES",
    "RECORDER",
    "Comparison",
    "Event",
    "Header",
    "Lane",
    "Memory",
    "Op",
    "Phase",
    "Recorder",
    "Timeline",
    "chain",
    "compare",
    "critical_path",
    "dtype_name",
    "from_pandas",
    "lane_of",
    "read_timeline",
    "ring_share",
    "to_pandas",
    "to_parquet",
    "write_chrome",
]
