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
# # Lab 1: from DDP to FSDP2 in one diff
#
# Two training loops, each in one file that a plain `torchrun` starts: one with DDP, one with `fully_shard`. They have
# the same model, the same rows, the same clipping. You would do this to your own script before you rent eight cards.
#
# How many lines differ? Are the losses the same? And if a rank stores half of everything, does it need half of the
# memory? (About 30 minutes.)

# %%
from fsdp_sim.learn import predict  # noqa: F401
from labs.experiments import ddp_to_fsdp2
from labs.experiments.gpu_results import result_of
from labs.experiments.pictures import bars

lines = ddp_to_fsdp2.changed_lines()
added = [line for line in lines if line.startswith("+") and not line.startswith(("+++", '+"'))]
assert len(added) == 9
ddp_to_fsdp2.diff()

# %% [markdown]
# Three imports, a mesh, three lines that shard, `full_tensor()`, and how weights are saved. The **mesh** says which
# ranks share the parameters, and on what device. Without it torch takes the machine's accelerator, even if your model
# is on the CPU.

# %% [markdown]
# Three of these lines are worth a second look:
#
# - **Blocks first, then the whole.** Each call makes one unit of what is left; the last takes the embeddings.
# - **The optimizer stays where it was: after.** It must hold the shards. Made before, it would hold whole parameters
#   that FSDP no longer uses, and training would stand still without an error.
# - **`full_tensor()`**: the norm is a DTensor too. This makes a plain tensor of it, the same on every rank,
#   whether each rank has the whole norm or only its part.

# %% [markdown]
# What did *not* change matters too. Each rank still takes **its own rows** (`local_batch`), and `set_device` still
# comes before the first collective. All ranks call `get_model_state_dict`, because it gathers; rank 0 alone saves what
# it returns. If only rank 0 called it, it would wait for the others for ever.
#
# Now the collectives of a step. DDP reduces gradients, in buckets. And FSDP2, with five blocks and a root?

# %% predict="collectives_of_fsdp2"

# %%
simulations = {api: ddp_to_fsdp2.predict(api, ranks=2) for api in ("ddp", "fsdp2")}
for api, simulation in simulations.items():
    issued = ddp_to_fsdp2.issued(simulation)
    print(
        f"{api:5s} {len(issued):2d} collectives:", *(f"{c.kind} {c.bytes / 2**20:.2f} MiB" for c in issued[:3]), "..."
    )
assert [len(ddp_to_fsdp2.issued(simulation)) for simulation in simulations.values()] == [2, 17]

# %% [markdown]
# Six units: six all-gathers in forward. In backward five, because the root was kept. Six reduce-scatters.
#
# Now for real. Torchrun starts both scripts on two ranks as they are, and we watch one step of each: every byte of
# every tensor, every collective.

# %% predict="peak_on_two_ranks"

# %% tags=["nbval-ignore-output"]
result = ddp_to_fsdp2.run(ranks=2)

# %% tags=["nbval-ignore-output"]
result

# %%
row = {(row.name, row.quantity): row for row in result.rows}
for name, quantity in (("ddp", "all-reduces per step"), ("fsdp2", "all-gathers per step")):
    assert row[name, quantity].predicted == row[name, quantity].measured
saved = 1 - row["fsdp2", "peak memory"].measured / row["ddp", "peak memory"].measured
print(f"FSDP2 on two ranks: the same losses, and {saved:.0%} less memory at the peak")
assert 0.2 < saved < 0.4
assert all(abs(error) < 0.05 for error in result.errors().values())

# %% tags=["nbval-ignore-output"]
bars(result.rows, "peak memory", "FSDP2 on two ranks needs less memory than DDP, but not half of it")

# %% [markdown]
# Less, but not half. The ranks divide parameters, gradients and optimizer state. They do not divide activations: each
# rank computes its own rows through every layer.
#
# And the wire carries more. The gathers come twice, while DDP's all-reduce is worth one reduce-scatter and one
# all-gather.

# %%
moved = {name: 2 * r.measured if "all-red" in q else r.measured for (name, q), r in row.items() if "bytes of all" in q}
moved["fsdp2"] += row["fsdp2", "bytes of reduce-scatters"].measured
print(f"FSDP2 moves {moved['fsdp2'] / moved['ddp']:.2f} times what DDP moves")
assert 1.4 < moved["fsdp2"] / moved["ddp"] < 1.5

# %% [markdown]
# 1.5 times is the rule. Here it is a little less, because the root's parameters are not gathered twice.
#
# **On GPUs:** `python -m labs.experiments.ddp_to_fsdp2 --device cuda` runs the same two scripts on NCCL, a rank on each
# GPU. On a single one you see what the diff costs, not what it saves: nothing is divided by one.
# **On several nodes:** start the two scripts with `torchrun --nnodes=...`; not a line of them changes.

# %% [markdown]
# The cells above ran on CPU cores, GPU or not. The cell below runs this lab on every GPU of this machine, a
# rank each. Where torch can use none, it says why, and shows what was recorded on one, if anything was.

# %% tags=["nbval-ignore-output"]
result_of("ddp_to_fsdp2")
