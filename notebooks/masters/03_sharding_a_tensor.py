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
# # Sharding a tensor: who keeps which numbers?
#
# Which rows of a parameter does a rank keep? After this chapter you can say it, and read a DTensor. You can make a
# model that is too large for one process, and fill it from a checkpoint. And you can prove that a model is sharded.

# %% [markdown]
# > **Our 8B model** begins with an embedding of 128,256 rows. Each of eight cards is to keep an eighth of it. Which
# > eighth? And who puts it there? In fp32 the model has 32 GB. If each of the eight processes of a node first builds
# > all of it, the node needs 257 GB before anything is cut.
#
# **Core path, about 45 minutes:** sections 1, 2, 4 and 5, with the exercises marked *core*. The rest is
# there if you like.
#
# **What is real:** everything. Two to four ranks of this machine, torch's own `fully_shard`, FSDP1 and DTensor.
# **What differs on GPUs:** where the shards live, and (section 6) how DTensor draws random numbers.

# %%
import warnings

import torch
import torch.distributed as dist
from IPython.display import HTML
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_sim import viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.exercises.sharding.audit_of_shards import PartlySharded
from fsdp_sim.learn.exercises.sharding.moved_before_sharding import Layers as Six
from fsdp_sim.learn.exercises.sharding.original_parameters import Layers
from fsdp_sim.learn.find import file_of
from fsdp_sim.learn.pictures.sharding import by_columns, by_rows, end_to_end, owners
from fsdp_sim.mini import FSDPParam, init_weights
from fsdp_sim.ranks import run
from labs.cluster.torchrun import torchrun
from labs.experiments.mine import mine

# %%
CPU = torch.device("cpu")

# %% [markdown]
# ## 1. Cut along the first dimension
#
# `fully_shard` cuts every parameter into one piece for each **rank**. We take a weight that is small enough to print.

# %% predict="kept_of_a_small_weight"


# %%
def cut():
    layer = nn.Linear(4, 2, bias=False)
    layer.weight.data = torch.arange(1.0, 9.0).view(2, 4)
    fully_shard(layer)
    return layer.weight.to_local().tolist(), layer.weight.full_tensor().tolist()


kept = run(cut, 2, progress=False)
for rank, (rows, _) in enumerate(kept):
    print(f"rank {rank} keeps the row", *(", ".join(f"{x:g}" for x in row) for row in rows))
assert [rows for rows, _ in kept] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
assert all(whole == [[1, 2, 3, 4], [5, 6, 7, 8]] for _, whole in kept)

# %%
owners({"by rows": by_rows(4, 4, 2), "by columns": by_columns(4, 4, 2)}, "FSDP cuts as on the left: whole rows")

# %% [markdown] covers=["coverage 004.83", "coverage 004.84", "coverage 002.16"]
# Whole rows: a number in a cell is the rank that keeps it. `Shard(0)` cuts dim 0, as `torch.chunk` does. You may have
# seen a matrix drawn in a left and a right half. FSDP does not cut like that, and for a reason. Rows lie together in
# memory, so a shard is one piece. It can be sent as it is, and gathered pieces are the whole without being
# rearranged. (torch's `shard_placement_fn` can choose another dim.) To make the weight whole, no rank "sends" while
# another "gathers": in an all-gather each sends its rows and receives all others.

# %% [markdown] covers=["coverage 004.96"]
# ## 2. Rows that do not divide
#
# GPT-2 has 50,257 words, and that is not a multiple of four. Who keeps how many rows then? Let's take five.
#
# Stuck? `hint("rows_of_each_rank")` gives the next of three hints, `solution("rows_of_each_rank")` the solution.

# %% predict="five_rows_on_four_ranks"

# %% exercise="rows_of_each_rank"

# %%
assert checked.use(5, 4) == [2, 2, 1, 0]
tensors = {"kept": by_rows(5, 4, 4), "as it travels": by_rows(5, 4, 4, padded=True)}
owners(tensors, "Five rows on four ranks: two, two, one and none; what travels is padded (grey)")

