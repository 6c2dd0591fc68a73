"""Who waits in which collective, and who never came: torch's flight recorder, written to files and read.

torch keeps the last collectives of each rank in a ring buffer, its flight recorder, for gloo as for NCCL. One rank's
dump says little. Those of all ranks, laid side by side, say where a job that hangs has stopped: within a process group
collectives are numbered, and who has not got as far as the others is the one that they wait for.

Read in this order:

    dumps      what a rank's dump holds, and how it is read from a file that nobody vouches for
    diagnosis  where ranks have stopped, and in which unit

A rank writes its dump by `fsdp_sim.measure.flight_recorder`, where NCCL's watchdog does not.

``python -m labs.cluster.flight_recorder FOLDER`` says what the dumps in a folder say.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp; torch's own reader, for pickles of trusted origin: torchfrtrace.
"""

from fsdp_sim.measure.flight_recorder import recorded, write
from labs.cluster.flight_recorder.diagnosis import Mismatch, diagnose, unit_of
from labs.cluster.flight_recorder.dumps import Dump, Entry, Group, read

__all__ = ["Dump", "Entry", "Group", "Mismatch", "diagnose", "read", "recorded", "unit_of", "write"]
