"""The labs: predict, run, measure, compare. Each is a module, run as ``python -m labs.lab.NAME``, and a notebook.

result           what every lab returns
on_rank          what they train on CPU ranks
calibrated       step times as `fsdp-sim calibrate`'s file predicts them, for labs 2 and 4
ddp_to_fsdp2     1   from DDP to FSDP2 in one diff (`scripts`), with the same loss
memory           2   what each knob saves
units            3   wrapping and unit size
overlap          4   prefetch and overlap: read a trace
numerics         5   precision, accumulation, clipping
resume           6   checkpoint, kill it, go on with fewer ranks
compile          7   torch.compile and activation checkpointing
hugging_face     8   T5 and BERT; the same through Accelerate and Lightning Fabric
nodes            9   two nodes on one machine, a lost node, a hang
tune             10  the fastest plan that fits, found and then tried
"""
