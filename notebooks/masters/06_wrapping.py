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
# Before anything is trained you decide what is gathered together. It is one line for each block, and most of what
# goes wrong with FSDP goes wrong in it. After this chapter you can cut a model into units, say what each cut costs,
# read a policy, and know how a wrong cut fails: loudly, slowly, or without a word.
#
# **What is real:** torch's FSDP1 and FSDP2 on ranks, every error message, all counts and bytes.
# **What is modelled:** step times, and every GPU.

# %%
import functools

import torch
from IPython.display import HTML
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

import fsdp_sim.mini
from fsdp_sim import Plan, engine, viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.apart import Trial, carry_out
from fsdp_sim.learn.pictures.wrapping import cuts, over_units, owners, whole_at_once
from fsdp_sim.measure import units_from_module
from fsdp_sim.measure.trace_wrap import wrap_names
from fsdp_sim.ranks import run
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.timeline import COLLECTIVES, Memory, Op

# %% [markdown] covers=["coverage 000.9", "coverage 000.16", "coverage 004.36", "misconception 0.12"]
# ## 1. One call, one unit
#
# A **unit** is what is gathered, computed and freed together. One call of `fully_shard` makes one: of all parameters
# inside the module that no earlier call has taken. It does not place anything: every rank has a slice of every unit
# and computes all of them.
#
# Take GPT-2 with 124 million parameters: a call for each of its blocks, then one for the model. What does the last one
# still find?
# %% predict="units_of_gpt2"
# %%
from labs.model import empty, model_config
from labs.wrapping.wrap_policy import find_units

gpt2 = empty(model_config("gpt2"))
ways = {name: find_units(gpt2, how).names for name, how in (("the model alone", "root"), ("each block", "block"))}
in_root = [name for name, unit in owners(gpt2, ways["each block"]).items() if unit == "root"]
print(len(ways["each block"]) + 1, "units; in the root:", *in_root)
assert len(ways["each block"]) + 1 == 13
assert in_root == ["tok_emb.weight", "pos_emb.weight", "norm.weight", "norm.bias"]
cuts(gpt2, ways, "The same parameters, cut once and cut by blocks")

# %% [markdown] covers=["coverage 004.87", "misconception 4.97", "misconception 4.98", "misconception 4.99"]
# Thirteen. What is left makes up the **root**: embeddings, last norm, and the head, which here is the embedding again.
# The order is bottom-up: the inner modules first, the root last, for a call takes what is still free. (The other way
# round, the root would take all.) Every parameter is a DTensor of its own either way; units say what travels together.

# %% [markdown]
# Now on two ranks, with torch. What does each all-gather of a forward bring?


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


for bottom_up in (False, True):
    results = on_ranks(gathered, [(bottom_up,)] * 2)
    numbers = [record.numel for record in results.records[0] if record.op == "all_gather"]
    print(*results[0], "· gathers", " and ".join(f"{number:,}" for number in numbers), "numbers")
    assert numbers == ([4096, 8192, 8192] if bottom_up else [20480])

# %% [markdown]
# With a call for the model alone, one gather brings all 20,480 numbers; bottom-up, each of three units comes
# by itself, the root's 4,096 first. And a module that was given to `fully_shard` has changed its class: from
# `Block` to `FSDPBlock`. Nothing is wrapped around it, so names of parameters stay. The same in the mini, and
# where torch does it:

# %%
assert results[0] == ("FSDPSequential", "FSDPBlock")
in_torch(fsdp_sim.mini.fully_shard)

# %% [markdown] covers=["pitfall 13"]
# ## 2. Too few
#
# The root alone is one unit: the whole model is sharded, and gathered at once. Stuck? `hint("root_alone")` gives the
# next of three hints and `solution("root_alone")` the solution; so for every exercise. What you leave unsolved blocks
# nothing: the chapter goes on with the reference.

# %% exercise="root_alone"

# %% [markdown]
# What a rank held at most, counted on the ranks: as it was, yours (or the reference), and with a unit for
# each linear layer. The dashed line is the model itself, which every rank is given whole to begin with.

# %% tags=["nbval-ignore-output"]
from fsdp_sim.learn.exercises.wrapping import root_alone as memory_files

trial = Trial(tuple((call,) for call in memory_files.inputs(0)), metered=True)
tried = {"the model alone": memory_files.stub, "each block": checked.use, "each linear": memory_files.each_linear}
peaks = {name: max(carry_out(trial, function).peak_bytes) for name, function in tried.items()}
assert peaks["the model alone"] > 1.9 * peaks["each block"] > 1.9 * peaks["each linear"]
whole_at_once(peaks, memory_files.MODEL_BYTES, "the model as it was given", "One unit is all of the model at once")