# %% [markdown] covers=["coverage 004.96"]
# So it is not N/R rows each. The last ranks keep fewer rows, or none, and take part all the same. A collective moves
# equal pieces, so pieces are **padded** for the journey. That invites two mistakes, and neither says a word. Here
# is the first:

# %% exercise="case_02"

# %%
whole = torch.arange(10.0)[:, None].expand(10, 4).contiguous()
loaded = run(
    lambda use: use(whole if dist.get_rank() == 0 else torch.empty(0), 10, 4)[:, 0].tolist(), 4, checked.use,
    progress=False,
)  # fmt: skip
assert [row for rows in loaded for row in rows] == list(range(10))
rows = tuple((f"rank {rank}", ", ".join(f"{row:g}" for row in rows)) for rank, rows in enumerate(loaded))
HTML(viz.Table("10 rows", ("", "loads"), rows).to_html())

# %% [markdown]
# Each rank begins where the ranks before it end.

# %% [markdown]
# ### Optional: the second mistake
#
# This one shows in the loss:

# %% exercise="case_03"

# %%
words = file_of("case_03")
given = words.inputs(0)
leaked = words.with_padding(given)
mended = run(lambda use: use(*given[dist.get_rank()]).item(), 4, checked.use, progress=False, show_output=False)
assert torch.allclose(torch.tensor(mended), torch.stack(words.losses(given)))
assert all(leak > loss for loss, leak in zip(words.losses(given), leaked, strict=True))
both = enumerate(zip(mended, leaked, strict=True))
rows = tuple((f"rank {rank}", f"{loss:.5f}", f"{leak:.5f}") for rank, (loss, leak) in both)
assert words.padding_of(given) == 3
HTML(viz.Table(f"Loss over {given[0][1]:,} words", ("", "yours", "with the padding"), rows).to_html())

# %% [markdown]
# On four ranks three rows of padding travel with the head. They are no words, and each of them takes its share of the
# probability. So the loss is too large, on every rank, and nothing fails. Cut them off.

# %% [markdown] covers=["coverage 004.90"]
# ## 3. The flat way of FSDP1
#
# FSDP1 lays all parameters of a **unit** end to end, as one flat parameter, and cuts that into equal chunks.

# %% predict="ranks_with_a_part_of_both"

# %%
shapes = [(4, 4), (5, 3)]
a, b = end_to_end(shapes, 4)
assert not set(a.flat) & set(b.flat)
tensors = {"a, FSDP2": by_rows(4, 4, 4), "b, FSDP2": by_rows(5, 3, 4), "a, FSDP1": a, "b, FSDP1": b}
owners(tensors, "FSDP2 cuts each parameter, FSDP1 the line of all of them")

# %% [markdown] covers=["coverage 004.90"]
# With FSDP1 no rank has a part of both. With FSDP2 all have, except rank 3: five rows leave nothing for it.
#
# A flat chunk needs no copying before it travels, and hardly any padding. But what is in a rank's chunk? It has no
# name, and it ends in the middle of a row. All of a unit must have one dtype, and train or be frozen together. FSDP2
# gives up the flat parameter. It cuts every parameter by itself, each keeps its name and its settings, and no module
# is wrapped.

# %% [markdown]
# FSDP1 has an option that sounds as if it gave the parameters back:

# %% exercise="original_parameters"

# %%
names = [f"{number}.weight (4 × 4)" for number in range(3)]
flat = end_to_end([(4, 4)] * 3, 4)
for rank, found in enumerate(run(checked.use, 4, Layers((4, 4, 4, 4)), progress=False, show_output=False)):
    assert found["shapes"] == [[int((one == rank).sum())] for one in flat]
owners(dict(zip(names, flat, strict=True)), "What use_orig_params shows: the stretch of each weight in a rank's chunk")

# %% [markdown]
# Look at rank 1. It sees 4 numbers of the first weight, 8 of the second and none of the third, each time as a vector.

