"""Two steps on one axis, and where they part."""
