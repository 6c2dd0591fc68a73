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
# # Wrapping: what should be one unit?
#
# You decide this before the first step: which layers travel together. It takes one line a block, and it is where most
# FSDP setups go wrong. By the end you can cut a model into units, say what each cut costs, read somebody else's
# policy, and recognise a wrong cut. Some fail loudly, some are slow, and the worst ones just train.

# %% [markdown]
# > **Our 8B model** on eight H100. Give `fully_shard` each block and then the model, and a step holds about 66 GiB: it
# > fits. Forget the blocks, give it the model alone, and the same step wants about 92 GiB. That is one line of code.
# > Ask for both: `fsdp-sim simulate --model llama3-8b --gpu H100-SXM-80GB --gpus 8 --seq-len 8192`, then once more
# > with `--plan wrap=root`.
#
# **Core path, about 45 minutes:** sections 1, 2, 3 and 5, with the exercises marked *core*. The rest is
# there if you like.
#
# **What is real:** torch's FSDP1 and FSDP2 on ranks, every error message, all counts and bytes.
# **What is modelled:** step times, and every GPU.

# %%
import functools

import torch
from accelerate import FullyShardedDataParallelPlugin
from IPython.display import HTML
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

import fsdp_sim.mini
from fsdp_sim import Plan, engine, viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.apart import Trial, carry_out
from fsdp_sim.learn.exercises.wrapping import size_based_units as size_files
from fsdp_sim.learn.find import file_of
from fsdp_sim.learn.pictures.numerics import losses
from fsdp_sim.learn.pictures.wrapping import cuts, over_units, owners, whole_at_once
from fsdp_sim.measure import units_from_module
from fsdp_sim.measure.trace_wrap import wrap_names
from fsdp_sim.ranks import run
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.timeline import COLLECTIVES, Memory, Op
from labs.cluster.torchrun import torchrun
from labs.experiments.mine import mine
from labs.model import empty, model_config
from labs.wrapping.wrap_policy import find_units

# %% [markdown] covers=["coverage 000.9", "coverage 000.16", "coverage 004.36", "misconception 0.12"]
# ## 1. One call, one unit
#
# A **unit** is what is gathered, computed and freed together. Each call of
# [`fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) makes one. It takes every
# parameter inside the module that no earlier call has taken. No unit is *placed* anywhere. Every rank keeps a slice
# of every unit, and every rank computes them all.
#
# Take GPT-2 with 124 million parameters. You call it on each block, then on the model. What is left for that last
# call?
# %% predict="units_of_gpt2"
# %%
gpt2 = empty(model_config("gpt2"))
ways = {name: find_units(gpt2, how).names for name, how in (("the model alone", "root"), ("each block", "block"))}
in_root = [name for name, unit in owners(gpt2, ways["each block"]).items() if unit == "root"]
print(len(ways["each block"]) + 1, "units; in the root:", *in_root)
assert len(ways["each block"]) + 1 == 13
assert in_root == ["tok_emb.weight", "pos_emb.weight", "norm.weight", "norm.bias"]
cuts(gpt2, ways, "The same parameters, cut once and cut by blocks")

# %% [markdown] covers=["coverage 004.87", "misconception 4.97", "misconception 4.98", "misconception 4.99"]
# Thirteen. The last call makes the **root** of what is left: the embeddings, the last norm, and the head (in GPT-2 the
# embedding again). So go bottom-up, inner modules first. Start with the model, and it takes everything.
#
# Either way each parameter becomes a DTensor of its own. The units only decide who travels with whom.

# %% [markdown]
# Now with torch, on two ranks. How much does each all-gather of a forward bring?


# %%
class Block(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, width, bias=False), nn.GELU(), nn.Linear(width, width, bias=False))


def on_ranks(function, calls):
    return run(lambda *call: function(*call), 2, each=calls, progress=False, show_output=False)


