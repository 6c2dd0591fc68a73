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
# # Where does the memory go?
#
# Your model does not fit on the card. Why not? Let's count. After this notebook you can say, for any model and any
# number of GPUs, what a rank keeps, what it holds only for a moment, and whether it fits. You also know why one source
# says 16 bytes per parameter and the next 18.

# %% [markdown]
# > **Our 8B model** on one H100: a step would hold about 145 GiB, and a process gets 78.5. So you buy seven more and
# > give each a copy of the model, as DDP does. Now each of the eight wants about 173 GiB, even more. Something has to
# > be divided. What? (`fsdp-sim simulate --model llama3-8b --gpu H100-SXM-80GB --gpus 1 --seq-len 8192`, then `--gpus
# > 8 --api ddp --param-dtype bf16`)

# %% [markdown]
# **Core path, about 45 minutes:** sections 2, 3, 4 and 6, with the exercises marked *core*. The rest is
# there if you like.
#
# **What is real:** the ranks, torch's DDP and FSDP, and every byte labelled *measured* or *counted*.
# **What is modelled:** models too large for this machine. The simulator builds the program that torch would
# issue and adds up what is alive. It leaves out fragmentation and what the CUDA context takes.

# %%
import torch
from IPython.display import HTML
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_sim import Cluster, Model, Plan, simulate, viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.pictures.memory import curves, holders, stacks
from fsdp_sim.mini import FSDPParam, fully_shard
from fsdp_sim.ranks import run
from fsdp_sim.schedule import build as build_program
from fsdp_sim.schedule import toy
from fsdp_sim.timeline import Op
from labs.cluster.torchrun import torchrun
from labs.config import TrainConfig
from labs.experiments.memory import MemoryCase, counted_step
from labs.loop.minimal import shard
from labs.measure.allocations import at_peak
from labs.model import build, empty
from labs.model.gpt import GPTConfig

# %% [markdown]
# ## 1. Same layers, other storage
#
# Three ways to train on four ranks. **DDP** (distributed data parallel) gives each rank a whole model and other
# rows of the batch. A **pipeline** gives each rank other layers, and sends activations on. And **FSDP**?
# We write its own number into every row of a weight, shard the model, and look which rows a rank still has.


# %%
def rows_stored(how):
    model = build(GPTConfig.preset("teaching"))
    for layer in model.layers:
        layer.mlp.fc.weight.data[:, 0] = torch.arange(len(layer.mlp.fc.weight))  # every row knows its number
    model = DistributedDataParallel(model).module if how == "ddp" else shard(model, fully_shard)
    found = []
    for weight in (layer.mlp.fc.weight for layer in model.layers):
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        found.append((int(local[0, 0]) / len(weight), (int(local[-1, 0]) + 1) / len(weight)))
    return found


# %%
ddp, fsdp = (list(run(rows_stored, 4, how, progress=False, show_output=False)) for how in ("ddp", "fsdp"))

# %% predict="layers_on_rank_2"