# %% [markdown] covers=["pitfall 22"]
# Next, one layer in fp32 and one in bf16, in one unit. Do FSDP1 and FSDP2 take it?


# %% tags=["hide-input"]
class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()

    def forward(self, x):
        return self.b(self.a(x).bfloat16())


def said_by(api):
    try:
        if api == "FSDP1":
            FullyShardedDataParallel(TwoDtypes(), device_id=CPU)
        else:
            fully_shard(TwoDtypes())(torch.ones(2, 8)).sum().backward()
    except (ValueError, AssertionError) as error:
        return str(error).partition(" but got")[0]


# %% predict="two_dtypes_in_one_unit"

# %%
errors = {api: run(said_by, 2, api, progress=False, show_output=False)[0] for api in ("FSDP1", "FSDP2")}
print(*(f"{api}: {error}" for api, error in errors.items()), sep="\n")
assert errors["FSDP1"] == "Must flatten tensors with uniform dtype"
assert errors["FSDP2"] == "FSDP expects uniform original parameter dtype"

# %% [markdown] covers=["pitfall 22"]
# Both refuse, FSDP1 when it wraps, FSDP2 at the first forward. Keep parameters in fp32 and let the mixed-precision
# policy cast what is gathered. Or give the odd layer a unit of its own.
#
# ## 4. A tensor that knows the whole: DTensor
#
# Two ranks shard two layers, and we ask the first weight, of 60 × 60, for all that it knows.


# %% tags=["hide-input"]
def look():
    model = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 62))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)  # the root; here nothing is left for it
    weight = model[0].weight
    assert isinstance(model, FSDPModule)
    assert isinstance(model[0], nn.Linear)
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in model.parameters())
    answers = {"type": type(weight.data).__name__, "shape": tuple(weight.shape), "placements": weight.placements}
    answers |= {"numel()": weight.numel(), "to_local().shape": tuple(weight.to_local().shape)}
    answers |= {"full_tensor().shape": tuple(weight.full_tensor().shape), "lives on": weight.to_local().device}
    answers |= {"type of the layer": type(model[0]).__name__}
    return answers | {"parameters of the model": sum(p.numel() for p in model.parameters())}


# %% predict="shape_of_a_sharded_weight"

# %%
answers = {name: str(value) for name, value in run(look, 2, progress=False)[0].items()}
HTML(viz.Table("model[0].weight on rank 0 of 2", ("ask for", "answer"), tuple(answers.items())).to_html())

# %%
assert answers["shape"] == answers["full_tensor().shape"] == "(60, 60)"
assert answers["to_local().shape"] == "(30, 60)"
assert answers["parameters of the model"] == str(7442)
assert answers["type of the layer"] == "FSDPLinear"

# %% [markdown] covers=["coverage 004.89", "coverage 004.86", "coverage 004.85", "coverage 004.95"]
# A **DTensor** (from `torch.distributed.tensor`; in older code `torch.distributed._tensor`) has the shape of
# the whole, a **placement** that says how it is cut, and the local piece. You always shard as this loop does: each
# layer, then the root.
#
# The module stays what it was. Its class becomes `FSDPLinear`, both a `Linear` and an `FSDPModule`, which adds
# `unshard()` and `reshard()`. And shards live where the **mesh** of ranks is: here on the CPU, else on each rank's GPU.

# %% [markdown] covers=["coverage 004.100"]
# Why a DTensor? Because your loop can stay as it was. The optimizer gets `model.parameters()`,
# `clip_grad_norm_` gives the norm over all ranks, and each rank keeps 1/R of parameters, gradients and
# optimizer state (up to what does not divide). Not everything is an option of `fully_shard`: offload is, but
# activation checkpointing is a wrapper of its own.

# %%
in_torch(FSDPParam.shard, FSDPParam.to_sharded_dtensor, FSDPParam.to_unsharded)

