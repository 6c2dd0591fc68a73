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
# # Gallery: every figure, and what to read in it
#
# A figure takes a `Timeline`, whoever made it: the simulator, four processes of this machine, or the
# profiler of your own run. It says in words what it shows, and has its numbers as a table.
#
# As saved here the figures are pictures. Run the notebook (about a minute) and they answer the mouse.

# %%
from dataclasses import replace

import numpy as np

from fsdp_sim import Cluster, Plan, engine, simulate, viz
from fsdp_sim.diagnose import diagnose
from fsdp_sim.explore import Sweep
from fsdp_sim.schedule import build, toy
from fsdp_sim.timeline import to_pandas, write_chrome
from labs.experiments.prefetch import Experiment, training_only

eight = Cluster("A100-SXM-80GB", gpus=8)
sixteen = Cluster("A100-SXM-80GB", gpus=16, bandwidth_gbps=100)  # two nodes and a slow network between them
gpt2 = {"micro_batch": 4, "param_dtype": "bf16", "reduce_dtype": "fp32"}

# %% [markdown]
# ## A training step
#
# A lane is a stream: what stands in one lane runs in that order. **Red** is exposed communication: the wire
# works and the compute lane has nothing to do. Below it, on the same axis, what is alive and what for.

# %% tags=["nbval-ignore-output"]
step = simulate("gpt2-124m", sixteen, Plan(**gpt2))
assert 0.08 < step.exposed_comm_s / step.step_time_s < 0.12
viz.timeline(step.timeline).titled("A tenth of this step is red: GPT-2 on two nodes and a slow network")

# %% [markdown]
# ## Two steps on one axis
#
# The same step twice: each all-gather is asked for when it is needed, or two blocks ahead. Below, block by
# block, what that gains.

# %% tags=["nbval-ignore-output"]
needed = simulate("gpt2-124m", sixteen, Plan(**gpt2, unshard_async_op=True))
ahead = simulate("gpt2-124m", sixteen, Plan(**gpt2, forward_prefetch=2))
assert ahead.exposed_comm_s < 0.7 * needed.exposed_comm_s
assert abs(ahead.step_time_s / needed.step_time_s - 1) < 0.001
pair = viz.compare(needed.timeline, ahead.timeline, titles=("asked when needed", "two blocks ahead"))
pair.titled("Two blocks ahead hides more and gains nothing: in forward the CPU launches no sooner")

# %% [markdown]
# ## Predicted and measured
#
# Four processes of this machine train a small GPT with the mini-FSDP. The prediction was made before that
# run, from what single pieces cost alone.

# %% tags=["nbval-ignore-output"]
experiment = Experiment()
predicted = experiment.predict(experiment.measure_pieces(4), forward_prefetch=1)
measured = training_only(experiment.run(5, forward_prefetch=1).timeline)
viz.compare(predicted, measured, titles=("predicted", "measured")).titled(
    "The same program twice: as predicted from its pieces, and as four processes ran it"
)

# %% [markdown]
# ## Who holds what, moment by moment
#
# A column is a rank, a row a shard. Play it, or step. No layer lives on one GPU: every rank computes all of
# them, and keeps its own row of each.

# %% tags=["nbval-ignore-output"]
viz.shard_map(build(toy(3), Plan(), world_size=4))

# %% [markdown]
# ## A collective, chunk by chunk
#
# Real numbers, moved and added by the real algorithm. An all-reduce is a reduce-scatter and an all-gather;
# FSDP puts the optimizer, and the next forward, between the two.

# %% tags=["nbval-ignore-output"]
viz.collective("all-reduce", ranks=4)

# %% [markdown]
# ## What the peak is made of

# %% tags=["nbval-ignore-output"]
hopper = Cluster("H100-SXM-80GB", gpus=8)
llama = {"micro_batch": 1, "seq_len": 8192, "param_dtype": "bf16"}
kept = simulate("llama3-8b", hopper, Plan(**llama))
recomputed = simulate("llama3-8b", hopper, Plan(**llama, activation_checkpointing="full"))
assert 0.55 < 1 - recomputed.peak_memory_bytes / kept.peak_memory_bytes < 0.62
peak = viz.memory_waterfall({"everything kept": kept, "checkpointing": recomputed})
peak.titled("Compute the blocks again in backward, and nearly three fifths of the peak are gone")

