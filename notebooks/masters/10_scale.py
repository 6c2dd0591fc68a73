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
# # Scale: where should the shards lie?
#
# Inside a node bytes travel an order of magnitude faster than between nodes. By the end you can place shards so that
# little crosses the slow link, say how many tokens hide a network, find the one rank that a thousand others wait for,
# and choose a plan. And you can say when plain DDP is enough, and what a good month is.

# %% [markdown]
# > **Our 8B model** gets 64 H100 in eight nodes, and two offers. With InfiniBand, 400 Gbit/s a GPU, a step takes about
# > 1.4 s (1.2 to 1.5). With 100 Gbit/s a *node*, the same step takes about 6 s (4.8 to 8.0), and the GPUs wait for
# > three quarters of it. The second cluster is much cheaper. Can you make it work? (`fsdp-sim simulate --model
# > llama3-8b --gpu H100-SXM-80GB --gpus 64 --seq-len 8192 --activation-checkpointing full`, then with `--inter 100GbE`)
#
# **Core path, about 90 minutes:** sections 1 to 4, 6 and 8, with the exercises `case_20`,
# `tokens_that_hide` and `name_the_straggler`. The rest is there if you like.

# %% [markdown]
# **What is real:** groups, collectives and shards on four ranks, the lab, and published runs in section 10.
# **What is modelled:** everything that says *simulated*: clusters of up to 1,024 GPUs from the catalogue; failures and
# pipelines in sections 11 and 12. No GPU was used here.

# %%
import subprocess
import sys
import warnings

import psutil
import torch
import torch.distributed as dist
from IPython.display import HTML
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

# %%
import fsdp_sim.mini.hsdp
from fsdp_sim import Cluster, Plan, engine, simulate, viz
from fsdp_sim.cost import workload
from fsdp_sim.explore import Sweep
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.pictures.memory import curves, stacks
from fsdp_sim.learn.pictures.scale import goodputs, idle, utilisations
from fsdp_sim.ranks import run
from fsdp_sim.schedule import build, toy
from fsdp_sim.timeline import Op
from fsdp_sim.validate import fitting_rows, read_csv

# %% [markdown]
# ## 1. Two kinds of links
#
# Each GPU has a link to the other GPUs of its node, and a share of the network between nodes. How different are they?

# %% predict="link_in_the_node"

# %%
clusters = {
    "H100, InfiniBand": Cluster("H100-SXM-80GB", gpus=16),
    "A100, InfiniBand": Cluster("A100-SXM-80GB", gpus=16),
    "A100, 25 Gbit/s per GPU": Cluster("A100-SXM-80GB", gpus=16, bandwidth_gbps=25),
}
links = {name: (c.intra_link.bytes_per_s / 1e9, c.inter_link.bytes_per_s / 1e9) for name, c in clusters.items()}
rows = tuple((name, f"{a:.0f}", f"{b:.3g}", f"{a / b:.0f} times") for name, (a, b) in links.items())
assert [round(a / b) for a, b in links.values()] == [9, 12, 96]
HTML(viz.Table("GB/s per GPU and direction", ("", "in the node", "between nodes", "faster"), rows).to_html())

# %% [markdown] covers=["coverage 001.51", "coverage 002.12"]
# So shard *inside* a node, and keep a copy of the model on each. That is **hybrid sharding** (HSDP; in FSDP1
# `HYBRID_SHARD`). Gathers and reduce-scatters stay in the node. Between nodes there is only an all-reduce of gradients,
# each rank with those that hold the same shard. You pay in memory: a node's GPUs divide the states, not all GPUs.
#
# Below, four ranks on two nodes.

# %% predict="who_holds_the_same"

# %%
viz.shard_map(build(toy(3), Plan(shard_size=2), world_size=4)).titled("Two copies, and each rank holds half of one")


# %%
def place_of(rank_order):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=rank_order)
    shard, copies = (dist.get_process_group_ranks(mesh.get_group(name)) for name in ("shard", "replicate"))
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=mesh)
    return str(shard), str(copies), str(model.weight.placements), model.weight.to_local().numel() / 64


places = run(place_of, 4, ("replicate", "shard"), progress=False)
rows = tuple((f"rank {rank}", *map(str, place)) for rank, place in enumerate(places))
assert [place[:2] for place in places[:2]] == [("[0, 1]", "[0, 2]"), ("[0, 1]", "[1, 3]")]
assert all(place[3] == 0.5 for place in places)
HTML(viz.Table("HSDP on 2 x 2", ("", "shards with", "same as", "placements", "holds"), rows).to_html())

# %% [markdown] covers=["pitfall 48", "coverage 004.44"]
# Four ranks, and each holds a *half*: memory follows the shard group, not the world. The mesh has dimensions
# `(replicate, shard)`, in this order. The last one varies fastest, and ranks are numbered node by node.
#
# Give FSDP1 a mesh too. Without one it takes the devices it sees for a node, which is wrong in a container that shows
# fewer. And you need no DDP inside FSDP or around it: replicate *and* shard is one mesh with two dimensions.

