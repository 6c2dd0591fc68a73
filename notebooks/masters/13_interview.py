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
# # The interview: say it, with a number
#
# An interviewer wants to hear a number, where it comes from, and what would change it. Here every question draws its
# numbers anew, and a wrong answer meets the mistake that usually leads to it. By the end you can hold a mock interview
# of half an hour, and you know which section to read again.

# %% [markdown]
# > **Our 8B model**, one last time. "How much memory does it need on 8 cards? And why does your step take 1.3 seconds?"
# > You have counted the bytes, hidden the gathers, cut the units, saved it, moved it to 64 cards and found its bugs.
# > Now say it in two minutes.
#
# **Core path, about 45 minutes:** sections 1 to 5, with the exercises marked *core*. The mock interview of section 6
# takes half an hour more, another day if you like. The rest is there too.
#
# **What is real:** the whiteboard exercises run on ranks. **What is computed:** every answer, by this library,
# when it is asked. Nothing is looked up in a list.

# %%
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn import board, check, hint, in_torch, predict, solution  # noqa: F401
from fsdp_sim.learn.drill import ask, mock, sheet, spoken, whiteboard
from fsdp_sim.learn.find import load
from fsdp_sim.learn.judges.account import message_bytes, sent_bytes
from fsdp_sim.learn.pictures.bug_hunt import error_of, where_ranks_stand
from fsdp_sim.learn.pictures.checkpoints import reads
from fsdp_sim.learn.pictures.collectives import sent_bars
from fsdp_sim.learn.tried import tried
from fsdp_sim.mini.group import FSDPParamGroup
from fsdp_sim.ranks import run
from fsdp_sim.viz.theme import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

# %% [markdown]
# ## 1. One question
#
# `ask` draws a question: by its topic, by its name, or, with nothing in brackets, what is due. Before you run the
# second cell, write your own number into it, with a unit.

# %%
question = ask("states_of_a_rank", seed=11)
question

# %%
question.answer("5 GB")

# %% [markdown]
# Your interviewer first hears the order of magnitude, then whether you know what is in it. So you may be 5% off. But
# say GB or GiB (they differ by 7%), and don't say a bare "7.9": you will be asked, of what?
#
# Which mistake gives the number in the next cell?

# %%
of_all = question.question.given["parameters"] * 16
reply = question.answer(f"{of_all / 1e9:.0f} GB")
assert not reply.right
assert reply.cause
reply

# %% [markdown]
# ## 2. The same question, another assumption
#
# 16, 18 or 20 bytes per parameter? 2Ψ or 3Ψ on the wire? Sources disagree because they count different things: see the
# [ZeRO paper](https://arxiv.org/abs/1910.02054), sections 3 and 7. The strong answer says which. So do these questions.

# %%
ask("recipe_of_a_number", seed=3)

# %% [markdown]
# ## 3. In which order, and why
#
# Letters, apart or together. The answer names the first place that is wrong, and the reason.

# %%
order = ask("issued_in_backward", seed=5)
order

# %%
order.answer(" ".join("abcdefgh"[: len(order.question.options)]))

# %% [markdown]
# ## 4. Whiteboard
#
# Three times you get the minutes that an interviewer gives, and the check of the course. `whiteboard` starts the clock.
# Say aloud what you do. What is on each rank now? What leaves it? Who waits for whom? (Section 9 has three more.)

# %% tags=["nbval-ignore-output"]
clock = whiteboard("all_gather_from_sends")
clock

# %% exercise="all_gather_from_sends"

# %% tags=["hide-input"]
print(clock.stop(checked))
gathered = tried("all_gather_from_sends", checked.use)
bars = {f"rank {r}": [(ALL_GATHER, sent_bytes(of) / 2**10)] for r, of in enumerate(gathered.records)}
assert all(whole.equal(gathered[0]) for whole in gathered)
assert all(abs(sent_bytes(of) / (3 / 4 * gathered[0].nbytes) - 1) < 0.01 for of in gathered.records)
sent_bars(bars, "KiB sent", "Every rank sends three shards of four: all links work at once")

# %% [markdown]
# An all-reduce has two halves, and between them there is room for an optimizer. That is ZeRO-1.

