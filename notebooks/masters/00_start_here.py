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
# # Start here: who waits for whom?
#
# Four processes train one model together, and for a third of the time they just wait. In ten minutes, with sections 1
# and 2, you know what they wait for. You have made half of the waiting disappear, and you said beforehand by how much.
# Another quarter of an hour measures it, trains a GPT, and leaves the last word to you. You need no GPU.

# %% tags=["hide-input", "remove-cell"] slideshow={"slide_type": "skip"}
# Google Colab has none of this yet: there this cell installs it. Everywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    course = "fsdp-sim[labs,explore,figures,trainers,configurations]==0.2.0"  # a wheel that lies here, or the index's
    get_ipython().run_line_magic("pip", f"install --quiet --find-links . '{course}'")
    from fsdp_sim.cli.course_files import bring_labs

    bring_labs()

# %%
import torch
import torch.distributed as dist

from fsdp_sim import Cluster, Model, Plan, simulate, viz
from fsdp_sim.learn import board, check, hint, in_torch, predict, solution  # noqa: F401
from fsdp_sim.mini import fully_shard
from fsdp_sim.mini.group import FSDPParamGroup
from fsdp_sim.ranks import run
from fsdp_sim.timeline.analysis import exposed_comm_s, exposed_intervals
from labs.cluster.torchrun import torchrun
from labs.data import load_corpus, local_batch
from labs.experiments.sleeping_blocks import SleepTimes
from labs.loop.minimal import make_optimizer, mean_over_ranks, shard, train_step
from labs.model import build
from labs.model.gpt import GPTConfig

# %%
step = SleepTimes()
assert 0.3 < exposed_comm_s(step.predict(), rank=0) / step.predict().span_s < 0.35
viz.timeline(step.predict(), ranks=[0]).titled("A third of this step, the rank waits for the network")

# %% [markdown]
# This is one training step under **Fully Sharded Data Parallel** (FSDP), as one of the four processes, a **rank**,
# lives it. Time runs to the right. Blue is forward, orange is backward. **Red is what this course is about: the
# network works, and the rank waits.** Look below each red box to see for what.
#
# **What is real here:** ranks, the data they exchange, training, every time labelled *measured*. **What is
# modelled:** the speed of the network (a laptop has none), and everything labelled *predicted*.

# %% [markdown]
# > **Our 8B model.** One story goes through this course. You are to train Llama 3 with 8 billion parameters, on
# > documents of 8,192 tokens. One H100 cannot hold it. Eight can, just, and a step takes about 1.0 s (0.94 to 1.16).
# > Then a node dies, and it has to go on with fewer cards. Then it is too slow, on a network that was cheap. And one
# > morning it hangs. Its numbers are predictions: the time is in the brackets four times in five. You can ask for
# > each of them, here with `fsdp-sim simulate --model llama3-8b --gpu H100-SXM-80GB --gpus 8 --seq-len 8192`.

# %% [markdown]
# ## 1. Who holds what
#
# Why would a rank wait at all? Because it does not have the whole model. FSDP does **not** put different layers on
# different ranks: every rank computes every layer, on its own rows of the batch. What it divides is *storage*. Each
# parameter is cut into pieces along its first dimension, and each rank keeps one piece.

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
# A quarter of the rows. A **DTensor** is a tensor that knows the shape of the whole and holds one piece of it.
#
# `run` took a function from this very cell, started four processes, and brought back what each returned.
# `fully_shard` is ours: a small FSDP in `fsdp_sim/mini` that you can read in an evening. It does what torch's
# `fully_shard` does, in the same order, with the same names.

# %% [markdown]
# ## 2. One step, by arithmetic
#
# To compute a block, a rank needs the whole block. So the ranks exchange their pieces in an **all-gather**, compute,
# and free what they do not own. After backward a **reduce-scatter** adds up the gradients of all ranks and leaves each
# rank its piece. What is gathered, computed and freed together is a **unit**; here every block is one.
#
# The model above is made for arithmetic. Four blocks; each *sleeps* 60 ms in forward and 100 ms in backward, and each
# all-gather or reduce-scatter takes 50 ms. Look at forward: gather, compute, gather, compute. In backward the next
# all-gather runs *under* the computation. Why not in forward? Look at the order in which the rank issued them:

# %%
order = step.predict().issue_order(rank=0)
gather, backward = order.index("ALL_GATHER(layers.2)"), order.index("BWD layers.3")
print("in forward: ", order[gather - 2], "→", order[gather])
print("in backward:", order[backward - 1], "→", order[backward])
assert order[gather - 2] == "FWD layers.1"
assert order[backward - 1] == "ALL_GATHER(layers.2)"

