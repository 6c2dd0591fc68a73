"""What people say about the life of a unit: when it is whole, and what becomes of its gradient."""

from __future__ import annotations

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import LAYERS, collectives, count, issued

MISCONCEPTIONS = (
    Misconception(
        "There is no communication in backward, since each GPU has the gradients it needs.",
        "Backward has most of it. A GPT of 4 blocks and a root gathers the 4 blocks again and reduce-scatters 5 "
        "times.",
        ("misconception 3", "misconception 0.18"),
        lambda: LAYERS == 4 and count("ALL_GATHER", "backward") == 4 and count("REDUCE_SCATTER", "backward") == 5,
    ),
    Misconception(
        "In backward FSDP reduce-scatters the gradients, and that is all.",
        "Before the gradients of a unit can be computed its parameters are all-gathered again, because forward has "
        "freed them.",
        ("misconception 3.7",),
        lambda: collectives("backward") == {"ALL_GATHER", "REDUCE_SCATTER"},
    ),
    Misconception(
        "Each GPU computes only the gradients of its own shard.",
        "It computes the whole gradient of every unit, for its own batch. Only then does the reduce-scatter leave it "
        "the average of its slice.",
        ("misconception 0.17", "misconception 0.10"),
    ),
    Misconception(
        "A fully sharded unit frees its parameters only after backward.",
        "It frees them after its forward, and gathers them again for backward. The root is the exception, by default.",
        ("misconception 5",),
        lambda: {line for line in issued("backward") if line.startswith("ALL_GATHER")}
        == {f"ALL_GATHER(layers.{i})" for i in range(LAYERS)},
    ),
    Misconception(
        "Thanks to DTensor the optimizer all-reduces gradients.",
        "By the time it steps, the gradients have been reduce-scattered. It updates local shards with local "
        "gradients.",
        ("misconception 4.108",),
        lambda: issued("optimizer") == ["OPTIM"],
    ),
    Misconception(
        "FSDP gives the numbers of DDP.",
        "Up to the order in which they are added. In fp32 the difference is about 1e-8: compare with a tolerance, not "
        "bit by bit.",
        ("misconception 1.16",),
    ),
    Misconception(
        "After forward the results are scattered back.",
        "After forward the gathered copy is freed; nothing is sent. Only gradients are reduce-scattered, in backward.",
        ("misconception 4.2",),
        lambda: collectives("forward") == {"ALL_GATHER"},
    ),
    Misconception(
        "After use the parameters are sharded again.",
        "Nothing is cut a second time: the shard was there all along, and the whole copy beside it is freed.",
        ("misconception 4.37",),
    ),
    Misconception(
        "Every unit's parameters are freed immediately after its forward.",
        "Not the root's, by default; not with `reshard_after_forward=False`; and the flat buffer that the all-gather "
        "wrote to lives until the next unit's copy-out.",
        ("misconception 3.6", "misconception 4.99"),
        lambda: "ALL_GATHER(root)" not in issued("backward")
        and "ALL_GATHER(root)" in issued("backward", reshard_after_forward=True),
    ),
    Misconception(
        "Parameters are freed after each forward and backward pass.",
        "After each *unit's* forward and backward. If they were freed after the pass, the whole model would be there "
        "at once.",
        ("misconception 3.4",),
    ),
    Misconception(
        "Weights are needed once in forward.",
        "Unless a module is called several times, and activation checkpointing needs them again for the "
        "recomputation.",
        ("misconception 4.35",),
    ),
    Misconception(
        "In backward each GPU updates its part of the layer.",
        "Backward leaves gradients. The optimizer steps when all of backward is over.",
        ("misconception 2.23",),
        lambda: "OPTIM" not in issued("backward") and issued()[-1] == "OPTIM",
    ),
    Misconception(
        "FSDP's hooks run after the backward pass.",
        "They run during it: each unit's gradient is reduced while earlier units are still computing theirs. Only the "
        "root's waits for the end.",
        ("misconception 4.50",),
        lambda: issued("backward").index("REDUCE_SCATTER(layers.3)") < issued("backward").index("BWD layers.1"),
    ),
    Misconception(
        "Since layers run one after the other there can be no race conditions.",
        "Gathers, computation and reductions run on several streams. That each finds its data complete is the work of "
        "events and waits, and whoever writes an FSDP has to put them there.",
        ("misconception 4.29",),
    ),
)  # fmt: skip
