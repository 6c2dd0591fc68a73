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
# # Overlap: what hides an all-gather?
#
# FSDP sends half as much again as DDP, and is often as fast. How? Most of it travels while something computes. After
# this chapter you can say why an all-gather is exposed, and tell when no order of issue can help.

# %% [markdown]
# > **Our 8B model** communicates for about 155 ms of each step on eight H100. Its GPUs wait for only about 17 ms of
# > that, and nobody has set a flag. Where are the others? (`fsdp-sim simulate --model llama3-8b --gpu H100-SXM-80GB
# > --gpus 8 --seq-len 8192`; look under *Why it takes as long*.)
#
# **Core path, about 45 minutes:** sections 1, 2, 3 and 4, with the exercises marked *core*. The rest is
# there if you like.
#
# **What is real:** the ranks, the data they exchange, torch's FSDP and its profiler, the programs that torch issues.
# **What is modelled:** the durations in the drawn steps, the slow network between CPU ranks, every GPU.

# %%
import itertools
import tempfile
import time

import torch
from IPython.display import HTML

import fsdp_sim.mini.prefetch as mini_prefetch
from fsdp_sim import Cluster, Plan, engine, simulate, viz
from fsdp_sim.diagnose import diagnose
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, puzzle, solution  # noqa: F401
from fsdp_sim.learn.exercises.overlap import exposed_communication as trace_files
from fsdp_sim.learn.exercises.overlap import prefetch_one_ahead as forward_files
from fsdp_sim.learn.find import file_of
from fsdp_sim.learn.pictures.overlap import beside_ddp, forward_times, issued_ahead
from fsdp_sim.ranks import run
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.timeline import RECORDER, Memory, Op, Phase
from fsdp_sim.timeline.analysis import exposed_comm_s, median_step
from labs.cluster.torchrun import torchrun
from labs.config import TrainConfig
from labs.experiments import overlap as lab_overlap
from labs.experiments.mine import mine

# %% [markdown] covers=["coverage 004.102"]
# ## 1. Queues that wait for each other
#
# A **stream** is a queue of the GPU. Work in one stream runs in sequence; two streams run at the same time. Your CPU
# only fills the queues, and it is far ahead. A model of that: three blocks, 25 ms of forward and 50 ms of backward
# each, 10 ms for a collective, and everything else takes no time.

# %% predict="step_of_three_blocks"