# %% [markdown] covers=["pitfall 14", "misconception 1.23", "misconception 2.11"]
# ## 3. Too many
#
# A unit for each linear layer holds least. Then why not? Here is one step of GPT-2, all units freed after forward, cut
# in three ways.

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
# The bytes are the same. What differs is how often a **latency** is paid, and how much must be there at once.

# %% [markdown]
# So where is the best cut? Take a model that needs 120 ms to gather and 480 ms to compute, in 1 to 192 equal units.
# Each collective has a latency of 1 ms besides. We look at time, and at memory.


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
over_units(counts, times_s, peaks_bytes, "Few units have nothing to hide behind, many pay latencies")

# %% [markdown]
# One unit has nothing to compute while it travels; very small ones pay a latency each, and on a real GPU
# kernels for their copies, which this model leaves out. Memory gains most from the first cuts. A block is
# usually in the middle: worth its latency, and small enough that four times its size fit (parameters,
# buffers, gradients). Where blocks are small, put several into one unit: `fully_shard([block_0, block_1])`.

# %% exercise="attention_of_its_own"

# %% [markdown]
# The same bytes twice: three blocks, and each block in two units. A collective has a latency of 20 ms here, so that it
# shows.

# %%
steps = {"three units": cut(3, latency_s=0.020)[0], "six units": cut(6, latency_s=0.020)[0]}
gathers = {name: sum(e.op is Op.ALL_GATHER and e.unit != "root" for e in t.ops) for name, t in steps.items()}
assert gathers == {"three units": 6, "six units": 12}
viz.show(steps)

# %% [markdown] covers=["coverage 000.8", "coverage 001.50", "coverage 004.65", "misconception 0.11"]
# ## 4. Policies: FSDP1's way to say it
#
# FSDP1 is one wrapper call, and a **policy** tells it which modules inside become units.
# `ModuleWrapPolicy({Block})` goes by class; so does `transformer_auto_wrap_policy`, which is a function that
# still needs to be told the class, with `functools.partial`. Handed over as it stands, or called by you with
# the class alone, it ends in a TypeError. `fully_shard` has no policies: the loop over your blocks is the
# policy.

# %%
layer = nn.TransformerEncoderLayer(32, 2, 64)
stack = nn.Sequential(nn.Linear(32, 32), *(nn.TransformerEncoderLayer(32, 2, 64) for _ in range(3)))
by_class = ModuleWrapPolicy({nn.TransformerEncoderLayer})
by_function = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
assert wrap_names(stack, by_class) == wrap_names(stack, by_function) == ["1", "2", "3"]
try:
    transformer_auto_wrap_policy(transformer_layer_cls={nn.TransformerEncoderLayer})
except TypeError as error:
    print(error)

# %% exercise="policy_without_partial"

# %%
from fsdp_sim.learn.exercises.wrapping import policy_without_partial as policy_files

results = on_ranks(checked.use, policy_files.inputs(0))
numbers = [record.numel for record in results.records[0]]
print("gathered in a forward:", *(f"{number:,}" for number in numbers))
assert len(numbers) == 5
model = policy_files.Model()
both = {
    "the layer": {nn.TransformerEncoderLayer},
    "the layer and its norms": {nn.TransformerEncoderLayer, nn.LayerNorm},
}
cuts(model, {name: wrap_names(model, classes) for name, classes in both.items()}, "Every class more is more units")

# %% [markdown] covers=["coverage 002.14", "coverage 001.17", "coverage 001.48", "misconception 1.2"]
# Naming the norms as well makes thirteen units of five: the eight new ones are 64 numbers each, the slits in
# the lower bar, and each is three collectives more in a step.
#
# The third policy goes by size: `size_based_auto_wrap_policy` with `min_num_params`, 100 million by default. Guides set
# it to a million and tell you to try 500 thousand to 5 million.

# %% predict="units_at_a_million"

# %%
from fsdp_sim.learn.exercises.wrapping import size_based_units as size_files

thresholds = (500_000, 1_000_000, 5_000_000, 100_000_000)
tree = size_files.gpt(768)
module = size_files.module_of(tree)
names = {f"{n:,}": size_files.units_by_size(module, n) for n in thresholds}
assert [len(of) for of in names.values()] == [49, 37, 13, 0]
assert {name.rsplit(".", 1)[-1] for name in names["1,000,000"]} == {"embedding", "qkv", "up", "down"}
cuts(module, names, "A threshold of a million makes units of single layers")

