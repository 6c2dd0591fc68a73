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
# # A good run: is this fast, and will it last?
#
# The plan is chosen and the cluster is yours. By the end you can start a job on several nodes, say how good a step and
# a month are in one number each, and answer the colleague who asks why you don't use a pipeline.

# %% [markdown]
# > **Our 8B model** trains on 64 H100. Each GPU works for 44% of what its data sheet promises. Is that good? And
# > somewhere a GPU will break. How often do you save? (`fsdp-sim simulate --model llama3-8b --gpu H100-SXM-80GB --gpus
# > 64 --seq-len 4096 --param-dtype bf16`)
#
# **Real:** ports, processes, and the published runs in section 2. **Modelled:** everything that says *simulated*, and
# the failures and pipelines of sections 3 and 4. No GPU was used here. You need chapter 10 first.

# %%
import inspect
import socket
import subprocess
import sys
from statistics import median

import psutil
import torch.distributed as dist
from IPython.display import HTML
from torch.distributed.pipelining import stage

from fsdp_sim import Cluster, Plan, simulate, viz
from fsdp_sim.cost import workload
from fsdp_sim.learn import check, hint, in_torch, predict, solution  # noqa: F401
from fsdp_sim.learn.exercises.scale.how_often_to_save import expected, mtbf_s, played
from fsdp_sim.learn.pictures.memory import stacks
from fsdp_sim.learn.pictures.scale import goodputs, idle, utilisations
from fsdp_sim.mini import FSDPModule
from fsdp_sim.timeline import Op
from fsdp_sim.validate import fitting_rows, read_csv

# %% [markdown]
# ## 1. Starting on several nodes
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
# You see the same when there are more ranks than GPUs. Two NCCL ranks cannot share a GPU. With one GPU use one rank,
# or gloo on the CPU as here.

# %%
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
print("the launcher is gone; its worker", "still runs" if alive else "went with it")
worker.kill()
assert alive

# %% [markdown] covers=["pitfall 51"]
# The third: kill a launcher with SIGKILL and its workers live on. On a cluster they hold the GPUs and the port of a
# job that is over. Send SIGTERM (torchrun passes it on, and kills after 30 s). Before a restart look for the old
# ranks, not only for the launcher. The labs' own `torchrun` ties them: when the kernel dies its ranks leave.

# %% [markdown]
# ## 2. How good is a step?
#
# A step takes so many seconds. Is that fast? It depends on model, tokens and GPU, and **MFU**, model FLOPs
# utilization, takes all three into account ([Chowdhery et al., 2022](https://arxiv.org/abs/2204.02311)). Take the
# FLOPs that the model needs for a token, times tokens per second, and divide by the FLOP/s of the data sheet. A token
# needs 6 FLOPs per parameter, and attention besides. **HFU** counts what is recomputed too.
#
# Take Llama 3 8B on 64 H100, 4,096 tokens a sequence. Then recompute all activations, and fill the room with more
# sequences.


# %% tags=["hide-input"]
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
stacks(percent, "Recomputing keeps a GPU busier, and the model gets less of it", "% of the step busy (simulated)")

# %%
hfu = {name: round(of["needed, at the peak"] + of["recomputed, at the peak"]) for name, of in percent.items()}
for name, sim in steps.items():
    print(f"{name}: MFU {sim.mfu:.0%}, HFU {hfu[name]}%")
assert all(sim.fits for sim in steps.values())
assert [round(100 * sim.mfu) for sim in steps.values()] == [44, 49, 41, 46]
assert list(hfu.values()) == [44, 49, 53, 60]

# %% [markdown]
# *Needed* is MFU; with *recomputed* it is HFU. Then come kernels that are slower than the peak. What is missing to
# 100% are waits, for the network and for what the loop does between two steps.
#
# With four recomputed sequences HFU is higher than with two, and MFU lower. A GPU that recomputes everything does 8
# FLOPs per parameter and token where 6 count. So even at the peak its MFU would end at about 3/4.

