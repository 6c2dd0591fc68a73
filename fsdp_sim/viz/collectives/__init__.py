"""Collectives, chunk by chunk, with the data."""
