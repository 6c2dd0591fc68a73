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
# # The life of a unit
#
# A block of a GPT is one FSDP **unit**: what is gathered, computed and freed together. In half an hour you
# follow one unit through one training step: what a rank keeps of it, when it is whole, who asks for it, and
# how one knows that all of this changes no number.
#
# Before each cell, predict. Then run it.

# %%
import torch
import torch.distributed.fsdp
from IPython.display import HTML
from torch import nn

import fsdp_sim.mini
from fsdp_sim import viz
from fsdp_sim.measure.record import record
from fsdp_sim.ranks import run
from labs.gpt import GPTConfig
from labs.ladder import Setting, climb
from labs.models import build
from labs.overlap import Experiment, training_only
from labs.pieces import shard

# %% [markdown]
# ## 1. What a rank keeps
#
# `fully_shard` cuts every parameter into rows and leaves each rank its share, as a **DTensor**: a tensor
# that knows the shape of the whole and holds a part.
#
# *Predict:* a weight of 384 × 128 on 2 ranks. And one of 5 × 4, which cannot be halved?


# %%
def kept():
    block = build(GPTConfig.preset("teaching")).layers[0]
    odd = nn.Linear(4, 5, bias=False)
    for module in (block, odd):
        fsdp_sim.mini.fully_shard(module)
    weights = {"attn.qkv.weight": block.attn.qkv.weight, "a weight of 5 rows": odd.weight}
    return [
        (name, type(w.data).__name__, repr(w.placements[0]), tuple(w.shape), tuple(w.to_local().shape))
        for name, w in weights.items()
    ]


rows = [(f"rank {r}", *map(str, row)) for r, result in enumerate(run(kept, 2, progress=False)) for row in result]
HTML(viz.Table("What is kept", ("", "parameter", "type", "placement", "shape", "kept here"), tuple(rows)).to_html())

# %%
assert [row[-1] for row in rows] == ["(192, 128)", "(3, 4)", "(192, 128)", "(2, 4)"]
assert {row[2] for row in rows} == {"DTensor"}

# %% [markdown]
# `Shard(dim=0)`: cut along the first dimension, as `torch.chunk` would. Of five rows the first rank keeps
# three. The shape that the optimizer and a checkpoint see is that of the whole.

# %% [markdown]
# ## 2. Whole, and back
#
#                  kept                        whole                        kept
#         rank 0   ████····   ── unshard() ─▶  ████████  ── reshard() ─▶  ████····
#         rank 1   ····████                    ████████                   ····████
#
# The hooks of FSDP call these two around every forward and backward. You can call them yourself.
# *Predict:* what is left of the whole weight after `reshard()`: its shape? its memory?


# %%
def by_hand():
    block = fsdp_sim.mini.fully_shard(build(GPTConfig.preset("teaching")).layers[0])
    seen = []

    def look(when, tensor):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        kind = "DTensor" if local is not tensor else "plain tensor"
        seen.append((when, kind, str(tuple(tensor.shape)), f"{local.untyped_storage().nbytes():,}"))

    look("before: the weight on the module", block.attn.qkv.weight)
    block.unshard()
    whole = block.attn.qkv.weight
    look("after unshard(): the weight on the module", whole)
    block.reshard()
    look("after reshard(): the weight on the module", block.attn.qkv.weight)
    look("after reshard(): the whole weight you still hold", whole)
    return seen


# %%
seen = run(by_hand, 2, progress=False)[0]
assert [row[3] for row in seen] == ["98,304", "196,608", "98,304", "0"]
assert seen[3][2] == "(384, 128)"
HTML(viz.Table("attn.qkv.weight on rank 0", ("moment", "type", "shape", "bytes of memory"), tuple(seen)).to_html())

# %% [markdown]
# The whole weight keeps its shape and loses its memory: *the storage is resized to nothing*. That is how
# FSDP frees. Autograd saved this very tensor in forward and will read it in backward, so the tensor must
# stay. Only what is behind it goes, and comes back in time.

# %% [markdown]
# ## 3. One step
#
# Now a GPT of five blocks on 4 ranks, over a network as slow, next to these cores, as a cluster's is next to
# its GPUs. *Predict:* how often is a block gathered in one step? What else travels for it?

# %% tags=["nbval-ignore-output"]
timeline = training_only(Experiment().run(5).timeline)
viz.show(timeline, ranks=[0])

# %% [markdown]
# Now block 2 alone: what is communicated for it and the memory it takes, beside everybody's compute (the headline
# counts what is drawn, so only the communication of block 2). *Predict:* while which blocks compute is block 2 whole?

# %% tags=["nbval-ignore-output"]
unit = timeline.select(unit="layers.2")
viz.show(timeline.select(lambda e: e.unit == "layers.2" or e.op in ("FWD", "BWD")), ranks=[0], step=3)

# %% [markdown]
# Whole (blue) during its own two, and at no other time. Hatched is the flat buffer in which an all-gather
# arrives: in forward it is kept for one block longer, so that two can be under way; in backward it is there
# early, for block 3 asks for block 2 before it computes. The gradient comes in steps, as autograd writes it,
# goes into a buffer to be sent, and a quarter of it stays.