# %% [markdown] covers=["coverage 004.76", "coverage 001.40", "pitfall 35"]
# ## 5. Is it sharded?
#
# You may read that you should look at `param._sharded`, or at `module.numel_padded_per_param`. Neither exists: an
# `if hasattr` around the first prints nothing, for a model that is sharded and for one that is not. Suppose you forgot
# one layer. Write a check that says so.

# %% predict="what_a_forgotten_layer_shows"

# %% exercise="audit_of_shards"

# %%
audit = run(checked.use, 2, PartlySharded(((4, 4), (5, 4), (6, 4)), forgotten=(1,)), progress=False, show_output=False)
for rank, found in enumerate(audit):
    whole = ", ".join(found["not sharded"])
    print(f"rank {rank} keeps {found['kept here']} of {found['parameters']} numbers; {whole} are not sharded")
assert all(found["not sharded"] == ["1.weight", "1.bias"] for found in audit)
assert sum(found["kept here"] for found in audit) == audit[0]["parameters"] + 5 * 5
assert torch.tensor(list(run(
    lambda make: [loss.backward() or loss.item() for loss in (make()(torch.ones(2, 4)).sum(),)], 2,
    PartlySharded(((4, 4),) * 3, forgotten=(1,)), progress=False, show_output=False,
))).isfinite().all()  # fmt: skip
twice = {f"1.weight on rank {rank}": by_rows(5, 4, 1) + rank for rank in range(2)}
tensors = {"0.weight": by_rows(4, 4, 2), **twice, "2.weight": by_rows(6, 4, 2)}
owners(tensors, "The forgotten layer is whole on rank 0, and again on rank 1")

# %% [markdown]
# ### Optional: what `numel()` counts
#
# Count the parameters of a model after wrapping. Is it the model that you counted?


# %%
def counted(api):
    layer = nn.Linear(60, 122)
    if api == "FSDP1":
        return sum(p.numel() for p in FullyShardedDataParallel(layer, device_id=CPU).parameters())
    fully_shard(layer)
    assert not hasattr(layer.weight, "_sharded")
    assert not hasattr(layer, "numel_padded_per_param")
    return sum(p.numel() for p in layer.parameters())


counts = {api: run(counted, 2, api, progress=False, show_output=False)[0] for api in ("FSDP1", "FSDP2")}
print(*(f"{api}: {count:,} of {122 * 61:,} numbers" for api, count in counts.items()), sep="\n")
assert counts == {"FSDP1": 3721, "FSDP2": 7442}

# %% [markdown] covers=["pitfall 35", "coverage 004.95"]
# `numel()` of a DTensor counts the whole, `numel()` of FSDP1's flat parameter only the chunk. So if you count
# parameters after wrapping, and compute FLOP/s from that, you are right with FSDP2. With FSDP1 you are wrong by the
# number of ranks.

# %% [markdown] covers=["pitfall 19", "misconception 26"]
# ## 6. Where the first numbers come from
#
# DDP broadcasts rank 0's weights when it is made, so nobody notices a seed that differs from rank to rank. Now the
# same slip with `fully_shard`.

# %% predict="weights_of_two_seeds"

# %% exercise="whose_first_weights"

# %%
drawn = run(
    lambda use: use(torch.full((4, 4), float(dist.get_rank())))["whole"].tolist(), 2, checked.use, progress=False
)
drawers = [sorted({int(number) for number in row}) for row in drawn[0]]
assert drawers == [[0], [0], [1], [1]]
rows = tuple((f"row {row}", *(f"rank {rank}" for rank in ranks)) for row, ranks in enumerate(drawers))
HTML(viz.Table("The whole weight", ("", "was drawn by"), rows).to_html())

# %% [markdown]
# A mosaic of two models, and nothing says so. So seed all ranks alike. But the same seed has a trap of its own on
# CPUs. If a model is too large for one process, you make it on the **meta device** (shapes, no memory), shard it,
# give it memory with `to_empty`, and initialize. Both ranks have the same seed, and each draws its own rows.

# %% predict="rows_of_one_seed"


