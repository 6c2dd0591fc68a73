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
# # What stands at the peak?
#
# Out of memory is about the worst moment of a step, not about the average. So find the peak. By the end you can name
# what stands there, prove how low it could be, and pick the setting that buys memory for the least time.

# %% [markdown]
# > **Our 8B model** fits eight H100, barely: with rows of 8,192 tokens a step holds about 66 GiB, and torch's
# > allocator keeps 75 of the 78.5 that a process gets. One longer document and it is gone. What would you throw out
# > first? (`fsdp-sim simulate --model llama3-8b --gpu H100-SXM-80GB --gpus 8 --seq-len 8192`)
#
# **Core path, about 45 minutes:** sections 1, 3 and 4, with the exercises marked *core*. The rest is
# there if you like.
#
# **What is real:** the ranks, torch's FSDP2, and every byte labelled *measured*. **What is modelled:** large models on
# GPUs, by a simulator that plays torch's program and adds up what is alive. It leaves out fragmentation, the CUDA
# context, and the temporaries inside a kernel.

# %%
import torch
from IPython.display import HTML
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpointing
from torch.distributed.fsdp import CPUOffload, fully_shard

from fsdp_sim import Cluster, Model, Plan, simulate, viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.exercises.peak import saved_for_backward, step_in_least_memory
from fsdp_sim.learn.find import file_of
from fsdp_sim.learn.pictures.peak import histories
from fsdp_sim.measure.live_bytes import live_bytes
from fsdp_sim.mini.group import FSDPParamGroup
from fsdp_sim.mini.hsdp import post_forward_mesh_info
from fsdp_sim.ranks import run
from fsdp_sim.schedule import Kind, toy_program
from fsdp_sim.timeline import Op
from labs.config import TrainConfig
from labs.experiments import memory
from labs.experiments.mine import mine
from labs.loop.minimal import shard
from labs.model import build
from labs.model.gpt import GPTConfig

# %%
accumulation, least, blocks = file_of("case_11"), step_in_least_memory, saved_for_backward  # inputs of exercises
GIB = 2**30

# %% [markdown]
# ## 1. A step, watched from below
#
# Six equal layers on 64 ranks, and hardly any activations, so that you see the units alone. FSDP computes one layer at
# a time. Does it also hold only one?

# %% predict="layers_at_the_peak"

# %%
layers = Model("six layers", n_layer=6, d_model=1024, n_head=8, d_ffn=4096, vocab=64)
cluster = Cluster("A100-SXM-80GB", gpus=64)
step = simulate(layers, cluster, Plan(seq_len=16))
viz.timeline(step.timeline).titled("Three layers at once in forward, four in backward")

# %% [markdown] covers=["coverage 004.37"]
# No. Look at the strip below the bars. In forward you find three layers' worth:
#
# - a layer's parameters,
# - the flat buffer in which they arrived,
# - the buffer of the layer before, which FSDP lets go one layer late, so that two gathers can be under way.
#
# In backward four: parameters, their gradients, the buffer of the next gather, and what the last reduce-scatter still
# reads. Torch's [own memory
# test](https://github.com/pytorch/pytorch/blob/v2.13.0/test/distributed/_composable/fsdp/test_fully_shard_memory.py)
# allows three in forward beside the shards.

# %% [markdown]
# ### Optional: read the peak off the events
#
# Now read one off yourself.

# %% exercise="stands_at_the_peak"

# %%
settings = {"default": {}, "prefetch 2 ahead": {"forward_prefetch": 2}}
settings["never resharded"] = {"reshard_after_forward": False}
standing = {}
for name, setting in settings.items():
    timeline = simulate(layers, cluster, Plan(seq_len=16, **setting)).timeline.select(lambda e: e.is_memory)
    whole = {phase: checked.use(timeline, phase) for phase in ("forward", "backward")}
    standing[name] = {phase: sum("layers" in what for what in of) for phase, of in whole.items()}
assert standing["default"] == {"forward": 3, "backward": 4}
assert standing["prefetch 2 ahead"]["forward"] == 4
assert standing["never resharded"] == {"forward": 8, "backward": 7}
rows = tuple((name, f"{of['forward']}", f"{of['backward']}") for name, of in standing.items())
HTML(viz.Table("Things as large as a layer, at the peak", ("", "in forward", "in backward"), rows).to_html())

