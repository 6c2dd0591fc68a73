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
# A block of a GPT is one FSDP **unit**: what is gathered, computed and freed together. You follow one unit through a
# training step and write each part of its life yourself. In the end you have a mini-FSDP whose gradients are those of
# torch's `fully_shard`. Then you know who asks for what, and how to show that no number has changed.

# %% [markdown]
# > **Our 8B model** has 32 blocks of 218 million parameters. Between two steps a card keeps an eighth of each, 109 MB
# > in fp32. To compute one it needs all of it, 436 MB in bf16, and it should not have it a moment longer than that.
# > Who fetches it, who lets go of it, and when?
#
# **Core path, about 45 minutes:** sections 1 to 5, with the exercises marked *core*. The rest is
# there if you like.
#
# **Real:** ranks, collectives, torch's FSDP, every number. **Modelled:** the speed of the network in section 3,
# and one figure of the simulator, which says so.

# %%
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from IPython.display import HTML
from torch import nn

import fsdp_sim.mini
from fsdp_sim import Cluster, Plan, simulate, viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.pictures.unit import ShardCell, rows_held
from fsdp_sim.measure.record import record
from fsdp_sim.ranks import run
from labs.cluster.torchrun import torchrun
from labs.data import load_corpus, local_batch
from labs.experiments.ladder import LadderConfig, climb
from labs.experiments.mine import mine
from labs.experiments.prefetch import Experiment, training_only
from labs.loop.minimal import make_optimizer, mean_over_ranks, shard, train_step
from labs.model import build
from labs.model.gpt import GPTConfig

# %% [markdown] covers=["coverage 004.35", "coverage 004.110", "pitfall 19"]
# ## 1. What a rank keeps
#
# `fully_shard` leaves each rank its rows of every parameter, as a **DTensor** (chapter 3). That is all that
# construction does: **shard**. A step then gathers, computes and frees, unit by unit; the shard itself is never given
# up.
#
# Nobody broadcasts anything: a rank cuts the weight that *it* has drawn. Seed all ranks alike.

# %% [markdown]
# **Your turn.** Write the two halves of it: cut a weight into shards, and gather it again. Then each of four ranks
# fills nine rows with its own number, and your function cuts and gathers them. (As long as yours is not right, the
# reference does.) Stuck? `hint("shard_and_unshard")` gives the next of three hints, `solution("shard_and_unshard")`
# the solution and why it is so.

# %% predict="whole_of_nine_rows"

# %% exercise="shard_and_unshard"


# %%
def cut_and_gather():
    found = checked.use(torch.full((9, 2), float(dist.get_rank())))
    return found["shard"][:, 0].int().tolist(), found["whole"][:, 0].int().tolist()


cut = run(cut_and_gather, 4, progress=False, show_output=False)
columns = {"whole, on any rank": [ShardCell(r, f"drawn by rank {r}") for r in cut[0][1]]}
for r, (own, _) in enumerate(cut):
    columns[f"rank {r} keeps"] = [None] * 3 * r + [ShardCell(r, f"drawn by rank {r}") for _ in own]
assert [len(own) for own, _ in cut] == [3, 3, 3, 0]
assert all(whole == [0, 0, 0, 1, 1, 1, 2, 2, 2] for _, whole in cut)
rows_held("Nine rows on four ranks: three each, and none for the last", columns)

# %% [markdown]
# ## 2. Whole, and back
#
#                  kept                        whole                        kept
#         rank 0   ████····   ── unshard() ─▶  ████████  ── reshard() ─▶  ████····
#         rank 1   ····████                    ████████                   ····████
#
# The hooks of FSDP call these two around every forward and backward. You can call them yourself.
# Keep an eye on the whole weight: we hold on to it and look again after `reshard()`.


# %% tags=["hide-input"]
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


# %% predict="whole_weight_after_reshard"

# %%
seen = run(by_hand, 2, progress=False)[0]
assert [row[3] for row in seen] == ["98,304", "196,608", "98,304", "0"]
assert seen[3][2] == "(384, 128)"
HTML(viz.Table("attn.qkv.weight on rank 0", ("moment", "type", "shape", "bytes of memory"), tuple(seen)).to_html())

