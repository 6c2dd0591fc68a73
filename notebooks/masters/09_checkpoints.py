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
# # Checkpoints: what must survive?
#
# No rank has the model, so saving it takes all of them. By the end you can save a sharded model without a hang, load
# it on another number of ranks, go on after a kill so that nobody can tell, and say which checkpoints you trust.

# %% [markdown]
# > **Our 8B model** has been training for days when a node dies. Training [Llama 3
# > 405B](https://arxiv.org/abs/2407.21783), Meta counted 419 unexpected interruptions in 54 days on 16 thousand GPUs.
# > With the moments of AdamW, ours is 12 bytes a parameter, about 96 GB. We must write them while training goes on,
# > and read them back on whatever is left of the cluster.
#
# **Core path, about 45 minutes:** sections 1, 2, 3 and 5, with the exercises marked *core*. The rest is
# there if you like.
#
# **What is real:** the ranks, torch's FSDP and its `torch.distributed.checkpoint` (**DCP**), the files, the disk
# that is full, the kill. **What is modelled:** nothing, but the models are small and the disk is a local one.

# %%
import copy
import pickle
import pickletools
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from IPython.display import HTML
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_sim import viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.exercises.checkpoints.code_in_a_checkpoint import inputs
from fsdp_sim.learn.on_disk import Disk, Training
from fsdp_sim.learn.pictures.checkpoints import reads, saves
from fsdp_sim.learn.pictures.memory import stacks
from fsdp_sim.learn.pictures.numerics import losses
from fsdp_sim.mini import FSDPParam
from fsdp_sim.mini.group import FSDPParamGroup
from fsdp_sim.ranks import RanksError, run
from labs.checkpoint import Checkpointer
from labs.experiments import resume
from labs.experiments.mine import mine
from labs.experiments.resume import on_disk

# %%
temporary = tempfile.TemporaryDirectory()  # on the disk of this machine, where all ranks see it
folder = Path(temporary.name)

# %% [markdown]
# ## 1. What is in a state dict?
#
# A **state dict** maps names to tensors. Take a weight of 10 × 4, sharded by `fully_shard` over 4 ranks. What does
# `model.state_dict()` hold on each rank? And does it communicate?


# %% predict="rows_in_a_state_dict"


# %% tags=["hide-input"]
def what_is_in_it():
    weight = fully_shard(nn.Linear(4, 10, bias=False)).state_dict()["weight"]
    kept = weight.to_local()
    return type(weight).__name__, str(tuple(weight.shape)), str(tuple(kept.shape)), kept.nbytes


shown = run(what_is_in_it, 4, progress=False)
rows = tuple((f"rank {rank}", *map(str, found)) for rank, found in enumerate(shown))
assert [found[2] for found in shown] == ["(3, 4)", "(3, 4)", "(3, 4)", "(1, 4)"]
assert not any(record.op == "all_gather" for of_rank in shown.records for record in of_rank)
HTML(viz.Table("state_dict()['weight']", ("", "type", "shape", "kept here", "bytes here"), rows).to_html())

# %% [markdown] covers=["coverage 004.99", "coverage 001.41", "coverage 004.62"]
# **DTensors**: each knows the shape of the whole and holds this rank's rows. Nothing was sent. So every rank has the
# same keys, and the dict *looks* complete: all names are there, and most of the rows are not.
#
# That is a **sharded state dict**. A **full state dict** has whole tensors, gathered from all ranks. You need it to
# export a model, for instance to Hugging Face.

# %% [markdown] covers=["coverage 004.7", "coverage 004.68", "coverage 001.9"]
# How do you ask for one or the other?
# [`torch.distributed.checkpoint.state_dict`](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html) has it:
#
# - `get_model_state_dict(model)`: sharded, 1/W of the bytes on each of W ranks;
# - with `StateDictOptions(full_state_dict=True)`: full; with `cpu_offload=True` too: full, on rank 0 only, in host
#   memory.
#
# `get_optimizer_state_dict` does the same for the optimizer.

