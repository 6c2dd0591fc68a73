"""Training a real GPT with real FSDP: under torchrun, on CPUs or GPUs.

Read in this order:

    tokenizer, data, loader       text to tokens, and in which order they are read
    gpt, llama, models            two models, and their weights
    pieces                        the training in a few functions: what notebooks use
    config, preflight             what can be asked of the trainer, and what is refused before anything starts
    place, stopping               ranks, devices, groups; and how a run is told to leave
    wrapping                      one word chooses: one process, DDP, FSDP2, FSDP1, HSDP, the mini-FSDP
    optimizer, step               AdamW and its schedule; one step
    checkpoint                    what is kept, how it reaches the disk and comes back
    training, train               a training between two steps; the trainer's loop and command
    metrics, meters, report       what is shown
    profiling, clocks, run_summary recorded steps; all ranks on one clock; what they say in one line
    memory                        what a step holds, by the simulator's categories
    simulated, random_batch, timing, prediction   the simulator's word for the same step
    evaluation, closing           the validation loss, a sample; what is said at the end
    points                        moments at which the fault tests make a rank fail

Beside the trainer: `convert` (checkpoints to other formats), `checklist` with checklist_runs (does it all work here?),
and the experiments of the notebooks: `ladder` (with rungs, divergence, faults), `overlap`, `asleep` (blocks of known
length, for the demo), `notebook`.

The labs, each a module of `lab` and a notebook:

    trained, lab.result           the trainer started from Python; what a lab found
    pretend                       a cluster of which only the wire is modelled, on one device
    record                        a lab's findings on a GPU, kept for those who have none
    launch                        Slurm, Kubernetes, and the settings of NCCL and the flight recorder
    flight_recorder               who waits in which collective, and who never came
"""

from fsdp_sim.accelerators import hide_from_notebook
from fsdp_sim.packages import need

need("labs", "torch", "tyro")
hide_from_notebook()