# %%
def gathered(bottom_up):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), Block(64), Block(64))
    for module in (*list(model)[1:], model) if bottom_up else (model,):
        fully_shard(module)
    with torch.no_grad():
        model(torch.randn(2, 64))
    return type(model).__name__, type(model[1]).__name__


# %%
for bottom_up in (False, True):
    results = on_ranks(gathered, [(bottom_up,)] * 2)
    numbers = [record.numel for record in results.records[0] if record.op == "all_gather"]
    print(*results[0], "· gathers", " and ".join(f"{number:,}" for number in numbers), "numbers")
    assert numbers == ([4096, 8192, 8192] if bottom_up else [20480])

# %% [markdown]
# One call for the model: one gather, all 20,480 numbers at once. Bottom-up: three gathers, the root's 4,096 first.
#
# Look at the class, too. Your `Block` has become an `FSDPBlock`. `fully_shard` changes the class in place and wraps
# nothing around it, so the parameters keep their names. Here is the same place in our mini and in torch:

# %%
assert results[0] == ("FSDPSequential", "FSDPBlock")
in_torch(fsdp_sim.mini.fully_shard)

# %% [markdown] covers=["pitfall 13"]
# ## 2. Too few: one unit is no saving
#
# With the root alone, the whole model is one unit. It is sharded, and then gathered all at once. Stuck?
# `hint("case_06")` gives the next of three hints, `solution("case_06")` the solution. That works for every
# exercise, and nothing you leave unsolved stops you: the chapter goes on with the reference.

# %% exercise="case_06"

# %% [markdown]
# How much did a rank hold at most? Counted on the ranks: as it was, yours (or the reference), and with a unit for each
# linear layer. The dashed line is the model, which each rank was given whole to begin with.

# %% tags=["nbval-ignore-output"]
memory_files = file_of("case_06")
trial = Trial(tuple((call,) for call in memory_files.inputs(0)), metered=True)
tried = {"the model alone": memory_files.stub, "each block": checked.use, "each linear": memory_files.each_linear}
peaks = {name: max(carry_out(trial, function).peak_bytes) for name, function in tried.items()}
assert peaks["the model alone"] > 1.9 * peaks["each block"] > 1.9 * peaks["each linear"]
whole_at_once(peaks, memory_files.MODEL_BYTES, "the model as it was given", "One unit brings the whole model at once")

# %% [markdown] covers=["pitfall 14", "misconception 1.23", "misconception 2.11"]
# ## 3. Too many: every piece pays
#
# A unit for each linear layer holds the least. So why not always do that? We cut GPT-2 in three ways and free each
# unit after its forward.

# %% predict="bytes_by_cut"

# %%
ways["each linear"] = find_units(gpt2, "Linear").names
rows = []
for name, units in ways.items():
    program = build(units_from_module(gpt2, units), Plan(reshard_after_forward=True), world_size=16)
    sent = [i.bytes for i in program.ops if i.op in (Op.ALL_GATHER, Op.REDUCE_SCATTER)]
    rows.append((name, f"{len(units) + 1}", f"{len(sent)}", f"{sum(sent) / 1e9:.2f} GB", f"{max(sent) / 1e6:.0f} MB"))
assert [row[2] for row in rows] == ["3", "39", "147"]
assert len({row[3] for row in rows}) == 1
header = ("units", "units", "collectives", "bytes in all", "largest")
HTML(viz.Table("One step of GPT-2 on 16 ranks, fp32", header, tuple(rows)).to_html())

# %% [markdown]
# The bytes are the same. Only the number of pieces changes, and each piece pays the network's **latency** once more.

# %% [markdown]
# So there is a best cut somewhere in between. Let's find it for a model that takes 120 ms to gather and 480 ms to
# compute, in 1 to 192 equal units. Each collective costs 1 ms on top. Watch two curves: time, and memory.