# %% [markdown] covers=["coverage 004.30"]
# The whole weight keeps its shape and loses its memory: *the storage is resized to nothing*. Nothing is sent
# back and nothing is lost: every rank, not only "the owner", frees its copy, and each still has its shard.
#
# Is the whole weight needed only once, then? No. Autograd saved this very tensor in forward and will read it in
# backward. So the tensor must stay; only what is behind it goes, and comes back in time.

# %%
group = fsdp_sim.mini.group.FSDPParamGroup
in_torch(group.unshard, group.wait_for_unshard, group.reshard, fsdp_sim.mini.param.FSDPParam.free_unsharded_param)

# %% [markdown]
# ## 3. One step
#
# Now a GPT of five blocks on 4 ranks. The network is slowed down until it is as slow for these cores as a cluster's is
# for its GPUs.

# %% predict="collectives_for_one_block"

# %% tags=["nbval-ignore-output"]
timeline = training_only(Experiment().run(5).timeline)
viz.timeline(timeline, ranks=[0]).titled("Every block is gathered twice and reduced once")

# %% [markdown]
# Two all-gathers and one reduce-scatter for every block.

# %% [markdown]
# Now block 2 alone: its communication and its memory, beside everybody's compute.

# %% predict="while_block_2_is_whole"

# %% tags=["nbval-ignore-output"]
unit = timeline.select(unit="layers.2")
viz.timeline(timeline.select(lambda e: e.unit == "layers.2" or e.op in ("FWD", "BWD")), ranks=[0], step=3).titled(
    "Block 2 is whole in its own forward and its own backward"
)

# %% [markdown] covers=["coverage 000.12", "coverage 003.11"]
# Blue is the whole block: during its own forward and its own backward, and at no other time. Hatched is the flat
# buffer in which an all-gather arrives. In forward it stays one block longer, so that two can be under way. In
# backward it is there early, because block 3 asks for block 2 before it computes. (The root, not drawn here, stays
# whole after forward, because backward begins with it.)
#
# The gradient grows as autograd writes it, moves into a buffer to be sent, and a quarter of it stays.

# %%
life = [e.op for e in unit.select(rank=0, step=3).ops]
print(" → ".join(life))
assert life == [
    "ag_copy_in", "ALL_GATHER", "ag_copy_out", "FWD",
    "ag_copy_in", "ALL_GATHER", "ag_copy_out", "BWD", "rs_copy_in", "REDUCE_SCATTER",
]  # fmt: skip
assert (whole := [e.op for e in unit.select(rank=0, step=3, category="unsharded").events])
assert (whole[0], whole[-1]) == ("alloc", "free")
assert whole.count("alloc") == whole.count("free")
assert [e.op for e in unit.select(rank=0, step=3).events if e.op in ("FWD", "BWD") or e.category == "unsharded"] == [
    op for compute in ("FWD", "BWD") for op in [*["alloc"] * 12, compute, *["free"] * 12]
]
assert (gathers := [e.unit for e in timeline.select(rank=0, step=3).ops if e.op == "ALL_GATHER"])
assert gathers.count("root") == 1
assert gathers.count("layers.2") == 2

# %% [markdown] covers=["coverage 004.31", "coverage 004.32", "coverage 003.12"]
# It is gathered twice: for forward, and again for backward, because forward freed it. It is reduce-scattered once.
# That is the whole lifecycle, the same on all ranks.
#
# Must it be gathered again? `reshard_after_forward=False` says no. Settle what that does. Then look at GPT-2 on eight
# GPUs, simulated both ways.

# %% predict="step_if_blocks_stay_whole"

# %% exercise="kept_for_backward"

# %% tags=["nbval-ignore-output"]
eight = Cluster("A100-SXM-80GB", gpus=8)
freed, kept_whole = (
    simulate("gpt2-124m", eight, Plan(reshard_after_forward=keep, param_dtype="bf16", reduce_dtype="fp32"))
    for keep in (None, False)
)
assert kept_whole.peak_memory_bytes > freed.peak_memory_bytes
assert not any(e.op == "ALL_GATHER" and e.phase == "backward" and e.unit != "root" for e in kept_whole.timeline.ops)
assert (
    0
    < freed.step_time_s - kept_whole.step_time_s
    < sum(e.end_s - e.start_s for e in freed.timeline.ops if e.op == "ALL_GATHER" and e.phase == "backward")
)
print(*(f"peak {sim.peak_memory_bytes / 1e9:.2f} GB" for sim in (freed, kept_whole)), sep=", kept: ")
viz.compare(freed.timeline, kept_whole.timeline, titles=("freed after forward", "kept for backward")).titled(
    "Keep the blocks, and the gathers of backward are gone"
)