# %% [markdown]
# Does a full state dict shrink as ranks are added? Stuck? `hint("bytes_of_a_state_dict")` gives the next of three
# hints, `solution("bytes_of_a_state_dict")` the solution.

# %% exercise="bytes_of_a_state_dict"

# %% tags=["hide-input"]
bars = {}
for ranks in (2, 4):
    kept = run(checked.use, ranks, 202, progress=False)[0]
    bars[f"full, {ranks} ranks"] = {"a rank's state dict": kept["full_bytes"] / 1024}
    assert 50 < kept["full_bytes"] / 1024 < 51
    bars[f"sharded, {ranks} ranks"] = {"a rank's state dict": kept["sharded_bytes"] / 1024}
stacks(bars, "More ranks make a sharded state dict smaller, and leave a full one as it is", "KiB on rank 0")

# %% [markdown] covers=["coverage 001.47", "coverage 004.49", "pitfall 38", "coverage 004.130"]
# So it is the full state dict that runs out of memory. A model of 70 billion parameters with Adam's moments is 840 GB
# in one place (`cpu_offload`: in host memory). One rank writes it, and all others wait. Sharded, each of 64 ranks
# writes 13 GB, all at the same time. **Full is for export, sharded is for going on.**

# %%
states_bytes = 70e9 * 12  # fp32 weights and two moments
print(f"{states_bytes / 1e9:.0f} GB in one place, {states_bytes / 64 / 1e9:.0f} GB on each of 64 ranks")
assert (round(states_bytes / 1e9), round(states_bytes / 64 / 1e9)) == (840, 13)

# %% [markdown]
# ### Optional: what older code says
#
# In older code you will meet FSDP1's `state_dict_type(...)`, now deprecated, with three types: FULL, SHARDED, and
# LOCAL, flat pieces that only the same ranks can load. Full on rank 0 alone is
# `FullStateDictConfig(rank0_only=True, offload_to_cpu=True)` there.


# %%
def old_way():
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            pass
    return [str(warning.message) for warning in heard if "deprecat" in str(warning.message).lower()]


heard = run(old_way, 2, progress=False)[0]
print(heard[0].partition(". ")[0])
assert "state_dict_type() and FSDP.set_state_dict_type() are being deprecated" in heard[0]

# %% [markdown]
# ## 2. Who must call?
#
# Only one rank writes a full state dict. So is it enough if that rank asks for it?


# %% predict="only_rank_0_gathers"


# %%
def only_rank_0_asks():
    model = nn.Linear(4, 8, bias=False)
    fully_shard(model)
    if dist.get_rank() == 0:
        model.weight.full_tensor()


# %%
try:
    run(only_rank_0_asks, 2, progress=False)
except RanksError as error:
    verdict = error.verdict
print(verdict.headline)
print("fix:", verdict.fix)
assert "rank 1 returned without calling" in verdict.headline

# %% [markdown] covers=["pitfall 1", "coverage 004.69", "coverage 001.31"]
# `full_tensor()` is an **all-gather**: it ends when every rank has called it. Here a watchdog speaks up after a moment.
# On a cluster everybody waits for ten minutes, then the job dies, always at a save.
#
# So put `if rank == 0:` before the *write*, and never before the *gathering*. All ranks enter `state_dict`; one
# creates the file.

# %% exercise="case_16" tags=["nbval-ignore-output"]

# %% tags=["hide-input"]
each = [(torch.full((60, 128), float(rank)),) for rank in range(4)]
held = run(checked.use, 4, each=each, progress=False)
counts = [[int((state["weight"][:, 0] == r).sum()) if state else 0 for r in range(4)] for state in held]
assert [sum(of) for of in counts] == [240, 0, 0, 0]
rows = tuple((f"rank {rank}", *map(str, of)) for rank, of in enumerate(counts))
header = ("its full state dict has", *(f"rows of rank {r}" for r in range(4)))
HTML(viz.Table("All ranks gave their rows, and rank 0 alone has them all", header, rows).to_html())

