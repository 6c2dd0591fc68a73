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
# # Lab 8: somebody else's model
#
# So far the models were ours. Yours will come from somebody else, like this one: T5 of Hugging Face
# ([Raffel et al., 2019](https://arxiv.org/abs/1910.10683)). It has an encoder, a decoder, and one embedding that both
# read and that also makes the logits.
#
# It learns to write the headline of a text (WikiHow's format; offline the texts are the documentation inside
# `torch.distributed`). (About 30 minutes.)

# %% tags=["nbval-ignore-output"]
from fsdp_sim import viz
from fsdp_sim.learn import predict  # noqa: F401
from fsdp_sim.ranks import run
from labs.experiments.hugging_face import models, predicting, with_accelerate, with_fabric, with_fully_shard
from labs.experiments.hugging_face.batches import Task
from labs.experiments.hugging_face.measuring import MeasuredTraining, watch
from labs.experiments.hugging_face.pitfalls import tied_in_two_units

# %% predict="units_of_t5"

# %%
model = models.empty("t5")  # on the meta device: shapes and ties, no memory
places = [name for name, p in model.named_parameters(remove_duplicate=False) if p is model.shared.weight]
print("one parameter:", ", ".join(places))
print("blocks:", ", ".join(models.blocks(model, "t5")))
assert len(places) == 4

# %% [markdown]
# What units share must be in the unit around them. So each block is a unit, and the rest is the root. From the units
# follows what a step must gather, and how much memory it takes. Predicted, before it runs:

# %%
predicted = predicting.predict(Task("t5"), ranks=2)
for unit, numbers in predicted.units.items():
    print(f"{unit:16}  {numbers:7,} numbers")
print(f"gathered in a step: {predicted.gathered_bytes:,} bytes")
assert list(predicted.units) == ["root", *models.blocks(model, "t5")]

# %% [markdown]
# Now three trainings on two ranks: `fully_shard` by hand, then the same through Accelerate and through Lightning
# Fabric. Beside them, one process. Padding is no target, and rows have unequally many targets. So each rank takes the
# *sum* of its losses, over the targets of *all* ranks.

# %% tags=["nbval-ignore-output"]
ways = {
    "by hand": with_fully_shard.start_fsdp2,
    "Accelerate": with_accelerate.start_accelerate,
    "Fabric": with_fabric.start_fabric,
    "Accelerate as it is": with_accelerate.start_as_it_is,
}
jobs = {name: MeasuredTraining.of(start, Task("t5"), steps=2) for name, start in ways.items()}
alone = {"one": MeasuredTraining.of(with_fully_shard.start_single, Task("t5"), steps=2)}
one = run(watch, 1, alone, record=False, timeout_s=120)[0]["one"]
seen = run(watch, 2, jobs, record=False, timeout_s=120)[0]

# %%
for name, saw in seen.items():
    print(f"{name:20} {len(saw.units)} units, {sum(saw.collectives.values()):2} collectives a step")
    assert all(abs(a / b - 1) < 1e-5 for a, b in zip(saw.losses, one.losses, strict=True))
print("and every one of them has the losses of one process")
assert seen["Fabric"].collectives == seen["by hand"].collectives
assert seen["by hand"].gathered_bytes == predicted.gathered_bytes
assert abs(predicted.peak_bytes / seen["by hand"].peak_bytes - 1) < 0.05

# %% [markdown]
# The bytes are those predicted, the peak memory within 5%. Fabric does what you do by hand: its strategy calls *your*
# function with a mesh. Accelerate finds the blocks by the name of their class, and gives the embedding and the head a
# unit of their own.
#
# And **as it is**, on CPU ranks, Accelerate makes no units at all. It takes the FSDP plugin, says nothing, and trains
# with DDP. (In the run above we set two of its fields by hand.)

# %%
print("Accelerate's units:", ", ".join(seen["Accelerate"].units))
print("as it is:", ", ".join(sorted({op for op, _ in seen["Accelerate as it is"].collectives})))
assert "shared" in seen["Accelerate"].units
assert not seen["Accelerate as it is"].units

# %% tags=["nbval-ignore-output"]
step = seen["by hand"].step
assert [event.unit for event in step.events if event.op.name == "REDUCE_SCATTER"][-1] == "root"
viz.timeline(step).titled("T5 through encoder and decoder and back; last of all go the root's gradients")

# %% [markdown]
# A step of rank 0, recorded. The encoder's blocks run first, then the decoder's; backward is the reverse. The root's
# gradients leave last, because the embedding is used by the first operation of the step and by the last.

# %% predict="embedding_as_a_unit"

# %% tags=["nbval-ignore-output"]
twice = run(tied_in_two_units, 2, "fully_shard", record=False, timeout_s=120, progress=False)[0]
numbers = sum(p.numel() for p in model.parameters())
print(f"{numbers:,} numbers in the model, {twice.params:,} in its units")
print("torch:", twice.refused or "does not check")
assert twice.params == numbers + model.shared.weight.numel()

# %% [markdown]
# The embedding is there twice. `fully_shard` cut the weight of `shared`; the other three names kept the whole one,
# which went to the root. torch 2.13 checks, and refuses at the first forward; older versions do not check. Accelerate
# 1.15 makes the same of T5, unless its embeddings are one module first (`share_embedding`, in the run above).
#
# **Your machine.** CPU: `python -m labs.experiments.hugging_face` (BERT too). One GPU or many: `torchrun
# --nproc_per_node=N -m labs.experiments.hugging_face --pretrained google-t5/t5-small --csv wikihowAll.csv`.