# %% tags=["nbval-ignore-output"]
clock = whiteboard("zero1_step")
clock

# %% exercise="zero1_step"

# %% tags=["hide-input"]
print(clock.stop(checked))
stepped = tried("zero1_step", checked.use)
whole = stepped[0]["weights"].nbytes / 2**10
kinds = {"reduce_scatter": REDUCE_SCATTER, "all_gather": ALL_GATHER}
parts = [(kinds[record.op], 3 / 4 * message_bytes(record) / 2**10) for record in stepped.records[0]]
bars = {"ZeRO-1": parts, "DDP": [(ALL_REDUCE, 2 * 3 / 4 * whole)]}
assert abs(sum(kib for _, kib in parts) / (2 * 3 / 4 * whole) - 1) < 0.01
assert 4 * stepped[0]["momentum"].numel() == stepped[0]["weights"].numel()
sent_bars(bars, "KiB sent by rank 0, as rings", "ZeRO-1 sends what DDP sends, and keeps a fourth of the momentum")

# %% [markdown]
# The last one hangs. Read the code of the exercise first. Who waits for whom?

# %% tags=["nbval-ignore-output"]
hang = error_of(tried, "case_40", load("case_40").stub)
stands = where_ranks_stand(hang, "One rank is in an all-reduce, and no other will come")
assert sum("all_reduce" in "".join(row) for row in stands.tables[0].rows) == 1
stands

# %% tags=["nbval-ignore-output"]
clock = whiteboard("case_40")
clock

# %% exercise="case_40" tags=["nbval-ignore-output"]

# %% tags=["hide-input"]
print(clock.stop(checked))
mended = tried("case_40", checked.use)
calls = {rank: [record.op for record in of] for rank, of in enumerate(mended.records)}
assert len({tuple(of) for of in calls.values()}) == 1
assert calls[0].count("all_reduce") == 4
bars = {f"rank {r}": [(ALL_REDUCE, float(of.count("all_reduce")))] for r, of in calls.items()}
sent_bars(bars, "all-reduces in four steps", "Mended, every rank reduces its norm in every step")

# %% [markdown]
# ## 5. Say it, and be heard
#
# Half of an interview is talk. Speak for two minutes, and type what you said into the box. It listens: it marks the
# words that made a point, asks for what is missing, one thing at a time, and then goes further down. No network, no
# large model: only words, so it can be wrong. Then overrule it, with a reason. Where you see no box, call `answer`.

# %% tags=["nbval-ignore-output"]
walk = spoken("walk_through_a_step")
walk

# %%
reply = walk.answer(
    "Before a block's forward we all-gather its weights, and afterwards the whole weights are dropped. "
    "Everybody runs every layer, on data of its own."
)
reply

# %%
walk.answer("Before its backward we gather it once more.")

# %% [markdown]
# ## 6. Half an hour
#
# Mixed topics. It gets harder after a right answer and easier after a wrong one, and in every fourth you talk. Type and
# press Enter; `?` if you do not know, `q` to end with the report that a hiring committee would write. In a terminal:
# `fsdp-sim drill mock`. With `mock(design="dense_70b")`, or `fsdp-sim drill mock --design dense_70b`, it ends with an
# open question: you plan 70B on 256 GPUs, and the simulator judges your numbers.

# %% tags=["nbval-ignore-output"]
interview = mock(minutes=30)
interview

# %% [markdown]
# ## 7. What comes back, and a sheet
#
# What you missed is asked again in minutes. What you knew comes back in days, then weeks: `fsdp-sim drill` begins with
# what is due. The sheet has one rule for each question, and nothing else. `fsdp-sim drill sheet --html` makes a page to
# print.

# %%
sheet()

# %% [markdown]
# ## 8. Lab: settle it
#
# "38 collectives? I do not believe you." Then show it: the best answer is an experiment. Torch's own FSDP with three
# blocks and a root, one step. How many all-gathers, how many reduce-scatters?


# %% predict="all_gathers_of_three_blocks"


# %%
def one_step():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 8))
    for block in list(model)[:3]:
        fully_shard(block)
    fully_shard(model)
    model(torch.ones(4, 64)).sum().backward()