# %% [markdown] covers=["pitfall 39", "coverage 004.58", "coverage 004.47", "coverage 004.60"]
# ### Optional: recipes
#
# Four that you will find, and what each does:
#
# - `if rank == 0: save(model)`, around a function that gathers: a hang.
# - `if rank == 0: torch.save(model.state_dict())` with FSDP2: no hang, and a file with rank 0's rows. You notice at
#   the first load.
# - `ShardedStateDictConfig(rank0_only=True)`: a TypeError. Shards have no form that one rank holds.
# - `state_dict(state_dict_type=...)`: a TypeError. No version of torch had that argument.

# %%
try:
    found = ShardedStateDictConfig(offload_to_cpu=True, rank0_only=True)
except TypeError as error:
    found = error
print(found)
assert "unexpected keyword argument 'rank0_only'" in str(found)

# %% [markdown] covers=["coverage 004.121", "coverage 004.9"]
# In older code this is right: *all* ranks enter FULL_STATE_DICT, *rank 0* writes. Three things to check in it:
#
# - FSDP1 needs `FullStateDictConfig(offload_to_cpu=True, rank0_only=True)`, or every GPU gathers the whole model.
# - Without the optimizer's state you cannot go on from that file.
# - "Save if the validation loss improved" saves nothing when validation is off.

# %% [markdown]
# ## 3. A checkpoint that knows no ranks
#
# With **DCP** every rank writes its own rows and keeps an index: which rows of which tensor are in which file. Four
# ranks save a weight of ten rows. How many files, and what is in each?


# %% predict="files_of_four_ranks"


# %%
def save_on_all(path):
    model = nn.Linear(4, 10, bias=False)
    fully_shard(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)


# %% tags=["hide-input"]
run(save_on_all, 4, folder / "four", progress=False)
index = dcp.FileSystemReader(folder / "four").read_metadata()
chunks = index.state_dict_metadata["model.weight"].chunks
files = {f"file {i}": (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for i, chunk in enumerate(chunks)}
print(*sorted(path.name for path in (folder / "four").iterdir()), sep="\n")
assert list(files.values()) == [(0, 3), (3, 6), (6, 9), (9, 10)]

# %% [markdown] covers=["pitfall 40", "coverage 001.55"]
# Now three ranks load it. Each says what it wants: a DTensor of the whole shape on the *new* mesh. DCP cuts the wanted
# rows along the borders of the files, and reads those pieces and nothing else.
#
# (FSDP1's `SHARDED_STATE_DICT` was the first form of this. If each rank calls `torch.save` for itself, there is no
# index, and only the same number of ranks can read it.)


# %%
def load_on_three(path):
    model = nn.Linear(4, 10, bias=False)
    fully_shard(model)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)  # fills the tensors in place: they are the model's own
    return model.weight.to_local().detach()


# %% tags=["hide-input"]
loaded = run(load_on_three, 3, folder / "four", progress=False)
ends = torch.tensor([len(rows) for rows in loaded]).cumsum(0).tolist()
wanted = {f"rank {rank}": (end - len(loaded[rank]), end) for rank, end in enumerate(ends)}
assert list(wanted.values()) == [(0, 4), (4, 8), (8, 10)]
reads(files, wanted, "Saved by four ranks, loaded by three: each reads the rows it wants")

# %% exercise="load_onto_other_shards"

# %% tags=["hide-input"]
four = [torch.full((5, 3), float(rank)) for rank in range(4)]
halves = run(checked.use, 4, each=[(rows, str(folder / "halves")) for rows in four], progress=False)
files = {f"file {rank}": (5 * rank, 5 * rank + 5) for rank in range(4)}
wanted = {}
for rank, rows in enumerate(halves):
    first = 5 * int(rows[0, 0])
    wanted[f"rank {rank}"] = (first, first + len(rows))
reads(files, wanted, "Four shards on the disk, two in memory: each half is held twice")

