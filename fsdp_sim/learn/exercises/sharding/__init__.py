"""How a tensor is cut."""
