"""The record every part of the project speaks: a table of operations in time, and what is computed from it."""

from fsdp_sim.timeline.chrome import write_chrome
from fsdp_sim.timeline.columns import FIELDS, Columns
from fsdp_sim.timeline.comparison import Comparison, compare
from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.files import read_timeline
from fsdp_sim.timeline.frame import from_pandas, to_pandas, to_parquet
from fsdp_sim.timeline.header import Header
from fsdp_sim.timeline.kinds import COLLECTIVES, COMM_LANES, MEMORY, Lane, Memory, Op, Phase, dtype_name, lane_of
from fsdp_sim.timeline.recorder import RECORDER, Recorder
from fsdp_sim.timeline.timeline import Timeline

__all__ = [
    "COLLECTIVES",
    "COMM_LANES",
    "FIELDS",
    "MEMORY",
    "RECORDER",
    "Columns",
    "Comparison",
    "Event",
    "Header",
    "Lane",
    "Memory",
    "Op",
    "Phase",
    "Recorder",
    "Timeline",
    "compare",
    "dtype_name",
    "from_pandas",
    "lane_of",
    "read_timeline",
    "to_pandas",
    "to_parquet",
    "write_chrome",
]