# %% [markdown] covers=["coverage 004.48", "coverage 004.59"]
# ### Optional: why a load may write behind FSDP's back
#
# Why may `dcp.load` write into these tensors behind FSDP's back? Because a state dict hands out the very DTensors that
# the optimizer steps. Look for two things in the mini, and in torch below it: hooks that bring a unit back to its
# shards before a state dict is made or loaded; and what takes over a tensor that a load has put in place of the shard.

# %%
in_torch(FSDPParamGroup.lazy_init, FSDPParam.reset_sharded_param)

# %%
alone = run(load_on_three, 1, folder / "four", progress=False)[0]
same = torch.equal(torch.cat(list(loaded)), alone)
assert same
print("Three ranks together hold what one rank alone loads,", "bit for bit." if same else "but not bit for bit.")

# %% [markdown] covers=["coverage 004.48", "coverage 004.59"]
# ### Optional: read once, send to all
#
# What about loading on rank 0 and sending it round, as in `ckpt = broadcast_object_list([ckpt])[0]`? That function
# fills its list in place and returns `None`, so this line is a TypeError. Mended, it pickles the *whole* model to
# every rank: W copies in host memory.
#
# With a full file, let rank 0 read, and have `set_model_state_dict(...,
# StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))` send tensor by tensor. With DCP every rank reads
# its own.


# %%
def broadcast():
    box = [{"weight": 1} if dist.get_rank() == 0 else None]
    return dist.broadcast_object_list(box), box[0]


returned = run(broadcast, 2, progress=False)
print(f"returned: {returned[1][0]}; in the list: weight = {returned[1][1]['weight']}")
assert returned[1] == (None, {"weight": 1})

# %% [markdown]
# ## 4. Names, and copies
#
# A checkpoint finds tensors by name. What does `torch.compile(model)` do to the names?

# %% predict="name_after_compile"

# %%
model = nn.Sequential(nn.Linear(4, 4))
wrapped = torch.compile(model)  # a wrapper; nothing is compiled before the first call
print("torch.compile(model):      ", *wrapped.state_dict())
print("get_model_state_dict of it:", *get_model_state_dict(wrapped))
model.compile()  # in place
print("model.compile():           ", *model.state_dict())
assert list(wrapped.state_dict()) == ["_orig_mod.0.weight", "_orig_mod.0.bias"]
assert list(get_model_state_dict(wrapped)) == list(model.state_dict()) == ["0.weight", "0.bias"]

# %% [markdown] covers=["pitfall 43"]
# Wrappers leave traces in names: `_orig_mod.` (compile), `_fsdp_wrapped_module.` (FSDP1), `module.` (DDP). Load such a
# file with `strict=False`, and *nothing* matches, and nothing tells you.
#
# So compile in place, as `fully_shard` shards in place, and the names stay. Or save what `get_model_state_dict`
# returns: it strips the prefixes. And load with `strict=True`.

# %% [markdown]
# And a copy? You want a moving average of the weights, so you start with `copy.deepcopy(model)`.


# %% predict="copy_of_a_sharded_model"


# %%
def shadow():
    model = fully_shard(nn.Linear(4, 8))
    try:
        copy.deepcopy(model)
    except AssertionError as error:
        refused = str(error)
    average = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        average[name].lerp_(param.detach(), 0.01)  # on this rank's rows; nothing is sent
    return refused, average["weight"].to_local().numel(), type(average["weight"]).__name__


# %%
refused, numel, kind = run(shadow, 4, progress=False)[0]
print(refused, f"\nOne average of the weights: a {kind}, of which {numel} of 32 numbers are here.")
assert (numel, kind) == (8, "DTensor")

# %% [markdown] covers=["pitfall 24"]
# A sharded model refuses `deepcopy`. For a moving average (EMA) keep *shadow shards* instead: clone each DTensor, and
# average this rank's rows. That takes 1/W of the memory, nothing travels, and you save it like the rest, under a name
# of its own.

# %% [markdown]
# ## 5. What must be in a checkpoint?
#
# We kill a small training on 2 ranks after 3 steps. It has dropout and AdamW, and it goes on with its weights alone.
# Can you see that in the losses?