# %%
life = [e.op for e in unit.select(rank=0, step=3).ops]
print(" → ".join(life))
assert life == [
    "ag_copy_in", "ALL_GATHER", "ag_copy_out", "FWD",
    "ag_copy_in", "ALL_GATHER", "ag_copy_out", "BWD", "rs_copy_in", "REDUCE_SCATTER",
]  # fmt: skip
whole = [e.op for e in unit.select(rank=0, step=3, category="unsharded").events]
assert whole[0] == "alloc"
assert whole[-1] == "free"
assert whole.count("alloc") == whole.count("free")

# %% [markdown]
# Gathered twice: for forward, and again for backward, because forward freed it. Its gradients are
# reduce-scattered once: every rank receives the mean of its own rows, and steps them.
#
# ## 4. Who asks for it
#
# Hooks. `record` runs torch's own `fully_shard`, unmodified, on a pretend device that writes down what it is
# told; then the mini's. *Predict:* in backward, what is asked for between `wait_for_unshard` and the compute?


# %%
def program(fully_shard):
    def train(recorder):
        model = build(GPTConfig.preset("teaching", n_layer=3))
        for i, layer in enumerate(model.layers):
            recorder.watch(layer, f"layers.{i}")
        shard(model, fully_shard)
        tokens = torch.zeros(1, 8, dtype=torch.long)
        recorder.mark("forward")
        loss = model(tokens, tokens)
        recorder.mark("backward")
        loss.backward()
        return model

    return record(train, world_size=2)


torchs, minis = program(torch.distributed.fsdp.fully_shard), program(fsdp_sim.mini.fully_shard)

# %%
backward = minis.index("--- backward")
begin = minis.index("hook        -               pre_backward(layers.1)")
end = minis.index("op          compute         BWD layers.0")
print(*(line for line in minis[begin:end] if line.startswith(("hook", "op"))), sep="\n")
assert backward < begin < end
print(f"\n{len(minis)} lines; the same as torch's: {sorted(minis) == sorted(torchs)}")
order = [[line for line in lines if not line.startswith("free")] for lines in (torchs, minis)]
assert order[0] == order[1]
assert sorted(torchs) == sorted(minis)

# %% [markdown]
# Between its own `wait_for_unshard` and its compute, unit 1 asks for unit 0: that is **backward prefetch**.
# And the mini gives the device the very orders that torch gives, line by line.
#
# **Your turn** · ●○○ · 5 minutes. Which hooks of one unit run in *forward*, in which order? Complete the list
# with names that you saw above; `wait_for_unshard` is the third.


# %% tags=["exercise"]
def hooks_in_forward():
    ### BEGIN SOLUTION
    return ["pre_forward", "unshard", "wait_for_unshard", "post_forward", "reshard"]
    ### END SOLUTION


# %%
hooks = [line[28:].split("(")[0] for line in torchs[:backward] if line.startswith("hook") and "(layers.1)" in line]
print("Right." if hooks_in_forward() == hooks else "Not yet: five names; what begins, and what ends, a forward?")

# %% tags=["solution-only"]
assert hooks_in_forward() == hooks

# %% [markdown]
# <details><summary>Hint 1: the idea</summary>Two hooks are called by the module: before its forward and after
# it. Each calls others.</details>
# <details><summary>Hint 2: look</summary>The first is <code>pre_forward</code>. What makes the unit whole, and
# what frees it?</details>
# <details><summary>Hint 3: almost there</summary><code>pre_forward, unshard, wait_for_unshard, post_forward,
# …</code></details>

# %% [markdown]
# ## 5. Does it change a number?
#
# The **parity ladder** trains one GPT with the same weights and text in every way there is, from one process
# to HSDP, and compares every loss, gradient and parameter. *Predict:* with 2 ranks, which rungs agree with
# the rung above to the last bit? Which hold least memory?

# %% tags=["nbval-ignore-output"]
ladder = climb(Setting(ranks=2))
ladder

# %%
assert not ladder.divergences
assert all(row.against_above.bitwise is None for row in ladder.rows if row.against_above)
assert ladder["mini-fsdp"].program is None  # the collectives of torch's FSDP2, in the same order
assert ladder["mini-fsdp"].peak_bytes <= 1.02 * ladder["torch-fsdp2"].peak_bytes
print("Eleven ways to train on two ranks, and not one bit between them.")

# %% [markdown]
# Against one process the last bits differ: two halves of a batch, summed apart, round differently. And one
# thing is left out on purpose, and named: biases of the keys, whose true gradient is zero.
#
# ## 6. Break it
#
# A ladder that never complains proves little. So let one rank forget to step one shard. *Predict:* what goes
# wrong first: the loss, a gradient, or a parameter?

# %% tags=["nbval-ignore-output"]
broken = climb(Setting(ranks=2, steps=2), ["torch-fsdp2", "mini-fsdp"], broken={"mini-fsdp": "stale-shard"})
broken

# %%
found = broken["mini-fsdp"].against_above.beyond
print("first diverges", str(found).partition(" (")[0])
assert (found.step, found.what, found.unit, found.tensor) == (1, "parameter", "layers.1", "mlp.fc.weight")
assert found.shard_of == (1,)

# %% [markdown]
# The step, the unit, the tensor, the rows, and whose they are. Try `"not-averaged"`, `"wrong-seed"` and
# `"kept-whole"` too: of the last every number is right. What gives it away?
#
# ## What you have seen
#
# - A rank keeps rows (DTensors). `unshard` makes a unit whole, `reshard` takes the memory from behind it.
# - A unit is gathered twice a step and reduced once; in backward the unit before it is asked for early.
# - The mini gives torch's orders, and FSDP changes no number: only where numbers live, and when.
