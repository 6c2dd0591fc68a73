"""The life of a unit: whole, computed, freed, reduced."""