# %% predict="loss_with_weights_alone"


# %%
def goes_on_with_weights(batches):
    lost = Training(batches)
    before = lost.train(3)
    weights = lost.model.state_dict()
    alone = Training(batches)  # a new process: a new optimizer, the first batch, the first random numbers
    alone.model.load_state_dict(weights)
    return Training(batches).train(8), before + alone.train(5)


# %% tags=["nbval-ignore-output", "hide-input"]
torch.manual_seed(0)
batches = [(list(torch.randn(8, 4, 16).unbind()),) for _ in range(2)]
undisturbed, again = run(goes_on_with_weights, 2, each=batches, progress=False)[0]
shown = {"never interrupted": (0, undisturbed), "gone on with the weights alone": (3, again[3:])}
losses(shown, "With the weights alone, another run goes on", unit="")  # a mean square

# %%
assert again[:3] == undisturbed[:3]
assert all(abs(a - b) > 1e-3 for a, b in zip(again[3:], undisturbed[3:], strict=True))
assert all(a < b for a, b in zip(again[4:], undisturbed[4:], strict=True))

# %% [markdown] covers=["pitfall 41", "coverage 004.61"]
# Four things decide the next step: the **weights**, the **optimizer's state**, the **place in the data**, and the
# **random numbers** of each rank. Schedules follow from the step.
#
# Look at the squares. Soon they are *lower*! They read the first batches again, and that looks like progress. And
# without AdamW's moments, a loss that has settled jumps: the first steps are scaled as if gradients had no history.

# %% [markdown] covers=["pitfall 42", "coverage 004.63"]
# ### Optional: a resume that nobody can tell
#
# The place in the data and the random numbers make no noise. If data are read twice you often see nothing, or only at
# the *second* restart, when the place is counted from the first.
#
# And here is a bug that you will meet: read the file, then load `model.state_dict()`. Those are the model's own
# weights. The run begins anew and prints "resumed". So test a resume by its losses, against a run that nobody
# interrupted.

# %% exercise="case_17"

# %% tags=["nbval-ignore-output"]
resumed = run(checked.use, 2, each=[(*own, 3, str(folder / "resumed")) for own in batches], progress=False)[0]
shown = {"never interrupted": (0, undisturbed), "resumed after step 2": (3, resumed[3:])}
assert torch.allclose(torch.tensor(resumed), torch.tensor(undisturbed))
losses(shown, "With all four kept, nobody can tell", unit="")

# %% [markdown] covers=["coverage 001.32", "coverage 001.19"]
# "Resume works" means this picture. The labs' trainer goes on by itself when it finds a checkpoint in its `--out`, on
# another number of ranks too. It saves all four, and the config, and refuses a checkpoint that does not fit the model.

# %% [markdown]
# ## 6. Half a checkpoint
#
# A rank is killed in the middle of a save. What does the next start find? First `labs/checkpoint`, which is ours: we
# kill rank 0 (SIGKILL) at four moments of its second save.


# %%
def saves_twice(path, moment):
    import os

    checkpointer = Checkpointer(path, group=dist.new_group(backend="gloo"))
    weight = DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    os.environ |= {"RANK": str(dist.get_rank()), "FSDP_SIM_FAULTS": f"kill:{moment}@2@0"}
    for step in (1, 2):
        checkpointer.save(step, {"weight": weight}, {"step": step}, {})


# %% predict="left_by_a_killed_save"

# %%
rows = []
for moment in ("before-shard-write", "after-shard-write", "before-rename", "after-rename"):
    (out := folder / moment).mkdir()
    try:
        run(saves_twice, 2, out / "checkpoints", moment, progress=False)
    except RanksError as error:
        how = error.verdict.headline
    found = [one for one in on_disk(out) if one.name.startswith("step")]
    rows.append((moment, *(f"{one.name}: {'counts' if one.counts else 'does not'}" for one in found)))
HTML(viz.Table("On the disk after the kill", ("killed", "first save", "second save"), tuple(rows)).to_html())