# %% [markdown]
# Single linear layers: they are asked first, and they are large enough. What remains of the block is not, so norms and
# the small projections of all blocks fall to the root, which is gathered first and kept longest. At 5 million the
# blocks come out; at the default, nothing does.

# %% [markdown]
# Work out by hand what torch does:

# %% exercise="size_based_units"

# %%
counted = {n: checked.use(tree, n) for n in thresholds}
assert all(counted[n]["units"] == len(names[f"{n:,}"]) for n in thresholds)
by_width = {
    f"width {64 * n}": size_files.units_by_size(size_files.module_of(size_files.gpt(64 * n)), 1_000_000)
    for n in (6, 9, 12, 16)
}
print("units at a million, by width:", {name: len(units) for name, units in by_width.items()})
table = tuple((f"{n:,}", f"{found['units']}", f"{found['root']:,}") for n, found in counted.items())
HTML(viz.Table("GPT-2 of width 768", ("min_num_params", "units", "parameters in the root"), table).to_html())

# %% [markdown] covers=["pitfall 15", "coverage 004.93", "misconception 4.100", "misconception 4.103"]
# The same threshold makes other units in a wider model: sizes change, classes do not. And Accelerate takes a threshold
# of 0 for "no policy", in silence: one unit. So count your units, whoever makes them.
#
# "`FSDP` with a policy is the high level of the same thing" is not so. It makes nested FSDP1 wrappers with flat
# parameters; `fully_shard` makes DTensors and wraps nothing. Do not mix them; for new code, write the loop.

# %%
from accelerate import FullyShardedDataParallelPlugin

for threshold in (0, 1000):
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=threshold)
    plugin.set_auto_wrap_policy(nn.Linear(2, 2))
    print(f"min_num_params={threshold}:", "no policy" if plugin.auto_wrap_policy is None else "a policy")
    assert (plugin.auto_wrap_policy is None) == (threshold == 0)

# %% [markdown] covers=["coverage 004.66", "misconception 4.76"]
# ## 5. What no unit takes
#
# Blocks first, then the root: what if the root is forgotten, because what is left is small?

# %% predict="root_forgotten"

# %% exercise="head_left_outside"

# %%
from fsdp_sim.learn.exercises.wrapping import head_left_outside as head_files

rows = []
for name, function in (("as it was", head_files.stub), ("mended", checked.use)):
    pair = on_ranks(function, head_files.inputs(0))
    apart = (pair[0] - pair[1]).abs().max().item()
    rows.append((name, *(f"{weight[0, 0].item():+.4f}" for weight in pair), f"{apart:.4f}"))
    assert (apart < 1e-6) == (name == "mended")
header = ("", "weight [0, 0] on rank 0", "on rank 1", "largest difference")
HTML(viz.Table("The classifier after three steps", header, tuple(rows)).to_html())

# %% [markdown]
# Nothing complains: both ranks train, the loss falls, and a checkpoint keeps whichever classifier was written. A
# parameter that trains and is no DTensor is the sign to look for.

# %% [markdown] covers=["pitfall 17", "coverage 004.124", "misconception 1.3"]
# ## 6. One tensor, two names
#
# Many models use the embedding's weight as the head's: **tied** parameters. A parameter can be in one unit only. So
# what if the embedding is given to one call, and the head to another? FSDP2 since torch 2.13 says:


# %%
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
    return f"trains; still one tensor: {embed.weight is head.weight}"


for together in (False, True):
    (text, _) = on_ranks(tied, [(together,)] * 2)
    print(text)
    assert ("already managed" in text) != together

# %% [markdown] covers=["pitfall 16"]
# `fully_shard([embed, head])` makes one unit of several modules, and the root around both would do as well: leave them
# to it. FSDP1 does not look.

# %% predict="ties_in_fsdp1"

# %% exercise="tied_in_two_units"

# %% tags=["nbval-ignore-output"]
from fsdp_sim.learn.exercises.wrapping import tied_in_two_units as tied_files
from labs.experiments.pictures import losses

calls = tied_files.inputs(0)
right = tied_files.trained()(calls)[0]
off = {}
for name, function in (("mended", checked.use), ("in two units", tied_files.stub)):
    found = on_ranks(function, calls)[0]
    print(f"{name:12s}", "  ".join(f"{loss:.4f}" for loss in found))
    off[name] = (0, [loss - expected for loss, expected in zip(found, right, strict=True)])
