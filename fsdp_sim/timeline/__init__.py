"""The record every part of the project speaks: a table of operations in time, and what is computed from it."""

from fsdp_sim.timeline.analysis import (
    Interval,
    busy_s,
    communicates,
    computes,
    exposed_comm_s,
    exposure_of,
    group_number,
    in_turn,
    median_step,
    spans_of,
    spans_of_steps,
    step_time_s,
    subtract,
    total_s,
    uncovered,
    union,
)
from fsdp_sim.timeline.call_sites import calls, learners_line, remember
from fsdp_sim.timeline.chakra import write_chakra
from fsdp_sim.timeline.chrome import write_chrome
from fsdp_sim.timeline.clocks import aligned
from fsdp_sim.timeline.columns import FIELDS, Columns
from fsdp_sim.timeline.comparison import Comparison, OperationPair, UnitDifference, compare
from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.files import read_timeline, trace_files
from fsdp_sim.timeline.frame import from_pandas, to_pandas, to_parquet
from fsdp_sim.timeline.header import ClockShift, Header, HostWork, UnitShards
from fsdp_sim.timeline.kinds import COLLECTIVES, COMM_LANES, MEMORY, Lane, Memory, Op, Phase, Word, dtype_name, lane_of
from fsdp_sim.timeline.limits import read_bytes, read_text
from fsdp_sim.timeline.meetings import meetings
from fsdp_sim.timeline.recorder import RECORDER, Recorder
from fsdp_sim.timeline.ring import RING_PASSES, ring_share
from fsdp_sim.timeline.side import Side
from fsdp_sim.timeline.snapshot import Snapshot, load_snapshot
from fsdp_sim.timeline.timeline import Timeline, timeline_of
from fsdp_sim.timeline.written import written

__all__ = [
    "COLLECTIVES",
    "COMM_LANES",
    "FIELDS",
    "MEMORY",
    "RECORDER",
    "RING_PASSES",
    "ClockShift",
    "Columns",
    "Comparison",
    "Event",
    "Header",
    "HostWork",
    "Interval",
    "Lane",
    "Memory",
    "Op",
    "OperationPair",
    "Phase",
    "Recorder",
    "Side",
    "Snapshot",
    "Timeline",
    "UnitDifference",
    "UnitShards",
    "Word",
    "aligned",
    "busy_s",
    "calls",
    "communicates",
    "compare",
    "computes",
    "dtype_name",
    "exposed_comm_s",
    "exposure_of",
    "from_pandas",
    "group_number",
    "in_turn",
    "lane_of",
    "learners_line",
    "load_snapshot",
    "median_step",
    "meetings",
    "read_bytes",
    "read_text",
    "read_timeline",
    "remember",
    "ring_share",
    "spans_of",
    "spans_of_steps",
    "step_time_s",
    "subtract",
    "timeline_of",
    "to_pandas",
    "to_parquet",
    "total_s",
    "trace_files",
    "uncovered",
    "union",
    "write_chakra",
    "write_chrome",
    "written",
]