# %% [markdown]
# Prefetch one layer more, and you hold one more. Never reshard, and you hold all six: with two buffers in forward that
# makes 8, with a gradient in backward 7.
#
# ## 2. How low can it be?
#
# Let's go the other way. What must be alive, whatever your program does? You need no program to answer, only one
# moment and an argument about it. Take the backward of the first unit, which comes last.

# %% predict="least_in_last_backward"

# %% exercise="step_in_least_memory"


# %%
def history(step):
    rank = torch.distributed.get_rank()
    shards, x, forward, backward = least.inputs(0)[rank]
    shards = [shard.clone() for shard in shards]  # of a view the whole storage would count
    with live_bytes(*shards, x) as meter:
        step(shards, x.clone(), forward, backward)
    return meter.history().tolist()


# %%
never, late = (wrong.function for wrong in least.EXERCISE.wrong[:2])
habits = {"yours": checked.use, "never frees": never, "reduces at the end": late}
lives = {name: run(history, 2, habit, progress=False, show_output=False)[0] for name, habit in habits.items()}
assert max(lives["yours"]) < 1.01 * least.least_bytes(None)
assert max(lives["yours"]) < max(lives["reduces at the end"]) < max(lives["never frees"]) * 1.2
histories(lives, "Freed twice, reduced at once: a step at its lower bound (measured)", least=least.least_bytes(None))

# %% [markdown]
# *Freed twice* means: each unit after its forward, and again after its backward. Your two loops do it by hand, FSDP
# does it in hooks.
#
# ## 3. Reshard after forward: True, False, a number, None
#
# [`reshard_after_forward`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) takes four kinds of
# value. We try them all with Llama 3 8B on 8 H100, one row of 8,192 tokens. With 4, each rank keeps a quarter of every
# unit between forward and backward, beside its shard.

# %% predict="cost_of_never_resharding"

# %%
eight = Cluster("H100-SXM-80GB", gpus=8)
row = {"micro_batch": 1, "seq_len": 8192, "param_dtype": "bf16"}
values = (True, None, 4, False)
kept = {str(value): simulate("llama3-8b", eight, Plan(**row, reshard_after_forward=value)) for value in values}
print(*(f"{name:5} {sim.peak_memory_bytes / GIB:.1f} GiB" for name, sim in kept.items()), sep="\n")
assert not kept["False"].fits
assert kept["True"].peak_memory_bytes == kept["None"].peak_memory_bytes
assert round((kept["False"].peak_memory_bytes - kept["True"].peak_memory_bytes) / 1e9, 1) == 13.5
assert 3 < (kept["4"].peak_memory_bytes - kept["True"].peak_memory_bytes) / GIB < 4
assert [sim.fits for sim in kept.values()] == [True, True, True, False]
viz.memory_waterfall(kept).titled("Never free a unit, and Llama 3 8B does not fit")

# %% [markdown]
# `True` frees each unit after its forward. `None`, the default, does too, except for the root: its backward comes
# first. `False` keeps them all, so at the end of forward the whole model stands there, 15 GiB of bf16.
#
# A number n keeps a slice of 1/n beside the fp32 shard, here a quarter in bf16. Backward then gathers among 4 ranks of
# one node, for 3.2 GiB more (the picture counts them as shards).

# %% [markdown]
# You may have read that full sharding frees parameters "after backward". Does it? Stuck? `hint("freed_after_forward")`
# gives the next of three hints, `solution("freed_after_forward")` the solution. Either way you can go on.

# %% exercise="freed_after_forward"

# %%
assert (found := run(checked.use, 2, progress=False, show_output=False)[0])[0]
counts = {}
for value in (True, None, False):
    program = toy_program(5, world_size=2, plan=Plan(reshard_after_forward=value))
    counts[f"{value}"] = sum(i.op is Op.ALL_GATHER for i in program.ops)
assert found[1] == counts["None"] == 11
rows, header = tuple((name, f"{n}") for name, n in counts.items()), ("reshard_after_forward", "all-gathers in a step")
HTML(viz.Table("Five units and a root", header, rows).to_html())

# %% [markdown]
# Where is that in the code? One function turns your setting into the ranks that hold a unit between forward and
# backward, and `reshard` follows it. `post_forward` calls it, except in one case: look for the `if`. You will need it
# in section 4.

# %%
in_torch(post_forward_mesh_info, FSDPParamGroup.reshard, FSDPParamGroup.post_forward)

# %% [markdown] covers=["pitfall 13"]
# ### Optional: "FSDP saves nothing"
# A friend calls `fully_shard(model)`, nothing else, and runs out of memory as before. What happened?

# %% predict="only_the_model_wrapped"

