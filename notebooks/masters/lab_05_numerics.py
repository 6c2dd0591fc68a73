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
# # Lab 5: precision, accumulation, clipping
#
# Four settings that change the numbers of a training. Each has a right way, and a wrong way that raises no error. You
# predict how far off a number is, then measure it with torch's own FSDP2 and FSDP1. (About 40 minutes.)
#
# bf16 keeps 8 binary digits, so one rounding is off by at most 2⁻⁸ = 0.4%. Now add the gradients of 64 ranks in bf16.

# %% [markdown]
# ## 1. Adding gradients in bf16
#
# Around a ring, partial sums are rounded again and again. The errors have no common direction, so they add up like the
# steps of a drunkard: as the **root** of the number of ranks. So the gradients of two ranks are enough to predict the
# error for any number.

# %%
from fsdp_sim.learn import predict  # noqa: F401
from labs.experiments import numerics
from labs.experiments.gpu_results import result_of
from labs.experiments.numerics import BF16_UNIT

# %% predict="sum_of_64_in_bf16"


# %% tags=["nbval-ignore-output"]
def show(rows, only=""):
    for row in (row for row in rows if only in row.quantity):
        predicted = "" if row.predicted is None else f"{row.predicted:.3f}"
        print(f"{row.name:29}{row.quantity:27}{predicted:>6} predicted {row.measured:6.3f} measured {row.unit}")


rows = numerics.reduction(real=(2, 4))
assert all(abs(row.error) < 0.25 for row in rows)
assert BF16_UNIT < rows[-1].measured < 4 * BF16_UNIT
numerics.reduction_picture(rows)

# %% [markdown]
# 64 gradients: more than one rounding, less than four. That is why `reduce_dtype` is fp32 by default here.
#
# ## 2. fp16: too small for the format
#
# fp16 has a far smaller range than bf16: below 2⁻²⁵ a number becomes 0. At the start every wrong token's logit has a
# gradient of 1 / (vocabulary × tokens in the batch). Take half a million tokens, and a vocabulary of 256. How many of
# these gradients do you lose?

# %% predict="lost_of_half_a_million"

# %%
show(numerics.fp16(2**19))
assert round(100 * numerics.predict_vanished(2**19), 1) == 99.6
assert numerics.predict_vanished(2**19, scale=2.0**16) == 0

# %% [markdown]
# A scaler multiplies the loss, so that nothing is lost on the way, and divides the gradients before the
# update. bf16 has fp32's range and needs none. (The trainer has fp16 on GPUs only.)
#
# ## 3. Accumulation: send less, keep more
#
# Four micro-batches per step on four ranks. You can reduce the gradients of each, or add them up whole on every rank
# and reduce once. What is sent, and what is kept between two micro-batches?

# %%
accumulated = numerics.accumulation(ranks=4, micro_batches=4)
show(accumulated, "gradients sent")
show(accumulated, "gradients kept")
assert all(abs(row.error) < 0.01 for row in accumulated if row.predicted is not None)
assert accumulated[-1].measured < 1e-6
print("The gradients are the same, to a millionth.")

# %% [markdown]
# A quarter of the bytes sent, three times as many kept. With a 7-billion-parameter model `last` keeps 28 GB on every
# GPU, however many there are. If you run out of memory only when you accumulate, look here first.
#
# ## 4. Clipping: whose norm?
#
# With FSDP1 the parameters that a rank sees are its shards. `torch.nn.utils.clip_grad_norm_` takes the norm of these,
# and says nothing. Clip to 0.1 on 4 ranks. What is the true norm afterwards?

# %%
clipped = numerics.clipping(ranks=4, max_norm=0.1)
show(clipped)
after = {row.name: row.measured for row in clipped if "clipped" in row.quantity}
assert abs(after["FSDP2, DTensors"] - 0.1) < 1e-6
assert abs(after["FSDP1, torch.nn.utils"] - 0.2) < 1e-5

# %% [markdown]
# Twice as much: √4. And every rank has scaled its part by another factor, so the direction is wrong too.
# With FSDP1 call the wrapper's `clip_grad_norm_`. FSDP2's DTensors know that they are shards.
#
# ## 5. A mean of means is not the mean
#
# One rank has 240 tokens to learn from, the other 24 (the rest is padding). FSDP averages over *ranks*. How much does
# each token count?

# %% predict="token_of_the_shorter_rank"

# %%
show(uneven := numerics.tokens((240, 24)))
assert all(abs(row.error) < 1e-3 for row in uneven if row.predicted is not None)
assert uneven[-1].measured > 0.1

# %% [markdown]
# Each rank's mean makes a token of the second rank count ten times one of the first. The trainer divides the *sum* of
# the losses by the tokens of all ranks (`labs/loop/step.py`). It multiplies by the number of ranks, because FSDP will
# divide by it.
#
# ## 6. And the training?
#
# The trainer under torchrun, in fp32 and with `param_dtype=bf16` (parameters and optimizer stay fp32).

# %% tags=["nbval-ignore-output"]
curves = numerics.losses(ranks=2, steps=4)
off = max(abs(a / b - 1) for a, b in zip(curves["bf16"], curves["fp32"], strict=True))
assert 0 < off < BF16_UNIT
print("Every loss in bf16 is within 2⁻⁸ of fp32's, and they are not the same.")

# %% [markdown]
# ## Go on
#
# **One GPU or more:** `python -m labs.experiments.numerics --device cuda` trains in fp16 too, with its scaler.
# **Many:** add the error of 1,024 ranks to figure 1 with `predict_reduction(gradients_of(2), 1024)`. And
# compare the losses of `--reduce_dtype=bf16` and `fp32` on your own model before you save half of the bytes.

# %% [markdown]
# The cells above ran on CPU cores, GPU or not. The cell below runs this lab with the trainer on the GPUs of
# this machine, two at most; its other experiments stay on CPU cores. Where torch can use none, it says why,
# and shows what was recorded on one, if anything was.

# %% tags=["nbval-ignore-output"]
result_of("numerics")
