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
# # Collectives: what travels between the ranks, and what does it cost?
#
# FSDP buys memory with communication. What does it send, and what does that cost? After this chapter you can say what
# an all-gather, a reduce-scatter and an all-reduce leave on each rank, and count the bytes of a training step.

# %% [markdown]
# > **Our 8B model** lies in eight pieces, one on each card, and no card can compute a block with what it has. So
# > before every block the pieces come together, and every gradient has to find the card that keeps its rows. All that
# > in a step of about 1.0 s. How many bytes must a card send? Guess now; we count them at the end.
#
# **Core path, about 45 minutes:** sections 1, 2, 3 and 8, with the exercises marked *core*. The rest is
# there if you like.
#
# **What is real:** the ranks, everything they send, the bytes (counted by the kernel), the times on gloo.
# **What is modelled:** section 9, where a cluster's network is simulated, and in section 7 the speed of one wire.

# %%
import torch
import torch.distributed as dist
from IPython.display import HTML
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_sim import Cluster, Plan, viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.exercises.collectives.more_than_ddp import Model, sent
from fsdp_sim.learn.judges.account import GLOO, message_bytes, sent_bytes
from fsdp_sim.learn.pictures.collectives import alpha_beta, sent_bars
from fsdp_sim.measure.on_rank import Case, measure
from fsdp_sim.mini.collectives import (
    all_gather_single,
    foreach_all_gather,
    foreach_reduce_scatter,
    reduce_scatter_single,
)
from fsdp_sim.ranks import Network, run
from fsdp_sim.viz.charts.scaling_points import cases_of, line_of
from fsdp_sim.viz.theme import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from labs.experiments.mine import mine
from labs.loop.minimal import shard
from labs.model import build
from labs.model.gpt import GPTConfig

# %% [markdown]
# ## 1. Three collectives
#
# A **collective** is an operation that every **rank** of a group calls, and that ends when all have. Below,
# rank r begins with the numbers 10r, 10r+1, 10r+2, 10r+3. An **all-gather** puts pieces together, an
# **all-reduce** adds, a **reduce-scatter** adds and deals out the sum. We all-gather each rank's first number, and
# reduce-scatter and all-reduce all four.

# %% predict="rank_1_after_reduce_scatter"


# %%
def three():
    rank, own, piece = dist.get_rank(), torch.arange(4.0) + 10 * dist.get_rank(), torch.empty(1)
    gathered, reduced = torch.empty(4), own.clone()
    all_gather_single(gathered, own[:1], None)
    reduce_scatter_single(piece, own, dist.ReduceOp.SUM, None, False)
    dist.all_reduce(reduced)
    return [f"rank {rank}", *(", ".join(f"{x:g}" for x in t.tolist()) for t in (own, gathered, piece, reduced))]


rows = run(three, 4, progress=False)
header = ("", "begins with", "all-gather", "reduce-scatter", "all-reduce")
HTML(viz.Table("What each rank holds", header, tuple(map(tuple, rows))).to_html())

# %%
assert {row[2] for row in rows} == {"0, 10, 20, 30"}
assert [row[3] for row in rows] == ["60", "64", "68", "72"]
assert {row[4] for row in rows} == {"60, 64, 68, 72"}

# %% [markdown] covers=["coverage 003.15", "coverage 003.16"]
# **All-gather**: each brings a piece, all leave with the whole. **Reduce-scatter**: each brings a whole, the wholes
# are added, each leaves with *its* piece of the sum. **All-reduce**: all leave with the whole sum.

# %% [markdown]
# When does FSDP use which? It all-gathers a unit's parameters before the unit computes, in forward and again in
# backward. Then it reduce-scatters the gradients. That is all: after the optimizer's step nothing is sent, because
# the next forward gathers anyway.

# %% [markdown] covers=["coverage 004.21", "misconception 18"]
# ## 2. Does an owner broadcast?
#
# You may have read that a layer has an owner, which broadcasts its weights, and to which all send their gradients.
# Then the owner's link would work while the others wait. Let the ranks answer: the check starts them and calls your
# function on each.
#
# Stuck? `hint("owner_or_everyone")` gives the next of three hints, `solution("owner_or_everyone")` the solution.

# %% predict="who_sends_a_layer"

# %% exercise="owner_or_everyone"

# %%
forward = run(checked.use, 4, progress=False, show_output=False)
rows = tuple((f"rank {r}", f"{sent_bytes(records) / 2**10:.1f} KiB") for r, records in enumerate(forward.records))
assert len({kib for _, kib in rows}) == 1
HTML(viz.Table("In one forward", ("", "sends"), rows).to_html())

