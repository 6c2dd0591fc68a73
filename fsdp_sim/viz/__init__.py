"""Figures of timelines: in a notebook, in a page that opens without a network, and told in words."""

from fsdp_sim.viz.html import Section, save_html, show
from fsdp_sim.viz.summary import Table, describe, summary_table, summary_table_html
from fsdp_sim.viz.timeline_figure import timeline_figure

__all__ = [
    "Section",
    "Table",
    "describe",
    "save_html",
    "show",
    "summary_table",
    "summary_table_html",
    "timeline_figure",
]