# %%
assert "rank 0 was killed by SIGKILL" in how
assert [row[1] for row in rows] == ["step-1: counts"] * 4
assert [row[2] for row in rows] == ["step-2.tmp-…: does not"] * 3 + ["step-2: counts"]

# %% [markdown] covers=["pitfall 44"]
# Before the rename there is only `step-2.tmp-…`, which no restart looks at. After it, all of step 2 is there. At no
# moment is there half a checkpoint under the final name. The order makes it so:
#
# 1. all ranks write and **fsync** (the disk has it, not only the kernel's cache);
# 2. they tell each other;
# 3. rank 0 writes a manifest with sizes and SHA-256, and renames the folder;
# 4. *then* it moves `latest`.
#
# Move `latest` first, and one day you start from a checkpoint that is not there.

# %% [markdown]
# DCP alone does not do that. You save into the same folder each time, and once a disk is full. Mend it.

# %% predict="same_folder_and_a_full_disk"

# %% exercise="case_18"

# %%
room = [[False, False, False], [False, False, True]]
weights = [torch.full((40, 16), float(step)) for step in range(3)]
kept = run(checked.use, 2, each=[(weights, full, str(folder / "kept")) for full in room], progress=False)
newest = int(kept[0][0, 0])
written = {f"rank {rank}": [not one for one in full] for rank, full in enumerate(room)}
assert newest == 1
saves(written, [step <= newest for step in range(3)], "One rank had no room, so step 2 is no checkpoint, but step 1 is")

# %% [markdown]
# DCP does give you two things. It writes `.metadata` last, so a *new* folder without it can never be loaded. And when
# one rank fails, all ranks raise. (Careful: `CheckpointException` is a `BaseException`. `except Exception` lets it
# pass, and your job ends.)
#
# What it does not see is a flipped bit. For that you need checksums; `labs/checkpoint` verifies its own before it
# loads.

# %% [markdown]
# ## 7. While training goes on
#
# [`dcp.async_save`](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html) copies the tensors and returns;
# a thread does the writing. What if a disk is full?

# %% predict="who_raises_in_background"


