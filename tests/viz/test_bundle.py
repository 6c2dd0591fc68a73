"""What a notebook shows of a widget, also with the ipywidgets 7 of somebody else's Jupyter."""

import ipywidgets
import pytest

from fsdp_sim.viz.bundle import WIDGET_VIEW, widget_bundle


@pytest.mark.parametrize("old", [False, True])
def test_a_widget_is_named_by_its_id(old, monkeypatch):
    if old:
        monkeypatch.delattr(ipywidgets.Widget, "_repr_mimebundle_")
    widget = ipywidgets.HTML("some text")

    assert widget_bundle(widget)[WIDGET_VIEW] == {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
