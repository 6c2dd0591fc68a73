# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Start here: why does a training step take as long as it does?
#
# In ten minutes you train a GPT on four processes with Fully Sharded Data Parallel (FSDP), see every
# operation of a step, and predict the next step before you run it. No GPU needed. Each process is a **rank**;
# on a cluster every rank has a GPU of its own.
#
# **What is real:** the four ranks, the data they exchange, the training, every time labelled *measured*.
# **What is modelled:** the speed of the network (a laptop has none), and everything labelled *predicted*.

# %%
import torch
import torch.distributed as dist

from fsdp_sim import simulate, viz
from fsdp_sim.learn import board, check, hint, predict, solution  # noqa: F401
from fsdp_sim.mini import fully_shard
from fsdp_sim.ranks import Network, run, track
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.timeline.analysis import step_time_s
from labs.data import local_batch
from labs.experiments.prefetch import Experiment, same_order, training_only
from labs.loop.minimal import make_optimizer, mean_over_ranks, shard, train_step
from labs.model import build
from labs.model.gpt import GPT, GPTConfig

# %% [markdown]
# ## 1. Who holds what
#
# FSDP does **not** put different layers on different ranks. Every rank computes every layer, on its own
# rows of the batch. What is divided is *storage*: each parameter is cut into pieces along its first
# dimension, and each rank keeps one piece.

# %% predict="rows_of_a_rank"


# %%
def who_holds_what():
    model = shard(build(GPTConfig.preset("teaching")), fully_shard)
    weight = model.layers[0].attn.qkv.weight
    return type(weight).__name__, tuple(weight.shape), tuple(weight.to_local().shape)


holdings = run(who_holds_what, world_size=4, progress=False)
for rank, (kind, whole, piece) in enumerate(holdings):
    print(f"rank {rank}: a {kind} of {whole}, of which it stores {piece}")
assert holdings == [("DTensor", (384, 128), (96, 128))] * 4

# %% [markdown]
# A quarter of the rows. A **DTensor** is a tensor that knows the shape of the whole and holds one piece of
# it.
#
# `run` took a function from this very cell, started four processes, and brought back what each returned.
# `fully_shard` is ours: a small FSDP in `fsdp_sim/mini` that you can read in an evening. It does what
# torch's `fully_shard` does, in the same order, with the same names.

# %% [markdown]
# ## 2. Train
#
# The text is the source code of `torch.distributed` itself, byte by byte; the model a GPT with five blocks.
# Each block is one FSDP **unit**: what is gathered, computed and freed together. What is left (embeddings,
# last norm, head) is a sixth unit, the **root**. Each rank trains on its own rows of each batch.

# %%
experiment = Experiment()
corpus = experiment.corpus
print(f"{corpus.name}: {len(corpus.train) + len(corpus.val):,} bytes of text")
print(f"{GPT(GPTConfig.preset('teaching')).num_params():,} parameters")
print("units:", ", ".join(unit.name for unit in experiment.units))
assert [unit.name for unit in experiment.units] == ["root", *(f"layers.{i}" for i in range(5))]


# %%
def train(steps, batch=32):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = shard(build(GPTConfig.preset("teaching"), seed=0), fully_shard)
    optimizer = make_optimizer(model)
    losses = []
    for step in track(range(steps)):
        x, y = (local_batch(t, rank, ranks) for t in corpus.batch(step, batch, seq_len=128))
        losses.append(train_step(model, optimizer, x, y))
    return mean_over_ranks(torch.stack(losses)).tolist()


# %% tags=["nbval-ignore-output"]
four = run(train, 4, 12)
one = run(train, 1, 4)

# %% predict="losses_of_four_ranks"

# %%
for step in range(4):
    print(f"step {step:2d}:  loss {four[0][step]:.3f} on four ranks, {one[0][step]:.3f} on one")
print(f"step 11:  loss {four[0][11]:.3f} on four ranks")
assert four[0][-1] < four[0][0] - 1
assert torch.allclose(torch.tensor(four[0][:4]), torch.tensor(one[0]), rtol=1e-5)