# %%
pipeline = [[(0, 1) if layer * 4 // 5 == rank else (0, 0) for layer in range(5)] for rank in range(4)]  # for contrast
assert ddp == [[(0, 1)] * 5] * 4
assert fsdp == [[(rank / 4, (rank + 1) / 4)] * 5 for rank in range(4)]
ways = {"DDP (measured)": ddp, "pipeline (drawn)": pipeline, "FSDP (measured)": fsdp}
holders(ways, "Where the layers are kept: with FSDP a quarter of each, on every rank")

# %% [markdown] covers=["coverage 000.1", "coverage 002.1", "coverage 004.1", "coverage 004.2", "coverage 004.34"]
# A quarter of *every* layer. If the model is a book, FSDP does not hand out chapters. Each rank has a quarter of
# every page, and borrows the other three quarters for as long as it reads that page. To **shard** a tensor is to cut
# it like this. The full name is Fully Sharded Data Parallel (not "SFDP"): parameters, gradients and optimizer state
# are all sharded. It comes from DDP by way of ZeRO (section 4) and the library FairScale, and what it changes is
# storage. After a layer has been used nothing is sent back: the whole copy is freed. Only *gradients* travel back.
# They are reduced (added up on the way), and each rank gets its own rows of their mean.

# %% [markdown] covers=["coverage 004.3", "coverage 004.10", "coverage 004.16", "coverage 004.23", "coverage 004.38"]
# And who *computes*? Everyone: every layer, in the same order, each rank on its own rows of the batch. That is why it
# is **data** parallel. Two GPUs in the same layer do not share its work. Give both the same rows, and one of them
# computes for nothing. Step through the figure, or read its eight panels: a column is a rank, and the four rows of a
# unit are its quarters. In `layers.1`, who has all four quarters, and who sends an activation?

# %%
viz.shard_map(build_program(toy(3), Plan(), world_size=4))

# %% [markdown] covers=["coverage 004.19", "coverage 004.20", "coverage 004.24", "coverage 004.26"]
# No rank owns a layer, so nobody broadcasts it, and nobody collects its gradients. Forward takes the layers in order,
# and backward in reverse: each needs the result of the one before. In both, a layer's shards are **all-gathered** on
# every rank. Its gradients are **reduce-scattered**: each rank receives its slice of the mean.

# %% slideshow={"slide_type": "notes"}
issued = {i.op for i in build_program(toy(3), Plan(), world_size=4).ops if i.group_size > 1}
print(*sorted(op.name.lower().replace("_", "-") for op in issued), sep=" and ")
assert issued == {Op.ALL_GATHER, Op.REDUCE_SCATTER}  # no send, no broadcast

# %% [markdown]
# Settle it with an experiment of your own. The check starts the ranks and calls your function on each of
# them; your function only does what one rank does. Stuck? `hint("who_computes_what")` gives the next of three
# hints, `solution("who_computes_what")` the solution and its reason. Either way the notebook goes on.

# %% exercise="who_computes_what"

# %%
answers = run(checked.use.function, 3, progress=False, show_output=False)
rows = [(f"rank {rank}", f"{gathered} of 6") for rank, (_, gathered) in enumerate(answers)]
assert rows == [(f"rank {rank}", "6 of 6") for rank in range(3)]
HTML(viz.Table("In one forward", ("", "layers gathered and computed"), tuple(rows)).to_html())

# %% [markdown]
# All six, on every rank: the sentence is false.

# %% [markdown]
# ## 2. Four numbers for each parameter
#
# Where do the 124 million parameters of GPT-2 come from? The **meta** device builds a model of shapes, without
# memory, so we can count them.

# %%
gpt2 = empty(GPTConfig.preset("gpt2"))
counts = {"token embedding": gpt2.tok_emb.weight.numel(), "positions": gpt2.pos_emb.weight.numel()}
counts["12 blocks"] = sum(p.numel() for p in gpt2.layers.parameters())
counts["last norm"] = sum(p.numel() for p in gpt2.norm.parameters())
assert counts["12 blocks"] == 12 * 7_087_872
assert sum(counts.values()) == 124_439_808
assert gpt2.head.weight is gpt2.tok_emb.weight  # tied: counted once
for name, n in counts.items():
    print(f"{name:15} {n / 1e6:5.1f} million parameters")
assert [round(3 * counts[name] / sum(counts.values())) for name in ("12 blocks", "token embedding")] == [2, 1]

# %% [markdown] covers=["coverage 000.4"]
# Two thirds are blocks, and a third is one table. The head that predicts the next token uses the embedding's table:
# the two are **tied**. Count it twice and you get 163 million. Sharded over 4 ranks, each keeps 31 million numbers, a
# quarter of every tensor: no rank has the whole table, or all of blocks 0 to 2.
#
# Now we take one optimizer step and look for the tensors that are as large as the model.

# %% predict="bytes_of_gpt2_states"

# %%
assert round((sum(counts.values()) + counts["token embedding"]) / 1e6) == 163
model = torch.nn.Linear(1000, 1000, bias=False)  # a million parameters
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 1000)).sum().backward()
optimizer.step()
state = optimizer.state[model.weight]
kept = {"parameters": model.weight, "gradients": model.weight.grad}
kept |= {"mean": state["exp_avg"], "variance": state["exp_avg_sq"]}
per_parameter = {name: tensor.nbytes / 1e6 for name, tensor in kept.items()}
print(*(f"{name}: {size:.0f} bytes" for name, size in per_parameter.items()), sep=", ")
assert sum(per_parameter.values()) == 16