# %%
def cut(units, gather_s=0.120, forward_s=0.160, latency_s=0.001, model_bytes=192 * 2**20):
    parts = [Unit("root", (), ("embed", ..., "head"))]
    parts += [Unit(f"layers.{i}", (Param("weight", (model_bytes // 4 // units,)),)) for i in range(units)]
    wire_s = latency_s + gather_s / units
    takes_s = {Op.FWD: forward_s / units, Op.BWD: 2 * forward_s / units}

    def seconds(i):
        return takes_s.get(i.op, wire_s if i.op in COLLECTIVES else 0.0) if i.unit.startswith("layers") else 0.0

    program = build(parts, Plan(), world_size=8)
    whole = (Memory.UNSHARDED, Memory.AG_OUTPUT, Memory.UNSHARDED_GRAD, Memory.RS_INPUT)
    return engine.replay(program, seconds), engine.memory(program).peak_of(whole)


# %% predict="fastest_number_of_units"

# %%
counts = (1, 2, 3, 6, 12, 24, 48, 96, 192)
times_s, peaks_bytes = [], []
for count in counts:
    timeline, n_bytes = cut(count)
    times_s.append(timeline.span_s)
    peaks_bytes.append(n_bytes)
assert counts[times_s.index(min(times_s))] in (12, 24)
assert peaks_bytes == sorted(peaks_bytes, reverse=True)
assert peaks_bytes[counts.index(12)] == 4 * 192 * 2**20 // 12
over_units(counts, times_s, peaks_bytes, "A few units cannot hide, a hundred pay for latency")

# %% [markdown]
# A single unit has nothing to compute while it travels. Very small units pay a millisecond each, and on a real GPU the
# kernels that copy them as well, which this model leaves out. Memory falls fastest with the first few cuts.
#
# A block usually sits in the middle. It is worth its latency, and small enough that four of its size fit: parameters,
# buffers, gradients. If your blocks are tiny, put several into one unit: `fully_shard([block_0, block_1])`.

# %% exercise="attention_of_its_own"

# %% [markdown]
# The same bytes twice: three blocks whole, then each block as two units. The latency here is 20 ms, so that you can
# see it.

# %%
steps = {"three units": cut(3, latency_s=0.020)[0], "six units": cut(6, latency_s=0.020)[0]}
assert [sum(e.op is Op.ALL_GATHER and e.unit != "root" for e in t.ops) for t in steps.values()] == [6, 12]
viz.timeline(steps).titled("Twice the units: the same bytes, and twice as often the latency")

# %% [markdown] covers=["coverage 000.8", "coverage 001.50", "coverage 004.65", "misconception 0.11"]
# ## 4. How does FSDP1 say it? With a policy
#
# In FSDP1 you make one wrapper call and hand over a **policy**: which modules inside become units?
# `ModuleWrapPolicy({Block})` picks them by class. So does `transformer_auto_wrap_policy`, once you have told it the
# class with `functools.partial`. Hand it over as it stands, or call it yourself with only the class, and you get a
# TypeError. (Both are in
# [`wrap.py`](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/wrap.py).)
#
# `fully_shard` has no policies. Your loop over the blocks is the policy.

# %%
stack = nn.Sequential(nn.Linear(32, 32), *(nn.TransformerEncoderLayer(32, 2, 64) for _ in range(3)))
by_class = ModuleWrapPolicy({nn.TransformerEncoderLayer})
by_function = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
print("units by class:", *wrap_names(stack, by_class), "· by function:", *wrap_names(stack, by_function))
assert wrap_names(stack, by_class) == wrap_names(stack, by_function) == ["1", "2", "3"]
try:
    transformer_auto_wrap_policy(transformer_layer_cls={nn.TransformerEncoderLayer})
except TypeError as error:
    print(error)

# %% exercise="case_07"

# %%
policy_files = file_of("case_07")
results = on_ranks(checked.use, policy_files.inputs(0))
numbers = [record.numel for record in results.records[0]]
assert len(numbers) == 5

# %%
print("gathered in a forward:", *(f"{number:,}" for number in numbers))
model = policy_files.Model()
both = {
    "the layer": {nn.TransformerEncoderLayer},
    "the layer and its norms": {nn.TransformerEncoderLayer, nn.LayerNorm},
}
units = {name: wrap_names(model, classes) for name, classes in both.items()}
assert [len(of) + 1 for of in units.values()] == [5, 13]
cuts(model, units, "Name the norms too, and five units become thirteen")

# %% [markdown] covers=["coverage 002.14", "coverage 001.17", "coverage 001.48", "misconception 1.2"]
# Five units became thirteen, because the norms were named as well. Each of the eight new ones is 64 numbers, the slits
# in the lower bar, and each costs three more collectives a step.
#
# A third policy goes by size: `size_based_auto_wrap_policy`, with `min_num_params` of 100 million by default. You will
# see a million in many scripts. What does that make of GPT-2?

# %% predict="units_at_a_million"

# %%
thresholds = (500_000, 1_000_000, 5_000_000, 100_000_000)
tree = size_files.gpt(768)
module = size_files.module_of(tree)
names = {f"{n:,}": size_files.units_by_size(module, n) for n in thresholds}
assert [len(of) for of in names.values()] == [49, 37, 13, 0]
assert {name.rsplit(".", 1)[-1] for name in names["1,000,000"]} == {"embedding", "qkv", "up", "down"}
cuts(module, names, "A threshold of a million makes units of single layers")

# %% [markdown]
# Single linear layers. The policy works from the inside out, and a linear layer of GPT-2 is large enough already.
# What remains of its block no longer is. So the norms and small projections of all blocks end up in the root, which is
# gathered first and kept longest. At 5 million you get the blocks. At the default you get nothing.

# %% [markdown]
# Now you be torch. Which units does a threshold make?

# %% exercise="size_based_units"

# %%
counted = {n: checked.use(tree, n) for n in thresholds}
assert all(counted[n]["units"] == len(names[f"{n:,}"]) for n in thresholds)
by_width = {
    f"width {64 * n}": size_files.units_by_size(size_files.module_of(size_files.gpt(64 * n)), 1_000_000)
    for n in (6, 9, 12, 16)
}
print("at a million:", ", ".join(f"{len(units)} units at {name}" for name, units in by_width.items()))
table = tuple((f"{n:,}", f"{found['units']}", f"{found['root']:,}") for n, found in counted.items())
HTML(viz.Table("GPT-2 of width 768", ("min_num_params", "units", "parameters in the root"), table).to_html())

# %% [markdown] covers=["pitfall 15", "coverage 004.93", "misconception 4.100", "misconception 4.103"]
# Make the model wider, and the same threshold makes other units: sizes change, classes do not. And Accelerate reads a
# threshold of 0 as "no policy", without a word. You then train with one unit. So count your units, whoever made them.
#
# One thing about the two APIs. FSDP1 with a policy makes nested wrappers around flat parameters; `fully_shard` makes
# DTensors and wraps nothing. They are two implementations, so don't mix them in one model. New code: write the loop.

# %%
for threshold in (0, 1000):
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=threshold)
    plugin.set_auto_wrap_policy(nn.Linear(2, 2))
    print(f"min_num_params={threshold}:", "no policy" if plugin.auto_wrap_policy is None else "a policy")
    assert (plugin.auto_wrap_policy is None) == (threshold == 0)

# %% [markdown] covers=["coverage 004.66", "misconception 4.76"]
# ## 5. What if you forget the root?
#
# You shard the blocks, and only a small head is left. Surely that one can stay as it is?

# %% predict="root_forgotten"

# %% exercise="case_08"

# %%
head_files = file_of("case_08")
rows = []
for name, function in (("as it was", head_files.stub), ("mended", checked.use)):
    pair = on_ranks(function, head_files.inputs(0))
    apart = (pair[0] - pair[1]).abs().max().item()
    rows.append((name, *(f"{weight[0, 0].item():+.4f}" for weight in pair), f"{apart:.4f}"))
    assert (apart < 1e-6) == (name == "mended")
header = ("", "weight [0, 0] on rank 0", "on rank 1", "largest difference")
HTML(viz.Table("The classifier after three steps", header, tuple(rows)).to_html())

# %% [markdown]
# Nothing complains. Both ranks train, the loss falls, and the checkpoint keeps the classifier of whoever wrote it.
# Here is what to look for: a parameter that trains and is no DTensor.

# %% [markdown] covers=["pitfall 17", "coverage 004.124", "misconception 1.3"]
# ## 6. One tensor, two names
#
# Many models use one weight as embedding and as head ([Press and Wolf, 2017](https://arxiv.org/abs/1608.05859)): the
# two are **tied**. But a parameter can live in one unit only. So what happens if you give the embedding to one call
# and the head to another? FSDP2 since torch 2.13 tells you:


# %% tags=["hide-input"]
def tied(together):
    embed, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, head)
    for unit in ([embed, head],) if together else (embed, head):
        fully_shard(unit)
    fully_shard(model)
    try:
        model(torch.zeros(2, dtype=torch.long)).sum().backward()
    except ValueError as error:
        return str(error)
    return f"trains, and it is still {'one tensor' if embed.weight is head.weight else 'two tensors'}"


for together in (False, True):
    (text, _) = on_ranks(tied, [(together,)] * 2)
    print(text)
    assert ("already managed" in text) != together

# %% [markdown] covers=["pitfall 16"]
# Two ways out: `fully_shard([embed, head])` makes one unit of both, or you leave both to the root around them.
#
# FSDP1 does not check.

# %% predict="ties_in_fsdp1"

# %% exercise="case_09"

# %% tags=["nbval-ignore-output"]
tied_files = file_of("case_09")
calls = tied_files.inputs(0)
right = tied_files.trained()(calls)[0]
off = {}
for name, function in (("mended", checked.use), ("in two units", tied_files.stub)):
    found = on_ranks(function, calls)[0]
    print(f"{name:12s}", "  ".join(f"{loss:.4f}" for loss in found))
    off[name] = (0, [loss - expected for loss, expected in zip(found, right, strict=True)])
assert max(map(abs, off["mended"][1])) < 1e-4 < max(map(abs, off["in two units"][1]))
assert abs(off["in two units"][1][0]) < 1e-4
losses(off, "In two units the loss starts right, then leaves that of one process")

# %% [markdown]
# The loss falls every time. Only next to the right one do you see that it is wrong. That is why a few steps against a
# single process (chapter 4) are worth a minute before a run of a week.

# %% [markdown] covers=["pitfall 23", "pitfall 22"]
# ## 7. What may share a unit?
#
# FSDP1 flattens a unit into one tensor. So a unit needs one dtype, and with `use_orig_params=False` its parameters
# must all train or all be **frozen**. FSDP2 keeps each parameter by itself. Let's give both a large frozen layer and
# a small trained one behind it, like an adapter of [LoRA](https://arxiv.org/abs/2106.09685). Then we mix two dtypes.


# %% tags=["hide-input"]
def shared(how, mixed):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4, bias=False))
    model[1].to(torch.bfloat16 if mixed else torch.float32)
    model[0].weight.requires_grad_(mixed)
    try:
        if how == "FSDP2":
            fully_shard(model)
        else:
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params="True" in how)
        model(torch.randn(2, 64)).sum().backward()
    except (ValueError, AssertionError) as error:
        return str(error).partition(" but got")[0]
    grads = [p.grad for p in model.parameters()] if how == "FSDP2" else [model._handle.flat_param.grad]
    kept = sum(getattr(g, "_local_tensor", g).numel() for g in grads if g is not None)
    return f"trains; a rank keeps {kept:,} numbers of gradient"


