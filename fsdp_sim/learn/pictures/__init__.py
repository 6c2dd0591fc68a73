"""Drawings that one chapter needs: pure functions from data to the same pictures that `fsdp_sim.viz` makes."""
