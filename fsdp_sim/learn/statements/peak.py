"""What people say about peak memory, checkpointing of activations, and offload."""

from __future__ import annotations

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import LAYERS, count, refused

MISCONCEPTIONS = (
    Misconception(
        "Only one layer's full parameters exist at any time.",
        "With FSDP2's defaults 3 units stand at the peak of forward and 4 at that of backward: parameters, the flat "
        "buffer of the next gather, gradients and the input of the reduce-scatter. FSDP1 has about 2 and the root.",
        ("misconception 2.24", "misconception 4.38"),
    ),
    Misconception(
        "Activations are sharded too.",
        "They are not: they belong to a rank's own batch. What shrinks them is a smaller micro-batch, activation "
        "checkpointing, or parallelism over the sequence.",
        ("misconception 12",),
    ),
    Misconception(
        "Checkpointing a sharded block doubles its all-gathers.",
        "Not in torch 2.13: recomputation happens inside backward, where the unit is gathered anyway.",
        ("misconception 27",),
        lambda: count("ALL_GATHER", activation_checkpointing="full") == count("ALL_GATHER") == 2 * LAYERS + 1,
    ),
    Misconception(
        "`checkpoint_wrapper(model)` turns activation checkpointing on.",
        "Around the whole model it recomputes everything at once: a third more compute, and the same peak. Wrap each "
        "block.",
        ("misconception 2.30",),
    ),
    Misconception(
        "Out of memory? Turn on CPU offload. It belongs in an optimized configuration.",
        "It comes last, because it slows every step. First see that blocks are units (one unit saves no peak), "
        "checkpoint activations, look at the logits and at `no_sync`, add GPUs. And keep the reduction in fp32.",
        ("misconception 0.28", "misconception 2.32", "misconception 2.34", "misconception 4.93"),
    ),
    Misconception(
        "`nvidia-smi` shows how much memory training needs.",
        "It shows what the process holds: the allocator's reserve and the CUDA context included. Reset the peak at "
        "each phase, then read the allocator's allocated and reserved bytes.",
        ("misconception 1.17",),
    ),
    Misconception(
        "It does not matter in which order checkpointing and sharding are applied.",
        "FSDP1: apply checkpointing after wrapping. FSDP2: checkpointing, then compile, then `fully_shard`. (And see "
        "that the script's flag does anything: in one popular port it is only planned.)",
        ("misconception 1.25",),
    ),
    Misconception(
        "CPU offload moves parameters away while they are not used.",
        "It moves parameter shards, gradients and the optimizer to the CPU, where the step then runs. Every unit is "
        "copied over and back in every iteration.",
        ("misconception 0.20", "misconception 2.1"),
    ),
    Misconception(
        "`CPUOffload(offload_gradients=True)` offloads gradients.",
        "A TypeError: there is only `offload_params`, and gradients go with their parameters. FSDP2 has "
        "`CPUOffloadPolicy(pin_memory=...)`.",
        ("misconception 7", "misconception 4.77"),
        lambda: refused("torch.distributed.fsdp:CPUOffload", TypeError, offload_gradients=True)
        and not refused("torch.distributed.fsdp:CPUOffloadPolicy", TypeError, pin_memory=True),
    ),
    Misconception(
        "Print allocated and maximal memory on rank 0.",
        "Of every rank, and of each phase: reset the peak before it, and print what is reserved too.",
        ("misconception 4.88",),
    ),
)  # fmt: skip
