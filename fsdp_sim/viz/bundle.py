"""What a notebook shows of a widget."""

from __future__ import annotations

from typing import Any

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def widget_bundle(widget: Any) -> dict[str, Any]:
    """The MIME bundle of a widget. One of ipywidgets 7, as Colab has, does not make it: there its id says enough."""
    if not hasattr(widget, "_repr_mimebundle_"):
        return {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}
    found: Any = widget._repr_mimebundle_()
    bundle: dict[str, Any] = found[0] if isinstance(found, tuple) else found  # a tuple has its metadata besides
    return bundle