# %%
in_torch(fsdp_sim.mini.hsdp.FSDPMeshInfo, fsdp_sim.mini.hsdp.get_mesh)

# %% [markdown]
# Stuck in an exercise? `hint("case_20")` gives the next of three hints,
# `solution("case_20")` the solution and why it is so.

# %% exercise="case_20"

# %%
each = [(torch.randn(60_000),) for _ in range(4)]
done = run(checked.use, 4, each=each, progress=False, show_output=False)  # torch warns that a name will go
moved = {}
for rank, records in enumerate(done.records):
    groups = {"in the node": 0.0, "between nodes": 0.0}
    for record in records:
        where = "between nodes" if len({member // 2 for member in record.members}) > 1 else "in the node"
        groups[where] += 4 * record.numel / 1000 * record.op.startswith(("reduce", "all_reduce"))
    moved[f"rank {rank}"] = groups
stacks(moved, "The whole gradient stays in the node; half of it crosses.", "kB in collectives, by rank")

# %%
assert all(round(groups["between nodes"]) == 120 for groups in moved.values())

# %% [markdown]
# ## 2. What leaves a node?
#
# HSDP all-reduces one shard on every rank. FSDP gathers and reduces the whole model, through one ring around all nodes.
# Let's count the bytes that leave a node.

# %% predict="bytes_saved_by_hsdp"

# %% exercise="bytes_between_nodes"

# %%
names = {"fsdp": "FSDP", "fsdp kept": "FSDP, kept after forward", "hsdp": "HSDP"}
lines = {
    name: {nodes: checked.use(1.0, nodes, 8, how) for nodes in (2, 4, 8, 16, 32, 64, 128)}
    for how, name in names.items()
}
assert round(lines["FSDP"][8] / lines["HSDP"][8], 1) == 1.7
assert max(lines["HSDP"].values()) < 2 < lines["FSDP"][2]
sentence = "A node sends the model nearly three times a step, and with a copy of its own at most twice"
curves(lines, sentence, x="nodes", y="times the model's bytes, leaving each node")

# %% [markdown] covers=["coverage 001.20"]
# On 8 nodes 1.7 times fewer: 1.75 times the model instead of 2.95. On many nodes a third less. That may be less than
# you hoped for, and the reason is simple: every shard must still be reduced with the other nodes.
#
# HSDP has more to offer than bytes, though:
#
# - rings of 8 members instead of all ranks, so less latency;
# - gathers on the fast link;
# - with several micro-batches *one* all-reduce for all of them (`set_requires_all_reduce`).
#
# To try it on two nodes of four GPUs, `torchrun --nnodes=2 --nproc_per_node=4` starts and numbers the ranks. Which node
# gets which numbers follows from `--node_rank`, or from the rendezvous.

# %% [markdown]
# ## 3. Four strategies, three stages: who is who?
#
# FSDP1 has `FULL_SHARD`, `SHARD_GRAD_OP`, `NO_SHARD` and `HYBRID_SHARD`. DeepSpeed has stages 1 to 3 of
# [ZeRO](https://arxiv.org/abs/1910.02054). Take 8 billion parameters in fp32 with AdamW on 64 GPUs. What does each
# leave on a GPU?

# %% predict="less_than_10_gb_of_states"


# %%
def between_steps(shards, api):
    sizes = {"parameters": (1, 0, 0), "gradients": (0, 1, 0), "optimizer": (0, 0, 2)}
    return {
        part: engine.model_state_bytes(8.03, shards, api, param_bytes=4 * p, grad_bytes=4 * g, optimizer_bytes=4 * o)
        for part, (p, g, o) in sizes.items()
    }


# %%
ways = {
    "DDP, NO_SHARD": (1, "ddp"), "ZeRO-1": (64, "zero1"), "ZeRO-2": (64, "zero2"),
    "FULL_SHARD (ZeRO-3), SHARD_GRAD_OP": (64, "fsdp2"), "HYBRID_SHARD, 8 per node": (8, "fsdp2"),
}  # fmt: skip
held = {name: between_steps(*way) for name, way in ways.items()}
stacks(held, "What is sharded: the optimizer, then gradients, then parameters.", "GB on each of 64 GPUs, at the step")

# %%
total = {name: sum(parts.values()) for name, parts in held.items()}
assert [name for name, size in total.items() if size < 10] == ["FULL_SHARD (ZeRO-3), SHARD_GRAD_OP"]
assert round(8 * (16 / (8 + 8 / 8)) / 8, 1) == 1.8  # 16 bytes a parameter against 9, on 8 GPUs

# %% [markdown] covers=["coverage 003.6", "coverage 003.7", "coverage 003.8", "coverage 003.19"]
# - **ZeRO-1** shards the optimizer's state. After the step an all-gather makes the parameters whole again.
# - **ZeRO-2** shards gradients too: a reduce-scatter instead of an all-reduce. Also with an all-gather after the step.
# - **ZeRO-3** shards parameters too, and all-gathers them on demand.
#
# FSDP is not another level: `FULL_SHARD` *is* ZeRO-3. After its step nothing is gathered, because the next forward does
# that anyway. And none of them shards activations, or the work.

# %% [markdown] covers=["coverage 001.53", "coverage 001.56"]
# On 8 GPUs ZeRO-1 keeps 9 bytes of 16, so your model can be 1.8 times as large as with DDP. FSDP keeps 2. (Those are
# states only, an upper bound: activations and gathered units come on top.) Combining FSDP with ZeRO-1 would shard
# nothing more, for the optimizer's state is 1/W already.
#
# What FSDP pays for it is a second all-gather: 3 passes of the model instead of 2.

# %% exercise="parameters_between_passes"

# %%
moments = {}
for reshard, name in ((True, "FULL_SHARD"), (False, "SHARD_GRAD_OP")):
    found = run(checked.use, 4, 250, reshard, progress=False)[0]
    moments |= {
        f"{name}: {moment}": {"of the weight": found[moment] / 1000} for moment in ("before", "between", "after")
    }
assert [of["of the weight"] for of in moments.values()] == [0.25, 0.25, 0.25, 0.25, 1.0, 0.25]
stacks(moments, "The two differ only between forward and backward.", "share of the weight on a rank")

# %% [markdown] covers=["coverage 002.9", "coverage 002.10", "coverage 004.128"]
# `FULL_SHARD` keeps everything sharded but the unit at work. `SHARD_GRAD_OP` shards parameters as well: they are shards
# between steps, and whole from a unit's forward to its backward. In between that is the whole model at once, so don't
# expect only a little more memory.
#
# In FSDP2 both are `reshard_after_forward`. A number keeps a slice, gathered in groups of that size.


# %%
def no_shard():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        FullyShardedDataParallel(
            nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
        )
    return [str(warning.message) for warning in heard if "NO_SHARD" in str(warning.message)]


heard = run(no_shard, 2, progress=False)[0]
print(heard[0])
assert "deprecated" in heard[0]

# %% [markdown] covers=["coverage 002.11"]
# `NO_SHARD` behaves like DDP and is deprecated. Use DDP itself.
#
# ## 4. How many tokens hide a network?
#
# A GPU computes a block while the next one's parameters travel. How many tokens does it need, so that it never waits?

# %% predict="tokens_for_twice_the_model"

# %% exercise="tokens_that_hide"

# %%
gbits = (10, 25, 50, 100)
lines = {  # half the peak, as a good run reaches
    f"{name}, half its peak": {
        gbit: checked.use(0.5 * Cluster(name, gpus=64).gpu.peak_flops("bf16"), gbit * 1e9 / 8, 64) for gbit in gbits
    }
    for name in ("H100-SXM-80GB", "A100-SXM-80GB")
}
curves(lines, "With so many tokens per GPU and micro-batch the network is hidden", x="Gbit/s of the ring", y="tokens")

# %%
at_25 = lines["A100-SXM-80GB, half its peak"][25]
print(f"an A100 whose ring has 25 Gbit/s needs {at_25:,.0f} tokens, whatever the model")
assert 45_000 < at_25 < 50_000

# %% [markdown]
# P parameters compute T tokens in 2 P T / F seconds, where F is the FLOP/s that you reach. Their 2 P bytes travel in
# 2 P / B, at B bytes/s. Set both equal: T = F / B. The P is gone! So of any cluster you can ask: how many tokens does
# one of its GPUs take at once?
#
# The curves are for one ring through one link. A node of eight GPUs, each with such a link, runs eight rings that share
# the work: B is eight times as large, and some 6,000 tokens do. The simulator counts that way, and adds latency,
# contention between kernels, and copies. Next, left: kernels and the GPU; right: units, and the network between nodes
# with eight links of 50 GB/s:

# %%
viz.roofline(
    simulate("llama3-8b", Cluster("H100-SXM-80GB", gpus=64), Plan(micro_batch=1, seq_len=4096, param_dtype="bf16"))
)

# %% [markdown]
# ## 5. A thousand GPUs
#
# We give every GPU the same work, and take 8 to 1,024 of them (simulated): once with a shard per GPU, once with shards
# inside nodes. A perfect cluster would draw a level line.

# %% predict="from_8_to_1024_gpus"

# %%
short = {"micro_batch": 1, "seq_len": 2048, "param_dtype": "bf16"}
roce = Cluster("H100-SXM-80GB", gpus=8, bandwidth_gbps=100)
lines = {
    "FSDP": ("llama3-8b", roce, Plan(**short)),
    "HSDP": ("llama3-8b", roce, Plan(**short, shard_size=8)),
}
viz.scaling(lines, gpus=[8, 16, 64, 256, 1024]).titled("On 1,024 GPUs HSDP is nearly twice as fast as FSDP")


# %%
def rate(gpus, **plan):
    cluster = Cluster("H100-SXM-80GB", gpus=gpus, bandwidth_gbps=100)
    return simulate("llama3-8b", cluster, Plan(**short, **plan)).tokens_per_s_per_gpu


rates = {gpus: (rate(gpus), rate(gpus, shard_size=8)) for gpus in (8, 1024)}
print({gpus: [round(one) for one in both] for gpus, both in rates.items()})
assert rates[8][0] == rates[8][1]
assert rates[1024][0] < rates[1024][1] < rates[8][1]
assert 1.75 < rates[1024][1] / rates[1024][0] < 2

# %% [markdown]
# This is **weak scaling**: the work per GPU stays. The first step down is the slow link. The long fall after it is
# latency, which grows with the members of a ring. HSDP's gathers stay in rings of 8; what it loses is the all-reduce
# between nodes.
#
# One thing no line shows. A thousand GPUs with one sequence each make a batch of 1,024 sequences. Whether your model
# *learns* as much from each token is another question ([McCandlish et al., 2018](https://arxiv.org/abs/1812.06162)).

# %% [markdown]
# ## 6. One slow rank
#
# A collective ends when the last rank has come. Now rank 212 of 512 computes 20% slower. What do the other 511 lose?


# %% predict="one_slow_of_512"


# %%
def slow(seconds, ranks, factor=1.2):
    return engine.straggler(seconds, ranks, rank=212, factor=factor)


plan = Plan(micro_batch=1, seq_len=4096, param_dtype="bf16", activation_checkpointing="full")
wide = Cluster("H100-SXM-80GB", gpus=512)
even = simulate("llama3-8b", wide, plan, skew=lambda seconds, ranks: slow(seconds, ranks, 1.0))
uneven = simulate("llama3-8b", wide, plan, skew=slow)
print(f"{uneven.step_time_s / even.step_time_s - 1:.0%} slower, for all 512")
assert 0.15 < uneven.step_time_s / even.step_time_s - 1 < 0.2
assert 0.13 < 1 - even.step_time_s / uneven.step_time_s < 0.18
viz.rank_bands(uneven).titled("One slow rank keeps 511 others waiting")

# %% [markdown]
# Everybody waits for one. 511 GPUs stand still about a sixth of the time. *Their* profiles show long collectives, and
# you would blame the network. Whose profile shows the cause?

# %% exercise="name_the_straggler"

# %%
import random

from fsdp_sim.learn.exercises.scale.name_the_straggler import traced

trace = traced(random.Random(3))
slowest = checked.use(trace)
spent = {rank: sum(e.duration_s for e in trace.select(rank=rank).ops if e.op == "ALL_GATHER") for rank in range(8)}
assert min(spent, key=spent.get) == slowest
bars = {f"rank {rank}{' (slow)' * (rank == slowest)}": {"in all-gathers": 1e3 * s} for rank, s in spent.items()}
stacks(bars, "Who waits least is the one that is waited for.", "ms in all-gathers")

# %% [markdown]
# ## 7. Choose a plan
#
# Llama 3 8B on eight nodes with a slow network, and each GPU has 4 sequences of the batch. Which settings would you
# try?

# %% exercise="plan_for_a_slow_network"

# %%
answer = checked.use()
fixed = {
    "model": "llama3-8b", "gpu": "A100-SXM-40GB", "gpus": "64", "bandwidth_gbps": "25", "seq_len": "2048",
    "grad_accum": "4", "activation_checkpointing": "full", "param_dtype": "bf16",
}  # fmt: skip
vary = {
    "shard_size": ["64", "16", "8"], "reshard_after_forward": ["true", "false"], "requires_all_reduce": ["true", "last"]
}  # fmt: skip
print("your plan:", answer)
viz.pareto(Sweep(fixed, vary))

# %% [markdown]
# Every mark is a plan, simulated. Those on the line are beaten by nothing in both time and memory. If a sweep is too
# large to try by hand, `fsdp-sim sweep` writes it as a table, and `fsdp_sim.explore.changes_that_fit` tells you what
# would make a plan fit.

# %% [markdown]
# ## 8. When is DDP enough?
#
# GPT-2 with 774 million parameters on 32 A100 of 40 GB, 100 Gbit/s per GPU (simulated). FSDP sends half as much again
# as DDP. Does it lose?


# %% predict="fsdp_beside_ddp"

# %%
cluster = Cluster("A100-SXM-40GB", gpus=32, bandwidth_gbps=100)
ways = {
    "DDP": {"api": "ddp"}, "ZeRO-1": {"api": "zero1"}, "ZeRO-2": {"api": "zero2"},
    "FSDP": {"reshard_after_forward": True}, "FSDP, kept": {"reshard_after_forward": False},
}  # fmt: skip
sims = {
    (name, rows): simulate("gpt2-774m", cluster, Plan(micro_batch=rows, seq_len=1024, param_dtype="bf16", **way))
    for name, way in ways.items()
    for rows in (4, 16)
}


# %%
def throughput(sim):
    return f"{sim.tokens_per_s_per_gpu:,.0f}{'' if sim.fits else ' (does not fit)'}"


table = tuple((name, throughput(sims[name, 4]), throughput(sims[name, 16])) for name in ways)
HTML(viz.Table("Tokens per second and GPU", ("", "4 sequences", "16 sequences"), table).to_html())

# %%
four = {name: sims[name, 4].tokens_per_s_per_gpu for name in ways}
assert 0.95 < four["FSDP"] / four["DDP"] < 1.05
assert not sims["DDP", 16].fits
assert sims["FSDP", 16].fits
assert sims["FSDP", 16].tokens_per_s_per_gpu > 1.1 * four["DDP"]

# %% [markdown]
# Where the network is hidden both are as fast, and DDP is simpler. It is enough when 16 bytes a parameter fit, and with
# them the activations of a batch that keeps the GPU busy. FSDP's gain here is room, and room buys larger batches.
# (ZeRO-1 and ZeRO-2 lose a little: nothing hides their all-gather after the step.)
#
# So how do you choose? In this order:

# %% [markdown]
# 1. States and activations fit? DDP.
# 2. They do not: FSDP over one node, and recompute blocks.
# 3. More than a node, and more tokens per GPU than F/B of the network: FSDP over all.
# 4. Fewer tokens: HSDP, if a node's GPUs can hold the states. Accumulate, and reduce over the copies once.
# 5. Still too slow: larger batches, or another kind of parallelism.

# %% [markdown]
# ## 9. Starting on several nodes
#
# Three things fail before your first step. The first: a rank on the second node of four GPUs calls `set_device(RANK)`.

# %% predict="device_of_rank_5"

# %%
nodes, per_node = 2, 4
rows = tuple(
    (f"node {rank // per_node}", f"{rank}", f"{rank % per_node}", "" if rank < per_node else f"no GPU {rank} here")
    for rank in range(nodes * per_node)
)
assert sum(bool(row[3]) for row in rows) == 4
HTML(viz.Table("Two nodes of four GPUs", ("", "RANK", "LOCAL_RANK", "set_device(RANK)"), rows).to_html())

# %% [markdown] covers=["pitfall 49"]
# Call `set_device(LOCAL_RANK)`, before anything else. Without it all ranks of a node take GPU 0, and NCCL says
# "Duplicate GPU detected: rank 0 and rank 1 both on CUDA device". (Not shown on this machine: it takes GPUs.)
#
# You see the same when there are more ranks than GPUs. Two NCCL ranks cannot share a GPU. With one GPU use one rank, or
# gloo on the CPU as here.

# %%
import socket

with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    try:
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True)
    except dist.DistNetworkError as error:
        why = "EADDRINUSE" if "EADDRINUSE" in str(error) else str(error)
print("a second job on the same port:", why)
assert why == "EADDRINUSE"

# %% [markdown] covers=["pitfall 50"]
# The second: a fixed `MASTER_PORT`, 29500 by default. It is taken as soon as another job runs there, or the last one
# has not quite died. On one machine `torchrun --standalone` finds a free port. On several use `--rdzv-backend=c10d
# --rdzv-endpoint=HOST:PORT`, with a `--rdzv-id` per job. A fixed master address works too, but has no way back after a
# node is lost.

# %%
START = "import subprocess; worker = subprocess.Popen(['sleep', '60']); print(worker.pid, flush=True); worker.wait()"
launcher = subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True)
worker = psutil.Process(int(launcher.stdout.readline()))
launcher.kill()  # SIGKILL: no last word to the worker
launcher.wait()
alive = worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
print("launcher gone; its worker still runs:", alive)
worker.kill()
assert alive

