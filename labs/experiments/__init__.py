"""The labs: predict, run, measure, compare. Each is a notebook and a module, ``python -m labs.experiments.NAME``.

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

What the labs share:

result            what every lab returns
pictures          a result as a figure
command           a lab as a command
on_rank           what they train on CPU ranks
calibrated_times  step times as `fsdp-sim calibrate`'s file predicts them, for labs 2 and 4
gpu_results       what a lab found on a GPU, kept for those who have none

Beside the labs:

checklist         does it all work here? Trained under torchrun by checklist_runs
mine              the learner's own FSDP beside one process, the mini and torch's
ladder            the parity ladder: the same GPT trained in every way, and where two ways part
prefetch          the demo: a step with prefetch and without, also of sleeping_blocks, whose length is known
"""
