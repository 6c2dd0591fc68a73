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
# Inside a node bytes travel ten times faster than between nodes. By the end you can place shards so that little
# crosses the slow link, tell the strategies apart, and find the one rank that a thousand others wait for.

# %% [markdown]
# > **Our 8B model** gets 64 H100 in eight nodes, and two offers. With InfiniBand, 400 Gbit/s a GPU, a step takes
# > about 1.4 s (1.2 to 1.5). With 100 Gbit/s a *node*, the same step takes about 6 s (4.7 to 8.2), and the GPUs wait
# > for three quarters of it. The second cluster is much cheaper. Can you make it work? (`fsdp-sim simulate --model
# > llama3-8b --gpu H100-SXM-80GB --gpus 64 --seq-len 8192 --activation-checkpointing full`, then with `--inter
# > 100GbE`)
#
# **Core path, about 45 minutes:** sections 1, 3 and 6, with the exercises marked *core*. The rest is
# there if you like.

# %% [markdown]
# **What is real:** groups, collectives and shards on four ranks, and the lab. **What is modelled:** everything that
# says *simulated*: clusters of up to 1,024 GPUs from the catalogue. No GPU was used here.

# %%
import random
import warnings

import torch
import torch.distributed as dist
from IPython.display import HTML
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import fsdp_sim.mini.hsdp
from fsdp_sim import Cluster, Plan, engine, simulate, viz
from fsdp_sim.explore import Sweep
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.exercises.scale.name_the_straggler import traced
from fsdp_sim.learn.pictures.memory import curves, stacks
from fsdp_sim.ranks import run
from fsdp_sim.schedule import build, toy
from labs.cluster.process_group import RankPlace
from labs.cluster.torchrun import train
from labs.config import TrainConfig
from labs.experiments.nodes import across_bytes
from labs.model import empty

# %% [markdown]
# ## 1. Two kinds of links
#
# Each GPU has a link to the other GPUs of its node, and a share of the network between nodes. How different are they?

# %% predict="link_in_the_node"

# %% tags=["hide-input"]
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


# %% tags=["hide-input"]
def place_of(rank_order):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=rank_order)
    shard, copies = (dist.get_process_group_ranks(mesh.get_group(name)) for name in ("shard", "replicate"))
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=mesh)
    return str(shard), str(copies), str(model.weight.placements), model.weight.to_local().numel() / 64


places = run(place_of, 4, ("replicate", "shard"), progress=False)

# %% tags=["hide-input"]
rows = tuple((f"rank {rank}", *place[:3], f"{place[3]:.0%}") for rank, place in enumerate(places))
assert [place[:2] for place in places[:2]] == [("[0, 1]", "[0, 2]"), ("[0, 1]", "[1, 3]")]
assert all(place[3] == 0.5 for place in places)
header = ("", "shards with", "same as", "placements", "holds of the weight")
HTML(viz.Table("HSDP on 2 x 2", header, rows).to_html())

# %% [markdown] covers=["pitfall 48", "coverage 004.44"]
# Four ranks, and each holds a *half*: memory follows the shard group, not the world. The mesh has dimensions
# `(replicate, shard)`, in this order. The last one varies fastest, and ranks are numbered node by node.
#
# You need no DDP inside FSDP or around it: replicate *and* shard is one mesh with two dimensions. Give FSDP1 one too,
# else it takes the devices it sees for a node.

# %%
in_torch(fsdp_sim.mini.hsdp.FSDPMeshInfo, fsdp_sim.mini.hsdp.get_mesh)

# %% [markdown]
# Stuck? `hint("case_20")` helps in three steps; `solution("case_20")` tells.

# %% exercise="case_20"