# %% [markdown] covers=["pitfall 51"]
# The third: kill a launcher with SIGKILL and its workers live on. On a cluster they hold the GPUs and the port of a job
# that is over. Send SIGTERM (torchrun passes it on, and kills after 30 s). Before a restart look for the old ranks, not
# only for the launcher. The labs' own `torchrun` ties them: when the kernel dies its ranks leave.

# %% [markdown]
# ## 10. How good is a step?
#
# A step takes so many seconds. Is that fast? It depends on model, tokens and GPU, and **MFU**, model FLOPs utilization,
# takes all three into account ([Chowdhery et al., 2022](https://arxiv.org/abs/2204.02311)). Take the FLOPs that the
# model needs for a token, times tokens per second, and divide by the FLOP/s of the data sheet. A token needs 6 FLOPs
# per parameter, and attention besides. **HFU** counts what is recomputed too.
#
# Take Llama 3 8B on 64 H100, 4,096 tokens a sequence. Then recompute all activations, and fill the room with more
# sequences.


# %%
def parts(sim):
    flops = dict.fromkeys((Op.FWD, Op.BWD, Op.RECOMPUTE), 0.0)
    for i in sim.program.ops:
        if i.op in flops:
            work = sim.workload.work[i.unit]
            flops[i.op] += work.backward_flops if i.op is Op.BWD else work.forward_flops
    again = sim.mfu * flops[Op.RECOMPUTE] / (flops[Op.FWD] + flops[Op.BWD])
    busy = sim.exposure.compute_s / sim.step_time_s
    names = ("needed, at the peak", "recomputed, at the peak", "slower than the peak")
    return dict(zip(names, (sim.mfu, again, busy - sim.mfu - again), strict=True))


