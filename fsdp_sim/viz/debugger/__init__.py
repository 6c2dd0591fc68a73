"""The debugger: a recorded run, stepped forwards and backwards next to the lines that issued it."""

from fsdp_sim.viz.debugger.moments import Moment, moment
from fsdp_sim.viz.debugger.page import debugger_page
from fsdp_sim.viz.debugger.sources import code_css, coloured_lines
from fsdp_sim.viz.debugger.stepping import Debugger, debugger

__all__ = ["Debugger", "Moment", "code_css", "coloured_lines", "debugger", "debugger_page", "moment"]