# %%
gb = {"DDP, any ranks": 1, "FSDP, 4 ranks": 4, "FSDP, 8 ranks": 8}
parts = {"parameters": 4, "gradients": 4, "moments": 8}
params = sum(counts.values())
states = {name: {part: params * n / ranks / 1e9 for part, n in parts.items()} for name, ranks in gb.items()}
assert [round(sum(of.values()), 2) for of in states.values()] == [1.99, 0.5, 0.25]
rows = tuple((name, *(f"{n:.2f}" for n in of.values()), f"{sum(of.values()):.2f}") for name, of in states.items())
HTML(viz.Table("What a rank keeps of GPT-2, in GB", ("", *parts, "all"), rows).to_html())

# %% [markdown] covers=["coverage 000.10", "coverage 000.2", "coverage 001.21"]
# Parameters, gradients, and AdamW's two **moments**, a running mean and a running variance of the gradient: 16
# bytes. For GPT-2 that is 0.5 + 0.5 + 1.0 = 2.0 GB. With DDP *each* rank keeps these 2.0 GB, on 4 ranks or on 400.
# With FSDP each of 4 ranks keeps 0.5 GB, each of 8 a quarter of a GB.

# %% [markdown]
# ### Optional: measured on real ranks
#
# Don't take our word for it. Measure, with torch's own DDP and FSDP. With `param_dtype=bf16`, a setting of
# FSDP, a unit is gathered and computed in bf16: 2 bytes a number.

# %% predict="what_bf16_halves"

# %% exercise="bytes_kept"


# %%
def measured():
    from functools import partial

    from fsdp_sim.learn.exercises.memory.bytes_kept import train

    return checked.use(partial(train, [120, 60, 30]))


