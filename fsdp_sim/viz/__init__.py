"""Figures of timelines and simulations: in a notebook, in a page that opens without a network, and told in words.

Where plotly is missing this imports nothing, and each name says so: `explorer.drawing`, which draws with plain numbers
for a page, is imported past it.
"""

from importlib.util import find_spec
from typing import Any

from fsdp_sim.packages import need

if find_spec("plotly") is not None:
    from fsdp_sim.viz.charts.accuracy_page import accuracy_figures
    from fsdp_sim.viz.charts.accuracy_scatter import accuracy
    from fsdp_sim.viz.charts.memory_curve import memory_curve
    from fsdp_sim.viz.charts.pareto_front import pareto
    from fsdp_sim.viz.charts.rooflines import roofline
    from fsdp_sim.viz.charts.scaling_curves import scaling
    from fsdp_sim.viz.charts.waterfall import memory_waterfall
    from fsdp_sim.viz.collectives.rings import collective
    from fsdp_sim.viz.comparison.comparing import compare
    from fsdp_sim.viz.debugger import Debugger, debugger, debugger_page
    from fsdp_sim.viz.explorer import Explorer, explorer, explorer_page
    from fsdp_sim.viz.html import Section, save_html
    from fsdp_sim.viz.picture import Picture
    from fsdp_sim.viz.present import present
    from fsdp_sim.viz.shard_maps.shards import shard_map
    from fsdp_sim.viz.steps.summary import describe, summary_table
    from fsdp_sim.viz.steps.timeline_figure import timeline_figure
    from fsdp_sim.viz.steps.timelines import rank_bands, show, timeline
    from fsdp_sim.viz.table import Table

__all__ = [
    "Debugger",
    "Explorer",
    "Picture",
    "Section",
    "Table",
    "accuracy",
    "accuracy_figures",
    "collective",
    "compare",
    "debugger",
    "debugger_page",
    "describe",
    "explorer",
    "explorer_page",
    "memory_curve",
    "memory_waterfall",
    "pareto",
    "present",
    "rank_bands",
    "roofline",
    "save_html",
    "scaling",
    "shard_map",
    "show",
    "summary_table",
    "timeline",
    "timeline_figure",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        need("fsdp_sim.viz", "plotly")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