# %% [markdown] covers=["misconception 4"]
# The gathers of backward are gone, and the step is shorter by less than their bars: they were hidden behind compute.

# %% [markdown]
# ### Optional: kept, or replicated?
#
# Does keeping them mean that parameters are *replicated*, as is often said of FSDP1's `SHARD_GRAD_OP`, the same
# idea? Look at what one rank has on the module at three moments of a step.


# %% tags=["hide-input"]
def at_three_moments():
    def kinds():
        return {type(p.data).__name__ for p in model.parameters()}

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for unit in model:
        torch.distributed.fsdp.fully_shard(unit, reshard_after_forward=False)
    torch.distributed.fsdp.fully_shard(model, reshard_after_forward=False)
    before, loss = kinds(), model(torch.ones(2, 64)).sum()
    between = kinds()
    loss.backward()
    return before, between, kinds()


# %%
moments = run(at_three_moments, 2, progress=False, show_output=False)[0]
print("before forward {}, between {}, after backward {}".format(*map(", ".join, moments)))
assert moments == ({"DTensor"}, {"Tensor"}, {"DTensor"})

# %% [markdown]
# Whole from forward to the end of backward; shards at all other times, also while the optimizer steps.
#
# ## 4. Backward speaks
#
# Each rank has computed whole gradients, of every parameter, from its own rows of the batch. It keeps only its share,
# the gradient of the rows that it stores. Can it just throw the rest away?

# %% predict="missing_in_own_gradient"

# %% exercise="silent_backward"

# %%
viz.collective("reduce-scatter", ranks=4).titled(
    "The numbers of all are added on their way to the rank that keeps them"
)

# %% [markdown] covers=["coverage 000.7", "coverage 000.13", "misconception 3"]
# This is how gradients are sharded: not by layers, and not by what a rank computed. Everybody's numbers for a row are
# added up on their way to the one rank that keeps the row. A reduce-scatter sums, and FSDP needs the **mean**. Each
# rank's loss was a mean over its own rows, and the batch is everybody's.
#
# ### Optional: write the reduce-scatter of a unit
#
# A unit has many parameters and one reduce-scatter. Write it. Then we try it on numbers that you can check in your
# head: row *i* of rank *r*'s gradient is filled with *i + r*.

# %% predict="reduced_rows_of_rank_1"

# %% exercise="reduce_scatter_gradients"


# %%
def reduce_small():
    gradients = [torch.arange(8.0)[:, None].expand(8, 2) + dist.get_rank(), torch.zeros(4, 3)]
    return checked.use(gradients)[0][:, 0].tolist()


reduced = run(reduce_small, 4, progress=False, show_output=False)
columns = {
    f"rank {r} keeps": [None] * 2 * r + [ShardCell(r, f"{value:g}") for value in values]
    for r, values in enumerate(reduced)
}
assert reduced == [[1.5, 2.5], [3.5, 4.5], [5.5, 6.5], [7.5, 8.5]]
rows_held("Each rank keeps two rows of the mean over four ranks", columns)

# %% [markdown]
# Row 2 holds the mean of 2, 3, 4 and 5, which is 3.5: all ranks are in it.
#
# ## 5. Who asks for it
#
# Hooks do. `record` runs torch's own `fully_shard`, unmodified, on a pretend device that writes down what it is told.
# Then it runs the mini.


# %% tags=["hide-input"]
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

# %% predict="between_wait_and_backward"