# %% tags=["nbval-ignore-output"]
def background(path):
    group = dist.new_group(backend="gloo")
    weight = DTensor.from_local(torch.zeros(200_000, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    writer = Disk(path, full=dist.get_rank() == 1)
    future = dcp.async_save({"weight": weight}, storage_writer=writer, process_group=group)
    for _ in range(5):
        dist.all_reduce(torch.ones(1000))  # training goes on, in its own group
    return type(future.exception()).__name__


failed = run(background, 2, folder / "background", progress=False)
print("async_save returned a future; the error was in it:", failed[0])

# %%
groups = {record.group for record in failed.records[0] if record.op != "new_group"}
print(f"groups that had collectives: {len(groups)}, training's and the checkpoint's own")
assert list(failed) == ["CheckpointException"] * 2
assert len(groups) == 2

# %% [markdown] covers=["pitfall 10"]
# No line raises. The error is in the future, on *all* ranks, and nowhere else. Two more rules:
#
# - The thread runs collectives, so give it a **process group of its own**. Two threads in one group issue in an order
#   that differs from rank to rank, and training hangs.
# - One save at a time. The next one waits for the last.

# %% exercise="case_19"

# %%
full = [[False] * 4, [False, False, True, False]]
gradients = list(torch.ones(4, 40, 16).unbind())
counted = run(checked.use, 2, each=[(gradients, of_rank, str(folder / "async")) for of_rank in full], progress=False)[0]
written = {f"rank {rank}": [not one for one in of_rank] for rank, of_rank in enumerate(full)}
assert counted == [0, 1, 3]
saves(written, [step in counted for step in range(4)], "Four saves in the background, and only three are checkpoints")

# %% [markdown]
# ## 8. Whose checkpoint is it?
#
# The index of section 3, `.metadata`, is a Python object in a file. What could be in it?

# %% predict="format_of_the_index"

# %%
content = (folder / "four" / ".metadata").read_bytes()
called = {str(argument) for order, argument, _ in pickletools.genops(content) if order.name == "SHORT_BINUNICODE"}
print("it names:", ", ".join(sorted(name for name in called if "torch" in name)))
assert isinstance(pickle.loads(content), dcp.Metadata)
assert any("torch.distributed.checkpoint.metadata" in name for name in called)

# %% exercise="code_in_a_checkpoint"

# %%
seen = run(checked.use, 1, each=inputs(seed=7), progress=False)[0]
ways = tuple((way, "ran code" if note else "did not") for way, note in seen.items() if way != "claim")
assert [ran for _, ran in ways] == ["did not", "ran code", "ran code"]
HTML(viz.Table("Two checkpoints of a stranger, loaded", ("way", "its code"), ways).to_html())

# %% [markdown]
# A pickle is a program. `torch.load` refuses most of them by default; DCP's index does not ask. So load what your own
# jobs wrote, from a folder that only they can write.
#
# Between people, weights travel as [**safetensors**](https://github.com/huggingface/safetensors): a header, then bytes.
# `python -m labs.checkpoint.convert` makes them, and refuses folders of DCP whose index is a pickle.

# %%
misconceptions("checkpoints")

# %% [markdown]
# ### Your own FSDP: the whole model
#
# The last part of your file. With it the file is complete: fewer than 400 lines that train as torch's.
# `torchrun --nproc_per_node=2 -m labs.experiments.mine my_fsdp.py` trains it beside torch's with micro-batches and
# clipping, saves after half of the steps and goes on with a new model.

# %% exercise="whole_tensors"

# %% tags=["nbval-ignore-output"]
standing = mine()
standing

# %% tags=["nbval-ignore-output"]
standing.picture

# %% [markdown]
# ## 9. Lab: kill it
#
# `torchrun` trains on two ranks and saves every second step. We kill rank 0 while it saves step 4: all files are
# written, the folder has not got its name yet. Then one process *without FSDP* goes on.

# %% tags=["nbval-ignore-output"]
resume.kill(folder / "killed", ranks=2, where="before-rename")
alone = resume.goes_on(folder / "killed", folder / "alone", "--api=single", ranks=1)

# %% predict="step_after_the_kill"

# %%
for one in on_disk(folder / "killed"):
    print(f"{one.name:12}  {'counts' if one.counts else 'does not count'}")
print(
    f"went on from step {alone.report['resumed_from']}; last loss {alone.losses[-1]:.3f}, first {alone.losses[0]:.3f}"
)
assert [one.counts for one in on_disk(folder / "killed")] == [True, False]
assert alone.report["resumed_from"] == 2
assert alone.losses[-1] < alone.losses[0]

# %% [markdown]
# `lab_06_resume.ipynb` compares all losses with those of a run that nobody disturbed, and lets torchrun restart by
# itself.
#
# **One GPU or more:** `python -m labs.experiments.resume --ranks 4` uses the GPUs that each rank finds. **Many nodes:**
# `torchrun --max-restarts=3 ... -m labs.train --save_every=100 --async_save=true --out=/shared/run`, where all nodes
# see the folder. Then kill a node.

# %% tags=["nbval-ignore-output"]
board("checkpoints")

# %% [markdown]
# ## What you have seen
#
# - A full state dict is the whole model in one place, gathered by **all** ranks. A sharded one is each rank's rows.
# - DCP's checkpoint has whole shapes and an index, so any number of ranks can load it.
# - To go on you need weights, optimizer, place in the data and each rank's random numbers. Compare losses to be sure.
# - A checkpoint counts after one rename. In the background the error is in the future, and the group is its own.
# - A pickle runs code. Ask who wrote it.

# %% [markdown]
# > **Our 8B model** was saved by 64 ranks, 1.5 GB each, and goes on with 32 if a few nodes are gone. There is room for
# > it: a step then holds about 58 GiB instead of 57 (`--gpus 32` and `--gpus 64` in the command of chapter 7).
#
# Next: `10_scale.ipynb`, from one node to many.