# %%
def on_meta(initialize):
    with torch.device("meta"):
        layer = nn.Linear(4, 8, bias=False)
    fully_shard(layer)
    layer.to_empty(device="cpu")
    initialize(layer)
    return layer.weight.full_tensor().tolist()


def by_dtensor(layer):
    torch.manual_seed(0)
    nn.init.normal_(layer.weight)


# %%
weights = torch.tensor(run(on_meta, 2, by_dtensor, progress=False, show_output=False)[0])
print("rows 0 to 3", "are" if torch.equal(weights[:4], weights[4:]) else "are not", "rows 4 to 7 once more")
assert torch.equal(weights[:4], weights[4:])

# %% [markdown]
# The same rows twice: on a mesh of CPUs DTensor draws the same numbers on every rank (on GPUs it moves each rank's
# random stream to its own place). There is a warning, and no error.

# %% [markdown]
# This always works: one seed, the *whole* parameter, then the cut. The mini's `init_weights` does that unit by unit,
# and gets what one process gets:


# %%
def by_unit():
    with torch.device("meta"):
        layer = nn.Linear(4, 8, bias=False)
    import fsdp_sim.mini

    fsdp_sim.mini.fully_shard(layer)
    init_weights(layer, seed=0)
    return layer.weight.full_tensor().tolist()


# %%
torch.manual_seed(0)
alone = nn.Linear(4, 8, bias=False).weight.detach()
weights = torch.tensor(run(by_unit, 2, progress=False)[0])
print("the numbers are", "those" if torch.equal(weights, alone) else "not those", "of one process")
assert torch.equal(weights, alone)

# %% [markdown]
# ## 7. First to the device, or first to shards?
#
# "Move the model to the GPU, then wrap it." "Never move it before you wrap it." You will read both. Try both, and look
# at the memory.

# %% predict="moved_before_it_is_cut"

# %% exercise="moved_before_sharding"

# %%
found = run(checked.use, 2, Six(256), progress=False, show_output=False)[0]
mib = {name: found[name] / 2**20 for name in ("on device first", "sharded first")}
assert 2.1 < mib["on device first"] / mib["sharded first"] < 2.3
rows = tuple((name, f"{value:.2f} MiB") for name, value in mib.items())
HTML(viz.Table("Six layers on two ranks", ("", "peak"), rows).to_html())

# %% [markdown] covers=["misconception 10", "coverage 004.85", "pitfall 21"]
# Neither is an error. Moved first, a device must hold the whole model once; sharded first, its shards only:
# `fully_shard` moves what it keeps to the mesh's device. (FSDP1 wants one of three: the module on the device,
# `torch.cuda.set_device`, or its argument `device_id`.)
#
# The host's memory runs out in the same way. If each of 8 ranks loads a checkpoint of 160 GB, the host needs
# 1,280 GB. So only rank 0 loads it, every rank makes its model on meta, and rank 0 hands out the weights. The code
# below does that, and something is still missing.

# %%
loads_gb = {"every rank loads": 8 * 160, "rank 0 loads": 160}
print(*(f"{name}: {size_gb:,} GB in the host's memory" for name, size_gb in loads_gb.items()), sep="\n")
assert loads_gb["every rank loads"] == 1280

# %% exercise="case_04"

# %%
model_files = file_of("case_04")
given = model_files.inputs(0)
turned = run(lambda use: use(*given[dist.get_rank()]), 2, checked.use, progress=False, show_output=False)
print("NaN in the output:", "yes" if any(output.isnan().any() for output in turned) else "no")
assert not any(output.isnan().any() for output in turned)
with torch.device("meta"):
    model = model_files.Rotary()
tensors = {"parameter": dict(model.named_parameters()), "buffer": dict(model.named_buffers())}
in_file = model.state_dict()
rows = [(name, kind, "yes" if name in in_file else "no") for kind, some in tensors.items() for name in some]
assert rows == [("layer.weight", "parameter", "yes"), ("inv_freq", "buffer", "no")]
HTML(viz.Table("Does the checkpoint bring it?", ("name", "is a", "in the state dict"), tuple(rows)).to_html())