# %%
backward = minis.index("--- backward")
begin = minis.index("hook        -               pre_backward(layers.1)")
end = minis.index("op          compute         BWD layers.0")
print(*(line for line in minis[begin:end] if line.startswith(("hook", "op"))), sep="\n")
assert backward < begin < end
assert (
    begin
    < minis.index("op          all_gather      ALL_GATHER(layers.0) n=2", begin)
    < minis.index("op          compute         BWD layers.1")
)
same = "the same" if sorted(minis) == sorted(torchs) else "not the same"
print(f"\nThe mini's program has {len(minis)} lines, and they are {same} as torch's.")
assert (order := [[line for line in lines if not line.startswith("free")] for lines in (torchs, minis)])
assert order[0] == order[1]
assert sorted(torchs) == sorted(minis)

# %% [markdown]
# In a `hook` line FSDP enters one of its functions; in an `op` line it gives the device work, for the queue that is
# named. Between its own `wait_for_unshard` and its compute, unit 1 asks for unit 0: that is **backward prefetch**. So
# when unit 0's own turn comes, its `unshard` finds nothing left to do. And the mini issues exactly what torch issues,
# line by line.

# %% exercise="hooks_in_forward"

# %%
hooks = [line[28:].split("(")[0] for line in torchs[:backward] if line.startswith("hook") and "(layers.1)" in line]
assert hooks == checked.use()  # your function if it was right, else the reference
print("You and torch name", "the same five." if checked.use() == hooks else "other hooks.")
calls = {"pre_forward": "the module, before forward", "post_forward": "the module, after forward"}
by = [(hook, calls.get(hook, hooks[0] if i < 3 else hooks[3])) for i, hook in enumerate(hooks)]
HTML(viz.Table("The hooks of a unit's forward, in order", ("hook", "called by"), tuple(by)).to_html())

# %%
in_torch(group.pre_forward, group.post_forward, group.pre_backward, group.post_backward)

# %% [markdown] covers=["coverage 004.88", "pitfall 18"]
# ### Optional: past the hooks
#
# Hooks run when the *module* is called: `model(x)`. Call `model.forward(x)`, or a method of your own, and nobody
# unshards: torch then stops with an error about mixed tensors and DTensors. `register_fsdp_forward_method` adds a
# method of yours to those that gather.


# %%
def around_the_hooks():
    unit = torch.distributed.fsdp.fully_shard(nn.Linear(8, 8))
    unit(torch.ones(1, 8))
    unit.reshard()
    try:
        unit.forward(torch.ones(1, 8))
    except RuntimeError as error:
        return str(error)


said_by_torch = run(around_the_hooks, 2, progress=False, show_output=False)[0]
print(said_by_torch.partition(". ")[0])
assert "got mixed torch.Tensor and DTensor" in said_by_torch

# %% [markdown]
# ## 6. Write a mini-FSDP
#
# You have the parts: gather, free, gather again, free, reduce. torch has hooks for modules and for tensors, and they
# call you at the right moments. That is all a mini-FSDP is. Some things you leave out: prefetch (chapter 5), padding,
# mixed precision (chapter 8), and units of more than one parameter.

# First, what yours will be measured against: three small units, two rows for each of four ranks, and torch's own.


# %%
def weights_and_rows():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(3, 64, 64, generator=draw) / 8, torch.randn(4, 2, 64, generator=draw)[dist.get_rank()]


def forward_and_backward(units):
    nn.Sequential(*units)(weights_and_rows()[1]).square().mean().backward()


# %%
def torchs_own():
    units = [nn.Linear(64, 64, bias=False) for _ in range(3)]
    for unit, weight in zip(units, weights_and_rows()[0], strict=True):
        unit.weight.data = weight
        torch.distributed.fsdp.fully_shard(unit)
    model = torch.distributed.fsdp.fully_shard(nn.Sequential(*units))
    model(weights_and_rows()[1]).square().mean().backward()
    return [unit.weight.grad.to_local() for unit in units]


# %%
def empty_units():
    units = [nn.Linear(64, 64, bias=False) for _ in range(3)]
    for unit in units:
        unit.weight.untyped_storage().resize_(0)
    return units


# %% [markdown]
# Write the hooks. Then comes the test that counts, yours against torch's on the same weights and rows: first the
# collectives, then the gradients.

# %% predict="collectives_of_yours_and_torchs"

# %% exercise="hooks_of_a_unit"


# %%
def yours():
    shards = [weight.chunk(4)[dist.get_rank()].clone() for weight in weights_and_rows()[0]]
    return checked.use(empty_units, shards, forward_and_backward)


