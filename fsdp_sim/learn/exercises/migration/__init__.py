"""From DDP and FSDP1 to FSDP2."""