# %% [markdown] covers=["coverage 004.21", "coverage 003.16"]
# Each sends as much as every other. Every rank owns rows of *every* parameter, so all links work at once. The same
# with gradients: no rank receives a whole summed gradient. Each receives its own rows of it, and FSDP asks for the
# **mean** over the ranks, not the sum.
#
# ## 3. A ring
#
# How do four ranks bring four pieces to everyone? In a **ring** each sends to its right neighbour only.

# %% predict="steps_of_a_ring"

# %%
ring = viz.collective("all-gather", ranks=4)
assert "takes 3 steps" in ring.finding
ring.titled("Each passes on what it has just received, and after three steps all have all")

# %% [markdown]
# Play it (when you have run the cell), or read the panels: a framed chunk has just arrived. In each of three
# steps every rank sends one chunk, and every link carries one: none is idle, none is crowded. With W ranks that is
# W-1 steps, and each rank sends W-1 of W chunks: **(W-1)/W of the message**. As much has to reach each rank.

# %% [markdown]
# ### Optional: a ring that was tested on two ranks
#
# The code below does this too, its author says.

# %% exercise="case_01"

# %%
chunks = [torch.tensor([float(10 * r + 1), float(10 * r + 2)]) for r in range(3)]
gathered = run(lambda use: use(chunks[dist.get_rank()]).tolist(), 3, checked.use, progress=False)
assert all(torch.tensor(rows).equal(torch.stack(chunks)) for rows in gathered)
rows = tuple((f"rank {r}", ", ".join(f"{x:g}" for chunk in whole for x in chunk)) for r, whole in enumerate(gathered))
HTML(viz.Table("After your ring", ("", "holds"), rows).to_html())

# %% [markdown]
# ## 4. The same ring, with additions
#
# A reduce-scatter is the same ring with a plus sign: what arrives is added to what a rank has, and passed on.

# %% predict="numbers_sent_to_reduce_scatter"

# %%
ring = viz.collective("reduce-scatter", ranks=4)
assert "each rank sends 6 exactly" in ring.finding
ring.titled("A sum travels on and grows, and ends at the rank that keeps it")

# %% [markdown]
# Again W-1 steps, and (W-1)/W of the message from each. A chunk of the sum is finished when it has met every rank,
# and it ends where it belongs.

# %% [markdown]
# The ring is one way to send; rows can also go straight to the rank that adds them up. Write it either way:

# %% exercise="reduce_scatter_from_sends"

# %%
reduced = run(lambda use: use(torch.ones(4, 2**16)).sum().item(), 4, checked.use, progress=False)
assert list(reduced) == [4.0 * 2**16] * 4
sent_mib, ring_mib = sent_bytes(reduced.records[0]) / 2**20, 2 * 3 / 4 * 4 * 2**16 * 4 / 2**20
assert abs(2 * sent_mib / ring_mib - 1) < 0.01
rows = (("your reduce-scatter", f"{sent_mib:.2f} MiB"), ("an all-reduce in a ring", f"{ring_mib:.2f} MiB"))
HTML(viz.Table("Of 1 MiB on four ranks", ("", "rank 0 sends"), rows).to_html())

# %% [markdown]
# Half of what an all-reduce sends. Where is the other half?

# %% [markdown]
# ## 5. All-reduce is both
#
# After a reduce-scatter each rank has one finished chunk of the sum, and lacks the others. We run one more collective,
# and compare with torch's all-reduce to the last bit.

# %% predict="what_completes_an_all_reduce"

# %%
ring = viz.collective("all-reduce", ranks=4)
assert "Its first 3 steps are a reduce-scatter, its last 3 an all-gather" in ring.finding
ring.titled("Three steps to add up, three to hand round")


# %%
def both_ways():
    torch.manual_seed(dist.get_rank())
    whole, own, again = torch.randn(4096), torch.empty(1024), torch.empty(4096)
    reduce_scatter_single(own, whole, dist.ReduceOp.SUM, None, False)
    all_gather_single(again, own, None)
    dist.all_reduce(whole)
    return torch.equal(whole, again)


same = list(run(both_ways, 4, progress=False))
print(*(f"rank {rank}: the same to the last bit" for rank, is_same in enumerate(same) if is_same), sep="\n")
assert same == [True] * 4