ways = {"your mini-FSDP": yours, "torch's fully_shard": torchs_own}
ran = {name: run(way, 4, progress=False, show_output=False) for name, way in ways.items()}
columns = {
    name: [ShardCell(int(record.op == "reduce_scatter"), record.op.replace("_", "-")) for record in results.records[0]]
    for name, results in ran.items()
}
rows_held("The same collectives; torch asks for the next unit before it computes", columns, row="call {}")

# %%
own, theirs = ran.values()
worst = max((a - b).abs().max().item() for r in range(4) for a, b in zip(own[r], theirs[r], strict=True))
assert worst < 1e-7
assert (issued := [[cell.text for cell in column] for column in columns.values()])
assert sorted(issued[0]) == sorted(issued[1])
assert issued[0][3:5] == ["all-gather", "reduce-scatter"]
assert issued[1][3:5] == ["all-gather", "all-gather"]
print("Gradients of all units on all ranks:", "the same to 1e-7" if worst < 1e-7 else f"off by up to {worst:.1e}")

# %% [markdown]
# Yours waits until a unit's own backward to gather it; torch gathers one unit ahead. The gradients are the same.

# %% [markdown]
# Two files go on from here. Each needs torch alone, and `torchrun --nproc_per_node=2 FILE` runs it.
# `fsdp_sim/mini/readings/one_idea.py` says it all in one autograd function, whose forward is an all-gather and whose
# backward is a reduce-scatter. `fsdp_sim/mini/readings/fsdp.py` is `fully_shard` for one evening: your four hooks,
# and what you left out. In its `pre_backward`, two lines ask for the unit that comes next:
# ```python
# if self.places and (place := self.places.pop()) > 0:  # backward goes through the units in reverse
#     self.context.forward_order[place - 1].unshard()
# ```

# %% [markdown]
# ### Your own FSDP: the hooks
#
# From chapter 2 to 9 a file of yours grows, `my_fsdp.py`: a `fully_shard` in plain torch that takes any model. Each
# chapter has a part of it, and an answer that is accepted is put into the file. What you skip is the reference's, and
# the file says so.

# %% exercise="put_hooks"

# %% tags=["nbval-ignore-output"]
standing = mine()
standing

# %% tags=["nbval-ignore-output"]
standing.picture

# %% [markdown]
# Why does torch's hide nothing here? It leaves the waiting to the streams of a GPU (`unshard_async_op` is false), and
# gloo has none, so the CPU waits in each all-gather. Your file asks with `async_op=True`, and waits when it must.

# %% [markdown] covers=["coverage 001.13", "coverage 001.28", "coverage 001.29"]
# ## 7. Does it change a number?
#
# A new training loop deserves a checklist, and its first line is a baseline **without FSDP**: one process. Then one
# rank, two, four and eight.


# %%
def train(steps=3, batch=8, fully_shard=torch.distributed.fsdp.fully_shard):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(GPTConfig.preset("teaching", n_layer=2), seed=0)
    if fully_shard is not None:
        shard(model, fully_shard)
    optimizer, losses = make_optimizer(model), []
    for step in range(steps):
        x, y = (local_batch(t, rank, ranks) for t in load_corpus().batch(step, batch, seq_len=64))
        losses.append(train_step(model, optimizer, x, y))
    return mean_over_ranks(torch.stack(losses)).tolist()


# %% predict="losses_of_eight_ranks"

# %%
baseline = run(train, 1, 3, 8, None, progress=False)[0]
print("no FSDP  ", "  ".join(f"{loss:.4f}" for loss in baseline))
for ranks in (1, 2, 4, 8):
    losses = run(train, ranks, progress=False, show_output=False)[0]
    print(f"{ranks} rank{'s' * (ranks > 1):1s}  ", "  ".join(f"{loss:.4f}" for loss in losses))
    assert torch.allclose(torch.tensor(losses), torch.tensor(baseline), rtol=1e-5)

# %% [markdown] covers=["coverage 001.27", "coverage 001.34"]
# The same up to **rounding**. One rank needs no other code: it only gathers nothing.

