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
# # Lab 4: what can hide an all-gather?
#
# An all-gather costs nothing while something else computes. So the question is *when it is issued*. FSDP1 has
# `BACKWARD_PRE` and `BACKWARD_POST` for that, FSDP2 explicit prefetch. Here you read it off torch's own traces, as you
# would when your job is too slow. (About 40 minutes.)
#
# **What is real:** the ranks, torch's FSDP1 and FSDP2, the traces of torch's profiler, all times *measured*.
# **What is modelled:** the slow network between the ranks, and everything *predicted*.

# %%
from fsdp_sim import viz
from fsdp_sim.learn import predict  # noqa: F401
from fsdp_sim.timeline import Op
from fsdp_sim.timeline.analysis import median_step
from labs.config import TrainConfig
from labs.experiments import overlap
from labs.experiments.gpu_results import result_of
from labs.experiments.pictures import bars
from labs.experiments.prefetch import Experiment
from labs.experiments.result import LabResult, this_machine
from labs.measure.step_summary import first_divergence

config = TrainConfig(n_layer=3, seq_len=64, global_batch=4, device="cpu")
settings = overlap.configs(config)
print("\n".join(settings))

# %% [markdown]
# ## 1. Predict
#
# Three blocks. Each is gathered once in forward and again in backward.
#
# In each of these settings, how many of the six all-gathers are issued **before another unit
# computes**, so that there is something to hide behind?

# %% predict="gathers_ahead_of_post"

# %%
predicted = {name: overlap.predicted_step(setting, ranks=2) for name, setting in settings.items()}
for name, step in predicted.items():
    compute, reduce = overlap.ahead(step)
    print(f"{name:26s} {compute} before another unit computes, {reduce} only before a reduce-scatter")
assert overlap.ahead(predicted["FSDP1, BACKWARD_PRE"]) == (3, 0)
assert overlap.ahead(predicted["FSDP1, BACKWARD_POST"]) == (0, 2)
assert overlap.ahead(predicted["FSDP2, forward prefetch 1"]) == (5, 0)

# %% [markdown]
# ## 2. Run torch, and read its trace
#
# Two ranks train with each setting while torch's profiler records. Its traces become timelines of the same kind as the
# simulator's, with both ranks on one clock. (How? No rank can leave a collective before all have entered, and that says
# how far their clocks are apart.)
#
# Watch block 2 in backward, with `BACKWARD_PRE` and with `BACKWARD_POST`. What comes between its all-gather and its
# computing?

# %% predict="order_of_backward_post"

# %% tags=["nbval-ignore-output"]
measured = overlap.record(settings, ranks=2)
for name in settings:
    assert first_divergence(predicted[name], measured[name]) is None
    assert overlap.ahead(measured[name]) == overlap.ahead(predicted[name])
print("In every setting torch issued what was predicted, in that order.")
begins = {}
for name in ("FSDP1, BACKWARD_PRE", "FSDP1, BACKWARD_POST"):
    step = measured[name].select(step=median_step(measured[name]), rank=0, phase="backward")
    wire = (Op.ALL_GATHER, Op.REDUCE_SCATTER)
    begins[name] = [e.label for e in step.ops if e.op in wire or e.label.startswith("BWD layers")][:6]
    print(f"{name}:\n   ", "\n    ".join(begins[name]))
pre, post = begins.values()
assert pre[1:3] == ["ALL_GATHER(layers.1)", "BWD layers.2"]
assert post[1:4] == ["BWD layers.2", "ALL_GATHER(layers.1)", "REDUCE_SCATTER(layers.2)"]

# %% [markdown]
# `PRE` asks for block 1 before block 2 computes. The gather hides behind that, and two blocks are whole at a time.
#
# `POST` asks after block 2 has computed and was freed. You save memory; the gather can hide only behind the end of that
# computing, on a GPU whose CPU runs ahead. Either way it comes before the reduce-scatter. On NCCL's one queue per group
# it would otherwise wait for the reduction.

# %% [markdown]
# ## 3. What is it worth?
#
# On CPUs torch's FSDP waits for each collective where it is issued; ours does not. We give its ranks a network on which
# a block's all-gather takes about as long as a block's forward. (On a much slower one little could be hidden, on a much
# faster one there would be little to hide.) Backward issues ahead in any case.
#
# How much of the time on the wire lies under computing, without forward prefetch and with it?

# %% tags=["nbval-ignore-output"]
slow = Experiment(world_size=2, batch=8, seq_len=128, network=overlap.SLOW)
(block,) = [unit for unit in slow.units if unit.name == "layers.1"]
n_bytes = sum(param.padded_bytes(2) for param in block.params)
wire_s = overlap.SLOW.seconds("all_gather", n_bytes, 2)
print(f"A block has {n_bytes / 1e6:.2f} MB; its all-gather takes {1e3 * wire_s:.1f} ms at", overlap.SLOW)
rows, steps = overlap.on_slow_network(slow)  # each piece alone, two predictions from them, then two runs
LabResult("overlap", "measured", tuple(rows), this_machine(ranks=2))

# %% tags=["nbval-ignore-output"]
off, on = (steps[f"{name}, measured"] for name in overlap.PREFETCHES)
assert (overlap.ahead(off), overlap.ahead(on)) == ((5, 0), (9, 0))
for name in overlap.PREFETCHES:
    assert first_divergence(steps[f"{name}, predicted"], steps[f"{name}, measured"]) is None
bars(rows, overlap.HIDDEN, "How much of the time on the wire lies under computing")

# %% tags=["nbval-ignore-output"]
last = steps[f"{[*overlap.PREFETCHES][-1]}, predicted"]
viz.compare(last, on, titles=("predicted", "measured")).titled("In the predicted order; only the lengths differ")

# %% [markdown]
# ## 4. The rate limiter
#
# On a GPU the CPU only queues work, and runs ahead. FSDP1 could issue the gathers of all blocks before the first one
# computes, and each of them holds memory. So `limit_all_gathers` makes the CPU wait.
#
# GPT-2 with 774 million parameters on 8 GPUs. How many all-gathers has the CPU issued, at most,
# whose units have not begun to compute? In forward and backward each block has one.

# %% predict="gathers_ahead_with_limiter"

# %%
for row in overlap.limiter_rows():
    print(f"{row.name}: {row.predicted:.0f} (predicted)")
limited, unlimited = overlap.limiter_rows()
assert limited.predicted <= 3 < 30 < unlimited.predicted

# %% [markdown]
# ## What to do on GPUs
#
# - One GPU: no rank to talk to. Read the order of a trace; `labs.cluster.pretend` shows the overlap of a cluster.
# - Several: `python -m labs.experiments.overlap --device cuda --model gpt2 --rows 8 --seq-len 1024` times every
#   setting, FSDP1's without its limiter too, and puts the prediction of the catalogue beside it.
# - Any run: `torchrun ... -m labs.train --out=runs/a --profile=4` writes `runs/a/timeline.jsonl.gz` of all ranks. Its
#   last line tells you: exposed, overlap, waiting for late ranks, idle, and where the prediction was left.

# %% [markdown]
# The cells above ran on CPU cores, GPU or not. The cell below runs this lab on every GPU of this machine, a
# rank each; it takes two or more. Where torch can use none, it says why, and shows what was recorded on
# one, if anything was.

# %% tags=["nbval-ignore-output"]
result_of("overlap")