# %% [markdown] covers=["coverage 004.57", "coverage 000.33"]
# **All-reduce = reduce-scatter + all-gather.** FSDP lives on this equation. DDP keeps a replica on every rank and
# all-reduces gradients, bucket by bucket, from hooks in backward (`device_ids=[rank]` tells it which GPU the replica
# is on). FSDP opens the all-reduce in the middle. After the reduce-scatter a rank steps its piece. Then the
# all-gather of the next forward brings new parameters instead of old gradients. (On gloo the two agree to the last
# bit. Other libraries may add in another sequence, and then the last bits differ.)

# %% exercise="all_reduce_in_two_halves"


# %%
def halves(use):
    return use(torch.full((1002,), float(dist.get_rank()))).unique().tolist()


done = run(halves, 4, checked.use, progress=False, show_output=False)
assert list(done) == [[6.0]] * 4
parts = [(record.op, 3 / 4 * message_bytes(record)) for record in done.records[0]]
parts += [("both", sum(size for _, size in parts)), ("all_reduce", 2 * 3 / 4 * 1002 * 4)]
assert [size for _, size in parts] == [3 / 4 * 1004 * 4, 3 / 4 * 1004 * 4, 2 * 3 / 4 * 1004 * 4, 2 * 3 / 4 * 1002 * 4]
rows = tuple((op.replace("_", "-"), f"{size:,.0f} bytes") for op, size in parts)
HTML(viz.Table("1002 numbers, 4 ranks", ("", "rank 0 sends"), rows).to_html())

# %% [markdown]
# Two halves send what the whole sends, and 12 bytes more. That is the price of equal pieces: 1002 numbers are
# **padded** to 1004.
#
# ### Is it always a ring?

# %% [markdown]
# No. [NCCL](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-algo) has several ways, and takes
# the one that it expects to be fastest. Between nodes an all-reduce may go up and down a [double binary
# tree](https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/). On 64 H100 a ring takes
# 2 × 63 steps, each with its latency; a tree of the eight nodes climbs three levels, and comes down again. Our
# simulator, fitted to published measurements, gives 64 KiB there 0.33 ms as a ring and 0.10 ms as a tree.

# %% [markdown]
# Inside a node the switch can add:
# [NVLS](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-nvls-enable), and SHARP in the
# network. Then a GPU sends 1 + 1/W of the message and not 2(W-1)/W: 1 GiB on eight H100 takes 4.1 ms instead of 5.3.
# That is less than any ring can do. It helps DDP, and the all-reduce between copies (chapter 10). All-gathers and
# reduce-scatters, the two that FSDP needs, are rings in those measurements, and so they are in this course.

# %% [markdown]
# A third way takes the GPU's **copy engines**, which move bytes while all multiprocessors compute ([NCCL
# 2.28](https://developer.nvidia.com/blog/fusing-communication-and-compute-with-new-device-api-and-copy-engine-collectives-in-nvidia-nccl-2-28/)).
# An all-gather only copies, so it can go that way and slows no matmul beside it. A reduce-scatter adds, and so it
# cannot.

# %% [markdown]
# ## 6. What gloo does differently
#
# Here all of this runs on **gloo**, a library for CPUs; on GPUs it is **NCCL**. Does (W-1)/W of the message really
# leave the process? The kernel of the operating system counts every byte. Ask it.

# %% predict="what_gloo_sends"

# %% exercise="reduce_scatter_over_gloo"

# %% tags=["nbval-ignore-output"]
numbers = 2**20
counted = run(lambda use: use(torch.ones(numbers)), 4, checked.use, progress=False, show_output=False)[0]
ring = 3 / 4 * numbers * 4 / 2**20
rows = [
    (op.replace("_", "-"), f"{ring:.2f} MiB", f"{counted[op] / 2**20:.2f} MiB")
    for op in ("all_gather", "reduce_scatter")
]
assert abs(counted["all_gather"] / 2**20 / ring - 1) < 0.05
assert abs(counted["reduce_scatter"] / 2**20 / (2 * ring) - 1) < 0.05
HTML(viz.Table("Sent by rank 0", ("", "as a ring", "on gloo"), tuple(rows)).to_html())


