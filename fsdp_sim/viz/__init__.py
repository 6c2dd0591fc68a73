"""Figures of timelines: in a notebook, in a page that opens without a network, and told in words."""

from fsdp_sim.viz.html import Section, save_html
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.summary import describe, summary_table, summary_table_html
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.timeline_figure import timeline_figure
from fsdp_sim.viz.timelines import show, timeline

__all__ = [
    "Picture",
    "Section",
    "Table",
    "describe",
    "save_html",
    "show",
    "summary_table",
    "summary_table_html",
    "timeline",
    "timeline_figure",
]