# %%
wrapped = {how: simulate("llama3-8b", eight, Plan(**row, wrap=how)) for how in ("block", "root")}
issued = {how: sum(i.op is Op.ALL_GATHER for i in sim.program.ops) for how, sim in wrapped.items()}
whole = {how: sum(sim.memory.peak_by_category[part] for part in ("unsharded", "ag_output")) / GIB
         for how, sim in wrapped.items()}  # fmt: skip
rows = tuple((f"wrap={how}", f"{issued[how]}", f"{whole[how]:.1f} GiB", f"{sim.peak_memory_bytes / GIB:.1f} GiB",
              "yes" if sim.fits else "no") for how, sim in wrapped.items())  # fmt: skip
assert issued == {"block": 65, "root": 1}
assert [sim.fits for sim in wrapped.values()] == [True, False]
assert round(whole["root"]) == 30
header = ("", "all-gathers in a step", "whole parameters, with their buffers", "peak", "fits")
HTML(viz.Table("One unit for everything, and a unit for each block (simulated)", header, rows).to_html())

# %% [markdown]
# Nothing but `fully_shard(model)` makes one unit. One all-gather brings everything, and the model stands there twice:
# as parameters, and as the buffer in which they came. Call it on each block, bottom up, and then on the model. (If your
# peak is activations, no wrapping will help you. Look at its parts before you turn a knob.)

# %% [markdown]
# ## 4. Activations: not sharded, but you can compute them twice
#
# Most of what stands there is **activations**: what forward saves for backward, of a rank's own rows. FSDP does not
# touch them.
# %% [markdown] covers=["coverage 000.28", "coverage 001.52", "pitfall 47"]
# **Activation checkpointing** keeps only the input of what it wraps, and computes the rest again in backward
# ([Chen et al., 2016](https://arxiv.org/abs/1604.06174)). (With a checkpoint on your disk it shares a word.)
#
# So wrap *blocks*. `apply_activation_checkpointing(model, check_fn=...)` puts a `checkpoint_wrapper` around each
# module that `check_fn` picks, non-reentrant by default. Did your peak hardly move? Look at what it picked. Around
# the children of a block, a checkpoint keeps what autograd would have kept anyway.
#
# You pay with a second forward. A step's compute has three parts, one of forward and two of backward, and now you add
# a fourth: a third more. **Selective** checkpointing keeps what is expensive to compute again ([Korthikanti et al.,
# 2022](https://arxiv.org/abs/2205.05198)).

# %% [markdown]
# The block runs again in backward. Must its parameters travel again, too?

# %% exercise="checkpoint_around_units"

# %%
assert list(run(checked.use, 2, progress=False, show_output=False)[0]) == [True, 9]
choices = {"none": None, "selective": "selective", "full": "full"}
long = {name: simulate("llama3-8b", eight, Plan(**row, activation_checkpointing=ac)) for name, ac in choices.items()}
speed = {name: sim.tokens_per_s_per_gpu / long["none"].tokens_per_s_per_gpu for name, sim in long.items()}
print(*(f"{name:9} {share:4.0%} of the tokens per second" for name, share in speed.items()), sep="\n")
assert 0.75 < speed["full"] < 0.82
assert long["full"].peak_memory_bytes < 0.45 * long["none"].peak_memory_bytes
viz.memory_waterfall(long).titled("Recompute the blocks, and more than half of the peak is gone")

# %% [markdown]
# Now you choose. Rows of 4,096 tokens, cards of 40 GB: which setting buys what is missing with the least time? (One of
# them, `cpu_offload`, keeps the shards in the CPU's memory: section 7.)

# %% exercise="plan_for_long_rows"

# %%
chosen, cards = checked.use(), Cluster("A100-SXM-40GB", gpus=8)
others = {"your plan": chosen, "one row, kept": chosen | {"micro_batch": 1, "activation_checkpointing": None},
          "two rows, kept": chosen | {"micro_batch": 2, "activation_checkpointing": None},
          "kept whole": chosen | {"reshard_after_forward": False},
          "checkpointed": chosen | {"activation_checkpointing": "full"},
          "offloaded": chosen | {"cpu_offload": True}}  # fmt: skip
plans = {n: simulate("llama2-7b", cards, Plan(seq_len=4096, param_dtype="bf16", **one)) for n, one in others.items()}
for name, sim in plans.items():
    print(f"{name:14}", f"{sim.tokens_per_s_per_gpu:,.0f} tokens/s per GPU" if sim.fits else "does not fit")
