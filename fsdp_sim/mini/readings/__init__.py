"""FSDP in three readings. Each is one file that stands alone on torch, and runs: ``torchrun --nproc_per_node=2 FILE``.

    one_idea   one autograd function, whose forward is an all-gather and whose backward is a reduce-scatter
    one_loop   DDP, FSDP, and FSDP with overlap: the training step written out, three twins that differ in marked lines
    fsdp       `fully_shard` for one evening: DTensor shards, hooks, prefetch, mixed precision, gradient accumulation

The mini itself, which has all of torch's `fully_shard`, begins in ``fsdp_sim/mini/api.py``.
"""