assert max(map(abs, off["mended"][1])) < 1e-4 < max(map(abs, off["in two units"][1]))
assert abs(off["in two units"][1][0]) < 1e-4
losses(off, "How far the loss is from that of one process: at step 0 it is right")

# %% [markdown]
# The loss falls in all of them; only beside the right one does it show. That is why the parity of a few steps with one
# process (chapter 4) is worth a minute before a long run.

# %% [markdown] covers=["pitfall 23", "pitfall 22"]
# ## 7. What may share a unit
#
# FSDP1 flattens a unit into one tensor, so a unit needs one dtype, and, with `use_orig_params=False`, parameters that
# all train or are all **frozen**. FSDP2 keeps each parameter by itself. We give both a frozen layer with a small
# trained one behind it (an adapter, as in LoRA), and then two dtypes.


# %%
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
# With `use_orig_params=True` FSDP1 trains, and keeps a gradient for the frozen layer as well: 2,176 is half of all
# 4,352 parameters. FSDP2 keeps half of the 256 that train. Two dtypes in a unit are refused by both: keep parameters in
# fp32 and let the precision policy cast what is gathered (chapter 8), or make them two units.

# %%
assert (64 * 64 + 64 * 4) // 2 == 2176
assert 64 * 4 // 2 == 128

# %% [markdown] covers=["pitfall 18"]
# ## 8. Around the hooks
#
# Units are gathered by hooks, and hooks run when a module is *called*. `model(x)` gathers; `model.forward(x)`,
# `model.generate(x)` and `model.embed(x)` do not, and find shards: FSDP2 speaks of a mix of Tensor and DTensor, FSDP1
# of a weight that must be 2-D.

# %% exercise="forward_bypassed"

# %%
from fsdp_sim.learn.exercises.wrapping import forward_bypassed as hook_files

calls = hook_files.inputs(0)
made = on_ranks(checked.use, calls)
rows = []
for rank, (tokens, alone) in enumerate(zip(made, hook_files.in_one_process(calls), strict=True)):
    rows.append((f"rank {rank}", " ".join(map(str, tokens[0].tolist())), " ".join(map(str, alone[0].tolist()))))
    assert torch.equal(tokens, alone)
HTML(viz.Table("The first row: 5 words given, 6 made", ("", "sharded", "in one process"), tuple(rows)).to_html())

# %% [markdown]
# One thing more is easy to miss: every rank must take the same number of steps, for each of them gathers. A rank that
# stops at its own end of text leaves the others waiting (chapter 12).
#
# Now open what others say about wrapping; each sentence is wrong or half the truth, and the truth is inside.

# %%
misconceptions("wrapping")

# %% tags=["nbval-ignore-output"]
board("wrapping")

# %% [markdown]
# ### Your own FSDP: its units
#
# `fully_shard` of one module: what is in its unit, and who holds it?

# %% exercise="parameters_of_unit"

# %% tags=["nbval-ignore-output"]
from labs.experiments.mine import mine

standing = mine()
standing

# %% tags=["nbval-ignore-output"]
standing.picture

# %% [markdown]
# ## Lab: choose the cut on the command line
#
# `labs.train` takes `--wrap=block`, `root`, a number as the size policy does, or names of classes, and says how many
# units it made. A block here has 197 thousand parameters, and its parts have fewer. On one GPU nothing travels, so only
# memory changes; on many, with `--nproc_per_node` as many as you have, compare step times. `lab_03_units.ipynb`
# predicts and measures all cuts.

# %% tags=["nbval-ignore-output"]
from labs.cluster.torchrun import torchrun

lab = torchrun("-m", "labs.train", "--steps=2", "--global_batch=4", "--seq_len=64", "--n_layer=3", "--wrap=190000")

# %%
assert "4 units" in lab.output
assert len(lab.losses) == 2

# %% [markdown]
# ## What you have seen
#
# - One call of `fully_shard` is one unit; inner modules first, the root takes what is left, and it must be called.
# - The bytes of a step do not depend on the cut. The number of collectives, what can overlap, and the peak do: begin
#   with a unit for each block.
# - A policy by class says what you mean; one by size makes units of single layers.
# - Tied parameters belong into one unit. A forgotten root, and FSDP1 with ties in two units, are wrong in silence.
#
# Next: `07_peak_memory.ipynb`, what a step holds at most.