assert plans["your plan"].fits
assert not plans["two rows, kept"].fits
viz.memory_waterfall(plans).titled("Two rows do not fit if all their activations stay")

# %% [markdown]
# ### Optional: which tensors, and one checkpoint around all
#
# Take a block of two linear layers and a GELU. Which tensors does autograd save?

# %% predict="activations_on_two_ranks"

# %% exercise="saved_for_backward"

# %%
torch.manual_seed(0)
given = blocks.inputs(0)[0]
saved = run(lambda use: use(*given), 2, checked.use, progress=False, show_output=False)[0]
assert saved["alone"] == saved["fsdp"] == saved["checkpointed layers"] > 5 * saved["checkpointed blocks"]
rows = tuple((how, f"{n_bytes / 1e3:.0f} kB") for how, n_bytes in saved.items())
HTML(viz.Table("Activations of three blocks", ("", "saved"), rows).to_html())

# %% [markdown]
# Sharding saves none of them, and a checkpoint around each layer saves none either: around each block it does. And once
# around the whole model? We try it without sharding, in this process, forward and backward.


# %%
def peak_mib(wrap):
    torch.manual_seed(0)
    model = wrap(build(GPTConfig.preset("teaching")))
    tokens = torch.randint(0, 256, (8, 128))
    with live_bytes(model) as meter:
        model(tokens, tokens).backward()
    return meter.peak_bytes / 2**20


def each_block(model):
    checkpointing.apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.layers))
    return model


# %% predict="one_checkpoint_around_all"

# %%
ways = {
    "nothing": lambda model: model,
    "each block": each_block,
    "the whole model": checkpointing.checkpoint_wrapper,
}
mib = {name: peak_mib(wrap) for name, wrap in ways.items()}
assert mib["each block"] < 0.6 * mib["nothing"]
assert mib["the whole model"] > 0.95 * mib["nothing"]
rows = tuple((name, f"{peak:.1f} MiB") for name, peak in mib.items())
HTML(viz.Table("Measured in this process", ("a checkpoint around", "peak"), rows).to_html())

# %% [markdown] covers=["coverage 002.30", "coverage 002.29"]
# Around the whole model you compute everything twice and save nothing: backward begins by bringing all activations
# back, at once. Around each block, only those of one block come back at a time.

# %% [markdown]
# ## 5. Then the logits stand there
#
# Checkpoint every block, and look again. What is the largest part now?

# %% predict="largest_with_checkpoints"

# %%
fused = {"torch's loss": "torch", "fused loss": "fused"}
heads = {name: simulate("llama3-8b", eight, Plan(**row, activation_checkpointing="full", cross_entropy=ce))
         for name, ce in fused.items()}  # fmt: skip
saved_gib = (heads["torch's loss"].peak_memory_bytes - heads["fused loss"].peak_memory_bytes) / GIB
print(f"{8192 * 128_256 * 2 / GIB:.1f} GiB of logits in bf16; a fused loss saves {saved_gib:.1f} GiB at the peak")
assert 6.5 < saved_gib < 7.5
assert next(iter(heads["torch's loss"].memory.peak_by_category)) == "logits"
assert saved_gib > 0.6 * heads["torch's loss"].memory.peak_by_category["logits"] / GIB
viz.memory_waterfall(heads).titled("Now the logits are the largest part, and a fused loss takes most of them away")

# %% [markdown]
# Sharding does not touch the logits: they belong to a rank's own rows. A loss that computes in place or in pieces of
# the row does help, and so do fewer rows. Then the peak is somewhere else, and you ask again: *what stands there?*

# %% [markdown] covers=["pitfall 28"]
# ## 6. Out of memory, but only when accumulating
#
# To communicate once a step, you can reduce gradients in the last micro-batch alone: `no_sync()` in FSDP1,
# `set_requires_gradient_sync(False)` in FSDP2. You pay for it in memory. How much?

# %% predict="kept_without_reducing"

# %% exercise="case_11"


# %%
def accumulated(habit):
    batches, units, backward = accumulation.inputs(0)[torch.distributed.get_rank()]
    with live_bytes(*batches) as meter:
        habit([batch.clone() for batch in batches], units, backward)
    return meter.history().tolist()


habits = {"yours": checked.use, "whole until the end": accumulation.stub}
lives = {name: run(accumulated, 2, habit, progress=False, show_output=False)[0] for name, habit in habits.items()}
assert max(lives["yours"]) < 0.8 * max(lives["whole until the end"])
histories(
    lives, "Shards add up in little room, whole gradients do not (measured)", least=accumulation.least_bytes(None)
)