# %% predict="frozen_beside_trained"

# %%
hows = ("FSDP1, use_orig_params=False", "FSDP1, use_orig_params=True", "FSDP2")
both = [[on_ranks(shared, [(how, mixed)] * 2)[0] for mixed in (False, True)] for how in hows]
assert "uniform `requires_grad`" in both[0][0]
assert [text.split()[-4] for text in (both[1][0], both[2][0])] == ["2,176", "128"]
assert all("uniform" in text and "dtype" in text for _, text in both)
rows = tuple((how, *texts) for how, texts in zip(hows, both, strict=True))
HTML(viz.Table("A unit on 2 ranks", ("", "one layer frozen", "and two dtypes"), rows).to_html())

# %% [markdown]
# With `use_orig_params=True` FSDP1 trains, but keeps a gradient for the frozen layer too: 2,176 is half of all 4,352
# parameters. FSDP2 keeps half of the 256 that train.
#
# Both refuse two dtypes in one unit. Either keep the parameters in fp32 and let the precision policy cast what is
# gathered (chapter 8), or make them two units.

# %%
assert (64 * 64 + 64 * 4) // 2 == 2176
assert 64 * 4 // 2 == 128

# %% [markdown] covers=["pitfall 18"]
# ## 8. Why does `generate` find only shards?
#
# Hooks gather the units, and a hook runs when you *call* a module. `model(x)` gathers. `model.forward(x)`,
# `model.generate(x)` and `model.embed(x)` do not, so they find shards. FSDP2 then complains about a mix of Tensor and
# DTensor, FSDP1 about a weight that must be 2-D.

