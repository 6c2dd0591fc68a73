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
# # Lab 9: several nodes
#
# Inside a node GPUs are joined by links of hundreds of GB/s, and nodes by a network ten times slower. HSDP shards
# inside each node and keeps a copy per node. Take two nodes with two ranks each. How many times fewer bytes does HSDP
# send between the nodes than FSDP over all four ranks? (About 40 minutes.)
#
# **What is real:** two torchrun agents, four ranks, a network between them. **What is not:** the second
# machine. Where Linux allows it, each agent lives in a network namespace of its own, joined by one cable.

# %%
from dataclasses import replace

from fsdp_sim.learn import predict  # noqa: F401
from labs.cluster.launch import read_settings
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.experiments.nodes import across_bytes, hang, picture, run
from labs.model import empty

fsdp, hsdp = TrainConfig(api="fsdp2"), TrainConfig(api="hsdp")
two_by_two = RankPlace(world_size=4, local_world_size=2)

# %% [markdown]
# ## 1. Count
#
# FSDP's all-gathers and reduce-scatters run round all ranks, so they cross the cable. HSDP's stay inside a node, and
# only the shards' gradients are all-reduced across. M is the model's bytes in fp32.

# %% predict="fewer_bytes_with_hsdp"

# %%
model_bytes = 4 * empty(fsdp.model_config).num_params()
for name, gloo in (("NCCL", False), ("gloo", True)):
    sent = [across_bytes(config, two_by_two, gloo=gloo) / model_bytes for config in (fsdp, hsdp)]
    print(f"{name}: each node sends {sent[0]:.2f} M with FSDP, {sent[1]:.2f} M with HSDP")
    assert round(sent[0] / sent[1], 1) == (3.0 if gloo else 2.2)

# %% [markdown]
# gloo reduce-scatters by an all-reduce, which sends twice as much. FSDP pays for that here; on GPUs it does not.
#
# And with more nodes? Take 8 of them, then 64, 2 ranks each. Which of the two grows, and how far?

# %% predict="sent_on_64_nodes"

# %%
for nodes in (2, 8, 64):
    place = replace(two_by_two, world_size=2 * nodes)
    batch = 2 * nodes
    sent = [across_bytes(replace(c, global_batch=batch), place, gloo=False) / model_bytes for c in (fsdp, hsdp)]
    print(f"{nodes:2d} nodes: {sent[0]:.2f} M and {sent[1]:.2f} M")
assert sent[1] < 2.01

# %% [markdown]
# Both, and never far: a ring over N members sends (N - 1) / N of a message. HSDP ends below 2 M, FSDP below 3 M.
#
# ## 2. Run
#
# Each job starts on a fast cable. From what a step takes there, and from the bytes above, we predict what it takes at
# 100 Mbit/s. Then we make the cable that slow while the job runs.

# %% tags=["nbval-ignore-output"]
result = run(mbit=100, steps=2)
print(*result.notes)
picture(result)

# %%
for row in result.rows:
    assert row.quantity != "sent per node and step" or row.measured is None or abs(row.error) < 0.1
print("Bytes across the link within 10% of the prediction, where they can be counted.")

# %% [markdown]
# The time is the cable's plus that of the fast step, which varies on a busy machine. HSDP pays in memory: only the
# ranks of a node divide parameters, gradients and optimizer state, not all ranks.
#
# ## 3. One rank never comes
#
# Rank 1 is busy with something else before the forward of block 3. What do the others print?

# %% predict="what_the_others_print"

# %%
found = hang(rank=1, unit="layers.3", step=1)
print(found.findings[0])
assert found.findings[0].missing == (1,)
assert found.findings[0].unit == "layers.3"

# %% [markdown]
# They print nothing: they wait. The sentence is from torch's **flight recorder**, a ring buffer of the last collectives
# that every rank keeps, gloo's too
# ([tutorial](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)). Ranks 0, 2 and 3 have issued
# number 23 of their group, rank 1 has not. The dump does not name the unit; its place in the step's program does.

# %%
for rank, dump in sorted(found.dumps.items()):
    last, state = dump.entries[-1], "done" if dump.entries[-1].retired else "waits"
    print(f"rank {rank}: #{last.collective_seq_id} {last.kind} of {last.numel:,}, {state}")
assert [dump.entries[-1].retired for _, dump in sorted(found.dumps.items())] == [False, True, False, False]

# %% [markdown]
# ## 4. What to set, and when
#
# On a cluster NCCL's watchdog writes these dumps, if you tell it to. `labs/cluster/launch` does, in a Slurm script and
# in a manifest for Kubeflow Trainer. (Both were checked without a cluster, since none was at hand.) This is what they
# always set; `python -m labs.cluster.launch` has the rest, for the day something is wrong.

# %%
for setting in read_settings():
    if setting.value:
        print(f"{setting.name}={setting.value}\n    {setting.what}")

# %% [markdown]
# ## On your machines
#
# - **No second machine:** `python -m labs.experiments.nodes --lose` kills a node in mid-training and brings it back.
# - **One GPU:** the nodes stay on CPU cores; NCCL wants a GPU for each rank.
# - **Many GPUs:** `sbatch labs/cluster/launch/train.sbatch --model=gpt2 --api=hsdp`, then `--api=fsdp2`: compare
#   `median step` in the two reports. `python -m labs.cluster.flight_recorder runs/JOBID` after a hang.