# %%
def names_in_the_profiler():
    whole, own = torch.ones(8), torch.empty(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        reduce_scatter_single(own, whole, dist.ReduceOp.SUM, None, False)
    return sorted(event.key for event in profile.key_averages() if event.key.startswith(("c10d", "gloo")))


names = run(names_in_the_profiler, 4, progress=False, show_output=False)[0]
print(*names, sep="\n")
assert names == ["c10d::_reduce_scatter_base_", "gloo:all_reduce"]

# %% [markdown] covers=["misconception 33"]
# gloo gathers as a ring would, and reduce-scatters at twice the price. Why? Torch's profiler gives it away: what is
# called as a reduce-scatter runs as `gloo:all_reduce`, and each rank keeps its piece and drops the rest. (No wonder
# that section 5 found the same bits.) So never judge FSDP's cost by gloo's bytes or times. What does carry over to
# GPUs? Which collectives run, in which order, of how many elements. That is what this course counts, and what it
# simulates.

# %% [markdown]
# ## 7. What a message costs
#
# We time messages from 4 KiB to 16 MiB on two ranks. The largest has 4096 times the bytes of the smallest.

# %% predict="time_of_4096_times_the_bytes"

# %% tags=["nbval-ignore-output"]
cases = [Case(op, n_bytes=1024 * 4**k, group_size=2) for op in ("all_gather", "all_reduce") for k in range(1, 8)]
measured = run(measure, 2, cases, "cpu", 0.02, record=False, progress=False, show_output=False)
times = [max(of_one, key=lambda time: time.seconds) for of_one in zip(*measured, strict=True)]
sizes = [GLOO[time.op] / 2 * time.n_bytes for time in times]
for time in (times[0], times[6]):
    print(f"all-gather of {time.n_bytes / 1024:6,.0f} KiB: {1e3 * time.seconds:6.2f} ms")
assert times[0].seconds < times[6].seconds < 4096 * times[0].seconds

# %% [markdown]
# Far less than 4096 times. A small message does not wait for its bytes but for everything else: calls, packets,
# ranks that meet. So a message costs about **alpha + beta × bytes**: alpha is the **latency**, one over beta the
# **bandwidth**.

# %% [markdown]
# Two numbers describe a link, latency and bandwidth. Find them:

# %% exercise="fit_alpha_beta"

# %% tags=["nbval-ignore-output"]
link = checked.use([(n, time.seconds) for n, time in zip(sizes, times, strict=True)])
print(f"this machine, two ranks: {1e3 * link['latency_s']:.2f} ms and {link['bytes_per_s'] / 1e9:.2f} GB/s")
alpha_beta(times, **link, sent_bytes=sizes)

# %% [markdown]
# Where the dotted line (latency) and the dashed one (bytes) cross, both cost the same: at latency × bandwidth. Far to
# the left a message of half the size costs as much. That is why FSDP sends all parameters of a unit in *one* message,
# and why very small units are slow. In a ring each of the W-1 steps has its latency, so alpha grows with the ranks.
# Beta's part hardly does, since (W-1)/W stays below 1. An all-reduce has twice the steps, so on the left it takes
# longer than an all-gather: one curve for both is a compromise.
#
# What this model ignores: links of different speed on one way, several messages at once, ranks that come late.

# %% [markdown]
# Is a link as fast as it should be? We give four ranks links of 25 MB/s and time 4 MB. (The ranks and bytes are real;
# a collective ends when a pretended wire of that speed has carried a ring's share of them.)

# %% predict="size_over_time"

# %%
looks = {"all_gather": (1, ALL_GATHER), "reduce_scatter": (1, REDUCE_SCATTER), "all_reduce": (2, ALL_REDUCE)}
cases = [Case(op, n_bytes=4_000_000, group_size=4) for op in looks]
wire = Network(bandwidth_gbps=0.2)  # 25 MB/s

# %% tags=["nbval-ignore-output"]
wired = run(measure, 4, cases, "cpu", 0.2, network=wire, record=False, progress=False, show_output=False)[0]
bars, bus = {}, {}
for time in wired:
    passes, look = looks[time.op]
    algorithm = time.n_bytes / time.seconds / 1e6
    bus[time.op] = passes * 3 / 4 * algorithm
    bars |= {f"{look.name}: size / time": [(look, algorithm)], f"{look.name}: bus": [(look, bus[time.op])]}
assert all(abs(rate / 25 - 1) < 0.15 for rate in bus.values())
sent_bars(bars, "MB/s", "Bus bandwidth is that of the link, 25 MB/s; size over time is not")

# %% [markdown]
# Size over time is the **algorithm bandwidth**. For an all-gather it is more than the link's, since a quarter of what
# a rank has in the end never travelled. For an all-reduce, which goes round twice, it is less. **Bus bandwidth**
# counts what a ring sends: times (W-1)/W for an all-gather or reduce-scatter, times 2(W-1)/W for an all-reduce. That
# is what each link carries. So one number fits all collectives and any W, and you can compare it with a data sheet.
# NVIDIA's [`nccl-tests`](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md) print both, as `algbw`
# and `busbw`.

# %% [markdown]
# And the largest messages from before, on this machine, with no wire between?

# %% tags=["nbval-ignore-output"]
for time in (times[6], times[13]):
    algorithm = time.n_bytes / time.seconds / 1e9
    bus_of = looks[time.op][0] * 1 / 2 * algorithm  # W = 2
    print(f"{time.op}, two ranks of this machine: algorithm {algorithm:.2f} GB/s, bus {bus_of:.2f} GB/s")
assert times[6].n_bytes == times[13].n_bytes == 16 * 2**20

# %% [markdown]
# Here the "link" is memory, and copies and additions share it: no data sheet has its number. And the factor supposes
# a ring. Gloo's own reduce-scatter sends twice as much, so it would show half.

# %%
in_torch(all_gather_single, reduce_scatter_single, foreach_all_gather, foreach_reduce_scatter)

# %% [markdown]
# Above is where this happens, in the mini-FSDP and, folded, in torch. It takes three moves: copy a unit's shards into
# one buffer, send it in one collective, copy the pieces out.
#
# ## 8. A training step: 2Ψ or 3Ψ?
#
# Ψ is the number of parameters. "ZeRO-3 (that is FSDP) costs the same as DDP", "it costs 3Ψ against 2Ψ", "1.5
# times the bytes": you will read all three. Count how often each parameter, and its gradient, travels in a step. (On
# many ranks (W-1)/W is nearly 1.)

# %% predict="sent_if_parameters_stay"

# %% exercise="elements_sent"

# %%
ways = {"DDP": "ddp", "ZeRO-2": "zero2", "FSDP, frees after forward": "fsdp", "FSDP, keeps": "fsdp kept"}
psi = {name: checked.use(10**9, 1024, how) / 1e9 for name, how in ways.items()}
pieces = {"DDP": [(ALL_REDUCE, psi["DDP"])]}
for name in list(ways)[1:]:
    pieces[name] = [(ALL_GATHER, psi[name] - 1023 / 1024), (REDUCE_SCATTER, 1023 / 1024)]
assert [round(value) for value in psi.values()] == [2, 2, 3, 2]
sent_bars(pieces, "Ψ sent by a rank in a step, 1024 ranks", "FSDP gathers twice: 3 Ψ where DDP sends 2 Ψ")

# %% [markdown] covers=["misconception 13", "misconception 14"]
# So all three are right about something. ZeRO-1, ZeRO-2 and FSDP with `reshard_after_forward=False` send 2Ψ, as DDP
# does. FSDP that frees parameters after forward sends 3Ψ. And bytes are elements times the size of their dtype, which
# may differ. Gather in 2 bytes and reduce in 4, and you send 2 × 2 + 4 = 8 bytes a parameter. DDP in fp32 sends 2 × 4
# = 8, too.

# %% [markdown]
# ### Your own FSDP: the collective
#
# The course has a thread: a file of yours, `my_fsdp.py`, becomes a `fully_shard` in plain torch. Each chapter from
# here to 9 has a part of it, and what you skip is the reference's. The first part takes gradients to their owners.

# %% exercise="reduce_scatter_mean"

# %% tags=["nbval-ignore-output"]
standing = mine()
standing

# %% [markdown]
# ### Optional: exactly 1.5?
#
# Is it *exactly* 1.5 in torch? Measure it.

# %% exercise="more_than_ddp"


# %%
def ratios(use):
    x = torch.ones(2, 64)
    return {blocks: use(Model(64, 64, blocks), x, sent)["ratio"] for blocks in (1, 3, 7, 15)}


found = run(ratios, 2, checked.use, progress=False, show_output=False)[0]
assert found == {blocks: 1.5 - 0.5 / (blocks + 1) for blocks in found}
rows = tuple((f"the root and {blocks} more", f"{ratio:.3f}") for blocks, ratio in found.items())
HTML(viz.Table("FSDP's bytes", ("units", "times DDP's"), rows).to_html())

# %% [markdown] covers=["misconception 13"]
# Torch keeps the root's parameters after forward by default. So the root is gathered only once, and reduced once. The
# ratio is 1.5, less half of the root's share of the parameters.
#
# ## 9. Does it scale?
#
# "DDP scales to about 8 GPUs, FSDP to more than 100": you may meet a table that says so. We simulate GPT-2, which fits
# on one GPU, from 8 GPUs to 512.

# %% predict="speed_kept_on_512_gpus"

# %%
node = Cluster("A100-SXM-80GB", gpus=8)
plans = {"DDP": Plan(api="ddp", micro_batch=8), "FSDP": Plan(micro_batch=8)}
lines = {name: ("gpt2-124m", node, plan) for name, plan in plans.items()}
viz.scaling(lines, gpus=[8, 16, 32, 64, 128, 256, 512]).titled(
    "Both scale to 512 GPUs, and DDP keeps a little more of its speed"
)

# %%
kept = {name: line_of(name, case, [8, 512], "weak").kept for name, case in cases_of(lines, None, None).items()}
print(*(f"{name} keeps {share:.0%} of its speed from 8 to 512 GPUs" for name, share in kept.items()), sep="\n")
assert kept["DDP"] > 0.95
assert 0.85 < kept["FSDP"] < kept["DDP"]

# %% [markdown] covers=["coverage 001.25"]
# For a model that fits, both go on to hundreds of GPUs, and the first to lose is FSDP, not DDP: its rings
# carry more and smaller messages, and each of the W-1 steps has a latency. (Simulated: of many nodes the slowest is a
# few percent slower, and no link fails.) Memory limits DDP, the number of GPUs does not. Bandwidth and latency limit
# both, measured against the compute of a batch. When the ring gets too long, FSDP shards within a node only: chapter
# 10.

# %%
misconceptions("collectives")

# %% [markdown]
# ## Lab: a step of the real two
#
# torch's own DDP and `fully_shard`, one step of the same GPT on two real ranks, every collective on record. The GPT
# has five blocks, each a unit, and the root.


# %%
def step(api):
    model, tokens = build(GPTConfig.preset("teaching")), torch.zeros(2, 16, dtype=torch.long)
    model = DistributedDataParallel(model) if api == "ddp" else shard(model, fully_shard)
    dist.barrier()  # what DDP does when it is made is no part of the step
    model(tokens, tokens).backward()


# %% predict="collectives_of_a_step"

# %%
issued = {}
for api in ("ddp", "fsdp2"):
    records = run(step, 2, api, progress=False).records[0]
    issued[api] = records[[record.op for record in records].index("barrier") + 1 :]
    counts = {op: sum(record.op == op for record in issued[api]) for op in dict.fromkeys(r.op for r in issued[api])}
    print(f"{api}:", ", ".join(f"{op} {count} times" if count > 1 else f"{op} once" for op, count in counts.items()))
ratio = sent_bytes(issued["fsdp2"]) / sent_bytes(issued["ddp"])
print(f"FSDP2 sends {ratio:.2f} times what DDP sends")
assert (len(issued["ddp"]), len(issued["fsdp2"])) == (1, 17)
assert 1.4 < ratio < 1.5

# %% [markdown]
# FSDP issues eleven all-gathers and six reduce-scatters, where DDP makes do with one all-reduce. The root is gathered
# only once, so FSDP sends a little less than 1.5 times as much.

# %% [markdown]
# Go on in `lab_01_ddp_to_fsdp2.ipynb`, which runs both as `torchrun` scripts, and `lab_09_nodes.ipynb`, which counts
# what crosses from node to node.
#
# **On one GPU** there is nothing to send: `fsdp-sim calibrate --device cuda` measures its kernels alone. **On many:**
# the same command fits NCCL's latency and bandwidth on your links, and `python -m labs.experiments.ddp_to_fsdp2
# --ranks N` runs this comparison on NCCL.

# %% tags=["nbval-ignore-output"]
board("collectives")

# %% [markdown]
# ## What you have seen
#
# - All-gather: pieces become a whole everywhere. Reduce-scatter: wholes become pieces of a sum. All-reduce is both.
# - A ring sends (W-1)/W of the message from every rank, at the same time; nobody owns, nobody broadcasts.
# - DDP sends 2Ψ; FSDP 3Ψ, less what it keeps. On gloo a reduce-scatter costs double, on NCCL it does not.

# %% [markdown]
# > **Our 8B model**, counted: each of eight cards sends 26 GB of parameters in bf16 and 28 GB of gradients in fp32.
# > That is 54 GB in every step. Through a link of 100 Gbit/s it alone would take more than four seconds; the NVLink of
# > these cards makes it possible in a fraction of one. Which bytes are whose? So far we cut tensors as it came.
#
# Next: `03_sharding_a_tensor.ipynb`, which rows of a parameter each rank keeps.