# %% exercise="case_10"

# %%
hook_files = file_of("case_10")
calls = hook_files.inputs(0)
made = on_ranks(checked.use, calls)
rows = []
for rank, (tokens, alone) in enumerate(zip(made, hook_files.in_one_process(calls), strict=True)):
    rows.append((f"rank {rank}", " ".join(map(str, tokens[0].tolist())), " ".join(map(str, alone[0].tolist()))))
    assert torch.equal(tokens, alone)
HTML(viz.Table("The first row: 5 words given, 6 made", ("", "sharded", "in one process"), tuple(rows)).to_html())

# %% [markdown]
# One more trap: every rank must take the same number of steps, because each step gathers. A rank that stops at its own
# end of text leaves the others waiting (chapter 12).
#
# Here is what people say about wrapping. Decide for yourself before you open one.

# %%
misconceptions("wrapping")

# %% tags=["nbval-ignore-output"]
board("wrapping")

# %% [markdown]
# ### Your own FSDP: its units
#
# You call `fully_shard` on one module. Which parameters are in its unit, and which module holds each?

# %% exercise="parameters_of_unit"

# %% tags=["nbval-ignore-output"]
standing = mine()
standing

# %% tags=["nbval-ignore-output"]
standing.picture

# %% [markdown]
# ## Lab: choose the cut on the command line
#
# `labs.train` takes `--wrap=block`, `root`, a number (as the size policy does), or names of classes. It tells you how
# many units it made. A block here has 197 thousand parameters, and each of its parts has fewer.
#
# On one GPU nothing travels, so you will only see memory change. On many, set `--nproc_per_node` to as many as you
# have and compare step times. `lab_03_units.ipynb` predicts and measures all cuts.

# %% tags=["nbval-ignore-output"]
lab = torchrun("-m", "labs.train", "--steps=2", "--global_batch=4", "--seq_len=64", "--n_layer=3", "--wrap=190000")

# %%
assert "4 units" in lab.output
assert len(lab.losses) == 2

# %% [markdown]
# ## What you have seen
#
# - One call of `fully_shard`, one unit. Inner modules first; the root takes what is left. Never forget the root.
# - A cut does not change how many bytes you send. It changes how many collectives, what can overlap, and the peak.
#   Start with one unit a block.
# - A policy by class says what you mean. One by size makes units of single layers.
# - Keep tied weights in one unit. A forgotten root, and FSDP1 with tied weights in two units, go wrong without a word.

# %% [markdown]
# > **Our 8B model** now has 33 units: 32 blocks, and the root with embedding and head. No gather brings more than the
# > root's 2 GB of bf16, and so it fits on eight cards. Only just, though. Next we look at the worst moment.
#
# Next: `07_peak_memory.ipynb`, what a step holds at most.
