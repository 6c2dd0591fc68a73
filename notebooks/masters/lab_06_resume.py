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
# # Lab 6: checkpoint, kill it, resume on fewer ranks
#
# Torchrun trains on two ranks and saves every second step. While it writes the checkpoint of step 4, we kill rank 0:
# SIGKILL, no last word. Sooner or later a cluster does this to every long run.
#
# What is on the disk then? And if you go on from it, on **one** rank without FSDP, do you end with the same loss?
# (About 30 minutes.)

# %% [markdown]
# ## 1. What does a checkpoint weigh?
#
# A parameter in fp32 is 4 bytes, AdamW's two moments are 8, and for each parameter tensor AdamW has a number that
# counts its steps. How many bytes is that for two ranks, and for one?

# %%
import tempfile
from pathlib import Path

from fsdp_sim.learn import predict  # noqa: F401
from fsdp_sim.learn.pictures.numerics import losses
from labs.experiments import resume
from labs.experiments.gpu_results import result_of
from labs.experiments.resume import SETTING, train

# %% predict="bytes_by_ranks"

# %%
temporary = tempfile.TemporaryDirectory()  # gone with the kernel
folder = Path(temporary.name)
predicted = resume.predict_bytes(resume.MODEL)
print(f"{predicted:,} bytes, no matter how many ranks write them")

# %% tags=["nbval-ignore-output"]
whole = train(*SETTING, ranks=2, out=folder / "whole")  # nobody disturbs it: what all others are compared with
measured = resume.tensor_bytes(folder / "whole" / "checkpoints" / "step-8")
assert measured == predicted
print(f"{measured:,} bytes in the files of its last checkpoint")

# %% [markdown]
# ## 2. Kill it
#
# In the middle of a save: all files are written, and the folder has not yet got its name.

# %% tags=["nbval-ignore-output"]
said = resume.kill(folder / "killed", ranks=2, where="before-rename")

# %% predict="left_on_the_disk"

# %%
left = resume.on_disk(folder / "killed")
for one in left:
    print(f"{one.name:12}  {one.files} files  {'counts' if one.counts else 'does not count: ' + one.why}")
assert [one.counts for one in left] == [True, False]
assert left[0].bytes == left[1].bytes

# %% [markdown]
# Every byte of step 4 is there, and it counts for nothing. A checkpoint comes into being by **one rename**, after all
# ranks have written, hashed and synced their files. So there is never half of one.
#
# ## 3. Go on, on one rank
#
# Another number of ranks, another `--api`: that works, because tensors are stored by their own names and shapes, not by
# rank. The batch stays at 8 rows, so the data go on where they were.

# %% tags=["nbval-ignore-output"]
alone = resume.goes_on(folder / "killed", folder / "alone", "--api=single", ranks=1)
runs = {"2 ranks, undisturbed": (0, whole.losses), "killed, gone on with on 1 rank": (2, alone.losses[2:])}
losses(runs, "Killed while it saved step 4, gone on with from step 2 on one rank: the same losses")

# %%
print(f"went on from step {alone.report['resumed_from']}, on 1 rank with api=single")
print("losses:", " ".join(f"{loss:.2f}" for loss in alone.losses))
assert alone.report["resumed_from"] == 2
assert resume.furthest(alone.losses, whole.losses) < 1e-5

# %% [markdown]
# The losses of two ranks, up to rounding: one process adds the same numbers in another order.
#
# ## 4. Let torchrun do it
#
# With `--max-restarts=1`, when a rank dies torchrun ends the others and starts all anew. The script finds the newest
# checkpoint by itself. The same number of ranks as before.

# %% predict="restarted_on_two_ranks"

# %% tags=["nbval-ignore-output"]
anew = resume.restarted(folder / "restarted", ranks=2)
assert anew == whole.losses
print("Equal, bit for bit: parameters, both moments, step, random numbers and place in the data were saved.")

# %% [markdown]
# Leave one of these out and the loss jumps. Or, worse, it does not: data that are read twice look like progress.
#
# - `python -m labs.experiments.resume` also times a save beside what the disk alone takes, and goes on with FSDP1.
# - **One GPU or more:** the same command with `--device cuda`: a rank on each, and `--deterministic=true` in
#   all runs, since attention's backward on a GPU may add in any order.
# - **Many nodes:** `--out` on a file system that all nodes see, `--async_save=true` to train while it writes,
#   and `torchrun --max-restarts=3`. Kill a node, not a rank.

# %% [markdown]
# The cells above ran on CPU cores, GPU or not. The cell below runs this lab on every GPU of this machine, a
# rank each. Where torch can use none, it says why, and shows what was recorded on one, if anything was.

# %% tags=["nbval-ignore-output"]
result_of("resume")