on_ranks = run(measured, 2, progress=False, show_output=False)[0]
assert on_ranks["fsdp"] == on_ranks["fsdp bf16"] == [n // 2 for n in on_ranks["ddp"]]
rows = tuple((how, *(f"{n:,}" for n in sizes)) for how, sizes in on_ranks.items())
HTML(viz.Table("Bytes kept on rank 0 of 2, measured", ("", *parts), rows).to_html())

# %% [markdown]
# FSDP keeps half of what DDP does, to the byte, and bf16 changes nothing of it.

# %% [markdown]
# ## 3. Why do sources disagree: 16, 18 or 20?
#
# We count 16 bytes in fp32. [ZeRO's paper](https://arxiv.org/abs/1910.02054) trains in fp16, and says 16 too.

# %% predict="four_bytes_of_zeros_paper"

# %% [markdown] covers=["coverage 003.2", "coverage 003.9"]
# The paper writes (2 + 2 + K)Ψ, where Ψ is the number of parameters. 2 bytes are the fp16 parameters, 2 their
# gradients, and K = 12 an fp32 **master copy** and two moments. (So the first 2 is the fp16 copy alone; the fp32 one
# is in K.) FSDP keeps the fp32 parameters *instead* of a master copy: its bf16 copy of a unit exists only while that
# unit is whole. Both say 16, and mean different tensors.

# %% [markdown]
# Some recipes also keep or accumulate gradients in fp32. Write the sum for any of them:

# %% exercise="state_bytes_per_parameter"

# %%
asked = {
    "FSDP": ("fp32", "fp32", False, False), "ZeRO's paper": ("bf16", "bf16", True, False),
    "fp32 gradients": ("bf16", "fp32", True, False), "and an fp32 buffer": ("bf16", "bf16", True, True),
    "bf16, fp32 moments": ("bf16", "bf16", False, False),
}  # fmt: skip
size = {"fp32": 4, "bf16": 2}
recipes = {name: {"parameters": size[w], "gradients": size[g], "moments": 8, "master copy": 4 * m, "accumulator": 4 * a}
           for name, (w, g, m, a) in asked.items()}  # fmt: skip
assert [checked.use(*recipe) for recipe in asked.values()] == [16, 16, 18, 20, 12]
assert [sum(recipe.values()) for recipe in recipes.values()] == [16, 16, 18, 20, 12]
recipes["all bf16"] = {"parameters": 2, "gradients": 2, "moments": 4}
for weight in (torch.nn.Parameter(torch.ones(8).bfloat16()),):
    assert (weight.sum().backward(), weight.grad.dtype)[1] is torch.bfloat16
    assert ((adam := torch.optim.AdamW([weight])).step(), adam.state[weight]["exp_avg"].dtype)[1] is torch.bfloat16
stacks(recipes, "Sixteen, eighteen, twenty: each is right, for its recipe", "bytes per parameter")

# %% [markdown] covers=["coverage 004.15"]
# The last two have no fp32 copy. With moments in fp32 that is 12 bytes. Write `model.bfloat16()` and give it to
# AdamW, and the moments are bf16 too: 8 bytes. It is cheap, and few people train that way. bf16 forgets updates
# smaller than 1/512 of a weight, so small steps vanish (chapter 8). At 8 bytes a model of 7 billion "needs 56 GB".
# Does it, and does it fit a card?

# %% exercise="seven_billion_on_one_card"

# %%
fits, needed_bytes = checked.use()
assert not fits
assert needed_bytes == 112e9
rows = tuple((f"{n}", f"{needed_bytes / n / 1e9:.0f} GB") for n in (1, 2, 4, 8))
print("one card of 80 GB", "is enough" if fits else "is not enough")
HTML(viz.Table("7 billion parameters", ("GPUs", "each keeps"), rows).to_html())

# %% [markdown] covers=["coverage 004.17", "coverage 004.18"]
# On 8 cards the states take 14 GB each. 13 billion parameters take 208 GB: nine cards of 24 GB before the first
# activation. "It fits on consumer GPUs" may still be true, but these numbers do not show it. They leave out what the
# next sections are about. And why divide the *optimizer's* state first? Look at the picture of the recipes: with 8 of
# 16 bytes it is the largest part, and no rank needs another rank's.

# %%
assert 16 * 7e9 / 8 == 14e9
assert 8 * 24e9 < 16 * 13e9 < 9 * 24e9

# %% [markdown]
# ## 4. ZeRO: one thing more at each stage
#
# With DDP every rank keeps what every other rank keeps too. **ZeRO** takes its name from that, *zero redundancy
# optimizer*. It divides what is kept in three stages, and begins with the optimizer's state.

# %% predict="left_after_zero_1"

# %%
names = {"sharded": "parameters", "unsharded_grad": "gradients", "rs_output": "gradients", "optimizer": "moments"}


def kept_gb(api):
    events = simulate("gpt2-124m", eight, Plan(api=api, **small)).timeline.events
    kept = dict.fromkeys(names.values(), 0.0)
    for event in events[: next(n for n, event in enumerate(events) if event.op is Op.OPTIM)]:
        if event.category in names:
            kept[names[event.category]] += (1 if event.op is Op.ALLOC else -1) * event.bytes / 1e9
    return kept


# %%
eight = Cluster("A100-SXM-80GB", gpus=8)
small = {"micro_batch": 1, "seq_len": 64}  # so that states are what there is to see
stages = {"DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "FSDP (ZeRO-3)": "fsdp2"}
zero = {name: kept_gb(api) for name, api in stages.items()}
assert [round(sum(zero[name].values()), 2) for name in stages] == [1.99, 1.12, 0.68, 0.25]
stacks(zero, "Each stage of ZeRO divides one thing more by eight (simulated)", "GB on one rank")

# %% [markdown] covers=["coverage 003.1", "coverage 003.3", "coverage 003.10", "coverage 001.1", "coverage 000.3"]
# Stage 1 divides the optimizer's state. Stage 2 divides the gradients too, and stage 3 the parameters. Gather those
# layer by layer, free them again, and stage 3 is FSDP. The first two stages end a step with an all-gather of the new
# parameters, so they send as many bytes as DDP. FSDP gathers before every use instead.

# %% exercise="state_bytes_of_a_rank"

# %%
ranks = (1, 2, 4, 8, 16, 32, 64)
ways = {"DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "FSDP": "fsdp"}
lines = {name: {n: checked.use(7e9, n, how) / 1e9 for n in ranks} for name, how in ways.items()}
assert [lines[name][64] for name in ways] == [112, 56.875, 29.3125, 1.75]
curves(lines, "7 billion parameters: only FSDP has no floor", x="ranks", y="GB of states on one rank",
       limits={"a card of 80 GB": 80})  # fmt: skip

# %% [markdown] covers=["coverage 003.5", "coverage 002.21", "coverage 003.4"]
# That is the whole idea. Compute like data parallel, and store like **model parallel**, which puts layers, or parts
# of them, on different GPUs. A layer needs its parameters only while it computes, so only then are they whole. Model
# parallelism has to send activations: within each layer (tensor parallel) or between stages (pipeline). FSDP sends
# parameters and gradients, and their bytes do not grow with the batch.

# %% [markdown]
# ## 5. The peak is more than the states
#
# Back to GPT-2 124M, now in training: 12 rows of 1,024 tokens per rank, in fp32. DDP keeps 2.0 GB of states, FSDP on
# 4 ranks 0.5.

# %% predict="saved_at_the_peak"

# %%
rows_12 = {"micro_batch": 12, "seq_len": 1024}
whole = {"DDP": simulate("gpt2-124m", eight, Plan(api="ddp", **rows_12))}
for n in (4, 8):
    whole[f"FSDP, {n} ranks"] = simulate("gpt2-124m", Cluster("A100-SXM-80GB", gpus=n), Plan(**rows_12))
viz.memory_waterfall(whole).titled("Four ranks save a twelfth, not three quarters: activations and logits stay whole")

# %%
gigabytes = {name: sim.peak_memory_bytes / 1e9 for name, sim in whole.items()}
saved = 1 - gigabytes["FSDP, 4 ranks"] / gigabytes["DDP"]
print(f"four ranks save {saved:.0%} of the peak")
assert f"{saved:.0%}" == "8%"
assert 12 * 1024 * 50257 * 4 == 2_470_232_064
assert round(110e6 * 4 / 1e6) == 440
assert round(110e6 * 16 / 1e9, 2) == 1.76
assert 108e6 < Model.preset("bert-base").param_count < 110e6

# %% [markdown] covers=["coverage 000.11", "coverage 003.14", "coverage 004.11", "coverage 004.14", "coverage 004.22"]
# Not 75% less: about 8% (predicted). **Activations**, what forward keeps for backward, belong to a rank's own rows
# and are not sharded. Nor are the **logits**, a score of every word for every token: 12 × 1,024 tokens times 50,257
# words in fp32 is 2.47 GB, and the loss needs about three such tensors. So when you read "1/N" or "8 times less",
# ask: of what? Mostly it is of states, or of parameters alone. (BERT's 440 MB are its parameters in fp32. With
# gradients and moments it keeps 1.76 GB, and bf16 changes nothing of that.)

# %% exercise="what_more_ranks_divide"

# %%
narrow = Plan(micro_batch=1, seq_len=512)
sims = {n: simulate("gpt2-124m", Cluster("A100-SXM-80GB", gpus=n), narrow) for n in (2, 8, 32, 128)}
read = {f"{n} ranks": checked.use(sim.timeline) for n, sim in sims.items()}
assert read["128 ranks"]["divided"] < read["2 ranks"]["divided"] / 60
assert read["128 ranks"]["whole"] > 0.9 * read["2 ranks"]["whole"]
rows = tuple((n, *(f"{of[part] / 1e9:.2f} GB" for part in ("divided", "whole"))) for n, of in read.items())
HTML(viz.Table("At the peak of a rank", ("", "kept as shards", "the rest"), rows).to_html())

# %% [markdown]
# What is kept as shards halves whenever the ranks double. The rest stays at 0.8 GB.

# %% [markdown]
# ## 6. A unit comes whole
#
# Now two layers of 2 billion parameters, 8.2 GB each in fp32, and a thousand GPUs.

# %% predict="peak_on_a_thousand_ranks"

# %%
giant = Model("giant", n_layer=2, d_model=12_288, n_head=96, d_ffn=55_296, vocab=1000, bias=False)
thousand = simulate(giant, Cluster("A100-SXM-80GB", gpus=1000), Plan(seq_len=16))
layer_bytes = max(i.bytes for i in thousand.program.ops if i.op is Op.ALL_GATHER)
print(f"one layer: {layer_bytes / 1e9:.1f} GB; its shard: {layer_bytes / 1e6 / 1000:.1f} MB; "
      f"the peak on each rank: {thousand.peak_memory_bytes / 1e9:.1f} GB (that is "
      f"{thousand.peak_memory_bytes / 2**30:.1f} GiB)")  # fmt: skip
assert layer_bytes > 7.7e9
assert thousand.peak_memory_bytes > 3 * layer_bytes
assert thousand.peak_memory_bytes < 3.1 * layer_bytes
assert f"{layer_bytes / 1e9:.1f} and {thousand.peak_memory_bytes / 1e9:.1f}" == "8.2 and 24.8"
viz.memory_waterfall(thousand).titled("On a thousand ranks the peak is still three layers")

# %% [markdown] covers=["coverage 004.40", "coverage 004.37", "coverage 002.22", "coverage 002.23"]
# Three times the layer. With 6 GB free on each GPU this is impossible, and a million GPUs would not help: what is
# stored shrinks with the ranks, what is *used* does not. A unit is gathered whole, and it is not alone. There are its
# parameters, the flat buffer in which a gather arrives, and in backward its gradients and the buffer they are sent
# in. So "one layer at a time" takes three to four times a layer (chapter 7). Nothing is "sharded again" after use:
# the shard was there all along, and the whole copy is freed. The optimizer updates shards, so for that no layer is
# ever whole. What helps is a smaller unit, or a layer that is itself divided (tensor parallel).

# %% [markdown]
# Where does that memory come from, and where does it go? Each parameter asks for room for *all* ranks' rows, and after
# use gives it back without losing the tensor. Look at `resize_`, in our mini and in torch:

# %%
in_torch(FSDPParam.alloc_unsharded_param, FSDPParam.free_unsharded_param)

# %% [markdown]
# ## 7. How large a model fits?
#
# First with states alone, and without one activation: an upper bound.

# %% predict="largest_model_on_eight_cards"

# %% [markdown] covers=["coverage 001.22"]
# 80 GB over 16 bytes is 5 billion, for DDP on any number of cards; 8 cards with FSDP hold 8 times that, 40 billion.
# (You can find 20 and 160 billion in print: that takes 4 bytes per parameter, so no optimizer and no gradients.)

# %% [markdown]
# Now with everything, simulated. What is the largest published model that trains on 8 such cards?

# %%
assert (80e9 / 16, 8 * 80e9 / 16, 160e9 * 16 > 8 * 80e9) == (5e9, 40e9, True)
plan = Plan(micro_batch=1, seq_len=2048, param_dtype="bf16", activation_checkpointing="full")
family = ("llama2-7b", "llama2-13b", "mpt-30b", "llama2-70b")
on_eight = {name: simulate(name, eight, plan) for name in family}
print(*(f"{name} {'fits' if sim.fits else 'does not fit'}" for name, sim in on_eight.items()), sep="\n")
assert [sim.fits for sim in on_eight.values()] == [True, True, True, False]
viz.memory_waterfall(on_eight).titled("On eight cards 30 billion parameters fit, and 70 billion do not")

# %% [markdown]
# 30 billion parameters fit on 8 cards, 70 billion do not. Now you, with smaller cards. Which plan fits, and wastes
# least time? *Activation checkpointing* keeps fewer activations and computes them again in backward (chapter 7).

# %% exercise="plan_for_24_gb"

# %%
chosen = checked.use()
cards = Cluster("RTX-4090", gpus=8)
others = {"your plan": chosen, "keep activations": chosen | {"activation_checkpointing": None},
          "one row": chosen | {"micro_batch": 1}, "in fp32": chosen | {"param_dtype": None}}  # fmt: skip
plans = {name: simulate("gpt2-1.5b", cards, Plan(seq_len=1024, **one)) for name, one in others.items()}
assert plans["your plan"].fits
assert [name for name, sim in plans.items() if not sim.fits] == ["keep activations", "in fp32"]
assert plans["in fp32"].peak_memory_bytes < plans["in fp32"].memory_limit_bytes
assert round(plans["in fp32"].memory_limit_bytes / 2**30, 1) == 22.5
rows = []
for name, sim in plans.items():
    speed = f"{sim.tokens_per_s_per_gpu:,.0f}" if sim.fits else "does not fit"
    rows.append((name, f"{sim.peak_memory_bytes / 2**30:.1f} GiB", speed))
HTML(viz.Table("Each differs from yours in one setting", ("", "peak", "tokens/s per GPU"), tuple(rows)).to_html())

# %% [markdown]
# Look at the last row of the best plan. A process gets 22.5 GiB of such a card, and its tensors would just fit. But the
# allocator also holds gaps that no tensor fits into, and so it runs out.

# %% [markdown]
# ## 8. What it costs
#
# DDP all-reduces its gradients, and an all-reduce sends as much as a reduce-scatter and an all-gather
# (chapter 2). FSDP gathers parameters twice and reduces gradients once.

# %% predict="sent_beyond_ddp"

# %%
sends = {Op.ALL_REDUCE: 2, Op.ALL_GATHER: 1, Op.REDUCE_SCATTER: 1}  # times (W-1)/W of the message, in a ring


def sent_gb(plan):
    ops = simulate("gpt2-124m", eight, plan).program.ops
    return {str(op).lower().replace("_", "-"): sum(7 / 8 * n * i.bytes for i in ops if i.op is op) / 1e9
            for op, n in sends.items()}  # fmt: skip


# %%
plans = {"DDP": Plan(api="ddp"), "FSDP": Plan(reshard_after_forward=True)}
plans["parameters kept"] = Plan(reshard_after_forward=False)
sent = {name: sent_gb(plan) for name, plan in plans.items()}
assert (totals := [sum(of.values()) for of in sent.values()])
assert abs(totals[1] / totals[0] - 1.5) < 0.01
assert abs(totals[2] / totals[0] - 1) < 0.01
rows = []
for name, of in sent.items():
    rows.append((name, *(f"{n:.2f}" if n else "" for n in of.values()), f"{sum(of.values()):.2f}"))
HTML(viz.Table("GB sent by a rank in one step, fp32", ("", *sent["DDP"], "all"), tuple(rows)).to_html())

# %% [markdown] covers=["coverage 000.33", "coverage 004.33", "coverage 004.29", "coverage 004.39"]
# Half as much again. You pay with the second gather. (That layers run one after the other is nothing new, they always
# did.) Much of it hides behind compute (chapter 5). What you get for it is memory. The larger batch of many ranks
# comes from data parallelism, with DDP as with FSDP. Storage is divided, and the optimizer's work; the computation of
# each row is not. If your model fits with DDP, and time is all you want, you gain nothing here.

# %% [markdown]
# What people say about this subject, each statement folded with what is true:

# %%
misconceptions("memory")

# %% tags=["nbval-ignore-output"]
board("memory")

# %% [markdown]
# ## Lab: measure a real step
#
# The trainer, with torch's own `fully_shard`, as on a cluster: a million parameters, 16 bytes each, on two ranks.

# %% predict="what_the_process_takes"

# %% tags=["nbval-ignore-output"]
lab = torchrun("-m", "labs.train", "--steps=2", "--global_batch=8", "--seq_len=64", ranks=2)

# %% tags=["nbval-ignore-output"]
setting = MemoryCase(TrainConfig(seq_len=64, global_batch=8, device="cpu"), ranks=2)
counted = counted_step(setting)  # the same step once more, with every tensor counted
process_bytes, tensor_bytes = lab.metrics[-1]["memory_bytes"], sum(at_peak(counted).values())
assert tensor_bytes < 20 * 2**20
assert process_bytes > 10 * tensor_bytes
assert abs(tensor_bytes / setting.peak_bytes - 1) < 0.05
print(f"tensors at the peak: {tensor_bytes / 2**20:.1f} MiB, predicted: {setting.peak_bytes / 2**20:.1f} MiB")
print(f"the process, says the operating system: {process_bytes / 2**20:.0f} MiB")

# %% [markdown] covers=["coverage 001.24", "coverage 001.30", "coverage 001.39", "coverage 004.75", "coverage 004.120"]
# The rest is torch's own code.

# %% [markdown]
# On a GPU it is much the same. `nvidia-smi` shows what the process has *reserved*, and the CUDA context. That is
# neither what the job needs nor its peak. Ask the allocator: `torch.cuda.reset_peak_memory_stats()` before a phase,
# `max_memory_allocated()` and `max_memory_reserved()` after it, on *every* rank, since the last may hold less than
# rank 0. The trainer logs it for every step, beside time and tokens.
#
# One more habit for long runs: keep the best *and* the last checkpoint. With validation off, "save if the
# loss is best" may never save.

# %% [markdown] covers=["coverage 001.35"]
# A run that ends without an out-of-memory error tells you something too, but of that batch only. Take the longest
# rows you have, and two steps: the optimizer's state is made in the first.
#
# **Next:** `lab_02_memory.ipynb` turns a dozen knobs one by one, each predicted and then counted. **On one GPU:**
# `python -m labs.experiments.memory --model gpt2 --seq-len 512`. **On many:** the same command takes one rank per GPU.

# %% [markdown]
# ## What you have seen
#
# - FSDP is data parallel: every rank computes every layer. What is divided is storage, a slice of every tensor.
# - AdamW in fp32 keeps 16 bytes per parameter; 18 and 20 are other recipes. ZeRO divides these, part by part.
# - Peak = states / N + whole units and their gradients + buffers + activations + logits. Only the first term
#   knows N.
# - The largest unit must fit, whatever N is. The price of it all is a second gather.

# %% [markdown]
# > **Our 8B model** has 8.03 billion parameters, and 16 bytes for each are 128 GB. No card has that. Eight cards
# > divide it, and keep 16 GB each. A step on them still holds about 66 GiB: the rest is activations and logits, and
# > we come back to those (chapter 7). First something else. Before a block can compute, its eight pieces must come
# > together.
#
# Next: `02_collectives.ipynb`, what an all-gather and a reduce-scatter send.
