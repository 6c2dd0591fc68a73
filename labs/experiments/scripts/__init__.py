"""Two plain training loops to lay side by side, `train_ddp` and `train_fsdp2`; `watched` runs one and takes notes."""
