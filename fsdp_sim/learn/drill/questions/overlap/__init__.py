"""Overlap: what hides a collective, what nothing hides, and what hiding costs."""
