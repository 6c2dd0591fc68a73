"""Run N ranks from a notebook cell: started in milliseconds, watched, never left behind."""

from fsdp_sim.packages import need

need("fsdp_sim.ranks", "torch", "cloudpickle", "psutil", "tqdm")

from fsdp_sim.ranks import launch as _launch

_launch.start_server()  # first, so that it imports torch while this process does

from fsdp_sim.ranks.limits import Limits
from fsdp_sim.ranks.network import Network
from fsdp_sim.ranks.other_user import OtherUser
from fsdp_sim.ranks.rank import track
from fsdp_sim.ranks.run import RanksError, Results, run
from fsdp_sim.timeline import RECORDER

unit = RECORDER.label
"""``with unit("layers.0"): ...`` names the unit of the collectives issued inside, for timeline and watchdog."""

__all__ = ["Limits", "Network", "OtherUser", "RanksError", "Results", "run", "track", "unit"]
