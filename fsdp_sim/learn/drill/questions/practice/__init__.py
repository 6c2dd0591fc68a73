"""Practice: batches, learning rates, precision, data, checkpoints, and what machines that fail cost."""