# %% tags=["hide-input"]
each = [(torch.randn(60_000),) for _ in range(4)]
done = run(checked.use, 4, each=each, progress=False, show_output=False)  # torch warns that a name will go
moved = {}
for rank, records in enumerate(done.records):
    groups = {"in the node": 0.0, "between nodes": 0.0}
    for record in records:
        where = "between nodes" if len({member // 2 for member in record.members}) > 1 else "in the node"
        groups[where] += 4 * record.numel / 1000 * record.op.startswith(("reduce", "all_reduce"))
    moved[f"rank {rank}"] = groups
rows = tuple((rank, *(f"{kb:.0f} kB" for kb in of.values())) for rank, of in moved.items())
header = ("", *moved["rank 0"])
HTML(viz.Table("Half of the gradient crosses", header, rows).to_html())

# %%
assert all(round(groups["between nodes"]) == 120 for groups in moved.values())

# %% [markdown]
# ## 2. What leaves a node?
#
# HSDP all-reduces one shard on every rank. FSDP gathers and reduces the whole model, through one ring around all
# nodes. Let's count the bytes that leave a node.

# %% predict="bytes_saved_by_hsdp"

# %% exercise="bytes_between_nodes"

# %% tags=["hide-input"]
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
# To try it on two nodes of four GPUs, `torchrun --nnodes=2 --nproc_per_node=4` starts and numbers the ranks. Which
# node gets which numbers follows from `--node_rank`, or from the rendezvous.

# %% [markdown]
# ## 3. Four strategies, three stages: who is who?
#
# FSDP1 has `FULL_SHARD`, `SHARD_GRAD_OP` and more, DeepSpeed stages 1 to 3 of
# [ZeRO](https://arxiv.org/abs/1910.02054). Take 8 billion parameters in fp32 with AdamW on 64 GPUs. What does each
# leave on a GPU?

# %% predict="less_than_10_gb_of_states"


# %% tags=["hide-input"]
def between_steps(shards, api):
    sizes = {"parameters": (1, 0, 0), "gradients": (0, 1, 0), "optimizer": (0, 0, 2)}
    return {
        part: engine.model_state_bytes(8.03, shards, api, param_bytes=4 * p, grad_bytes=4 * g, optimizer_bytes=4 * o)
        for part, (p, g, o) in sizes.items()
    }


# %% tags=["hide-input"]
ways = {
    "DDP, NO_SHARD": (1, "ddp"), "ZeRO-1": (64, "zero1"), "ZeRO-2": (64, "zero2"),
    "FULL_SHARD (ZeRO-3), SHARD_GRAD_OP": (64, "fsdp2"), "HYBRID_SHARD, 8 per node": (8, "fsdp2"),
}  # fmt: skip
held = {name: between_steps(*way) for name, way in ways.items()}
assert [name for name, of in held.items() if sum(of.values()) < 10] == ["FULL_SHARD (ZeRO-3), SHARD_GRAD_OP"]
stacks(held, "What is sharded: the optimizer, then gradients, then parameters", "GB on each of 64 GPUs, at the step")

# %% [markdown] covers=["coverage 003.6", "coverage 003.7", "coverage 003.8", "coverage 003.19"]
# - **ZeRO-1** shards the optimizer's state. After the step an all-gather makes the parameters whole again.
# - **ZeRO-2** shards gradients too: a reduce-scatter instead of an all-reduce. Also with an all-gather after the step.
# - **ZeRO-3** shards parameters too, and all-gathers them on demand.
#
# FSDP is not another level: `FULL_SHARD` *is* ZeRO-3. And none of them shards activations, or the work.

# %% [markdown]
# What FSDP pays for its parameters is a second all-gather: 3 passes of the model instead of 2.

# %% exercise="parameters_between_passes"

# %% tags=["hide-input"]
moments = {}
for reshard, name in ((True, "FULL_SHARD"), (False, "SHARD_GRAD_OP")):
    found = run(checked.use, 4, 250, reshard, progress=False)[0]
    moments[name] = [found[moment] / 1000 for moment in ("before", "between", "after")]
assert list(moments.values()) == [[0.25, 0.25, 0.25], [0.25, 1.0, 0.25]]
rows = tuple((name, *(f"{share:.0%}" for share in of)) for name, of in moments.items())
header = ("a rank's share of the weight", "before forward", "between", "after backward")
HTML(viz.Table("The two differ only between forward and backward", header, rows).to_html())

# %% [markdown] covers=["coverage 002.9", "coverage 002.10", "coverage 004.128"]
# `FULL_SHARD` keeps everything sharded but the unit at work. With `SHARD_GRAD_OP` parameters are whole from a unit's
# forward to its backward: between the two, all of the model at once. In FSDP2 both are `reshard_after_forward`.

# %% [markdown]
# ## 4. How many tokens hide a network?
#
# A GPU computes a block while the next one's parameters travel. How many tokens does it need, so that it never waits?

# %% predict="tokens_for_twice_the_model"

# %% exercise="tokens_that_hide"

# %% tags=["hide-input"]
lines = {  # half the peak, as a good run reaches
    name: {
        gbit: checked.use(0.5 * Cluster(name, gpus=64).gpu.peak_flops("bf16"), gbit * 1e9 / 8, 64)
        for gbit in (10, 25, 50, 100)
    }
    for name in ("A100-SXM-80GB", "H100-SXM-80GB")
}
rows = tuple((name, *(f"{tokens:,.0f}" for tokens in of.values())) for name, of in lines.items())
header = ("the ring's Gbit/s", *map(str, lines["A100-SXM-80GB"]))
HTML(viz.Table("Tokens that hide the network, at half the GPU's peak", header, rows).to_html())

# %%
at_25 = lines["A100-SXM-80GB"][25]
print(f"an A100 whose ring has 25 Gbit/s needs {at_25:,.0f} tokens, whatever the model")
assert 45_000 < at_25 < 50_000
assert abs(at_25 / (0.5 * Cluster("A100-SXM-80GB", gpus=64).gpu.peak_flops("bf16")) / (63 / 64 / (25e9 / 8)) - 1) < 0.01

# %% [markdown]
# P parameters compute T tokens in 2 P T / F seconds, where F is the FLOP/s that you reach. Their 2 P bytes travel in
# 2 P / B, at B bytes/s. Set both equal: T = F / B. The P is gone! So of any cluster you can ask: how many tokens does
# one of its GPUs take at once?
#
# The table is for one ring through one link. A node of eight GPUs, each with such a link, runs eight rings that
# share the work: B is eight times as large, and some 6,000 tokens do. The simulator counts that way, and adds
# latency, contention between kernels, and copies. Next, left: kernels and the GPU; right: units, and the network
# between nodes with eight links of 50 GB/s:

# %%
eight_nodes = Cluster("H100-SXM-80GB", gpus=64)
roofs = viz.roofline(simulate("llama3-8b", eight_nodes, Plan(micro_batch=1, seq_len=4096, param_dtype="bf16")))
assert {unit[-1] for unit in roofs.tables[1].rows} == {"yes"}  # that it hides what it communicates
roofs.titled("Every unit computes for longer than it communicates")

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
for gpus, (fsdp, hsdp) in rates.items():
    print(f"{gpus:5,} GPUs: {fsdp:,.0f} tokens per second and GPU with FSDP, {hsdp:,.0f} with HSDP")
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


# %% tags=["hide-input"]
def slow(seconds, ranks, factor=1.2):
    return engine.straggler(seconds, ranks, rank=212, factor=factor)


plan = Plan(micro_batch=1, seq_len=4096, param_dtype="bf16", activation_checkpointing="full")
wide = Cluster("H100-SXM-80GB", gpus=512)
even = simulate("llama3-8b", wide, plan, skew=lambda seconds, ranks: slow(seconds, ranks, 1.0))
uneven = simulate("llama3-8b", wide, plan, skew=slow)
print(f"{uneven.step_time_s / even.step_time_s - 1:.0%} slower, for all 512")
assert 0.15 < uneven.step_time_s / even.step_time_s - 1 < 0.2
assert 0.13 < 1 - even.step_time_s / uneven.step_time_s < 0.18
bands = viz.rank_bands(uneven).titled("Rank 212 never waits, and 511 others wait for it after every block")
bands.figure.update_xaxes(range=[300, 420])  # seven blocks of backward
bands

# %% [markdown]
# You see seven blocks of backward; drag to move along the step. Look at the red boxes of the typical rank: after each
# block it waits for rank 212, which has none. So 511 GPUs stand still about a sixth of the time. *Their* profiles show
# long collectives, and you would blame the network. Whose profile shows the cause?

# %% exercise="name_the_straggler"

# %% tags=["hide-input"]
trace = traced(random.Random(3))
slowest = checked.use(trace)
spent = {rank: sum(e.duration_s for e in trace.select(rank=rank).ops if e.op == "ALL_GATHER") for rank in range(8)}
assert min(spent, key=spent.get) == slowest
bars = {f"rank {rank}{' (slow)' * (rank == slowest)}": {"in all-gathers": 1e3 * s} for rank, s in spent.items()}
stacks(bars, "Who waits least is the one that is waited for", "ms in all-gathers")

# %% [markdown]
# ## 7. Choose a plan
#
# Llama 3 8B on eight nodes with a slow network, and each GPU has 4 sequences of the batch. Which settings would you
# try?

# %% exercise="plan_for_a_slow_network"

# %% tags=["hide-input"]
answer = checked.use()
fixed = {
    "model": "llama3-8b", "gpu": "A100-SXM-40GB", "gpus": "64", "bandwidth_gbps": "25", "seq_len": "2048",
    "grad_accum": "4", "activation_checkpointing": "full", "param_dtype": "bf16",
}  # fmt: skip
vary = {
    "shard_size": ["64", "16", "8"], "reshard_after_forward": ["true", "false"], "requires_all_reduce": ["true", "last"]
}  # fmt: skip
print("your plan:", ", ".join(f"{name}={value}" for name, value in answer.items()))
plans = viz.pareto(Sweep(fixed, vary))
assert [(size, reduces) for _, size, _, reduces, *_ in plans.tables[0].rows[:2]] == [("8", "last")] * 2
plans.titled("The two fastest shard inside a node, and reduce between nodes once")

# %% [markdown]
# Every mark is a plan, simulated. Those on the line are beaten by nothing in both time and memory. If a sweep is too
# large to try by hand, `fsdp-sim sweep` writes it as a table, and `fsdp_sim.explore.changes_that_fit` tells you what
# would make a plan fit.
#
# > **Our 8B model** on the cheap network: HSDP alone hardly helps (`--shard-size 8`). An all-reduce in fp32 sends
# > about as many bytes between nodes as two gathers in bf16 and a reduce-scatter. But accumulate eight micro-batches
# > and reduce between nodes once (`--grad-accum 8 --plan requires_all_reduce=last`). Now a step of eight takes about
# > 15 s (13 to 18) instead of about 50 s (38 to 66). With InfiniBand it is about 11 s. That is what the better
# > network buys.

# %% [markdown]
# ## 8. When is DDP enough?
#
# GPT-2 with 774 million parameters on 32 A100 of 40 GB, 100 Gbit/s per GPU (simulated). FSDP sends half as much again
# as DDP. Does it lose?


# %% predict="fsdp_beside_ddp"

# %% tags=["hide-input"]
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
assert 0.95 < sims["FSDP", 4].tokens_per_s_per_gpu / sims["DDP", 4].tokens_per_s_per_gpu < 1.05
assert round(8 * (16 / (8 + 8 / 8)) / 8, 1) == 1.8  # 16 bytes a parameter against 9, on 8 GPUs
assert (sims["DDP", 16].fits, sims["FSDP", 16].fits) == (False, True)
assert sims["FSDP", 16].tokens_per_s_per_gpu > 1.1 * sims["DDP", 4].tokens_per_s_per_gpu
HTML(viz.Table("Tokens per second and GPU", ("", "4 sequences", "16 sequences"), table).to_html())

# %% [markdown]
# Where the network is hidden both are as fast, and DDP is simpler. It is enough when 16 bytes a parameter fit, and
# with them the activations of a batch that keeps the GPU busy. FSDP's gain here is room, and room buys larger
# batches. (ZeRO-1 and ZeRO-2 lose a little: nothing hides their all-gather after the step.)

# %% [markdown] covers=["coverage 001.53", "coverage 001.56"]
# How much room? On 8 GPUs ZeRO-1 keeps 9 bytes of 16, so your model can be 1.8 times as large as with DDP. FSDP keeps
# 2, of states. ZeRO-1 on top of it would shard nothing more: the optimizer's state is 1/W already.
#
# So how do you choose? In this order:

# %% [markdown]
# 1. States and activations fit? DDP.
# 2. They do not: FSDP over one node, and recompute blocks.
# 3. More than a node, and more tokens per GPU than F/B of the network: FSDP over all.
# 4. Fewer tokens: HSDP, if a node's GPUs can hold the states. Accumulate, and reduce over the copies once.
# 5. Still too slow: larger batches, or another kind of parallelism.

# %% [markdown]
# And FSDP1's `NO_SHARD`? What does torch say?


# %% tags=["hide-input"]
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
# It behaves like DDP. Use DDP itself.

# %%
misconceptions("scale")

# %% [markdown]
# ## Lab: a copy per pair
#
# Four real ranks of torchrun train with HSDP, two per copy. Which part of the parameters and of AdamW's moments does
# each rank keep? And how many times M, the bytes of the model, would a node send with FSDP and with HSDP?

# %% tags=["nbval-ignore-output"]
SETTING = ("--n_layer=2", "--steps=2", "--global_batch=8", "--seq_len=64")
hybrid = train(*SETTING, "--api=hsdp", "--shard_size=2", ranks=4)
print("losses:", *(f"{loss:.4f}" for loss in hybrid.losses))

# %% predict="kept_with_a_copy_per_pair"

# %% tags=["hide-input"]
model_bytes = 4 * empty(TrainConfig(n_layer=2).model_config).num_params()
shares = [kept / (3 * model_bytes) for kept in hybrid.report["state_bytes"]]
print("of the parameters and both moments each rank keeps", *(f"{share:.0%}" for share in shares))
assert all(abs(share - 1 / 2) < 0.01 for share in shares)
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
# wire. **Many:** `sbatch labs/cluster/launch/train.sbatch --model=gpt2 --api=hsdp`, then `--api=fsdp2`, and compare
# the reports.

# %% tags=["nbval-ignore-output"]
board("scale")

# %% [markdown]
# ## What you have seen
#
# - HSDP shards inside a node and copies across: a mesh of (replicate, shard). Memory follows the shard group.
# - Strategies differ in what is whole, and when. FULL_SHARD is ZeRO-3.
# - The rank with the least communication is the one that all others wait for.
# - DDP is enough while the states and a good batch fit.
#
# Next: `11_migration.ipynb`, your own script. For starting on several nodes, MFU, failures and pipelines there is
# `14_a_good_run.ipynb`.