# %%
def blocks(weights):
    root = Unit("root", (), ("embed", ..., "head"))
    return [root, *(Unit(f"layers.{i}", (Param("weight", (n // 4,)),)) for i, n in enumerate(weights))]


def step(plan=None, wire_s=0.010, device="gpu", layers=3, block_bytes=2**20):
    takes_s = {Op.FWD: 0.025, Op.BWD: 0.050, Op.ALL_GATHER: wire_s, Op.REDUCE_SCATTER: wire_s}

    def seconds(i):
        return takes_s.get(i.op, 0.0) if i.unit.startswith("layers") else 0.0

    program = build(blocks([block_bytes] * layers), plan or Plan(), world_size=8)
    return engine.replay(program, seconds, device=device)


# %%
fsdp2 = step()
assert 3 * (10 + 25) + 3 * (10 + 50 + 10) == 315
assert round(1e3 * fsdp2.span_s) == 245
viz.timeline(fsdp2).titled("Only the two ends stick out")

# %% [markdown]
# 245 ms. Look at the two pale red boxes in the row of compute. There the GPU waits, for the first all-gather and for
# the last reduce-scatter. These two are **exposed**, and everything else is hidden.

# %% [markdown]
# Block 1 must not start before its weights are there. Who makes sure? Not the CPU: it left long ago. This is what it
# left in the queues for blocks 0 and 1. Each line reads: what happens, on which stream, to which unit.

# %%
program = build(blocks([2**20] * 3), Plan(), world_size=8)
lines = [line for line in program.lines() if line.startswith(("op", "wait", "record"))]
first, last = (next(n for n, line in enumerate(lines) if line.endswith(f"FWD layers.{i}")) for i in (0, 1))
print(*lines[first : last + 1], sep="\n")
assert (gather := next(n for n, line in enumerate(lines) if "ALL_GATHER(layers.1)" in line))
assert next(line.split() for line in lines[gather:] if line[12:].startswith("compute")) == [
    "wait", "compute", lines[gather + 1].split()[-1],
]  # fmt: skip
assert not any(line.startswith("wait ") for line in lines[first:gather])

# %% [markdown] covers=["coverage 004.27", "coverage 004.25", "misconception 4.29", "misconception 4.30"]
# An **event** is a mark in a stream (`record`). Another stream can stop until the mark is reached (`wait`). Here
# `compute` waits for `e3`, the mark behind the all-gather: because of this line there is no race. And the all-gather
# itself? It waits for `e2`, which lies before forward 0, where block 0's parameters were copied out of their buffer.
# So it waits for nothing that block 0 computes, and gather 1 runs under forward 0. Here is the place in our mini, and
# in torch:

# %%
assert round(1e3 * exposed_comm_s(fsdp2, rank=0)) == 20
in_torch(mini_prefetch.prefetch_unshard, mini_prefetch.backward_prefetch)

# %% [markdown] covers=["coverage 002.18", "coverage 004.105", "coverage 004.107", "misconception 4.119"]
# ## 2. Who issues, and when
#
# In all of this chapter the training loop is the same, and so is what travels. What differs is when an all-gather is
# *issued*. Each block issues its own, before its forward. On a GPU that is early enough, because the CPU is there
# long before the GPU: **implicit prefetch**. On a CPU one thread issues and computes.

# %% predict="gathers_hidden_on_a_cpu"

# %%
on_cpu = step(device="cpu")
assert round(1e3 * on_cpu.span_s) == 275
assert round(1e3 * max(e.end_s for e in on_cpu.ops if e.op == "FWD")) == 3 * (10 + 25)
viz.compare(fsdp2, on_cpu, titles=("a GPU with its CPU ahead", "a CPU alone")).titled(
    "A CPU that computes itself hides nothing in forward"
)

# %% [markdown] covers=["coverage 000.21", "coverage 004.103", "misconception 0.22", "misconception 4.114"]
# In forward every gather is now exposed. **Explicit prefetch** (`set_modules_to_forward_prefetch`) lets a block issue
# the next one's gather before it computes. It moves a line up, and nothing else. On the CPU that gains 20 ms. On the
# GPU it gains nothing: its CPU is ahead anyway. So explicit prefetch pays when the CPU cannot keep up: many small
# kernels, little work in each.

# %% [markdown]
# Prefetching sounds like extra traffic. Is it? Count the all-gathers, with torch's own `fully_shard`. Stuck?
# `hint("gathers_with_prefetch")` gives the next of three hints and `solution("gathers_with_prefetch")` the solution; so
# for every exercise. A cell that you leave unsolved blocks nothing: the chapter goes on with the reference.

# %% exercise="gathers_with_prefetch"

# %% [markdown]
# What is gathered early is not gathered again. But it needs memory until it is used. How much? We prefetch one, two
# and three blocks ahead and count the blocks in memory, gathered or arriving, at the peak of a forward of six.

# %%
depths = {"as it comes": None, "one ahead": 1, "two ahead": 2, "three ahead": 3}
programs = {name: build(blocks([2**20] * 6), Plan(forward_prefetch=depth), 8) for name, depth in depths.items()}
whole = [Memory.UNSHARDED, Memory.AG_OUTPUT]
peaks = {name: engine.memory(six).peak_of(whole, Phase.FORWARD) / 2**20 for name, six in programs.items()}
assert list(peaks.values()) == [3, 3, 4, 5]
assert len({sum(i.op is Op.ALL_GATHER for i in six.ops) for six in programs.values()}) == 1
rows = tuple((name, f"{blocks_held:.0f}") for name, blocks_held in peaks.items())
HTML(viz.Table("Blocks in memory", ("prefetch", "at the peak"), rows).to_html())

# %% [markdown]
# One ahead is free: a GPU whose CPU is early has as many anyway. Each block further ahead costs a block of memory.

# %% [markdown]
# ### Optional: a prefetch of your own
#
# On real ranks, where the thread that computes also issues.

# %% exercise="prefetch_one_ahead"

# %% [markdown]
# The same function on two ranks, over a network as slow as the exercise says, with 40 ms of sleep for each forward.
# This is measured, beside a forward that gathers each unit when it needs it. One gather has nothing before it, and
# yours hides the five others (if your function was not right, this is the reference).


# %%
def slow_forward(unit, weight, x):
    with RECORDER.span(Op.FWD, f"layers.{unit}"):
        time.sleep(forward_files.COMPUTE_S)
        return torch.tanh(weight @ x)


# %% tags=["nbval-ignore-output"]
calls = [(shards, x, slow_forward) for shards, x, _ in forward_files.inputs(0)]
how = {"network": forward_files.NETWORK, "progress": False, "show_output": False}
rows = []
for name, forward in {"gathers when needed": forward_files.one_after_the_other, "yours": checked.use}.items():
    ran = run(lambda *call, forward=forward: forward(*call), 2, each=calls, **how).timeline
    rows.append((name, f"{1e3 * ran.span_s:.0f} ms", f"{1e3 * exposed_comm_s(ran, rank=0):.0f} ms"))
HTML(viz.Table("Six units, measured", ("", "forward", "exposed"), tuple(rows)).to_html())

# %% [markdown]
# ## 3. How much can hide?
#
# Now a slower network: 40 ms for a gather instead of 10. Each forward takes 25 ms, as before.

# %% predict="forward_on_a_slow_network"

# %%
fast, slow = step(wire_s=0.010), step(wire_s=0.040)
assert [round(1e3 * max(e.end_s for e in timeline.ops if e.op == "FWD")) for timeline in (fast, slow)] == [
    10 + 3 * 25, 3 * 40 + 25,
]  # fmt: skip
viz.timeline({"10 ms a collective": fast, "40 ms a collective": slow}).titled(
    "The longer row sets the pace: compute above, the network below"
)

# %% [markdown]
# Above, compute never pauses in forward; below, the wire never does. Whichever is longer sets the pace, and only the
# two ends stand alone.

# %% exercise="forward_time"

# %%
gathers_s = [n / 1e3 for n in (1, 5, 10, 15, 20, 25, 30, 40, 50, 60)]
layers = 12
curves = {
    "one after the other": [layers * (gather_s + 0.025) for gather_s in gathers_s],
    "overlapped": [checked.use(layers, gather_s, 0.025) for gather_s in gathers_s],
}
assert (simulated := [max(e.end_s for e in step(wire_s=g, layers=layers).ops if e.op == "FWD") for g in gathers_s])
assert all(abs(a - b) < 1e-9 for a, b in zip(curves["overlapped"], simulated, strict=True))
forward_times(gathers_s, 0.025, curves, "Up to the length of a forward, a gather costs next to nothing")

# %% [markdown]
# **A gather hides if it takes no longer than the compute beside it.** Compute grows with the tokens, the gather does
# not. So more tokens per GPU, a faster link, or fewer bytes (bf16) hide it.

# %%
assert (grows := [after - before for before, after in itertools.pairwise(curves["overlapped"])])
assert max(grows[:5]) < 0.006  # up to 25 ms, by no more than the first gather does
assert min(grows[5:]) > 0.05

# %% [markdown]
# ## 4. Backward: ask, then compute
#
# Backward runs the blocks from the last to the first. For each, FSDP2 asks for the next block, lets this one compute,
# and sends its gradients away. You have seen the place: `backward_prefetch`, above. There is no argument for it
# (FSDP1 has one: section 8). Write down all that the CPU issues. Then look when each of it runs.

# %% exercise="order_of_backward"

# %%
four = step(layers=4)
shown = ("ALL_GATHER", "BWD", "REDUCE_SCATTER")
backward = [e for e in four.ops if e.phase == "backward" and e.op in shown and e.unit.startswith("layers")]
assert [e.label for e in backward] == [label for label in checked.use(4) if "layers" in label]
assert [round(1e3 * e.start_s) for e in backward if e.label in ("ALL_GATHER(layers.2)", "BWD layers.3")] == [110, 110]
rows = tuple((e.label, f"{1e3 * e.start_s:.0f} to {1e3 * e.end_s:.0f} ms") for e in backward)
HTML(viz.Table("As the CPU issues it", ("", "runs"), rows).to_html())

# %% [markdown]
# Read it in threes: ask for a block, compute the one before, send its gradients. The gather of block 2 runs from the
# moment that block 3's backward does. That backward takes 50 ms, so there is time enough.

# %% [markdown] covers=["coverage 004.104", "misconception 4.115", "misconception 4.116", "misconception 4.118"]
# ## 5. One wire, one queue
#
# FSDP2 has a stream for all-gathers and another for reduce-scatters, yet the two never run at once: one communicator
# is one queue. With `set_separate_reduce_scatter_group(True)`, new in torch 2.13, reduce-scatters get their own. At
# 40 ms a collective the network is the longer row.

# %% predict="saved_by_two_queues"

# %%
queues = {"one queue": Plan(), "two queues": Plan(separate_reduce_scatter_group=True)}
rows = []
for name, plan in queues.items():
    slow = step(plan, wire_s=0.040)
    (asked_s,) = (e.start_s for e in slow.ops if e.label == "ALL_GATHER(layers.0)" and e.phase == "backward")
    rows.append((name, f"{1e3 * asked_s:.0f} ms", f"{1e3 * slow.span_s:.0f} ms"))
assert rows == [("one queue", "250 ms", "380 ms"), ("two queues", "210 ms", "350 ms")]
HTML(viz.Table("A second queue", ("", "gather of block 0 begins", "step"), tuple(rows)).to_html())

# %% [markdown]
# 30 of 380 ms. With one queue, the gather of block 0 stands behind the gradients of block 2. But this model gives both
# queues the full speed of the link at the same time, and a real link does not.

# %% [markdown]
# In one queue all depends on who comes first. Here is a backward in which the wrong one does.

# %% exercise="case_05"

# %% [markdown]
# Measured, on two ranks with the network of the exercise, and 50 ms of sleep for each backward. First the code that
# was to be mended, then the mended one.


# %%
backward_files = file_of("case_05")


def slow_backward(unit, weight, grad):
    with RECORDER.span(Op.BWD, f"layers.{unit}"):
        time.sleep(backward_files.COMPUTE_S)
        before = torch.tanh(weight.T @ grad)
        return before, torch.outer(grad, before)


def timed(backward):
    calls = [(shards, grad, slow_backward) for shards, grad, _ in backward_files.inputs(0)]
    how = {"network": backward_files.NETWORK, "progress": False, "show_output": False}
    return run(lambda *call: backward(*call), 2, each=calls, **how).timeline


# %% tags=["nbval-ignore-output"]
viz.timeline({"queued behind": timed(backward_files.stub), "issued before": timed(checked.use)}, ranks=[0]).titled(
    "Measured: issued before the reduction, a gather hides"
)

# %% [markdown]
# ## The schedule puzzle
#
# Now you are the one who issues. Twelve small steps, each with a goal: a time, sometimes a limit on how many units may
# be whole. Move the hatched lines, or their bars; the engine of this course replays your order at once. One thread
# issues from top to bottom and computes, as on a CPU: a collective travels beside the compute lines below it. The last
# level starts from torch's own order, and you will beat it.

# %% tags=["nbval-ignore-output"]
puzzle()

# %% [markdown] covers=["coverage 001.42", "misconception 1.22"]
# ## 6. Read a trace
#
# `NCCL_DEBUG=INFO` is sometimes given as the way to profile communication. It prints which links and rings NCCL has
# chosen, once, at the start: no times. Times are in a trace of `torch.profiler`. Here are two ranks of torch's own
# FSDP2, on CPU, recorded and read into the same kind of timeline.

# %% predict="exposed_in_a_trace_on_cpus"

# %% tags=["nbval-ignore-output"]
config = TrainConfig(n_layer=3, seq_len=64, global_batch=4, device="cpu")
traced = lab_overlap.record({"FSDP2": config}, ranks=2)["FSDP2"]
viz.timeline(traced, ranks=[0]).titled("On CPUs torch waits for each all-gather where it issues it")

# %% [markdown] covers=["coverage 004.101", "misconception 4.112"]
# All of them. On CPUs torch's FSDP waits for each collective where it issues it, so on a laptop a trace shows the
# *order* and no overlap. (You may see a little that is hidden. Those are the trainer's own all-reduces at the end,
# for the norm of the gradients and the ranks' losses.) The order of issue is the real one, and it is what makes
# overlap possible on GPUs.

# %% [markdown]
# FSDP2 hangs its hooks on the module and gathers DTensors. FSDP1 hangs them on a wrapper and gathers one flat
# parameter. So when you read about either, look which one it is.

# %%
in_backward = traced.select(step=median_step(traced), rank=0, phase="backward")
order = [
    e.label for e in in_backward.ops if e.op in ("ALL_GATHER", "REDUCE_SCATTER") or e.label.startswith("BWD layers")
]
print(*order[:6], sep="\n")
assert order[1:3] == ["ALL_GATHER(layers.1)", "BWD layers.2"]  # asked for before block 2 computes
assert not any(
    compute.start_s < gather.end_s and gather.start_s < compute.end_s
    for phase in ("forward", "backward")
    for ops in (traced.select(step=median_step(traced), rank=0, phase=phase).ops,)
    for gather in ops
    for compute in ops
    if gather.op == "ALL_GATHER" and compute.op in ("FWD", "BWD")
)

# %% exercise="exposed_communication"

# %% [markdown]
# Your function on two steps: the one in the picture above, and a simulated one of GPT-2 on eight RTX 4090. On GPUs
# most of it hides.

# %%
eight_rows = trace_files.simulated("RTX-4090", 8, None)
assert (found := checked.use(eight_rows))
assert abs(found["exposed_s"] - exposed_comm_s(eight_rows, rank=0)) < 1e-9
assert found["exposed_s"] < 0.5 * found["communication_s"]

# %% tags=["nbval-ignore-output"]
steps = {"torch, two CPU ranks": traced.select(step=median_step(traced), rank=0), "simulated, eight GPUs": eight_rows}
rows = [(name, *(f"{1e3 * seconds:.1f} ms" for seconds in checked.use(of).values())) for name, of in steps.items()]
HTML(viz.Table("Communication", ("", "in all", "exposed"), tuple(rows)).to_html())

# %% [markdown] covers=["coverage 000.31"]
# "Slow training? Enable prefetch." It is on already. First find out *what* the step waits for. `diagnose` does that
# for any timeline, and `fsdp-sim diagnose trace.json` for a trace of your own run.

# %%
doctor = diagnose(eight_rows)
print(doctor.headline)
print("first culprit:", doctor.culprits[0].culprit)
assert doctor.culprits[0].culprit != "issued late by the CPU"

# %% [markdown] covers=["coverage 001.23", "coverage 001.44", "misconception 1.12"]
# ## 7. When nothing can hide it
#
# "FSDP reaches 85 to 95% of DDP's speed." "It costs 10 to 15%." No source says where. We take GPT-2 with 350 million
# parameters on 64 GPUs, three links, and more and more tokens per GPU.

# %% predict="share_of_ddps_speed"

# %%
tokens, shares = [128, 256, 512, 1024, 4096, 16384], {}


def speeds(api, cluster):
    plans = [Plan(api=api, micro_batch=max(1, n // 1024), seq_len=min(n, 1024)) for n in tokens]
    return [simulate("gpt2-350m", cluster, plan).tokens_per_s_per_gpu for plan in plans]


for gbps in (100, 25, 10):
    cluster = Cluster("A100-SXM-80GB", gpus=64, bandwidth_gbps=gbps)
    pairs = zip(speeds("fsdp2", cluster), speeds("ddp", cluster), strict=True)
    shares[f"{gbps} Gbit/s per GPU"] = [fsdp / ddp for fsdp, ddp in pairs]
beside_ddp(tokens, shares, "What FSDP costs depends on the tokens per GPU and on the link")

# %%
assert [round(min(values), 2) for values in shares.values()] == [0.93, 0.78, 0.75]
assert all(values[-1] > 0.98 for values in shares.values())
assert (fast_link := Cluster("A100-SXM-80GB", gpus=64, bandwidth_gbps=100))
assert (few_tokens := {
    api: simulate("gpt2-350m", fast_link, Plan(api=api, seq_len=128)) for api in ("fsdp2", "ddp")
})  # fmt: skip
assert (optimizer_s := {
    api: sum(e.duration_s for e in sim.timeline.ops if e.op is Op.OPTIM and e.rank == 0)
    for api, sim in few_tokens.items()
})  # fmt: skip
assert shares["100 Gbit/s per GPU"][0] > 1
assert 0 < few_tokens["ddp"].step_time_s - few_tokens["fsdp2"].step_time_s < optimizer_s["ddp"] - optimizer_s["fsdp2"]
assert optimizer_s["ddp"] > 30 * optimizer_s["fsdp2"]

# %% [markdown]
# There is no such number. Here FSDP costs from next to nothing to a quarter, and all for one model. DDP too must send
# its gradients before the step ends. FSDP sends half as much again, and loses what it cannot hide of that. And once it
# is ahead: with few tokens on the fast link, because its optimizer steps a 64th of the parameters. (The model assumes
# that both reach the link's bandwidth and that all ranks are equally fast.)

# %% [markdown]
# Now open what others say about overlap. Each sentence is wrong or half the truth, and the truth is inside.

# %%
misconceptions("overlap")

# %% tags=["nbval-ignore-output"]
board("overlap")

# %% [markdown]
# Would you rather read overlap as code? `fsdp_sim/mini/readings/one_loop.py` writes DDP, FSDP and FSDP with overlap as
# three loops that differ in marked lines; `torchrun --nproc_per_node=2 FILE` runs it. Here is what hides a gather:
# ```python
# if i > 0:  # <--
#     layers[i - 1].gather()  # <-- before the backward that it travels beside
# grad = layers[i].backward(grad)
# ```

# %% [markdown]
# ### Your own FSDP: prefetch
#
# Your hooks of chapter 4 call `prefetch` when a unit's parameters have arrived and its backward has yet to run. What
# is asked for at that moment travels beside compute.

# %% exercise="prefetch"

# %% tags=["nbval-ignore-output"]
standing = mine()
standing

# %% tags=["nbval-ignore-output"]
standing.picture

# %% [markdown]
# ## 8. Appendix: FSDP1's flags, and its limiter
#
# For you who still read or run FSDP1. Explicit prefetch is `forward_prefetch=True` there. It is off by default, and
# it acts from the second step on: the first one shows it in which sequence the units run. FSDP2 has no such flag: you
# give it the list.

# %%
assert [round(1e3 * step(Plan(forward_prefetch=1), device=device).span_s) for device in ("gpu", "cpu")] == [245, 255]
fsdp1 = build(blocks([2**20] * 3), Plan(api="fsdp1", forward_prefetch=True), world_size=8, steps=2)
for number in (0, 1):
    orders = [i.what for i in fsdp1.ops if i.step == number and i.phase == "forward"]
    print(f"step {number}:", " · ".join(order for order in orders if "layers" in order))
    assert (orders.index("ALL_GATHER(layers.1) n=8") < orders.index("FWD layers.0")) == (number == 1)

# %% [markdown] covers=["coverage 000.20", "coverage 002.15", "coverage 002.17", "coverage 002.26"]
# ### Backward: before, after, or not at all
#
# `BackwardPrefetch.BACKWARD_PRE` (the default) asks for the next block before this one computes, as FSDP2 does;
# `BACKWARD_POST` after, `None` when it is needed. Its streams have other names: `unshard` carries the
# all-gathers, `post-backward` the reduce-scatters. Every rank sends its piece of every block (rows, no left
# or right half) and receives all others: nobody only sends.
#
# We take 20 ms a collective, and a CPU that is ahead.

# %% predict="backward_prefetch_with_a_cpu_ahead"

# %%
modes = {"BACKWARD_PRE": None, "BACKWARD_POST": "BACKWARD_POST", "None": "none"}
gpu = {name: step(Plan(api="fsdp1", backward_prefetch=mode), wire_s=0.020) for name, mode in modes.items()}
ms = {name: [round(1e3 * timeline.span_s), round(1e3 * exposed_comm_s(timeline, 0))] for name, timeline in gpu.items()}
assert ms == {"BACKWARD_PRE": [265, 40], "BACKWARD_POST": [265, 40], "None": [345, 120]}
rows = tuple((name, *(f"{n} ms" for n in of)) for name, of in ms.items())
HTML(viz.Table("With a CPU that is ahead", ("", "step", "exposed"), rows).to_html())

# %% [markdown] covers=["coverage 002.20", "coverage 004.129", "misconception 2.13", "misconception 2.20"]
# `POST` is not serial where the CPU runs ahead: it asks for block 1 after it has *issued* backward 2, which the GPU has
# not begun. `PRE` and `POST` both issue the gather before the reduce-scatter of this
# block. `None` issues it after, and both collectives use one **communicator**, which runs them in the order of issue:
# the gather queues behind the reduction, and the block waits for both: 40 ms for each of blocks 1 and 0. You have seen
# that picture: *queued behind*, in section 5.

# %% [markdown]
# Now let the thread that issues compute as well, as a CPU that is late does.

# %% predict="backward_prefetch_with_a_late_cpu"

# %%
late = {name: step(Plan(api="fsdp1", backward_prefetch=mode), 0.020, "cpu") for name, mode in modes.items()}
ms = {name: [round(1e3 * timeline.span_s) for timeline in (gpu[name], late[name])] for name in modes}
assert list(ms.values()) == [[265, 365], [265, 405], [345, 405]]
assert round(1 - 365 / 405, 2) == 0.10
rows = tuple((name, *(f"{n} ms" for n in of)) for name, of in ms.items())
HTML(viz.Table("A step", ("", "a CPU that is ahead", "a CPU that is late"), rows).to_html())

# %% [markdown] covers=["coverage 002.19"]
# All three: in forward nothing is hidden. In backward only `PRE` still hides its gathers, because it alone issues
# them before the compute. In torch's tutorial "2 to 10% faster" was measured once, and that is no rule. With a CPU
# that is ahead `PRE` and `POST` are equal; with a late one they differ by a tenth of the step. (The model leaves out
# the memory allocator.)

# %% [markdown] covers=["coverage 002.24", "misconception 2.24", "misconception 2.27"]
# ### What it holds
#
# You may read that `None` holds one block, `POST` one and a half, `PRE` two or three. What would half a block be?
# Let's count the whole blocks at the peak of backward, in the sequence in which the CPU allocates and frees. There
# are six, all equal.

# %% predict="whole_blocks_in_backward"

# %%
for name, mode in modes.items():
    six = build(blocks([2**20] * 6), Plan(api="fsdp1", backward_prefetch=mode), world_size=8)
    whole_bytes = engine.memory(six).peak_of([Memory.UNSHARDED], Phase.BACKWARD)
    print(f"{name:14s} {whole_bytes / 2**20:.0f} whole blocks in backward")
    assert whole_bytes / 2**20 == {"BACKWARD_PRE": 2}.get(name, 1)
assert (in_fsdp2 := engine.memory(build(blocks([2**20] * 6), Plan(), world_size=8)))
assert (held := [Memory.UNSHARDED, Memory.AG_OUTPUT])
assert [in_fsdp2.peak_of(held, phase) / 2**20 for phase in (Phase.FORWARD, Phase.BACKWARD)] == [3, 2]

# %% [markdown] covers=["misconception 2.26", "misconception 4.38"]
# There are no halves. With `PRE` two blocks are whole, with `POST` one, with `None` one. All three hold the same
# gradients: a block's own, and as much again in the buffer in which they are sent. `None` saves nothing against
# `POST`. FSDP2 adds up to as much as `PRE`; one of its two is the flat buffer in which the next block arrives. Its
# forward holds three, because there it gathers two ahead (chapter 7 counts that).

# %% exercise="whole_in_backward"

# %% [markdown]
# Your function for blocks of 2, 8, 4, 12, 4 and 6 MiB, beside the time of a step in which every operation takes 10 ms.

# %%
sizes, rows = [2**20 * n for n in (2, 8, 4, 12, 4, 6)], []
for name, mode in modes.items():
    uneven = build(blocks(sizes), Plan(api="fsdp1", backward_prefetch=mode), world_size=8)
    timed_s = engine.replay(uneven, lambda i: 0.0 if i.unit in ("embed", "head", "root") else 0.01).span_s
    held = checked.use(sizes, None if name == "None" else name)
    rows.append((name, f"{held / 2**20:.0f} MiB", f"{1e3 * timed_s:.0f} ms"))
assert [row[1] for row in rows[:2]] == ["16 MiB", "12 MiB"]
assert rows[0][2] == rows[1][2]
HTML(viz.Table("Six uneven blocks", ("", "whole at the peak", "step"), tuple(rows)).to_html())

# %% [markdown]
# With `PRE` the block of 12 MiB and a neighbour of 4, with `POST` the 12 alone. Their steps take as long.

# %% [markdown]
# ### A CPU too far ahead: the limiter
#
# A CPU that runs ahead issues all gathers of a forward at once, and each has memory from the moment it is issued.
# FSDP1's **rate limiter** (`limit_all_gathers=True`, the default) stops the CPU until the GPU is done with an earlier
# block, so that two or three are under way. We simulate GPT-2 with 774 million parameters, in 36 blocks that each do
# enough work to keep the GPU behind the CPU.

# %% predict="gathers_under_way_without_limiter"

# %%
cluster = Cluster("A100-SXM-80GB", gpus=16, bandwidth_gbps=100)
limits = {}
for limit in (True, False):
    plan = Plan(
        api="fsdp1", limit_all_gathers=limit, micro_batch=8, param_dtype="bf16", activation_checkpointing="full"
    )
    limits[f"limit_all_gathers={limit}"] = simulate("gpt2-774m", cluster, plan)

# %%
timelines = {name: sim.timeline for name, sim in limits.items()}
(asked,) = issued_ahead(timelines, "All-gathers under way").tables
assert [row[1] for row in asked.rows] == ["3", "36"]
HTML(asked.to_html())

# %% [markdown]
# 3 with the limiter; without it all 36, the whole model. The step takes as long either way, because the wire
# is the same. What grows is memory: FSDP1 frees with `record_stream`, which keeps a block until the GPU has
# passed, while the CPU already asks for the next one. FSDP2 needs no limiter: its streams wait for events, so
# memory does not depend on how far the CPU is ahead.

# %%
times_s = [sim.step_time_s for sim in limits.values()]
active = [sim.memory.active_bytes for sim in limits.values()]
print(f"{times_s[0] * 1e3:.1f} and {times_s[1] * 1e3:.1f} ms; {active[1] / active[0] - 1:.0%} more memory in use")
assert abs(times_s[1] / times_s[0] - 1) < 0.01
assert 1.1 < active[1] / active[0] < 1.3

# %% [markdown]
# ## Lab: a trace of your own
#
# `labs.train` writes a timeline of all ranks with `--profile`, and ends with a line that says how much was exposed and
# where the prediction was left. With more GPUs the command is the same, with `--nproc_per_node` as many as you have;
# on one there is nobody to talk to. `lab_04_overlap.ipynb` runs FSDP1 and FSDP2 in all settings.

# %% tags=["nbval-ignore-output"]
with tempfile.TemporaryDirectory() as folder:
    options = ("--steps=3", "--n_layer=3", "--global_batch=4", "--seq_len=64", "--profile=3", f"--out={folder}")
    lab = torchrun("-m", "labs.train", *options)

# %%
assert len(lab.losses) == 3
assert "exposed" in lab.output

# %% [markdown]
# ## What you have seen
#
# - Streams wait for events; what is issued early runs early, under somebody else's compute.
# - A gather hides if it takes no longer than the compute beside it; only the two ends of a step stand alone.
# - One communicator is one queue: a gather issued after a reduction waits for it. So FSDP2 asks before it computes.
# - How much FSDP costs follows from tokens per GPU and the link. It is not a constant.

# %% [markdown]
# > **Our 8B model**: the gather of a block takes about 1.1 ms, and the forward beside it about 8.9 ms. It hides, with
# > room to spare. The 17 ms are the two ends: the root, which everything waits for, and the last gradients. All this
# > holds for one unit a block. Who decided that?
#
# Next: `06_wrapping.ipynb`, what should be one unit.