# %% [markdown]
# The same, up to rounding. FSDP changes where numbers live and when they travel, not what is computed: the
# gradients are averaged over the ranks, so together the ranks train on one batch: all their rows.

# %% [markdown]
# ## 3. Predict a step
#
# Now with a network: as slow, next to these cores, as a cluster's is next to its GPUs. A **collective** is an
# exchange that all ranks take part in; it takes `latency + bytes / bandwidth`, one at a time. First a run in
# which every piece of a step runs alone. From these durations the simulator predicts two steps that nobody
# has run yet: with **prefetch** off, and with each block asking for the next block's parameters before it
# computes. In its words, communication is *exposed* while nothing computes, and *hidden* while something
# does.

# %% tags=["nbval-ignore-output"]
pieces = experiment.measure_pieces(6)
predicted = {depth: experiment.predict(pieces, forward_prefetch=depth) for depth in (None, 1)}
print("prefetch off:", viz.describe(predicted[None]))
print("prefetch on: ", viz.describe(predicted[1]))

# %% [markdown]
# ## 4. See it
#
# Prefetch off, measured.

# %% predict="while_parameters_arrive"

# %% tags=["nbval-ignore-output"]
off = training_only(experiment.run(8).timeline)
viz.show(off, ranks=[0, 1])

# %% [markdown]
# Read one rank from left to right. **all-gather** 0 brings block 0's whole parameters, then **forward** 0
# computes and frees them. The red boxes are **exposed communication**: the wire works and the core waits. In
# backward (orange) the next all-gather runs *under* the computation, and a **reduce-scatter** adds up the
# ranks' gradients and leaves each rank its piece. So all-gathers overlap in one half of the step and not in
# the other. Why? Look at the order in which rank 0 *issued* its operations.
#
# (The strip at the bottom is the memory that FSDP and the optimizer hold. Activations are not counted.)

# %%
order = off.select(step=3).issue_order(rank=0)
gather, backward = order.index("ALL_GATHER(layers.3)"), order.index("BWD layers.3")
print("in forward: ", order[gather - 2], "→", order[gather])
print("in backward:", order[backward - 1], "→", order[backward])
assert order[gather - 2] == "FWD layers.2"
assert order[backward - 1] == "ALL_GATHER(layers.2)"

# %% [markdown]
# In forward, all-gather 3 is issued after forward 2 has run: on a CPU the thread that would issue it is the
# one that computes. In backward FSDP *prefetches*: all-gather 2 is issued, then backward 3 computes.
#
# On a GPU the CPU only queues work and runs ahead of it, so there the default order overlaps in forward
# too. That is the one great difference between this machine and a cluster.

# %% [markdown]
# With `set_modules_to_forward_prefetch` a block issues the next block's all-gather before it computes.
# Above what was predicted, below what happens:

# %% tags=["nbval-ignore-output"]
on = training_only(experiment.run(8, forward_prefetch=1).timeline)
viz.show({"predicted": predicted[1], "measured": on}, ranks=[0, 1])

# %%
assert same_order(predicted[None], off)
assert same_order(predicted[1], on)
print("Every rank issued what the program says, in the order it says.")

# %% [markdown]
# What the simulator leaves out shows as the difference: four processes share a few cores, and which of
# them waits is up to the operating system. If your step took over 10% longer than predicted, something
# else was using the machine; if it was that much shorter, something was while the pieces were timed.

# %% [markdown]
# ## 5. Change one number
#
# A faster wire: we go from 0.16 to 0.32 Gbit/s, with prefetch off.

# %% predict="twice_the_bandwidth"

# %% [markdown]
# Change `bandwidth_gbps` and run the cell as often as you like: only the wire changes, so nothing needs to be
# measured again.

# %% tags=["nbval-ignore-output"]
bandwidth_gbps = 1.0

