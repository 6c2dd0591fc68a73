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
# # Lab 2: what does each knob save?
#
# In a step of FSDP parameters, optimizer state, gradients and activations are alive, and whole units come and go. Each
# knob acts on one of these and leaves the others alone. Before you turn one on a cluster, learn here what it does.
#
# The model below needs 18.7 MiB per rank, on two ranks. (About 30 minutes.)

# %%
from fsdp_sim import viz
from fsdp_sim.learn import predict  # noqa: F401

# %% predict="ranks_or_checkpoints"
# %%
from labs.config import TrainConfig
from labs.experiments import memory
from labs.experiments.gpu_results import result_of
from labs.measure.allocations import at_peak
from labs.measure.allocations.strips import memory_picture

base = TrainConfig(seq_len=64, device="cpu")
asked = memory.settings(base, ranks=2, rows=4)
predicted_mib = {name: setting.peak_bytes / 2**20 for name, setting in asked.items()}
for name in (memory.BASE, "8 ranks", "activation_checkpointing=full"):
    print(f"{name:30s} {predicted_mib[name]:5.1f} MiB")
assert predicted_mib["activation_checkpointing=full"] < predicted_mib["8 ranks"] < predicted_mib[memory.BASE]

# %% [markdown]
# No rank was started for these. The simulator plays the program that torch issues, and adds up what is alive. So what
# *is* alive at the peak?

# %% predict="most_of_a_small_peak"

# %% tags=["nbval-ignore-output"]
shown = {"8 rows per rank": "twice the rows", memory.BASE: "as it comes", "8 ranks": "8 ranks",
         "activation_checkpointing=full": "checkpointing"}  # fmt: skip
viz.memory_waterfall({label: asked[name].simulation for name, label in shown.items()})

# %% [markdown]
# Ranks divide the two lower parts, the parameter shards and the optimizer state. Activations belong to a rank's own
# rows, and no number of ranks makes them smaller. Here they are more than half of everything.
#
# Now every setting for real: two ranks (or 4, or 8) with torch's FSDP2, and every tensor of a step counted.

# %% tags=["nbval-ignore-output"]
result = memory.run(ranks=2, rows=4, seq_len=64)

# %% tags=["nbval-ignore-output"]
result

# %%
measured = {row.name: row.measured for row in result.rows if row.measured}
assert set(measured) == set(asked)
assert all(abs(error) < 0.05 for error in result.errors().values())
print(f"{len(measured)} settings, each predicted to 5% or better")

# %% [markdown]
# The peak is right. But is it right for the right reason? Two wrong parts can add up to a right sum. So we run the same
# step once more, and say of every tensor what it is for. Where do the two differ?

# %% tags=["nbval-ignore-output"]
step = memory.counted_step(asked[memory.BASE])
memory_picture(asked[memory.BASE].simulation.timeline, step)

# %%
expected, found = at_peak(asked[memory.BASE].simulation.timeline), at_peak(step)
for category in ("sharded", "optimizer", "unsharded", "ag_output"):
    assert abs(found[category] / expected[category] - 1) < 0.05
print("shards, optimizer state and whole parameters are where they were predicted")

# %% [markdown]
# The simulator lets a unit's activations come and go as one. A real block makes and frees them one by one.
#
# Now read the table against the base, one knob at a time. Three of them often surprise:
#
# - `reshard_after_forward=False` costs memory: whole parameters of all blocks live from forward to backward.
# - `wrap=root` costs too: one unit is the whole model, and it is there at once.
# - `param_dtype=bf16` does **not** halve the optimizer: shards and AdamW stay fp32. It halves whole parameters,
#   gradients and, here most of all, activations.

# %%
base_mib = measured[memory.BASE]
saved = {name: base_mib - mib for name, mib in measured.items()}
assert saved["reshard_after_forward=False"] < 0
assert saved["wrap=root"] < 0
for name, mib in sorted(saved.items(), key=lambda one: -one[1]):
    print(f"{name:34s} {mib:+6.1f} MiB saved of {base_mib:.1f}")

# %% [markdown]
# One more knob is the optimizer itself. Momentum SGD keeps one number per parameter, AdamW two.

# %% predict="saved_by_momentum_sgd"

# %%
kept_mib = 1_040_768 * 4 / 2 / 2**20
print(f"one number fewer for each parameter of this rank: {kept_mib:.2f} MiB")
assert abs(saved["optimizer=sgd_momentum"] - kept_mib) < 0.05

# %% [markdown]
# On CPU ranks you see only half of what `cpu_offload` does, because host and device are one memory. So the table has
# the device's part as predicted, and counts both together.
#
# **On one GPU:** `python -m labs.experiments.memory --device cuda --model gpt2 --seq-len 512` asks CUDA's allocator.
# With one rank nothing is divided; checkpointing, bf16 and offload still save. **On many:** the same command
# takes one rank per GPU. Then watch *reserved* beside *allocated* memory: the gap is fragmentation.

# %% [markdown]
# The cells above ran on CPU cores, GPU or not. The cell below runs this lab on every GPU of this machine, a
# rank each. Where torch can use none, it says why, and shows what was recorded on one, if anything was.

# %% tags=["nbval-ignore-output"]
result_of("memory")
