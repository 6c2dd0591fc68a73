"""FSDP in three readings:

    one_idea   FSDP as one autograd function, whose forward is an all-gather and whose backward is a reduce-scatter
    one_loop   the training loop written out: three twins that differ in a few marked lines

Nothing overlaps in the first; the second shows what overlap is.
"""
