"""The figure of a training step: lanes of operations over live memory; of many ranks, bands."""