# %% [markdown]
# And torch's own FSDP2? The teaching GPT on four ranks, three micro-batches: reduced each time, or once at the end.
# Its gradients take 4 MiB whole and 1 MiB sharded. The two peaks differ by less than those 3 MiB, because whoever
# reduces holds the buffer of a reduce-scatter instead.


# %%
def gradient_bytes(reduce_each):
    model, peaks = shard(build(GPTConfig.preset("teaching")), fully_shard), []
    tokens = torch.zeros(1, 16, dtype=torch.long)
    for micro_batch in range(3):
        model.set_requires_gradient_sync(reduce_each or micro_batch == 2)
        with live_bytes(model) as meter:
            model(tokens, tokens).backward()
        peaks.append(meter.peak_bytes / 2**20)
    return peaks


each, at_end = (run(gradient_bytes, 4, how, progress=False, show_output=False)[0] for how in (True, False))

# %%
whole_mib = 1_040_768 * 4 / 2**20
print(f"whole gradients: {whole_mib:.1f} MiB; at the peak of the last micro-batch {at_end[-1] - each[-1]:.1f} MiB more")
assert at_end[-1] - each[-1] > 0.4 * whole_mib

# %% [markdown]
# ## 7. Offload: the last resort
#
# `CPUOffloadPolicy` keeps shards in the CPU's memory. Which ones, and what does it cost you?

# %% predict="peak_saved_by_offload"

# %%
offload = {"on the GPU": False, "offloaded": True}
both = {name: simulate("llama3-8b", eight, Plan(**row, cpu_offload=there)) for name, there in offload.items()}
assert 0.5 < both["offloaded"].tokens_per_s_per_gpu / both["on the GPU"].tokens_per_s_per_gpu < 0.6
assert 0.15 < 1 - both["offloaded"].peak_memory_bytes / both["on the GPU"].peak_memory_bytes < 0.19
rows = tuple((name, f"{sim.peak_memory_bytes / GIB:.1f} GiB", f"{sim.tokens_per_s_per_gpu:,.0f}")
             for name, sim in both.items())  # fmt: skip
HTML(viz.Table("Llama 3 8B, its shards", ("", "peak", "tokens/s per GPU"), rows).to_html())

# %% [markdown] covers=["coverage 000.17", "coverage 000.26", "coverage 001.49", "coverage 001.54", "coverage 002.2"]
# Not "the parameters not in use". *All* shards live on the CPU, of parameters, gradients and optimizer state, and the
# optimizer steps there. A shard travels to the GPU before each gather, and a gradient's shard back after each
# reduction. Units, activations and logits stay where they were. Here you save a sixth of the peak and pay two fifths
# of the speed.
#
# In FSDP1 you write `CPUOffload(offload_params=True)`, and gradients follow. In FSDP2 it is
# [`CPUOffloadPolicy(pin_memory=True)`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
# Pinned memory is memory that the system may not move, so copies run while the GPU computes. No other program can
# have it meanwhile. First wrap, checkpoint, and fuse the loss; then think of offload.

# %% [markdown] covers=["coverage 004.67"]
# You will also find `offload_gradients=True` in guides.

# %% predict="offload_gradients_asked"

# %%
try:
    CPUOffload(offload_params=True, offload_gradients=True)
except TypeError as error:
    refused = str(error)
print(refused)
assert "unexpected keyword argument 'offload_gradients'" in refused

# %% [markdown] covers=["pitfall 45"]
# ## 8. Why does `nvidia-smi` say more?
#
# It says 75 GB, and the peak of all tensors was 55.

# %% predict="who_has_the_rest"

# %% [markdown]
# The **caching allocator** *reserves* memory in segments, and keeps them when tensors go ([torch's
# notes](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management)). FSDP1 marks its buffers with
# `record_stream`: nobody may reuse one until another stream has passed its last use. A CPU that runs ahead needs new
# ones meanwhile.
#
# What helps: FSDP2, which waits for events and never calls `record_stream`. In FSDP1, `limit_all_gathers`.

# %%
issued = {
    api: [i.kind for i in toy_program(4, world_size=2, plan=Plan(api=api)).instructions] for api in ("fsdp1", "fsdp2")
}
per_step = {api: {"record_stream": kinds.count(Kind.RECORD_STREAM), "the CPU waits": kinds.count(Kind.CPU_BLOCK)}
            for api, kinds in issued.items()}  # fmt: skip
