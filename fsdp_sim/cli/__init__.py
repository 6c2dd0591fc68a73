"""The command line: `fsdp-sim`, one file per command, and the set-up that comes before everything."""