# %% [markdown]
# ## Can this network hide this model?
#
# Left, the familiar roofline: kernels against the GPU. Right, the same for FSDP: units against the network.

# %% tags=["nbval-ignore-output"]
viz.roofline(recomputed)

# %% [markdown]
# ## More GPUs
#
# The same work per GPU, short sequences. A shard per GPU means ever longer rings; with HSDP the shards stay
# within a node, and only gradients travel further.

# %% tags=["nbval-ignore-output"]
short = {"micro_batch": 1, "seq_len": 2048, "param_dtype": "bf16"}
roce = Cluster("H100-SXM-80GB", gpus=8, bandwidth_gbps=200)
lines = {
    "8 x 400 Gbit/s per node": ("llama3-8b", hopper, Plan(**short)),
    "200 Gbit/s per GPU": ("llama3-8b", roce, Plan(**short)),
    "the same, HSDP": ("llama3-8b", roce, Plan(**short, shard_size=8)),
}
assert all(
    abs(np.divide(*(simulate(m, replace(c, gpus=n), p).tokens_per_s_per_gpu for n in (1024, 8))) - left) < 0.04
    for (m, c, p), left in zip(lines.values(), (0.51, 0.43, 0.89), strict=True)
)
viz.scaling(lines, gpus=[8, 16, 32, 64, 128, 256, 512, 1024]).titled(
    "One ring through 1,024 GPUs loses half the speed; shards that stay in a node lose a tenth"
)

# %% [markdown]
# ## A thousand ranks, one of them slow
#
# A million bars say nothing. A band says when most ranks run an operation; the slowest has its own row.

# %% tags=["nbval-ignore-output"]
thousand = simulate(
    "llama3-8b",
    Cluster("H100-SXM-80GB", gpus=1024),
    recomputed.plan,
    skew=lambda seconds, ranks: engine.straggler(seconds, ranks, rank=700, factor=1.2),
)
viz.rank_bands(thousand)

# %% [markdown]
# ## Which plan?
#
# Every combination, simulated. On the line are the plans that nothing else beats in both time and memory.

# %% tags=["nbval-ignore-output"]
fixed = {"model": "llama3-8b", "gpu": "H100-SXM-80GB", "gpus": "16", "seq_len": "8192"}
vary = {
    "micro_batch": ["1", "2", "4"],
    "activation_checkpointing": ["none", "selective", "full"],
    "reshard_after_forward": ["true", "false"],
}
viz.pareto(Sweep(fixed, vary))

# %% [markdown]
# ## How true are the predictions?
#
# All published runs the project knows, 8 to 512 GPUs. Where the simulator is wrong, the figure says so.

# %% tags=["nbval-ignore-output"]
viz.accuracy()

# %% [markdown]
# ## Why is my all-gather not overlapped?
#
# `fsdp-sim diagnose TRACE.json` answers that for a trace of torch's profiler; here for the run above.

# %% tags=["nbval-ignore-output"]
print(diagnose(measured))

# %% [markdown]
# ## Out of here
#
# Into ui.perfetto.dev, and into pandas.

# %% tags=["nbval-ignore-output"]
write_chrome(measured, "step.trace.json.gz")
to_pandas(measured).groupby(["op", "lane"], observed=True)["bytes"].agg(["count", "sum"])

# %% [markdown]
# ## Step through a real run
#
# Every recorded event of the run above, the line of the mini-FSDP that issued it, and what is alive then. Here
# are its telling moments; without `.show(live=False)` arrow keys go through all of them, both ways.

# %% tags=["nbval-ignore-output"]
viz.debugger(measured).show(live=False)

# %% [markdown]
# ## Play
#
# Everything at once: choose a model, a cluster and a plan, and see what the step becomes and why. Every
# control answers to the arrow keys; the line at the top is the whole state, to send to someone else.

# %% tags=["nbval-ignore-output"]
viz.explorer(state="model=llama3-8b gpu=H100-SXM-80GB gpus=64 micro_batch=1 seq_len=4096")
