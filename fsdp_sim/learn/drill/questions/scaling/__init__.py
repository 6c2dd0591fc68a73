"""Scale: where shards lie, what more GPUs cost, and what a run takes: tokens, days, failures."""
