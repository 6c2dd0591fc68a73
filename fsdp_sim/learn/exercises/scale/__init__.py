"""Many GPUs, several nodes."""