# %% [markdown] covers=["pitfall 35"]
# Compare runs by MFU, and when you read a number, ask how it was counted. Parameters before sharding? (`numel()` of an
# FSDP1 shard is one rank's.) With attention? The dense peak, or the one with sparsity, which is twice as high?

# %% [markdown]
# Nobody reaches 100%. What do published runs reach?

# %% predict="mfu_of_published_runs"

# %% tags=["hide-input"]
reached = {}
for one in fitting_rows(read_csv()):  # MPT models, mosaicml/llm-foundry's own tables
    made, gpu = workload(one.model, one.plan), one.cluster.gpu
    used = made.model_flops_per_token * made.tokens * one.plan.grad_accum / one.step_time_s
    how = "all recomputed" if one.plan.activation_checkpointing else "nothing recomputed"
    reached.setdefault(gpu.name, {}).setdefault(how, []).append(used / gpu.peak_flops("bf16"))
reached = dict(sorted(reached.items()))
sentence = "212 published FSDP runs reach a quarter to two thirds of the peak"
utilisations(reached, sentence, {"all recomputed: about 3/4 at most": 0.75})

# %% tags=["hide-input"]
mfus = {gpu: [part for parts_of in ways.values() for part in parts_of] for gpu, ways in reached.items()}
assert sum(map(len, mfus.values())) == 212
assert 0.25 < min(map(min, mfus.values())) < max(map(max, mfus.values())) < 2 / 3
cards = {name: Cluster(name, gpus=8).gpu for name in mfus}
for name, gpu in cards.items():
    matmul = gpu.sustained_matmul_flops / gpu.peak_flops("bf16")
    print(f"{name}: {median(mfus[name]):.0%} in the middle; matmuls alone {matmul:.0%}")
a100, h100 = cards["A100-SXM-80GB"], cards["H100-SXM-80GB"]
flops, gbytes = h100.bf16_flops / a100.bf16_flops, h100.mem_bytes_per_s / a100.mem_bytes_per_s
faster = flops * median(mfus[h100.name]) / median(mfus[a100.name])
print(f"H100 beside A100: FLOP/s x {flops:.1f}, bytes/s x {gbytes:.1f}, runs x {faster:.1f}")
assert (round(median(mfus[h100.name]), 1), round(median(mfus[a100.name]), 1)) == (0.4, 0.5)

# %% [markdown]
# Measured on GPUs, by others: the tables of [llm-foundry](https://github.com/mosaicml/llm-foundry). Matmuls alone stay
# below the data sheet, an H100's for want of power, and a step is more than matmuls: norms, the loss and the
# optimizer wait for memory.
#
# Why did MFU fall on H100, while runs became faster? For one, its memory bandwidth has grown half as much as its
# FLOP/s. So compare MFU on one kind of GPU. The middle of these runs is about 40% on H100 and 50% on A100. Are you far
# below? See what your step waits for (chapter 05, section 8).

# %% [markdown]
# ## 3. How good is a month?
#
# Llama 3 8B learns from 15 trillion tokens on 1,024 of these H100, with two sequences each. How many days is that?
# And how often does something break meanwhile? Llama 3 405B counted 419 unexpected interruptions in 54 days, on
# 16,384 GPUs ([Grattafiori et al., 2024](https://arxiv.org/abs/2407.21783), section 3.3.4).

# %% predict="days_of_15_trillion_tokens"

# %%
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

# %% tags=["hide-input"]
SAVE_S, RESTART_S = 60, 600  # assumed: a checkpoint stops training for a minute, a restart takes ten
every_s = [60 * 1.15**n for n in range(67)]
good, shown, best = {}, {}, {}
for gpus in (8, 1024, 16384):
    name, fails_s = f"{gpus:,} GPUs", mtbf_s(gpus)
    best[name] = float(checked.use(SAVE_S, gpus))
    good[name] = {s: expected(s, SAVE_S, fails_s, RESTART_S) for s in sorted([*every_s, best[name]])}
    shown[name] = {s: played(s, SAVE_S, fails_s, RESTART_S) for s in every_s[::6]}
goodputs(good, shown, best, "The more GPUs, the sooner the next checkpoint, and the less of the time counts")