# %% [markdown]
# You can be much stricter than that. The **parity ladder** trains one GPT in several ways, its rungs, and compares
# every loss, gradient and parameter, bit by bit: one process, torch's DDP, torch's FSDP2, the mini. We climb it with
# two ranks.

# %% predict="bitwise_rungs"

# %% tags=["nbval-ignore-output"]
ladder = climb(LadderConfig(ranks=2), ["torch-ddp", "torch-fsdp2", "mini-fsdp"])
ladder

# %%
assert not ladder.divergences
assert ladder["torch-fsdp2"].against_above.bitwise is None
assert ladder["mini-fsdp"].against_above.bitwise is None
assert ladder["mini-fsdp"].program is None  # the collectives of torch's FSDP2, in the same order
assert 0 < ladder["torch-fsdp2"].against_one.error < 1e-4
for name in ("torch-fsdp2", "mini-fsdp"):
    print(f"{name} against the rung above:", ladder[name].against_above.bitwise or "not one bit differs")

# %% [markdown]
# Against one process the last bits differ: two halves of a batch, summed apart, round differently. The ladder leaves
# out one thing on purpose, and says so: the biases of the keys. Their true gradient is zero (they add the same to all
# scores of a row, and a softmax does not see that).

# %% [markdown]
# A ladder that never complains proves little. So we let one rank forget to step one shard.

# %% predict="first_to_diverge"

# %% tags=["nbval-ignore-output"]
broken = climb(LadderConfig(ranks=2, steps=2), ["torch-fsdp2", "mini-fsdp"], broken={"mini-fsdp": "stale-shard"})
broken

# %%
found = broken["mini-fsdp"].against_above.beyond
print("first diverges", str(found).partition(" (")[0])
assert (found.step, found.what, found.unit, found.tensor) == (1, "parameter", "layers.1", "mlp.fc.weight")
assert found.shard_of == (1,)

# %% [markdown]
# A parameter, before any loss shows it: the step, the unit, the tensor, the rows, and whose they are.

# %% [markdown]
# Try `"not-averaged"`, `"wrong-seed"` and `"kept-whole"` in place of `"stale-shard"` above, and look at
# the table. With the last, every number is right. What gives it away?
#
# ## 8. What people say
#
# Open one when you have decided for yourself whether it is true.

# %% tags=["nbval-ignore-output"]
misconceptions("unit")

# %% tags=["nbval-ignore-output"]
board("unit")

# %% [markdown]
# ## 9. Lab: the checklist on your machine
#
# `labs/train.py` is the real trainer: `torchrun` starts it as on a cluster. The same seed and text as in section 7.

# %% tags=["nbval-ignore-output"]
lab = torchrun("-m", "labs.train", "--steps=3", "--global_batch=8", "--n_layer=2", "--seq_len=64", ranks=2)

# %%
assert torch.allclose(torch.tensor(lab.losses), torch.tensor(baseline), rtol=1e-4)
same = torch.allclose(torch.tensor(lab.losses), torch.tensor(baseline), rtol=1e-4)
print("The trainer's losses on two ranks are", "those" if same else "not those", "of section 7.")

# %% [markdown]
# `python -m labs.experiments.checklist` goes through the whole list: one process, 2, 4 and 8 ranks, DDP's
# losses, memory divided by the ranks, a checkpoint gone on from. With a GPU for each rank it runs on NCCL; **one GPU:**
# `--ranks 1` shows that nothing breaks, not that anything is divided. `lab_01_ddp_to_fsdp2.ipynb` makes the step from
# DDP in one diff.

# %% [markdown]
# ## What you have seen
#
# - A rank keeps rows (DTensors). `unshard` makes a unit whole, `reshard` takes the memory from behind it.
# - A unit is gathered twice a step and reduced once, to each rank's rows of the mean; in backward the unit before
#   it is asked for early.
# - All of it hangs on hooks, so call `model(x)`. You have written them, and had torch's gradients.
# - FSDP changes no number: only where numbers live, and when. Check that by comparing, not by looking.

# %% [markdown]
# > **Our 8B model**: each of its 32 blocks lives as yours did, 436 MB that come, go, come again and go. On eight H100
# > that keeps the network busy for about 155 ms of every step. Is the step 155 ms longer for it?
#
# Next: `05_overlap.ipynb`, how the gathers are hidden.
