"""Run N ranks from a notebook cell: started in milliseconds, watched, never left behind.

What they are forked from starts with the first `run`, or with `start_server`; in a notebook, when the cell that imports
this package has ended.
"""

from fsdp_sim.packages import need

need("fsdp_sim.ranks", "torch", "cloudpickle", "psutil", "tqdm")

from fsdp_sim.ranks.launch import start_server, start_server_after_cell
from fsdp_sim.ranks.limits import Limits
from fsdp_sim.ranks.network import Network
from fsdp_sim.ranks.other_user import OtherUser
from fsdp_sim.ranks.rank import track
from fsdp_sim.ranks.run import RanksError, Results, run
from fsdp_sim.timeline import RECORDER

start_server_after_cell()
unit = RECORDER.label
"""``with unit("layers.0"): ...`` names the unit of the collectives issued inside, for timeline and watchdog."""

__all__ = ["Limits", "Network", "OtherUser", "RanksError", "Results", "run", "start_server", "track", "unit"]