for api, calls in per_step.items():
    print(f"{api} in a step:", ", ".join(f"{what} {number} times" for what, number in calls.items()))
assert per_step["fsdp2"] == {"record_stream": 0, "the CPU waits": 0}
assert min(per_step["fsdp1"].values()) > 0

# %% [markdown]
# ### Reserved, and in pieces
#
# Our 8B model needs 66.5 GiB at its peak, and the allocator holds 75.3 for it; with FSDP1 (`--api fsdp1`) 78.2, with
# 78.5 to be had. Nobody uses the difference. Freed blocks stay with their stream and their size, and a request that
# fits none of them asks CUDA for more: that is **fragmentation**. When CUDA has nothing left, the allocator gives its
# unused segments back and tries again, and the GPU waits meanwhile.

# %% [markdown]
# So on a GPU look at three numbers of
# [`torch.cuda.memory_stats()`](https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html):
# allocated, reserved, and `num_alloc_retries`, which should be 0.
# [`expandable_segments:True`](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management) lets a segment
# grow instead of asking for another. It is no cure: here the allocator holds 74.9 GiB instead of 75.3
# (`--plan expandable_segments=true`). It pays where lengths change from step to step.

# %% [markdown] covers=["pitfall 38"]
# And a step is not the whole run. Sometimes it saves. Say every rank gathers parameters and AdamW's moments, in fp32.

# %% predict="full_state_of_70b"

# %%
full_gb = 70e9 * (4 + 8) / 1e9
print(f"full: {full_gb:.0f} GB in one place; sharded: {full_gb / 64:.0f} GB on each of 64 ranks")
assert full_gb == 840
assert round(full_gb / 64) == 13

# %% [markdown]
# A checkpoint that each rank writes for itself asks nobody to hold the whole (chapter 9).

# %% [markdown]
# What people say about memory. Decide before you open one:

# %%
misconceptions("peak")

# %% tags=["nbval-ignore-output"]
board("peak")

# %% [markdown]
# ### Your own FSDP: resharding, recomputation
#
# One place in your file decides what a unit keeps between forward and backward.

# %% exercise="after_forward"

# %% tags=["nbval-ignore-output"]
standing = mine()
standing

# %% tags=["nbval-ignore-output"]
standing.picture

# %% [markdown]
# ## Lab: turn the knobs on real ranks
#
# Two ranks train the teaching GPT with torch's FSDP2, in four settings. We predict each peak first, and then count
# every tensor of a step.

# %% tags=["nbval-ignore-output"]
asked = memory.settings(TrainConfig(seq_len=64, device="cpu"), ranks=2, rows=4)
knobs = ("activation_checkpointing=full", memory.BASE, "reshard_after_forward=False", "wrap=root")
some = {name: asked[name] for name in knobs}
counted = memory.count(some)

# %% predict="largest_of_four_peaks"

# %%
for name, setting in some.items():
    print(f"{name:30s} predicted {setting.peak_bytes / 2**20:5.1f} MiB, counted {counted[name] / 2**20:5.1f} MiB")
    assert abs(counted[name] / setting.peak_bytes - 1) < 0.05
assert sorted(some, key=counted.__getitem__) == list(knobs)

# %% [markdown]
# One unit for everything is worst, as it is whole twice: its parameters, and the buffer that they came in.

# %% [markdown]
# **Next:** `lab_02_memory.ipynb` has a dozen knobs, and shows the parts of the peak beside the prediction.
#
# **On one GPU:** `python -m labs.experiments.memory --model gpt2 --seq-len 512`. Checkpointing, a fused loss and
# offload show there too. **On many:** the same command takes one rank per GPU. Watch `max_memory_reserved()` beside
# `max_memory_allocated()`.

# %% [markdown]
# ## What you have seen
#
# - The peak is shards + whole units (three in forward, four in backward) + activations + logits, at *one* moment.
# - Wrapping and resharding shrink units, their gradients and buffers. Checkpoints around blocks shrink activations.
# - A lower bound is an argument about one moment, and a step can reach it.
# - Three ways to lose what sharding saved: whole gradients between micro-batches, one unit for everything, a
#   checkpoint around everything. Offload comes last.

# %% [markdown]
# > **Our 8B model:** add `--activation-checkpointing full` to the command above. Now a step holds about 27 GiB and
# > takes about 1.3 s (1.2 to 1.5), where it took about 1.0 s (0.94 to 1.16). We have room for longer rows and more of
# > them. Before we use it: are the numbers still right?
#
# Next: `08_numerics.ipynb`, what changes them.