step_ms = {}
for gbps in (0.16, 2 * 0.16, bandwidth_gbps):
    wired = Experiment(network=Network(gbps, latency_us=200))
    for prefetch, depth in (("off", None), ("on", 1)):
        step = wired.predict(wired.rewired(pieces), forward_prefetch=depth)
        step_ms[gbps, prefetch] = 1e3 * step_time_s(step, step=1)
        print(f"{gbps:4.2f} Gbit/s, prefetch {prefetch:3s}: {step_ms[gbps, prefetch]:4.0f} ms")
assert step_ms[2 * 0.16, "off"] > step_ms[0.16, "off"] / 2

# %% [markdown]
# Not half: the compute stays, and the more of the wire is hidden behind it, the less its speed matters.
# That sentence is most of what tuning FSDP is about.

# %% [markdown]
# ## 6. Your turn
#
# An exercise is a function that you write and a check that runs it, in a process of its own: nothing that it
# does can harm this notebook. Count the bars in one rank's row *all-gather* above (the one without a number
# is the root's), then generalise. `reshard_after_forward` is torch's setting: `True` frees every unit after
# its forward, `False` frees none, `None` (the default) frees the blocks and keeps the root. What is freed is
# gathered again in backward.

# %% exercise="all_gathers_per_step"

# %% [markdown]
# Stuck? `hint("all_gathers_per_step")` gives the next of three hints, `solution("all_gathers_per_step")` the
# solution and why it is so, and `board()` shows where you stand in the whole course. All of it stays on this
# machine.
#
# Two settings of one step on eight GPUs without fast links, simulated. The counts are those of your function
# if it was right, else of the reference. Below, the blocks are kept after forward: the all-gathers of
# backward are gone, and with them the gaps that they left. What it costs is memory (chapter 7).

# %%
tiny = Model("five blocks", n_layer=5, d_model=2048, n_head=16, d_ffn=8192, vocab=4096)
eight, bf16 = Cluster("A100-PCIe-80GB", gpus=8), {"param_dtype": "bf16", "micro_batch": 2, "seq_len": 1024}
steps = {keep: simulate(tiny, eight, Plan(reshard_after_forward=keep, **bf16)) for keep in (None, False)}
counts = {keep: checked.use(5, keep) for keep in steps}
for keep, step in steps.items():
    assert sum(event.op == "ALL_GATHER" for event in step.timeline.ops) == counts[keep]
titles = (f"blocks freed, {counts[None]} all-gathers", f"blocks kept, {counts[False]} all-gathers")
viz.compare(*(step.timeline for step in steps.values()), titles=titles)

# %% [markdown]
# ## 7. Lab: the same with torch
#
# `labs/train.py` trains this GPT with torch's own `fully_shard`, started by `torchrun` as on a cluster. What
# carries the data is gloo between CPUs, as here, and NCCL when every rank has a GPU. Same seed, same text,
# and two ranks instead of four.

# %% predict="losses_of_torch"

# %% tags=["nbval-ignore-output"]
from labs.cluster.torchrun import torchrun

lab = torchrun("-m", "labs.train", "--steps=4", "--global_batch=32", ranks=2)

# %%
print("torch's fully_shard:", "  ".join(f"{loss:.3f}" for loss in lab.losses))
print("the mini-FSDP:      ", "  ".join(f"{loss:.3f}" for loss in four[0][:4]))
assert torch.allclose(torch.tensor(lab.losses), torch.tensor(four[0][:4]), rtol=1e-4)

# %% [markdown]
# ## What you have seen
#
# - FSDP shards **storage**, not layers: each rank keeps a piece of every parameter, computes every layer.
# - A unit lives through *all-gather → compute → free*, in forward and again in backward; then its
#   gradients are reduce-scattered.
# - A step takes as long as its compute plus the communication that is **exposed**. Issue order decides
#   what is exposed.
# - The mini-FSDP issued what the simulator's program says, in its order, and torch's FSDP has its losses.
#
# Next: `01_where_the_memory_goes.ipynb`, what each of these bytes is for.