# %% [markdown]
# In forward, block 2 asks for its parameters when block 1 is done: on a CPU, the thread that would ask earlier is busy
# computing. In backward FSDP **prefetches**: it asks for block 2, then computes block 3. The mini does that in this
# hook, and so does torch (folded below it). Block 3 is made whole, and the last line asks for block 2:

# %%
in_torch(FSDPParamGroup.pre_backward)

# %% [markdown]
# `set_modules_to_forward_prefetch` does the same in forward: before a block computes, it asks for the next one. You
# have all the numbers now. Four blocks, 60 ms of forward each, 50 ms per all-gather:

# %% predict="gained_by_prefetch"

# %%
off, on = step.predict(), step.predict(forward_prefetch=1)
print(f"prefetch off: {1e3 * off.span_s:.0f} ms")
print(f"prefetch on:  {1e3 * on.span_s:.0f} ms")
assert round(1e3 * (off.span_s - on.span_s)) == round(1e3 * step.hideable_s) == 150
assert (round(1e3 * off.span_s), round(1e3 * on.span_s)) == (940, 790)

# %% [markdown]
# Three of the four all-gathers hide behind the forward before them: 3 × 50 ms. The first one cannot, because nothing
# computes before it.

# %% [markdown]
# ## 3. The same step, measured
#
# Now for real: four ranks, the mini-FSDP, real collectives over a network that is as slow as we said. Sleeping needs
# no core, so a busy machine makes the step longer, and does not change its shape.

# %% tags=["nbval-ignore-output"]
measured = step.run(forward_prefetch=1)
assert [round(1e3 * start_s) for start_s, end_s in exposed_intervals(on, rank=0) if end_s - start_s > 1e-6] == [
    0, 4 * 60 + 50, round(1e3 * on.span_s) - 50,  # the first gather, that of the turn, the last reduction
]  # fmt: skip
viz.compare(on, measured, titles=("predicted", "measured")).titled(
    "With prefetch only the two ends and the turn are red"
)

# %% [markdown]
# Every operation is where the arithmetic put it, a little later: hooks, threads and a busy machine take their share.
# What hides what is the same. Now make it yours. `SleepTimes(collective_s=0.1)` has a network half as fast,
# `forward_s=0.03` a faster GPU. When does prefetching stop gaining more?

# %%
for collective_s in (0.02, 0.05, 0.1, 0.2):
    wire = SleepTimes(collective_s=collective_s)
    off, on = (1e3 * wire.predict(forward_prefetch=depth).span_s for depth in (None, 1))
    print(f"collectives of {1e3 * collective_s:3.0f} ms: {off:4.0f} ms, prefetch {on:4.0f} ms, {off - on:3.0f} ms less")
assert round(off - on) == 3 * 60

# %% [markdown]
# It never gains more than the 60 ms of forward that each all-gather can hide behind. **A step takes as
# long as its compute, plus the communication that is exposed.** That sentence is most of what tuning FSDP is about.
#
# On a GPU the CPU only queues work and runs ahead of it, so there the default order overlaps in forward too. That is
# the one great difference between this machine and a cluster, and chapter 5 is about it.

# %% [markdown]
# ## 4. A real model
#
# Does all this sharding change what the model learns? Here is a GPT with five blocks, trained on the source code of
# `torch.distributed`, byte by byte. What lies outside the blocks (embeddings, last norm, head) is a sixth unit, the
# **root**. Each rank trains on its own rows of each batch.

# %%
corpus = load_corpus()


def train(steps, batch=32):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = shard(build(GPTConfig.preset("teaching"), seed=0), fully_shard)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(steps):
        x, y = (local_batch(t, rank, ranks) for t in corpus.batch(step, batch, seq_len=128))
        losses.append(train_step(model, optimizer, x, y))
    return mean_over_ranks(torch.stack(losses)).tolist()


# %% predict="losses_of_four_ranks"

# %% tags=["nbval-ignore-output"]
four = run(train, 4, 8)
one = run(train, 1, 4)

# %%
for step in range(4):
    print(f"step {step}:  loss {four[0][step]:.3f} on four ranks, {one[0][step]:.3f} on one")
print(f"step 7:  loss {four[0][-1]:.3f} on four ranks")
assert four[0][-1] < four[0][0] - 0.8
assert torch.allclose(torch.tensor(four[0][:4]), torch.tensor(one[0]), rtol=1e-5)