# %% predict="mfu_when_recomputing"

# %%
common = {"seq_len": 4096, "param_dtype": "bf16"}
twice = {"micro_batch": 4, "activation_checkpointing": "full"}
plans = {
    "1 sequence": Plan(**common, micro_batch=1),
    "2 sequences": Plan(**common, micro_batch=2),
    "4, recomputed": Plan(**common, **twice),
    "4, recomputed, compiled": Plan(**common, **twice, compile=True),
}
steps = {name: simulate("llama3-8b", Cluster("H100-SXM-80GB", gpus=64), plan) for name, plan in plans.items()}

# %%
percent = {name: {part: 100 * share for part, share in parts(sim).items()} for name, sim in steps.items()}
stacks(percent, "Recomputing keeps a GPU busier, and the model gets less of it.", "% of the step busy (simulated)")

# %%
hfu = {name: round(of["needed, at the peak"] + of["recomputed, at the peak"]) for name, of in percent.items()}
print({name: f"MFU {sim.mfu:.0%}, HFU {hfu[name]}%" for name, sim in steps.items()})
assert all(sim.fits for sim in steps.values())
assert [round(100 * sim.mfu) for sim in steps.values()] == [44, 49, 41, 46]
assert list(hfu.values()) == [44, 49, 53, 60]

