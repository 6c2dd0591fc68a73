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
# # Lab 7: activation checkpointing and torch.compile
#
# You checkpoint a block, you compile a block, you shard a block. In which order? A wrong one raises no error: the loss
# is right, and what you wanted to save is not saved. (About 30 minutes.)

# %%
from fsdp_sim.learn import predict  # noqa: F401
from labs.experiments.compile import HOW, measure_peak_bytes, orders, predict_peak_bytes
from labs.experiments.gpu_results import result_of
from labs.experiments.pictures import bars
from labs.experiments.result import ResultRow

# %% predict="checkpoint_compile_shard"

# %% [markdown]
# ## 1. Not keeping activations
#
# `full` keeps the input of each block, and computes the block again in backward. `selective` keeps every other matmul,
# and attention. The simulator knows what each keeps; nothing has run yet.

# %% predict="longer_by_recomputing"

# %%
predicted = {how: predict_peak_bytes(how) for how in HOW}
for how, n_bytes in predicted.items():
    print(f"checkpointing {how:10} peak {n_bytes / 1e6:5.1f} MB")
assert predicted["none"] > predicted["selective"] > predicted["full"]

# %% [markdown]
# Now two ranks train with each, and we count every tensor.

# %% tags=["nbval-ignore-output"]
measured = measure_peak_bytes(ranks=2)
for how, n_bytes in measured.items():
    print(f"checkpointing {how:10} peak {n_bytes / 1e6:5.1f} MB")

# %%
assert all(abs(predicted[how] / measured[how] - 1) < 0.05 for how in HOW)
assert measured["full"] < measured["none"] / 2
print("Every peak is within 5% of what was predicted; full needs less than half of none.")

# %% tags=["nbval-ignore-output"]
rows = [ResultRow(how, "peak memory", predicted[how] / 1e6, measured[how] / 1e6, "MB") for how in HOW]
bars(rows, "peak memory", "Checkpointing every block halves the peak; selective is in between")

# %% [markdown]
# The forward is a third of a step, so computing all of it again makes a step about a third longer. That is what you pay
# on a GPU to fit a longer sequence or a larger batch. `selective` pays less, for less.

# %% [markdown]
# ## 2. Which order?
#
# `labs/wrapping/checkpoint_and_compile.py` checkpoints each block, compiles it, and FSDP shards it last. Here are three
# other orders. Of each, torch's own counters say what the compiler saw: *graphs* it made, *regions* that it knows may
# be computed again, and *breaks*, where it had to stop.

# %% tags=["nbval-ignore-output"]
seen = orders()

# %%
for order, found in seen.items():
    print(f"{order:22} {found.graphs} graphs, {found.checkpoints} regions, {found.breaks} breaks")
assert len({found.loss for found in seen.values()}) == 1
print("And the loss is the same, bit for bit.")

# %% [markdown]
# - **right**: one graph that all blocks share, one for what follows them. The compiler sees the region.
# - **sharded too early**: FSDP's hooks are inside the region, the compiler cannot look into them, and the
#   blocks run eagerly, without a word. The one graph left is what follows the blocks.
# - **compiled too early**: the region is outside the graph. The compiler cannot choose what to keep.
# - **whole model compiled**: it stops at the first hook and starts anew in each block. By luck you get what compiling
#   each block gives.

# %%
right, early = seen["right"], seen["sharded too early"]
assert (right.graphs, right.checkpoints, right.breaks) == (2, 1, 0)
assert (early.graphs, early.checkpoints, early.breaks) == (1, 0, 1)
assert seen["compiled too early"].checkpoints == 0
assert seen["whole model compiled"].breaks > 0

# %% [markdown]
# ## Go on
#
# - `python -m labs.experiments.compile` also predicts and measures the trainer's step times. It feeds rows of other
#   lengths and counts the graphs that are made anew. And it trains compiled: with inductor where there is a C++
#   compiler, else with aot_eager.
# - **One GPU or more:** the same command with `--device cuda`. Then the trainer with `--model=gpt2
#   --compile=true`, with and without `--activation_checkpointing=selective`: predict both peaks, then
#   compare.
# - **On your own model:** `TORCH_LOGS=graph_breaks,recompiles` prints each place. There should be none.

# %% [markdown]
# The cells above ran on CPU cores, GPU or not. The cell below runs this lab with the trainer on every GPU
# of this machine, a rank each; the orders stay on CPU cores. Where torch can use none, it says why, and
# shows what was recorded on one, if anything was.

# %% tags=["nbval-ignore-output"]
result_of("compile")