# %% [markdown]
# The gradients are averaged over the ranks, so together they train on one batch: all their rows.

# %% [markdown]
# And what does one of its steps look like? This is real compute on few cores, so your picture is noisier than the
# last one:

# %% tags=["nbval-ignore-output"]
viz.timeline(four.timeline.select(step=5), ranks=[0, 1]).titled(
    "The same step with real compute: four processes on few cores"
)

# %% [markdown]
# Four processes share your cores, and the operating system decides which of them waits. You can still read it: the
# same all-gathers, and in backward the same orange over them. (The strip at the bottom is the memory of
# what FSDP gathers, reduces and keeps of the gradients. Activations are not counted.)

# %% [markdown]
# ## 5. Your turn
#
# An exercise is a function that you write and a check that runs it, in a process of its own: nothing that it does can
# harm this notebook. Count the bars in one rank's row *all-gather* above, then generalise. (The first has no number, it
# is the root's. A bar that is too narrow has none either: point at it, and it tells you whose it is.)
#
# `reshard_after_forward` is torch's setting: `True` frees every unit after its forward, `False` frees none, `None` (the
# default) frees the blocks and keeps the root. What is freed is gathered again in backward.

# %% exercise="all_gathers_per_step"

# %% [markdown]
# Stuck? `hint("all_gathers_per_step")` gives the next of three hints, `solution("all_gathers_per_step")` the solution
# and why it is so, and `board()` shows where you stand in the whole course. All of it stays on this machine.
#
# Here are two settings of one step on eight GPUs without fast links, simulated. The counts are those of your function
# if it was right, else of the reference. Below, the blocks are kept after forward: their all-gathers are gone from
# backward, and a quarter of the step with them. What is still red there waits for reduce-scatters. The price is memory
# (chapter 7).

# %%
tiny = Model("five blocks", n_layer=5, d_model=2048, n_head=16, d_ffn=8192, vocab=4096)
eight, bf16 = Cluster("A100-PCIe-80GB", gpus=8), {"param_dtype": "bf16", "micro_batch": 2, "seq_len": 1024}
steps = {keep: simulate(tiny, eight, Plan(reshard_after_forward=keep, **bf16)) for keep in (None, False)}
counts = {keep: checked.use(5, keep) for keep in steps}
for keep, simulated in steps.items():
    assert sum(event.op == "ALL_GATHER" for event in simulated.timeline.ops) == counts[keep]
titles = (f"blocks freed, {counts[None]} all-gathers", f"blocks kept, {counts[False]} all-gathers")
title = f"Keeping the blocks saves {counts[None] - counts[False]} of {counts[None]} all-gathers"
viz.compare(*(simulated.timeline for simulated in steps.values()), titles=titles).titled(title)

# %% [markdown]
# ## 6. Lab: the same with torch
#
# `labs/train.py` trains this GPT with torch's own `fully_shard`, started by `torchrun` as on a cluster. What carries
# the data is gloo between CPUs, as here, and NCCL when every rank has a GPU. Same seed, same text, and two ranks
# instead of four.

# %% predict="losses_of_torch"

# %% tags=["nbval-ignore-output"]
lab = torchrun("-m", "labs.train", "--steps=4", "--global_batch=32", ranks=2)

# %%
print("torch's fully_shard:", "  ".join(f"{loss:.3f}" for loss in lab.losses))
print("the mini-FSDP:      ", "  ".join(f"{loss:.3f}" for loss in four[0][:4]))
assert torch.allclose(torch.tensor(lab.losses), torch.tensor(four[0][:4]), rtol=1e-4)

# %% [markdown]
# ## What you have seen
#
# - FSDP shards **storage**, not layers: each rank keeps a piece of every parameter, and computes every layer.
# - A unit lives through *all-gather → compute → free*, in forward and again in backward; then its gradients are
#   reduce-scattered.
# - A step takes as long as its compute plus the communication that is **exposed**. The order of issue decides what is
#   exposed, and you can compute it before anything runs.
# - The numbers do not change: the mini-FSDP and torch's have the losses of one process.

# %% [markdown]
# > **Our 8B model** shows little red on eight H100: in a step of a second the network works and the GPUs wait for
# > about 17 ms. So why not take one card, and have no red at all? Because it does not fit. Let's see what stands in
# > the way.
#
# Next: `01_where_the_memory_goes.ipynb`. What is each of these bytes for?
