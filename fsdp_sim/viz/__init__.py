"""Figures of timelines and simulations: in a notebook, in a page that opens without a network, and told in words."""

from fsdp_sim.viz.accuracy_scatter import accuracy
from fsdp_sim.viz.comparing import compare
from fsdp_sim.viz.html import Section, save_html
from fsdp_sim.viz.pareto_front import pareto
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.rings import collective
from fsdp_sim.viz.rooflines import roofline
from fsdp_sim.viz.scaling_curves import scaling
from fsdp_sim.viz.selection import chain, critical_path
from fsdp_sim.viz.shards import shard_map
from fsdp_sim.viz.summary import describe, summary_table, summary_table_html
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.timeline_figure import timeline_figure
from fsdp_sim.viz.timelines import rank_bands, show, timeline
from fsdp_sim.viz.waterfall import memory_waterfall

__all__ = [
    "Picture",
    "Section",
    "Table",
    "accuracy",
    "chain",
    "collective",
    "compare",
    "critical_path",
    "describe",
    "memory_waterfall",
    "pareto",
    "rank_bands",
    "roofline",
    "save_html",
    "scaling",
    "shard_map",
    "show",
    "summary_table",
    "summary_table_html",
    "timeline",
    "timeline_figure",
]