step = run(one_step, 2, progress=False)
ops = [record.op for record in step.records[0]]
gathers, reductions = (sum(op.startswith(kind) for op in ops) for kind in ("all_gather", "reduce_scatter"))
print(f"{gathers} all-gathers and {reductions} reduce-scatters")
assert (gathers, reductions) == (2 * 3 + 1, 3 + 1)

# %% [markdown]
# Each block is gathered twice, the root once: it is kept for backward, which begins with it. Every unit is
# reduced once. With NCCL the counts are the same. And if your interviewer asks where it says so? Here, in a few lines:

# %%
in_torch(FSDPParamGroup.post_forward)

# %% [markdown]
# ## 9. Three more for the whiteboard
#
# The first one is asked most of all. The usual mistake passes the *whole* tensor round. It gives the right sum, and
# sends W - 1 tensors where 2(W - 1)/W are enough ([Patarasuk and Yuan, 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)).

# %% tags=["nbval-ignore-output"]
clock = whiteboard("ring_all_reduce")
clock

# %% exercise="ring_all_reduce"

# %% tags=["hide-input"]
print(clock.stop(checked))
ring = tried("ring_all_reduce", checked.use)
mib, tensor = [sent_bytes(of) / 2**20 for of in ring.records], ring[0].nbytes / 2**20
bars = {f"rank {r}": [(ALL_REDUCE, sent)] for r, sent in enumerate(mib)}
bars["the whole tensor round"] = [(ALL_REDUCE, 3 * tensor)]
assert all(abs(2 * sent / (3 * tensor) - 1) < 0.01 for sent in mib)
sent_bars(bars, "MiB sent", "Send pieces, not the whole tensor: on four ranks that is half as much")

# %% [markdown]
# DDP does not call one all-reduce per gradient: too many small messages. Why does it not call one for all of them?

# %% tags=["nbval-ignore-output"]
clock = whiteboard("ddp_buckets")
clock

# %% predict="why_ddp_has_buckets"

# %% exercise="ddp_buckets"

# %% tags=["hide-input"]
print(clock.stop(checked))
reduced = tried("ddp_buckets", checked.use)
limit = load("ddp_buckets").judge.inputs(0)[0][1] / 2**10
bars = {f"bucket {n}": [(ALL_REDUCE, message_bytes(r) / 2**10)] for n, r in enumerate(reduced.records[0], 1)}
assert all(message_bytes(record) / 2**10 >= limit for record in reduced.records[0][:-1])
layers, ready = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), []
for name, parameter in layers.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
layers(torch.ones(1, 2)).sum().backward()
assert ready[-1].startswith("0.")  # so one message of all gradients would leave when backward has ended
sent_bars(bars, "KiB reduced", f"A bucket leaves when it holds {limit:.0f} KiB, while backward goes on")

# %% [markdown]
# A checkpoint of four ranks is read by two. Which of its parts does each of them need?

# %% tags=["nbval-ignore-output"]
clock = whiteboard("reshard_checkpoint")
clock

# %% exercise="reshard_checkpoint"

# %% tags=["hide-input"]
print(clock.stop(checked))
shards = list(torch.arange(10).float().unsqueeze(1).chunk(4))
halves = [checked.use(shards, rank) for rank in range(2)]
assert torch.cat(halves).equal(torch.cat(shards))
files = {f"shard {r}": (int(shard[0]), int(shard[-1]) + 1) for r, shard in enumerate(shards)}
wanted = {f"rank {r}": (int(half[0]), int(half[-1]) + 1) for r, half in enumerate(halves)}
assert files["shard 1"][0] < wanted["rank 0"][1] == wanted["rank 1"][0] < files["shard 1"][1]
reads(files, wanted, "Ten rows, cut for four ranks and for two: shard 1 is needed by both")

# %% [markdown]
# Three more are in earlier chapters, and you can time them in the same way: `reduce_scatter_from_sends` (02),
# `shard_and_unshard` (04), `case_14` (08).
#
# ## What you have seen
#
# - A number, where it comes from, and what would change it. That is the whole art.
# - When sources disagree, say what each of them counts.
# - What you missed comes back. Ten minutes a day with `fsdp-sim drill` are enough.
#
# > **Our 8B model** is trained. With yours, begin where we began: count the bytes, then look for red.
