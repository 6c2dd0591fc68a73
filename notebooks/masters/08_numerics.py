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
# # What changes the numbers?
#
# FSDP itself changes no number. What you switch on beside it does: low precision, accumulation, clipping, a learning
# rate that follows the GPUs. Each has a right way, and a wrong one that raises no error. Here you measure how far off
# each wrong one is, mend it, and learn to say which setting is behind a bad loss curve.

# %% [markdown]
# > **Our 8B model** computes in bf16, and that is worth a lot. On eight H100, with checkpoints around the blocks, a
# > step takes about 1.3 s. In plain fp32 it would be about 16 s (14 to 17). So bf16 stays. What did it cost us?
# > (`fsdp-sim simulate --model llama3-8b --gpu H100-SXM-80GB --gpus 8 --seq-len 8192 --activation-checkpointing full`,
# > then with `--param-dtype none`)
#
# **Core path, about 45 minutes:** sections 1, 4, 5 and 8, with the exercises marked *core*. The rest is
# there if you like.
#
# **Real:** ranks, gloo, torch's FSDP2 and FSDP1, every gradient. **Modelled:** the memory and speed of GPUs in
# sections 1 and 4. What bf16 and fp16 do to numbers is the same on a CPU; what they gain in speed is not.

# %%
import torch
import torch.distributed as dist
from IPython.display import HTML
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DistributedSampler

import fsdp_sim.mini
from fsdp_sim import Cluster, Plan, simulate, viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.pictures.numerics import curves
from fsdp_sim.learn.pictures.unit import ShardCell, rows_held
from fsdp_sim.ranks import run
from fsdp_sim.schedule import build as build_program
from fsdp_sim.schedule import toy
from fsdp_sim.timeline import Op
from labs.cluster.torchrun import torchrun
from labs.data import load_corpus
from labs.experiments import numerics
from labs.experiments.mine import mine
from labs.loop.minimal import make_optimizer, train_step
from labs.model import build
from labs.model.gpt import GPTConfig

# %%
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def table(caption, header, rows):
    cells = tuple(tuple(map(str, row)) for row in rows)
    return HTML(viz.Table(caption, tuple(map(str, header)), cells).to_html())


# %% [markdown]
# ## 1. Three dtypes
#
# `MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)` is the usual choice. It sounds as if everything were bf16
# now. Let's look at a unit while it trains: its shard, the whole weight in forward, an activation, what travels each
# way, the gradient that the shard gets, Adam's moments, and a buffer (a table of ones).


# %% tags=["hide-input"]
def dtypes():
    model = nn.Sequential(nn.Linear(64, 64))
    model.register_buffer("table", torch.ones(64))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    seen = {"shard": model[0].weight.dtype, "buffer": model.table.dtype}

    def look(module, args, out):
        seen.update({"whole weight": module.weight.dtype, "activation": out.dtype})

    model[0].register_forward_hook(look)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).float().square().mean().backward()
    optimizer.step()
    seen["gradient of the shard"] = model[0].weight.grad.dtype
    seen["Adam's moments"] = optimizer.state[model[0].weight]["exp_avg"].dtype
    return {name: SHORT[dtype] for name, dtype in seen.items()}


# %% predict="what_is_in_bf16"

# %%
found = run(dtypes, 2, progress=False, show_output=False)
travels = {record.op: record.dtype for record in found.records[0]}
kept = dict(found[0]) | {"all-gather": travels["all_gather"], "reduce-scatter": travels["reduce_scatter"]}
assert {name for name, dtype in kept.items() if dtype == "bf16"} == {"whole weight", "activation", "all-gather"}
table("What has which dtype", ("", "dtype"), kept.items())

# %% [markdown] covers=["coverage 002.4", "coverage 002.5", "coverage 002.6", "coverage 003.17"]
# Three things. `param_dtype` is for the *gathered* parameters and for compute. Nothing is stored in it: the shard
# stays fp32, is its own master copy, and takes the step.
#
# `reduce_dtype` is for the reduce-scatter, and in HSDP for the all-reduce between replicas. The result is cast back to
# the shard's dtype. Leave `reduce_dtype` out, and torch up to 2.14 reduces in `param_dtype`. Torch 2.15 reduces in the
# shard's dtype, here fp32, and sends twice the bytes (`fsdp-sim program --torch 2.15 --plan param_dtype=bf16` shows
# it). Write both, and every version does the same. Both are fields of
# [`MixedPrecisionPolicy`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).

