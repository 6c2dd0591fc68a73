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
# # Lab 10: the fastest plan that fits
#
# You have a model, 4 rows per rank, a cluster of 8 ranks on a slow link, and 16 MiB of memory per rank. FSDP2 can keep
# parameters after forward, prefetch, recompute activations, or take the rows in two micro-batches. That makes 16 plans.
# Which two of these settings save memory, and which cost time? (About 30 minutes.)
#
# **What is real:** torch's own FSDP2, its schedule, its memory, the computing, on one process.
# **What is modelled:** the other ranks and the wire. So **the loss means nothing** here.

# %%
from fsdp_sim import viz
from fsdp_sim.learn import predict  # noqa: F401
from labs.experiments.gpu_results import result_of
from labs.experiments.tune import SPACE, TuneOptions, check, choose, rows_of, search

limit_bytes = 16 * 2**20
config, cluster = TuneOptions(ranks=8, bandwidth_gbps=0.5).asks
print(cluster)
for key, values in SPACE.items():
    print(f"{key}: {' or '.join(map(str, values))}")

# %% [markdown]
# ## 1. Let the simulator try all of them
#
# A plan is simulated in milliseconds. But on CPUs a catalogue knows little of small kernels and of Python. So we time
# the pieces of a step (a block's forward, a copy) once for each way to compute, over a wire that takes no time. Then
# the simulator plays torch's program with these pieces and the cluster's wire.

# %% predict="memory_of_forward_prefetch"

# %% predict="settings_that_save_memory"

# %% tags=["nbval-ignore-output"]
plans = search(config, cluster)
for plan in plans:
    print(f"{1e3 * plan.step_time_s:5.0f} ms  {plan.peak_bytes / 2**20:5.1f} MiB  {plan.name}")

# %% [markdown]
# ## 2. Time against memory
#
# Below and to the left is better. Filled plans fit, hollow ones do not. The line joins the plans that no other one
# beats in both. Where it is steep, a little memory costs you much time.

# %% tags=["nbval-ignore-output"]
viz.pareto(rows_of(plans, limit_bytes)).show()

# %%
memory = {plan.name: plan.peak_bytes for plan in plans}
defaults = memory["torch's defaults"]
print(f"torch's defaults need {defaults / 2**20:.1f} MiB")
assert defaults > limit_bytes
assert memory["activation_checkpointing=full"] < limit_bytes
assert memory["micro_batch=2"] < limit_bytes
assert memory["reshard_after_forward=False"] > defaults
assert memory["forward_prefetch=1"] == defaults

# %% [markdown]
# Torch's defaults do not fit. Recomputing and smaller micro-batches both save memory, and both cost time: one computes
# every block's forward twice, the other gathers and reduces every unit twice. Which is cheaper depends on the link.
# That is why you ask a simulator.
#
# Prefetching one block ahead in forward costs no peak memory here: the peak is in backward.

# %% [markdown]
# ## 3. Check three of them
#
# Will the plan that was chosen really fit? And will the fastest of all really not? Now torch's FSDP2 runs each of them
# as rank 0 of 8. Its collectives move the bytes that a rank would receive, then hold their stream for as long as the
# wire takes.

# %% tags=["nbval-ignore-output"]
chosen = choose(plans, limit_bytes)
result = check(chosen, steps=5)
result

# %%
peak = {row.name: row for row in result.rows if row.quantity == "peak memory"}
assert peak["fastest that fits"].measured * 2**20 <= limit_bytes < peak["torch's defaults"].measured * 2**20
assert all(abs(row.error) < 0.05 for row in peak.values())
print("The fastest that fits does fit, torch's defaults do not, and predicted memory is within 5% of the real.")

# %% [markdown]
# ## 4. Predicted and run
#
# Above is the simulator's step of the chosen plan, below the real one of torch's FSDP2, on a pretended wire. In the
# real one a wait divides an operation in two, and your machine may have done something else meanwhile.

# %% tags=["nbval-ignore-output"]
above, below = (result.timelines[f"fastest that fits, {which}"] for which in ("predicted", "pretended"))
viz.compare(above, below, titles=("predicted", "pretended")).show()

# %%
gathers = [[e.label for e in timeline.ops if e.op == "ALL_GATHER"] for timeline in (above, below)]
assert gathers[0] == gathers[1]
print("The real step gathers what was predicted, in the same order.")

# %% [markdown]
# ## On one GPU, and on many
#
# - **One GPU**: `python -m labs.experiments.tune --device cuda --cluster here --ranks 64 --model gpt2-xl
#   --limit-mib 60000`. The kernels, the overlap of streams and the allocator are the GPU's own; only the
#   wire is pretended. No GPU was at hand when this was written: that path has never run.
# - **Many**: train the plan that was chosen with `torchrun ... -m labs.train`, each key as `--key=value`.
# - **None**: `fsdp-sim sweep` simulates plans for clusters of the catalogue, without any run.

# %% [markdown]
# The cells above ran on CPU cores, GPU or not. The cell below runs this lab on one GPU of this machine, as
# rank 0 of 64 like it. Where torch can use none, it says why, and shows what was recorded on one, if
# anything was.

# %% tags=["nbval-ignore-output"]
result_of("tune")
