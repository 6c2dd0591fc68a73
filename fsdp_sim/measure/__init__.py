"""What only torch can tell: a module's units and work, the program that it issues, live bytes, a machine's speed."""

from fsdp_sim.packages import need

need("fsdp_sim.measure", "torch", "tqdm")

from fsdp_sim.measure.live_bytes import live_bytes
from fsdp_sim.measure.model_from_config import model_from_config
from fsdp_sim.measure.model_from_module import model_from_module
from fsdp_sim.measure.units import block_names, units_from_module

__all__ = ["block_names", "live_bytes", "model_from_config", "model_from_module", "units_from_module"]