# %% [markdown]
# **Buffers** are the rest: running means, masks, tables of positions. An embedding is a parameter. FSDP1 has a
# `buffer_dtype` for buffers and leaves batch norms alone; FSDP2 leaves all buffers as they are.
#
# Where is that in the code? The first function casts what goes into forward. The second says when to divide the
# gradients by the ranks. With fp32 and bf16 NCCL does it while it adds. In fp16 a sum could overflow, so one half of
# the division comes before it and the other half after.

# %%
in_torch(fsdp_sim.mini.precision.cast_forward_inputs, fsdp_sim.mini.precision.gradient_division)

# %% [markdown]
# So how much memory does it save? Take 1.5 billion parameters on eight GPUs, and compute everything in bf16.

# %% predict="memory_left_in_bf16"

# %% tags=["nbval-ignore-output"]
eight = Cluster("A100-SXM-80GB", gpus=8)
settings = {"fp32": {}, "bf16": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
sims = {name: simulate("gpt2-1.5b", eight, Plan(micro_batch=2, **more)) for name, more in settings.items()}
ratio = sims["bf16"].peak_memory_bytes / sims["fp32"].peak_memory_bytes
assert 0.6 < ratio < 0.66
print(f"bf16 takes {ratio:.0%} of the memory of fp32 (simulated)")
viz.memory_waterfall(sims).titled("bf16 takes almost two thirds of the memory of fp32, not half")

# %% [markdown] covers=["coverage 000.19", "coverage 002.3"]
# Not half. With bf16 or without, parameters, gradients and optimizer state take 16 bytes a parameter. What shrinks is
# what comes and goes: activations, whole units, the bytes on the wire. (Logits even grow: the loss makes fp32 copies
# beside those in bf16.)
#
# bf16 has the range of fp32, and 8 binary digits. fp16 has 11 digits and a small range; that is section 3.

# %% [markdown]
# ### Optional: write the step of a unit
#
# Now write the step of a unit, with all three dtypes. Stuck? `hint("cast_gather_reduce")` gives the next of three
# hints, `solution("cast_gather_reduce")` the solution and why it is so.

# %% exercise="cast_gather_reduce"


# %%
def traffic():
    ones = torch.ones(64, 1000)
    return checked.use(ones, lambda weight: torch.zeros_like(weight), 0.1).dtype


# %%
ran = run(traffic, 2, progress=False, show_output=False)
size_bytes = {"bf16": 2, "fp32": 4}
records = ran.records[0]
assert [(record.op, record.dtype) for record in records] == [("all_gather", "bf16"), ("reduce_scatter", "fp32")]
moved = {record.op.replace("_", "-"): size_bytes[record.dtype] * record.numel / 1e3 for record in records}
in_fp32 = {record.op.replace("_", "-"): 4 * record.numel / 1e3 for record in records}
rows = [(op, f"{moved[op]:.0f} kB", f"{in_fp32[op]:.0f} kB") for op in moved]
table("Half the bytes are gathered", ("", "moved", "had all been fp32"), rows)

# %% [markdown]
# ### Optional: what torch 2.14 and 2.15 changed
#
# The simulator knows the programs of three versions, and tests compare them with torch's own, line by line. One step
# of three layers, gathered in bf16, with no `reduce_dtype`:

# %%
changed = []
for version in ("2.13", "2.14", "2.15"):
    program = build_program(toy(3), Plan(param_dtype="bf16", torch=version), world_size=4)
    sent = [sum(i.bytes for i in program.ops if i.op is op) for op in (Op.ALL_GATHER, Op.REDUCE_SCATTER)]
    changed.append((version, len(list(program.lines())), *sent))
assert changed[0][1:] == changed[1][1:]
assert changed[2][3] == 2 * changed[1][3]
assert changed[2][1] < changed[1][1]
table("A step", ("torch", "lines of its program", "bytes gathered", "bytes reduce-scattered"), changed)

# %% [markdown]
# 2.14 issues what 2.13 does. 2.15 reduces in the shard's dtype, so it sends twice as much in backward, and it frees a
# gathered buffer when the next unit copies out, no longer at the end of that wait. If your job got slower with 2.15,
# look for a policy without `reduce_dtype`.

# %% [markdown] covers=["pitfall 33", "coverage 002.8"]
# ## 2. Why do shards and sums stay in fp32?
#
# Because eight binary digits are few. Keep a weight of 1 in fp32 and in bf16, and add a small update a hundred times.

# %% predict="bf16_weight_after_100_updates"

# %%
steps, update = 101, 1e-3
kept_in = {}
for dtype in (torch.float32, torch.bfloat16):
    weight, kept_in[dtype] = torch.ones(1, dtype=dtype), []
    for _ in range(steps):
        kept_in[dtype].append(weight.item())
        weight += update
shown = range(0, steps, 10)
lines = {f"kept in {SHORT[dtype]}": [values[i] for i in shown] for dtype, values in kept_in.items()}
assert abs(kept_in[torch.float32][-1] - 1.1) < 1e-3
assert set(kept_in[torch.bfloat16]) == {1.0}
curves("A bf16 weight never moves: each update is rounded away", lines, shown, x_title="step", y_title="weight")

# %% [markdown] covers=["coverage 004.126"]
# The next bf16 number above 1 is 1 + 2⁻⁷. A thousandth is less than half of the way, so it rounds back to 1, every
# time. That is the argument for a master copy in fp32
# ([Micikevicius et al., 2017](https://arxiv.org/abs/1710.03740)).
#
# If you *load* a model in bf16 and then shard it, its shards are bf16, and so are Adam's moments. Its loss stops
# falling early, or it needs ten times the rate. Load in fp32 and let the policy cast.

# %% [markdown]
# What if only the gradients travel in bf16? `reduce_dtype=bf16` halves their bytes. How far off is a sum over many
# ranks? (We run two with FSDP2; for more, we add up gradients in this process.)

# %% predict="sum_of_16_in_bf16"

# %% tags=["nbval-ignore-output"]
errors = numerics.reduction(real=(2,), added=(2, 4, 8, 16))
assert all(row.measured < 3 * numerics.BF16_UNIT for row in errors)
assert errors[-1].measured > errors[1].measured
assert 0.7 < errors[-1].measured / numerics.BF16_UNIT < 1.5
numerics.reduction_picture(errors)

# %% [markdown]
# More ranks, more error. From some point it grows with the root of their number, and at 16 it is as large as one bf16
# rounding can be at worst.
#
# So a careful choice is: bf16 for what you compute, fp32 for what you add up and for what you keep. Save the other
# half of the bytes when your own loss curve says that you may.

# %% [markdown] covers=["coverage 000.27", "coverage 002.7", "coverage 001.37"]
# ## 3. fp16, and the scaler
#
# What if you use fp16 everywhere? Its numbers end at 65,504, and below 2⁻²⁵ they become 0. Now think of the gradient
# of a wrong logit: it begins at 1 / (vocabulary × tokens of the batch).

# %% predict="tokens_that_fp16_loses"

# %%
n_tokens = [2**k for k in range(12, 24, 2)]
lost = {
    name: [numerics.predict_vanished(n, scale) for n in n_tokens]
    for name, scale in (("no scale", 1.0), ("scaled by 65,536", numerics.SCALE))
}
row = numerics.fp16(2**19)[0]
assert row.measured > 0.99
assert lost["no scale"][0] == 0
assert [numerics.predict_vanished(n) > 0.9 for n in (2**17 - 1, 2**17)] == [False, True]
assert lost["no scale"][-1] > 0.99
rows = [(f"{n:,}", *(f"{share[place]:.0%}" for share in lost.values())) for place, n in enumerate(n_tokens)]
table("Gradients that fp16 loses", ("tokens of the batch", *lost), rows)

# %% [markdown] covers=["coverage 004.51", "coverage 004.52", "pitfall 32"]
# From 2¹⁷ tokens on: times 2⁸ words that is 2²⁵. So you multiply the loss by a **scale** before backward, and divide
# the gradients by it before anything else looks at them. *Unscale, clip, step*, in this order. If something overflows,
# you leave the step out and halve the scale.
#
# The scaler does not touch activations. But sharding gives it a new problem: each rank sees only its own part of the
# gradients.

# %% [markdown]
# Here are two ranks and four steps, two of which overflow on one rank. First each rank decides for itself.


# %%
gradient = [[1.0, 1.0], [9.0, 1.0], [1.0, 1.0], [20.0, 1.0]]  # by step, of rank 0 and rank 1; times 8,192 in fp16


def scales(scale_after):
    def own(step, scale):
        return (torch.tensor([gradient[step][dist.get_rank()]]) * scale).half()

    return [scale_after(torch.zeros(1), own, steps, 8192.0, 0.1)["scale"] for steps in range(5)]


def alone(weights, backward, steps, scale, lr):
    for step in range(steps):
        scale = scale if backward(step, scale).isfinite().all() else scale / 2
    return {"scale": scale}


# %% predict="inf_on_one_rank"

# %% exercise="case_12"

# %%
ways = {"each for itself": alone, "together": checked.use}
lines = {
    f"{way}, rank {r}": values
    for way, train in ways.items()
    for r, values in enumerate(run(scales, 2, train, progress=False, show_output=False))
}
assert lines["together, rank 0"] == lines["together, rank 1"] == [8192, 8192, 4096, 4096, 2048]
assert lines["each for itself, rank 1"][-1] == 8192
rows = [(name, *(f"{scale:,.0f}" for scale in values)) for name, values in lines.items()]
table("The scale, after so many steps", ("", *range(5)), rows)

# %% [markdown] covers=["coverage 004.71", "coverage 004.118", "coverage 004.125"]
# With FSDP1 use
# [`ShardedGradScaler`](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/sharded_grad_scaler.py),
# which makes the ranks agree. With FSDP2 the plain `GradScaler` does, thanks to its DTensors. And if you have the
# policy, leave `torch.autocast` out. Two systems that cast are one too many.
#
# bf16 needs none of this. GPUs since Ampere have it, those of other makers too, and CPUs. To be sure, ask the device:
# `torch.cuda.is_bf16_supported(including_emulation=False)`. (Without that argument an older GPU says yes and emulates
# it.) And a policy of fp32 is simply no policy.


# %%
def range_of(dtype):
    info = torch.finfo(dtype)
    return SHORT[dtype], f"{info.max:.3g}", f"{info.smallest_normal:.3g}", f"{info.eps:.2g}"


ranges = [range_of(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
assert torch.finfo(torch.float16).max == 65504
assert torch.finfo(torch.bfloat16).max > 3e38
assert (torch.ones(1, dtype=torch.bfloat16) + 1).item() == 2  # on this CPU
table("Range and precision", ("", "largest", "smallest normal", "spacing at 1"), ranges)

# %% [markdown]
# ## 4. Accumulation: send less, keep more
#
# Four micro-batches a step, on four ranks. You can reduce the gradients of each. Or you add them up whole on every
# rank and reduce once: `set_requires_gradient_sync(is_last)` in FSDP2, `no_sync()` in FSDP1.

# %% predict="reduced_once_of_four"

# %% tags=["nbval-ignore-output"]
accumulated = numerics.accumulation(ranks=4, micro_batches=4)
assert all(abs(row.error) < 0.01 for row in accumulated if row.predicted is not None)
assert accumulated[-1].measured < 1e-6  # the difference of the two gradients
kept = [row for row in accumulated if row.quantity == "gradients kept"]
sent = {row.name: row.measured for row in accumulated if row.quantity == "gradients sent"}
rows = [
    (row.name, f"{sent[row.name]:.2f} MB", *(f"{mb:.2f} MB" for mb in (row.predicted, row.measured))) for row in kept
]
assert sent["requires_gradient_sync=true"] == 4 * sent["requires_gradient_sync=last"]
table("Gradients of a step, on each rank", ("", "reduce-scattered", "kept, predicted", "kept, measured"), rows)

# %% [markdown] covers=["coverage 001.10", "coverage 004.8", "coverage 004.46", "pitfall 29", "pitfall 30"]
# A quarter of the bytes, and whole gradients on every rank. The code looks like DDP's; the memory does not. It is the
# *reduce-scatter* that you skip. The gathers go on.
#
# So it is a trade, never a must. Out of memory only when you accumulate? Reduce every time. Slow when you accumulate,
# on a slow network? Reduce once, if it fits. (Reducing each time keeps a little more than a quarter: the root's
# reduce-scatter buffer stays until the next reduction.)
#
# One combination is wrong, and it is FSDP1's: CPU offload, and accumulation *outside* `no_sync`. It keeps only the
# newest reduced gradient, as [its documentation](https://docs.pytorch.org/docs/stable/fsdp.html) says. Under
# `no_sync` it is right, and nothing is offloaded meanwhile.

# %% [markdown]
# ### Your own FSDP: accumulation
#
# In your file one part adds up gradients from micro-batch to micro-batch, and its dtype decides their last bits.

# %% exercise="add_gradient"

# %% [markdown]
# ### Optional: a plan, and the mean that is none
#
# When should these eight micro-batches be reduced?

# %% exercise="plan_of_accumulation"

# %% tags=["nbval-ignore-output"]
four, common = Cluster("RTX-4090", gpus=4), {"seq_len": 512, "grad_accum": 8, "reshard_after_forward": False}
common |= {"param_dtype": "bf16", "reduce_dtype": "fp32"}
plans = {"yours": checked.use(), "reduced each time": checked.use() | {"requires_gradient_sync": True}}
sims = {name: simulate("gpt2-1.5b", four, Plan(**common, **plan)) for name, plan in plans.items()}
more_gb = (sims["yours"].peak_memory_bytes - sims["reduced each time"].peak_memory_bytes) / 1e9
print(f"whole gradients take {more_gb:.1f} GB more on every GPU (simulated)")
assert 3 < more_gb < 7
viz.memory_waterfall(sims).titled("Reduce only once, and every GPU holds whole gradients")

# %% [markdown] covers=["coverage 004.70", "misconception 36", "pitfall 31"]
# Now the numbers. You divide each loss by K, as every tutorial does. Is that the same as one large batch?
#
# (Watch the end of an epoch, too. The last group may have fewer batches. A loop that divides by K and steps every K-th
# time divides those wrongly, and may never step.)

# %% predict="loss_divided_by_k"

# %% exercise="case_13"

# %% [markdown]
# Twelve tokens come in four micro-batches of 1, 2, 3 and 6, on two ranks. How much does each token count?


# %%
def counts_of(accumulate):
    mine = torch.eye(12).split([1, 2, 3, 6])[2 * dist.get_rank() :][:2]  # token i is number i
    return (-12 * accumulate(torch.zeros(12), list(mine))).tolist()


def divided_by_k(weight, micro_batches):
    weight.requires_grad_()
    for tokens in micro_batches:
        ((weight - tokens).square().sum(1) / 2).mean().div(len(micro_batches)).backward()
    dist.all_reduce(weight.grad)
    return weight.grad / dist.get_world_size()


# %%
ways = {"each loss divided by K": divided_by_k, "sum over all tokens": checked.use}
lines = {name: run(counts_of, 2, way, progress=False, show_output=False)[0] for name, way in ways.items()}
assert all(abs(count - 1) < 1e-6 for count in lines["sum over all tokens"])
assert abs(lines["each loss divided by K"][0] - 3) < 1e-6
curves("Divide by K: a token alone counts six times one of six", lines, range(1, 13), x_title="token", y_title="counts")

# %% [markdown] covers=["coverage 002.31", "coverage 002.32", "pitfall 26", "coverage 001.36"]
# ## 5. Clipping: whose norm?
#
# Clipping cuts a gradient that is too long down to `max_norm`, after all micro-batches are reduced and before the
# step. FSDP1's parameters are plain tensors that hold a shard. What does `torch.nn.utils.clip_grad_norm_` do with
# them?

# %% predict="norm_after_clipping_shards"

# %%
clipped = numerics.clipping(ranks=4, max_norm=0.1)
after = {row.name: row.measured for row in clipped if "clipped" in row.quantity}
assert abs(after["FSDP2, DTensors"] - 0.1) < 1e-6
assert abs(after["FSDP1, the wrapper's"] - 0.1) < 1e-6
assert abs(after["FSDP1, torch.nn.utils"] - 0.2) < 1e-5
table("The norm after clipping to 0.1", ("with", "norm"), [(name, f"{norm:.3f}") for name, norm in after.items()])

# %% [markdown]
# Each of the four ranks cuts its own shard down to 0.1, by a factor of its own. Norms add up as squares, so you get
# √4 times 0.1. No error, no warning. To know that clipping works, compare a number with a single process. Mend it by
# hand:

# %% exercise="case_14"


# %%
def norm_seen(clip):
    own = torch.arange(1.0, 9.0).chunk(4)[dist.get_rank()]  # a gradient of 1 ... 8 on four ranks
    return clip([own], 1.0)["norm"]


def by_own_shard(shards, max_norm):
    return {"norm": shards[0].norm().item()}


ways = {"own shard": by_own_shard, "all shards": checked.use}
lines = {name: list(run(norm_seen, 4, way, progress=False, show_output=False)) for name, way in ways.items()}
true = torch.arange(1.0, 9.0).norm().item()
assert all(abs(norm - true) < 1e-4 for norm in lines["all shards"])
assert max(lines["own shard"]) < true
rows = [(f"the norm of {name}", *(f"{norm:.2f}" for norm in values)) for name, values in lines.items()]
table("A gradient of 1 to 8 on four ranks", ("", *(f"rank {rank}" for rank in range(4))), rows)

# %% [markdown] covers=["coverage 004.98", "pitfall 27"]
# ### Optional: clip DTensors
#
# And FSDP2? Does torch's own function work there? You will settle that in a moment.
#
# One thing can indeed go wrong, on GPUs only, so not here. With parameters offloaded to the CPU the norm is a number on
# the CPU, and a group with nothing but NCCL cannot reduce it. Make a group with both:
# `init_process_group("cpu:gloo,cuda:nccl")`.

# %% exercise="clip_of_dtensors"

# %%
rows = [torch.ones(2, 3), torch.ones(4, 3)]
ran = run(lambda: checked.use([3 * row for row in rows], 1.0)["norm"], 2, progress=False, show_output=False)
assert abs(ran[0] - (9 * 18 * 2) ** 0.5) < 1e-4
assert [record.op for record in ran.records[0]] == ["all_reduce"]
whole, moved = 2 * sum(row.numel() for row in rows), ran.records[0][0].numel
rows = [("clip_grad_norm_ reduces", moved), ("a gather would bring", whole)]
table("Norms travel, not gradients", ("", "numbers"), rows)

# %% [markdown] covers=["coverage 000.14", "coverage 003.13", "coverage 004.13", "coverage 004.97"]
# ## 6. Does the optimizer communicate?
#
# It holds DTensors, and its state has their shape. For each parameter AdamW keeps `step`, `exp_avg` and `exp_avg_sq`,
# not the parameter itself. What does it have to ask the other ranks?


# %% predict="collectives_of_adamw"


# %%
def a_step():
    model = fully_shard(nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    return list(state), tuple(state["exp_avg"].to_local().shape), model.weight.numel()


# %%
ran = run(a_step, 2, progress=False, show_output=False)
names, shape, numel = ran[0]
ops = [record.op for record in ran.records[0]]
print(f"state: {', '.join(names)}, of {shape[0]} x {shape[1]} on each rank; the whole step: {', '.join(ops)}")
assert (names, shape) == (["step", "exp_avg", "exp_avg_sq"], (32, 64))
assert ops == ["all_gather", "reduce_scatter"]  # of forward and backward; none of the optimizer

# %% [markdown] covers=["coverage 001.5", "coverage 004.53", "coverage 004.74"]
# Nothing. AdamW works element by element, and every rank has the gradient's rows that belong to its own. (ZeRO-1 and
# -2 gather after the step; in FSDP the next forward gathers anyway.)
#
# Any scheduler of learning rates works: it only writes numbers into the optimizer. `zero_grad(set_to_none=True)`, the
# default, frees the reduced gradients. And if an old guide offers you `flatten_parameters`: torch's FSDP never had it.
#
# So you make the optimizer from the shards, after wrapping. Always?

# %% exercise="optimizer_before_wrapping"

# %% tags=["nbval-ignore-output"]
draw = torch.Generator().manual_seed(0)
weight, x = torch.randn(16, 16, generator=draw) / 4, torch.randn(8, 16, generator=draw)
after_step = run(lambda: checked.use(weight, x, 0.5), 2, progress=False, show_output=False)[0]
start = (x @ weight.T).square().mean().item()
assert abs(after_step["FSDP2"] - start) < 1e-6
assert after_step["FSDP1, use_orig_params"] < 0.9 * start
rows = [(how, f"{start:.4f}", f"{loss:.4f}") for how, loss in after_step.items()]
table("An optimizer made before wrapping", ("", "loss before the step", "after it"), rows)

# %% [markdown] covers=["pitfall 34", "pitfall 35", "coverage 001.7"]
# Now **weight decay**. Many trainers decide by a rule: two dimensions, it decays. What does that rule find after
# wrapping, and what does `numel()` say?


# %% tags=["hide-input"]
def what_decays():
    found = {}
    for name in ("before wrapping", "FSDP2", "FSDP1"):
        model = nn.Sequential(nn.Linear(60, 62), nn.LayerNorm(62))
        if name == "FSDP2":
            fully_shard(model)
        if name == "FSDP1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        params = list(model.parameters())
        found[name] = sum(p.dim() >= 2 for p in params), sum(p.numel() for p in params)
    return found


# %% predict="matrices_in_fsdp1"

# %%
by_rank = run(what_decays, 2, progress=False, show_output=False)
decays = {name: [of[name][0] for of in by_rank] for name in by_rank[0]}
numels = {name: [of[name][1] for of in by_rank] for name in by_rank[0]}
assert decays == {"before wrapping": [1, 1], "FSDP2": [1, 1], "FSDP1": [0, 0]}
assert numels["FSDP1"][0] < numels["FSDP2"][0] == numels["before wrapping"][0]
rows = [(name, decays[name][0], f"{numels[name][0]:,}") for name in decays]
table("As rank 0 sees it", ("", "parameters that decay", "numbers in all"), rows)

# %% [markdown]
# FSDP1's shards are flat. So nothing decays, and if you count parameters (or compute a utilisation from them) you
# count one shard. Choose groups by *name, before wrapping*, as `labs/loop/optimizer.py` does, and count before
# wrapping. When you load such an optimizer in FSDP1, `optim_state_dict_to_load` goes by names as well.
#
# In FSDP2 the DTensors keep both dimensions, and `numel()` of the whole.

# %% [markdown] covers=["pitfall 36", "coverage 004.45"]
# ## 7. The learning rate and the global batch
#
# "N GPUs, so N times the rate": you have read that somewhere. Take the same 8 rows on one rank, on two, on four.


# %% predict="norm_by_ranks"


# %%
def gradient_norm(rows=8):
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(32, 32))
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1)).chunk(dist.get_world_size())[dist.get_rank()]
    model(x).square().mean().backward()
    return nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()


norms = {ranks: run(gradient_norm, ranks, progress=False, show_output=False)[0] for ranks in (1, 2, 4)}
print(*(f"{ranks} rank{'s' * (ranks > 1)}: {norm:.6f}" for ranks, norm in norms.items()), sep="\n")
assert max(norms.values()) - min(norms.values()) < 1e-6

# %% exercise="case_15"


# %%
def rates(step, rows):
    weight, mine = torch.zeros(1), -torch.ones(rows, 1)  # a gradient of 1: the step is the rate
    return -step(weight, mine, 0.1, 8).item()


def with_ranks(weight, rows, base_lr, base_rows):
    return weight - base_lr * dist.get_world_size()


steps = {"times the ranks": with_ranks, "by the global batch": checked.use}
lines = {name: [run(rates, n, step, 8 // n, progress=False)[0] for n in (1, 2, 4)] for name, step in steps.items()}
assert all(abs(lr - 0.1) < 1e-6 for lr in lines["by the global batch"])
assert abs(lines["times the ranks"][-1] - 0.4) < 1e-6
rows = [(f"the rate {name}", *(f"{lr:.1f}" for lr in values)) for name, values in lines.items()]
table("Eight rows, on", ("", "one rank", "two", "four"), rows)

# %% [markdown] covers=["coverage 004.73", "misconception 11"]
# Gradients are averaged, so more ranks alone change nothing. But if each rank keeps its rows, the global batch grows
# with the ranks, and then a larger rate may be right. In proportion for SGD ([Goyal et al.,
# 2017](https://arxiv.org/abs/1706.02677)), by the root for Adam ([Malladi et al.,
# 2022](https://arxiv.org/abs/2205.10287)), and up to a point that only a trial shows. Put the global batch into your
# rule, and a move to other GPUs needs no new one.

# %% [markdown] covers=["pitfall 37", "misconception 37"]
# ## 8. Seeds, and the order of the data
#
# You want the same weights on every rank, so you seed them all alike. What does dropout do then? And a sampler that
# nobody calls `set_epoch` on: in what order does it go through the second epoch?


# %% predict="dropped_with_one_seed"


# %%
def masks_and_orders(offset):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0 + offset * rank)
    mask = (nn.functional.dropout(torch.ones(64), 0.5) > 0).tolist()
    sampler = DistributedSampler(range(100), ranks, rank, shuffle=True)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(1)
    return mask, first == second, first == list(sampler)


# %%
same, apart = (run(masks_and_orders, 2, offset, progress=False) for offset in (0, 1))
rows = [("the ranks drop the same, with one seed", same[0][0] == same[1][0])]
rows += [("the ranks drop the same, with the rank added", apart[0][0] == apart[1][0])]
rows += [("the second epoch has the first one's order", same[0][1]), ("and after set_epoch", same[0][2])]
assert (same[0][0] == same[1][0], apart[0][0] == apart[1][0], *same[0][1:]) == (True, False, True, False)
table("Two ranks", ("", ""), [(what, "yes" if so else "no") for what, so in rows])

# %% [markdown]
# So: seed alike, build the model, then seed again with the rank added.
#
# The *sampler's* seed stays alike, though. It shuffles on every rank, and each rank takes its part. With different
# seeds the parts overlap, and some rows are never seen.

# %% exercise="samples_drawn_twice"

# %%
drawn = {f"rank {r}": list(DistributedSampler(range(10), 4, r, shuffle=False)) for r in range(4)}
columns, seen = {name: [] for name in drawn}, set()
for turn in range(3):
    for name, samples in drawn.items():
        again = samples[turn] in seen
        columns[name].append(ShardCell(int(again), f"sample {samples[turn]}{', again' * again}"))
        seen.add(samples[turn])
repeated = sum(cell.rank for column in columns.values() for cell in column)
assert repeated == checked.use(10, 4) == 2
rows_held("Ten samples on four ranks: two come a second time, in the last round", columns, row="draw {}")

# %% [markdown]
# ### Optional: frozen, and in four bits: LoRA and QLoRA
#
# [LoRA](https://arxiv.org/abs/2106.09685) trains small adapters beside frozen layers. Gradients and moments are next
# to nothing then, and what FSDP shards is mostly frozen weights. A step of our 8B model on eight cards, blocks
# checkpointed, falls from about 27 GiB to about 20. With those weights in four bits
# ([QLoRA](https://arxiv.org/abs/2305.14314)) it is about 17: logits and activations do not care. (`--plan
# lora_rank=16`, then `--plan base_quantization=nf4` too.)

# %% [markdown]
# Three traps, all about dtypes:
#
# - Four-bit weights are stored as bytes. FSDP1 cannot flatten them with bf16 ones, so store them *as* bf16:
#   `bnb_4bit_quant_storage=torch.bfloat16` ([PEFT's guide](https://huggingface.co/docs/peft/accelerate/fsdp)).
# - Helpers that prepare a model for k-bit training make fp32 of all that is not quantised. Then a unit has two dtypes,
#   or takes twice the memory that you planned.
# - It may go wrong without a word: a loss of 0.0, then NaN ([accelerate
#   #3983](https://github.com/huggingface/accelerate/issues/3983)). So print the dtype of every parameter after
#   sharding.

# %% [markdown]
# ## 9. What people say
#
# Decide for yourself before you open one.

# %% tags=["nbval-ignore-output"]
misconceptions("numerics")

# %% [markdown]
# ### Your own FSDP: clipping
#
# Beside the sum of section 4, one more part of your file decides the last bits: how gradients are clipped.
# (`standing.picture` draws a step of your file beside torch's, as in chapter 7.)

# %% exercise="clip_grad_norm"

# %% tags=["nbval-ignore-output"]
standing = mine()
standing

# %% tags=["nbval-ignore-output"]
board("numerics")

# %% [markdown]
# ## 10. Lab: the trainer in bf16
#
# `labs/train.py` under `torchrun`, gathering and computing in bf16. Beside it one process in fp32, with the same seed
# and text.

# %% tags=["nbval-ignore-output"]
lab = torchrun("-m", "labs.train", "--param_dtype=bf16", "--steps=4", "--global_batch=8", ranks=2)

# %% predict="losses_in_bf16"

# %% tags=["nbval-ignore-output"]
model = build(GPTConfig.preset("teaching"), seed=0)
optimizer = make_optimizer(model)
fp32 = [train_step(model, optimizer, *load_corpus().batch(step, 8, seq_len=128)).item() for step in range(4)]
off = max(abs(a / b - 1) for a, b in zip(lab.losses, fp32, strict=True))
assert 0 < off < numerics.BF16_UNIT
print(f"losses in bf16 and in fp32 are up to {off:.3%} apart; 2⁻⁸ is {numerics.BF16_UNIT:.2%}")

# %% [markdown]
# `lab_05_numerics.ipynb` predicts each of these numbers before it measures it.
#
# **One GPU or more:** `python -m labs.experiments.numerics` trains in fp16 too, with its scaler. **Many:** compare
# `--reduce_dtype=bf16` and `fp32` on your own model before you save half of the gradients' bytes.

# %% [markdown]
# ## What you have seen
#
# - bf16 for what you gather and compute, fp32 for what you add up and keep. fp16 needs a scaler on which all ranks
#   agree.
# - A mean of means is not the mean. Divide sums, by everybody's tokens. Norms add up as squares.
# - Accumulate without reducing, and you send less and keep whole gradients on every rank.
# - Make the optimizer after wrapping. It needs no communication, and its rate follows the global batch, not the ranks.
# - None of these mistakes raises an error. Compare with one process.

# %% [markdown]
# > **Our 8B model** trains at bf16 speed, with fp32 where sums and shards are, and we know what to compare if its loss
# > looks odd. It will run for days. Somewhere in those days it will be killed.
#
# Next: `09_checkpoints.ipynb`, what must survive.