# %% [markdown]
# *Needed* is MFU; with *recomputed* it is HFU. Then come kernels that are slower than the peak. What is missing to 100%
# are waits, for the network and for what the loop does between two steps.
#
# With four recomputed sequences HFU is higher than with two, and MFU lower. A GPU that recomputes everything does 8
# FLOPs per parameter and token where 6 count. So even at the peak its MFU would end at about 3/4.

# %% [markdown] covers=["pitfall 35"]
# Compare runs by MFU, and when you read a number, ask how it was counted. Parameters before sharding? (`numel()` of an
# FSDP1 shard is one rank's.) With attention? The dense peak, or the one with sparsity, which is twice as high?

# %% [markdown]
# Nobody reaches 100%. What do published runs reach?

# %% predict="mfu_of_published_runs"

# %%
reached = {}
for one in fitting_rows(read_csv()):  # MPT models, mosaicml/llm-foundry's own tables
    made, gpu = workload(one.model, one.plan), one.cluster.gpu
    used = made.model_flops_per_token * made.tokens * one.plan.grad_accum / one.step_time_s
    how = "all recomputed" if one.plan.activation_checkpointing else "nothing recomputed"
    reached.setdefault(gpu.name, {}).setdefault(how, []).append(used / gpu.peak_flops("bf16"))
