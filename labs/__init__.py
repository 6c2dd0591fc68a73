"""Training a real GPT with real FSDP: under torchrun, on CPUs or GPUs.

    model         the two models, a GPT and a Llama, and their weights
    data          text to tokens, and the order in which they are read
    config        what can be asked of the trainer; files of settings are in configs
    cluster       ranks: their process group, torchrun, Slurm and Kubernetes, the flight recorder, a pretended cluster
    wrapping      one word chooses: one process, DDP, FSDP2, FSDP1, HSDP, the mini-FSDP
    loop          one step, the optimizer, and what a run needs around them; loop.minimal is the training in a few lines
    checkpoint    what is saved, how it reaches the disk and comes back, and conversion to other formats
    measure       recorded steps, memory by category, and the simulator's prediction of the same step
    train         the trainer: its loop and its command, python -m labs.train
    experiments   the eleven labs, the parity ladder, the checklist
    gpu_day       an hour on somebody's GPU: all of these, one after the other, and what they found as one file

A folder's ``__init__`` says in which order to read it.
"""

from fsdp_sim.accelerators import hide_from_notebook
from fsdp_sim.packages import need

need("labs", "torch", "tyro")
hide_from_notebook()