# %% tags=["hide-input"]
most = {name: curve[best[name]] for name, curve in good.items()}
assert all(max(curve.values()) - most[name] < 0.002 for name, curve in good.items())
assert all(abs(share - expected(s, SAVE_S, mtbf_s(1024), RESTART_S)) < 0.01 for s, share in shown["1,024 GPUs"].items())
often, fails_s = best["16,384 GPUs"], mtbf_s(16384)
lost = {"saving": SAVE_S / often, "doing work again": often / 2 / fails_s, "restarting": RESTART_S / fails_s}
print("16,384 GPUs lose about", ", ".join(f"{share:.1%} {what}" for what, share in lost.items()))
quick = expected(checked.use(5, 16384), 5, fails_s, 180)
print(f"with 5 s for a save and 3 minutes for a restart {quick:.0%} count, not {most['16,384 GPUs']:.0%}")
assert 15 < often / 60 < 25
assert [list(d.values()) for d in (best, most)] == [sorted(d.values(), reverse=True) for d in (best, most)]
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
# ## 4. Why not a pipeline?
#
# A **pipeline** gives each GPU some of the layers, and sends activations instead of parameters
# ([GPipe](https://arxiv.org/abs/1811.06965)). With p stages and m micro-batches a stage works in m of m + p - 1 slots.
# The rest, (p-1)/(m+p-1), is the **pipeline bubble**. Take Llama 3 8B on 64 H100 in 8 nodes, some sequences of 2,048
# tokens for each GPU.

# %% predict="idle_in_a_pipeline"

# %% tags=["hide-input"]
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
sent = 3 * 2 * sims[1].workload.param_count  # FSDP in bf16: about three times the model leaves a node (chapter 10)
across = {n: 2 * 2 * 4096 * 2048 * 64 * n for n in (1, 16)}  # activations on, their gradients back: 4,096 for a token
for n, n_bytes in across.items():
    print(f"{n} per GPU: a node sends {sent / 1e9:.0f} GB with FSDP, {n_bytes / 1e9:.0f} GB as a stage of the pipeline")
assert sent > 20 * across[1]
assert sent < 2 * across[16]

# %% [markdown] covers=["coverage 004.34"]
# FSDP's bytes do not grow with the batch, and hide once a GPU has F/B tokens (chapter 10, section 4). At 400 Gbit/s
# that is from the first sequence on. A pipeline's bytes grow with the batch, and with few sequences they are twenty
# times fewer. So a pipeline is for slow links and batches that may not grow, often with FSDP inside each stage. It
# also cuts your model's code into stages; FSDP leaves the code as it is.
#
# What is modelled here? The simulator has no pipelines. The bubble is its formula, for equal stages and free sends,
# with a node for each stage, eight copies side by side, and one sequence as a micro-batch. Embedding and head make
# real stages unequal; interleaved schedules shrink the bubble.

# %% [markdown]
# FSDP inside a stage? A stage runs its layers once for every micro-batch. So the pipeline tells FSDP not to reduce and
# not to let go before the last one, with three setters. You know what each of them does:

# %%
micro_batch = (
    FSDPModule.set_requires_gradient_sync,
    FSDPModule.set_reshard_after_backward,
    FSDPModule.set_is_last_backward,
)
assert all(f"self.submod.{of.__name__}(" in inspect.getsource(stage) for of in micro_batch)
in_torch(*micro_batch)

# %% [markdown]
# ## What you have seen
#
# - `set_device(LOCAL_RANK)`, a free port, and no old ranks: then a job starts on several nodes.
# - A step is as good as its MFU. Compare it on one kind of GPU, counted one way.
# - A month is as good as its goodput: save every √(2 × save × MTBF).
# - FSDP's bytes do not grow with the batch; a pipeline's do, and it idles where batches are small.

# %% [markdown]
# > On 1,024 H100 **our 8B model** learns from 15 trillion tokens in about 19 days, and is interrupted about nine
# > times.
#
# Next: `lab_10_tune.ipynb`, the fastest plan that fits.
