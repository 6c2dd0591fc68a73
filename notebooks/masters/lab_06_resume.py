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
# torchrun trains on two ranks and saves every second step. While the checkpoint of step 4 is written, rank 0
# is killed: SIGKILL, no last word.
#
# *Predict:* what is on the disk then? And does a run that goes on from it, on **one** rank without FSDP, end
# with the same loss?

# %%
import tempfile
from pathlib import Path

from labs.lab.picture import losses
from labs.lab.resume import (
    MODEL,
    SETTING,
    furthest,
    goes_on,
    kill,
    on_disk,
    predict_bytes,
    restarted,
    tensor_bytes,
    train,
)

# %%
temporary = tempfile.TemporaryDirectory()  # gone with the kernel
folder = Path(temporary.name)

# %% [markdown]
# ## 1. What does a checkpoint weigh?
#
# A parameter in fp32 is 4 bytes, AdamW's two moments are 8; and for each parameter tensor AdamW has a number
# that counts its steps. *Predict* the bytes, for two ranks. For one?

# %%
predicted = predict_bytes(MODEL)
print(f"{predicted:,} bytes, no matter how many ranks write them")

# %% [markdown]
# First a run that nobody disturbs: what all others will be compared with.

# %% tags=["nbval-ignore-output"]
whole = train(*SETTING, ranks=2, out=folder / "whole")

# %%
measured = tensor_bytes(folder / "whole" / "checkpoints" / "step-8")
print(f"{measured:,} bytes in the files of its last checkpoint")
assert measured == predicted

# %% [markdown]
# ## 2. Kill it
#
# In the middle of a save: all files are written, and the folder has not yet been given its name.

# %% tags=["nbval-ignore-output"]
said = kill(folder / "killed", ranks=2, where="before-rename")

# %%
left = on_disk(folder / "killed")
for one in left:
    print(f"{one.name:12}  {one.files} files  {'counts' if one.counts else 'does not count: ' + one.why}")
assert [one.counts for one in left] == [True, False]

# %% [markdown]
# Every byte of step 4 is there, and it counts for nothing: a checkpoint comes into being by **one rename**,
# after all ranks have written, hashed and synced their files. So there is never half of one, and what was
# saved before is never touched. A run that overwrites its only checkpoint has none for a while.

# %% [markdown]
# ## 3. Go on, on one rank
#
# The same command with another number of ranks and another `--api`. Tensors are stored by their own names
# and shapes, not by rank; the batch stays at 8 rows, so the data go on where they were.

# %% tags=["nbval-ignore-output"]
alone = goes_on(folder / "killed", folder / "alone", "--api=single", ranks=1)

# %%
print(f"went on from step {alone.report['resumed_from']}, on 1 rank with api=single")
off = furthest(alone.losses, whole.losses)
print("losses:", " ".join(f"{loss:.2f}" for loss in alone.losses))
assert alone.report["resumed_from"] == 2
assert off < 1e-5

# %% tags=["nbval-ignore-output"]
runs = {"2 ranks, undisturbed": (0, whole.losses), "killed, gone on with on 1 rank": (2, alone.losses[2:])}
losses(runs, "Killed while it saved step 4, gone on with from step 2 on one rank: the same losses")

# %% [markdown]
# The losses of two ranks, up to rounding: one process adds the same numbers in another order.

# %% [markdown]
# ## 4. Let torchrun do it
#
# `--max-restarts=1`: when a rank dies, torchrun ends the others and starts all anew. The script finds the
# newest checkpoint by itself. *Predict:* same number of ranks. Are the losses close, or equal in every bit?

# %% tags=["nbval-ignore-output"]
anew = restarted(folder / "restarted", ranks=2)

# %%
assert anew == whole.losses
print("Equal, bit for bit: parameters, both moments, step, random numbers and place in the data were saved.")

# %% [markdown]
# Leave one of these out and the loss jumps, or, worse, does not: data that are read twice look like progress.

# %% [markdown]
# ## Go on
#
# - `python -m labs.lab.resume` also times a save beside what the disk alone takes, and goes on with FSDP1.
#   `--where after-shard-write` kills earlier.
# - **One GPU or more:** the same command; the trainer uses the GPUs that each rank finds.
# - **Many nodes:** `--out` on a file system that all nodes see, `--async_save=true` to train while it writes,
#   and `torchrun --max-restarts=3`. Kill a node, not a rank.