reached = dict(sorted(reached.items()))
sentence = "212 published FSDP runs reach a quarter to two thirds of the peak"
utilisations(reached, sentence, {"all recomputed: about 3/4 at most": 0.75})

# %%
from statistics import median

mfus = {gpu: [part for parts_of in ways.values() for part in parts_of] for gpu, ways in reached.items()}
assert sum(map(len, mfus.values())) == 212
assert 0.25 < min(map(min, mfus.values())) < max(map(max, mfus.values())) < 2 / 3
cards = {name: Cluster(name, gpus=8).gpu for name in mfus}
for name, gpu in cards.items():
    matmul = gpu.best_matmul_flops / gpu.peak_flops("bf16")
    print(f"{name}: {median(mfus[name]):.0%} in the middle; the best matmul alone {matmul:.0%}")
a100, h100 = cards["A100-SXM-80GB"], cards["H100-SXM-80GB"]
flops, gbytes = h100.bf16_flops / a100.bf16_flops, h100.mem_bytes_per_s / a100.mem_bytes_per_s
faster = flops * median(mfus[h100.name]) / median(mfus[a100.name])
print(f"H100 beside A100: FLOP/s x {flops:.1f}, bytes/s x {gbytes:.1f}, runs x {faster:.1f}")
assert (round(median(mfus[h100.name]), 1), round(median(mfus[a100.name]), 1)) == (0.4, 0.5)

# %% [markdown]
# Measured on GPUs, by others: the tables of [llm-foundry](https://github.com/mosaicml/llm-foundry). Even the best
# matmul stays below the data sheet, and a step is more than matmuls: norms, the loss and the optimizer wait for memory.
#
# Why did MFU fall on H100, while runs became faster? For one, its memory bandwidth has grown half as much as its
# FLOP/s. So compare MFU on one kind of GPU. The middle of these runs is about 40% on H100 and 50% on A100. Are you far
# below? See what your step waits for (chapter 05, section 8).

# %% [markdown]
# ## 11. How good is a month?
#
# Llama 3 8B learns from 15 trillion tokens on 1,024 of these H100, with two sequences each. How many days is that? And
# how often does something break meanwhile? Llama 3 405B counted 419 unexpected interruptions in 54 days, on 16,384 GPUs
# ([Grattafiori et al., 2024](https://arxiv.org/abs/2407.21783), section 3.3.4).