# %% [markdown] covers=["pitfall 20", "pitfall 21"]
# **Buffers** are not sharded: every rank has all of them. Some are not persistent, such as RoPE's frequencies or a
# mask, and those are in no state dict. So after `to_empty` nobody fills them. Whatever was in that memory decides
# what the model gives: NaN, zeros, or something else on each rank. Compute buffers again after `to_empty`, on every
# rank, and check them like parameters.

# %%
misconceptions("sharding")

# %% [markdown]
# ### Your own FSDP: the shard
#
# In `my_fsdp.py` each rank keeps `whole.split(rows_of_each_rank(len(whole), ranks))[rank]`. You have written that
# part already: it is your answer from section 2, put in when it was accepted.

# %% tags=["nbval-ignore-output"]
standing = mine()
standing

# %% [markdown]
# ## Lab: one rank, and the same model on two
#
# On one GPU the only rank has nobody to share with.

# %% predict="fsdp_on_one_rank"


# %%
def alone():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU)
    two = nn.Linear(4, 4)
    fully_shard(two)
    warned = [str(w.message) for w in caught if "NO_SHARD" in str(w.message)]
    return one.sharding_strategy.name, len(warned), type(two.weight.data).__name__, str(two.weight.placements[0])


strategy, warned, kind, placement = run(alone, 1, progress=False, show_output=False)[0]
print(f"FSDP1: {strategy}, with {warned} warning; FSDP2: {kind}, {placement}")
assert (strategy, warned, kind, placement) == ("NO_SHARD", 1, "DTensor", "S(0)")

# %% [markdown] covers=["pitfall 54"]
# FSDP1 changes to `NO_SHARD`, with a warning that is easily lost among others. So you measure another program. FSDP2
# keeps its DTensors and its schedule, without collectives. Measure with FSDP2, then, and remember that on one GPU you
# see no communication at all.

# %% [markdown]
# Now a GPT as it is trained on a cluster: torchrun, torch's `fully_shard`, two ranks, made on meta.

# %% tags=["nbval-ignore-output"]
lab = torchrun("-m", "labs.train", "--steps=2", "--global_batch=8", "--meta_init=true", ranks=2)

# %%
print("losses:", "  ".join(f"{loss:.3f}" for loss in lab.losses))
assert len(lab.losses) == 2
assert 5 < lab.losses[0] < 6  # a model that knows nothing: ln 256 = 5.5 for each byte

# %% [markdown]
# Go on in `lab_02_memory.ipynb` (what shards save), `lab_03_units.ipynb` (which parameters form a unit) and
# `lab_06_resume.ipynb` (shards saved by 4 ranks, loaded by 2).
#
# **On one GPU:** `python -m labs.experiments.memory --model gpt2 --ranks 1`; nothing is divided by one. **On many:**
# the same without `--ranks`; there DTensor's own initialization draws different rows on every rank.

# %% tags=["nbval-ignore-output"]
board("sharding")

# %% [markdown]
# ## What you have seen
#
# - FSDP2 cuts each parameter along dim 0, as `torch.chunk`: the last ranks keep fewer rows, or none. FSDP1 cuts a
#   line.
# - A DTensor has the shape of the whole; `to_local()` is what is here. A plain tensor was forgotten.
# - Nothing is broadcast: the same seed, the whole parameter, then the cut; or rank 0's checkpoint.
# - Whoever loads or gathers by hand must mind the padding, and after `to_empty` the buffers: neither complains.

# %% [markdown]
# > **Our 8B model** divides well. Of the embedding's 128,256 rows each of eight cards keeps 16,032, and each of 64
# > would keep 2,004. Nothing is padded, in any of its tensors. You build it on meta, cut it, and only then give it
# > memory: 4 GB a card, instead of 32. It lies there now. Time for a step.
#
# Next: `04_the_life_of_a_unit.ipynb`, what happens to the shards in a training step.
