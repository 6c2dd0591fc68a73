"""Saved, resharded, gone on from."""
