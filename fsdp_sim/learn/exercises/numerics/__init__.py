"""Precision, accumulation, clipping, averages."""
