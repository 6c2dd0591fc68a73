"""The explorer: a training step whose timeline, memory and explanation follow as its settings move.

In reading order: `settings` and `controls` (what can be moved), `scene` (the numbers to draw), `drawing`, `layout_of`,
`dependencies_of` (one operation), `words` (the sentences), `composed`, `figure_of` and `canvas` (the figure),
`explorer` (all of it together), `still` and `page` (without a kernel).
"""

from importlib.util import find_spec

from fsdp_sim.forms import FormState

if find_spec("plotly") is not None:  # else the files are imported one by one: see fsdp_sim.viz
    from fsdp_sim.viz.explorer.explorer import Explorer, explorer
    from fsdp_sim.viz.explorer.page import explorer_page

__all__ = ["Explorer", "FormState", "explorer", "explorer_page"]