# %% predict="days_of_15_trillion_tokens"

# %%
from fsdp_sim.learn.exercises.scale.how_often_to_save import expected, mtbf_s, played

DAY_S, sim = 24 * 3600, steps["2 sequences"]
days = 15e12 * sim.workload.model_flops_per_token / (1024 * sim.cluster.gpu.peak_flops("bf16") * sim.mfu) / DAY_S
print(f"{days:.0f} days; {days * DAY_S / mtbf_s(1024):.0f} interruptions, one in {mtbf_s(1024) / 3600:.0f} hours")
rows = [(f"{gpus:,}", f"{mtbf_s(gpus) / 3600:,.1f} h", f"{DAY_S / mtbf_s(gpus):.3g}") for gpus in (8, 1024, 16384)]
assert round(days) == 19
assert round(days * DAY_S / mtbf_s(1024)) == 9
HTML(viz.Table("At Llama 3's rate per GPU", ("GPUs", "time between two", "a day"), tuple(rows)).to_html())

# %% [markdown]
# A run takes its FLOPs ÷ (GPUs × peak × MFU) seconds. **MTBF** is the mean time between failures. For a job you divide
# that of one GPU by their number, because one that stops stops all. (If failures do not depend on each other, and your
# machines are like theirs. They may not be: count.)
#
# What does a failure cost? The work since the last checkpoint, and a restart. What remains is **goodput**, the part of
# the time that is training which counts. Save seldom, and a failure throws away much. Save often, and the job does
# nothing else.

# %% predict="minutes_between_saves"

# %% exercise="how_often_to_save"

# %%
SAVE_S, RESTART_S = 60, 600  # assumed: a checkpoint stops training for a minute, a restart takes ten
every_s = [60 * 1.15**n for n in range(67)]
good, shown, best = {}, {}, {}
for gpus in (8, 1024, 16384):
    name, fails_s = f"{gpus:,} GPUs", mtbf_s(gpus)
    best[name] = float(checked.use(SAVE_S, gpus))
    good[name] = {s: expected(s, SAVE_S, fails_s, RESTART_S) for s in sorted([*every_s, best[name]])}
    shown[name] = {s: played(s, SAVE_S, fails_s, RESTART_S) for s in every_s[::6]}
goodputs(good, shown, best, "The more GPUs, the sooner the next checkpoint, and the less of the time counts")

# %%
most = {name: curve[best[name]] for name, curve in good.items()}
assert all(max(curve.values()) - most[name] < 0.002 for name, curve in good.items())
assert all(abs(share - expected(s, SAVE_S, mtbf_s(1024), RESTART_S)) < 0.01 for s, share in shown["1,024 GPUs"].items())
often, fails_s = best["16,384 GPUs"], mtbf_s(16384)
lost = {"saving": SAVE_S / often, "done again": often / 2 / fails_s, "restarts": RESTART_S / fails_s}
print("16,384 GPUs lose about", {what: f"{share:.1%}" for what, share in lost.items()})
quick = expected(checked.use(5, 16384), 5, fails_s, 180)
print(f"with 5 s for a save and 3 minutes for a restart {quick:.0%} count, not {most['16,384 GPUs']:.0%}")
assert 15 < often / 60 < 25
assert (round(quick, 2), round(most["16,384 GPUs"], 2)) == (0.95, 0.85)

# %% [markdown]
# Marks are played: 20,000 random failures each. The rings are Young's interval
# ([1974](https://doi.org/10.1145/361147.361115)): **√(2 × save × MTBF)**, where saving costs as much as doing work
# again. Around it the curve is flat, so take it as an order of magnitude.
#
# On 8 GPUs two checkpoints a day are enough. On 16,384 you need one in 20 minutes, and lose 15% of the time all the
# same. A better interval does not help there. A cheaper failure does: saves in the background (chapter 09), of which
# training sees only the copy, and a quick restart. (The paper above reports more than 90% of effective training time.)

# %% [markdown]
# ## 12. Why not a pipeline?
#
# A **pipeline** gives each GPU some of the layers, and sends activations instead of parameters
# ([GPipe](https://arxiv.org/abs/1811.06965)). With p stages and m micro-batches a stage works in m of m + p - 1 slots.
# The rest, (p-1)/(m+p-1), is the **pipeline bubble**. Take Llama 3 8B on 64 H100 in 8 nodes, some sequences of 2,048
# tokens for each GPU.

# %% predict="idle_in_a_pipeline"

# %%
counts, stages = (1, 2, 4, 8, 16), 8
waits = {f"pipeline of {stages} (formula)": {n: (stages - 1) / (stages * n + stages - 1) for n in counts}}
full = {"seq_len": 2048, "param_dtype": "bf16", "activation_checkpointing": "full"}
for gbit in (25, 100, 400):
    cluster = Cluster("H100-SXM-80GB", gpus=64, bandwidth_gbps=gbit)
    sims = {n: simulate("llama3-8b", cluster, Plan(**full, micro_batch=n)) for n in counts}
    waits[f"FSDP, {gbit} Gbit/s (simulated)"] = {n: sim.exposed_comm_s / sim.step_time_s for n, sim in sims.items()}
idle(waits, "FSDP idles less than a pipeline, unless few sequences meet a slow network")

# %%
bubble, slow, usual, fast = waits.values()
assert all(fast[n] < usual[n] < bubble[n] for n in counts)
assert [n for n in counts if bubble[n] < slow[n]] == [1, 2, 4]
sent = 3 * 2 * sims[1].workload.param_count  # FSDP in bf16: about three times the model leaves a node (section 2)
across = {n: 2 * 2 * 4096 * 2048 * 64 * n for n in (1, 16)}  # activations on, their gradients back: 4,096 for a token
for n, n_bytes in across.items():
    print(f"{n} per GPU: a node sends {sent / 1e9:.0f} GB with FSDP, {n_bytes / 1e9:.0f} GB as a stage of the pipeline")
assert sent > 20 * across[1]
assert sent < 2 * across[16]

# %% [markdown] covers=["coverage 004.34"]
# FSDP's bytes do not grow with the batch, and hide once a GPU has F/B tokens (section 4). At 400 Gbit/s that is from
# the first sequence on. A pipeline's bytes grow with the batch, and with few sequences they are twenty times fewer. So
# a pipeline is for slow links and batches that may not grow, often with FSDP inside each stage. It also cuts your
# model's code into stages; FSDP leaves the code as it is.
#
# What is modelled here? The simulator has no pipelines. The bubble is its formula, for equal stages and free sends,
# with a node for each stage, eight copies side by side, and one sequence as a micro-batch. Embedding and head make real
# stages unequal; interleaved schedules shrink the bubble.

# %%
misconceptions("scale")

# %% [markdown]
# ## Lab: a copy per pair
#
# Four real ranks of torchrun train with HSDP, two per copy. Which part of the parameters and of AdamW's moments does
# each rank keep? And how many times M, the bytes of the model, would a node send with FSDP and with HSDP?

# %% tags=["nbval-ignore-output"]
from labs.cluster.torchrun import train

SETTING = ("--n_layer=2", "--steps=2", "--global_batch=8", "--seq_len=64")
hybrid = train(*SETTING, "--api=hsdp", "--shard_size=2", ranks=4)
print("losses:", *(f"{loss:.4f}" for loss in hybrid.losses))

# %% predict="kept_with_a_copy_per_pair"

# %%
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.experiments.nodes import across_bytes
from labs.model import empty

model_bytes = 4 * empty(TrainConfig(n_layer=2).model_config).num_params()
assert all(abs(kept / (3 * model_bytes) - 1 / 2) < 0.01 for kept in hybrid.report["state_bytes"])
print("Each of four ranks keeps half of the parameters and of AdamW's moments.")
assert hybrid.losses[1] < hybrid.losses[0]
two_by_two = RankPlace(world_size=4, local_world_size=2)
sent = [across_bytes(TrainConfig(n_layer=2, api=api), two_by_two, gloo=False) for api in ("fsdp2", "hsdp")]
print(f"each node would send {sent[0] / model_bytes:.2f} M with FSDP, {sent[1] / model_bytes:.2f} M with HSDP")
assert round(sent[1] / model_bytes, 2) == 1.0

# %% [markdown]
# `lab_09_nodes.ipynb` runs both over a network between two nodes, makes it slow, and finds a rank that never comes in
# the flight recorder's dump. `lab_10_tune.ipynb` searches the fastest plan that fits, and checks three of them.
#
# **One GPU:** `python -m labs.experiments.tune --device cuda --cluster H100 --ranks 64`: real kernels, a pretended
# wire. **Many:** `sbatch labs/cluster/launch/train.sbatch --model=gpt2 --api=hsdp`, then `--api=fsdp2`, and compare the
# reports.

# %% tags=["nbval-ignore-output"]
board("scale")

# %% [markdown]
# ## What you have seen
#
# - HSDP shards inside a node and copies across: a mesh of (replicate, shard). Memory follows the shard group.
# - Strategies differ in what is whole, and when. FULL_SHARD is ZeRO-3; nothing is left for ZeRO-1 to shard.
# - A network is hidden from about F/B tokens per GPU on, whatever the model.
# - The rank with the least communication is the one that all others wait for.
# - DDP is enough while the states and a good batch fit.
# - A step is as good as its MFU. A month is as good as its goodput: save every √(2 × save × MTBF).

# %% [markdown]
# > **Our 8B model** on the cheap network: HSDP alone hardly helps (`--shard-size 8`). An all-reduce in fp32 sends about
# > as many bytes between nodes as two gathers in bf16 and a reduce-scatter. But accumulate eight micro-batches and
# > reduce between nodes once (`--grad-accum 8 --plan requires_all_reduce=last`). Now a step of eight takes about 15 s
# > (13 to 18) instead of about 50 s (39 to 64). With InfiniBand it is about 11 s. That is what the better network buys.
#
# Next: `11_migration.ipynb`, your own script.
