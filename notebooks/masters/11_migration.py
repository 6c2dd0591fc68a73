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
# # Migration: what changes when DDP, or FSDP1, becomes FSDP2?
#
# You have a script that trains with `DistributedDataParallel`, or with `FullyShardedDataParallel` from a guide of
# 2022. Here you move both to `fully_shard`, and prove that the numbers stay. You learn what each old argument is
# called now, and when you had better stay with DDP.

# %% [markdown]
# > **Our 8B model** came with a DDP script. On H100s that script would need about 136 GiB on every card, even with
# > every block checkpointed, and no card has that. So the script must change. How much of it? (`fsdp-sim simulate
# > --model llama3-8b --gpu H100-SXM-80GB --gpus 8 --seq-len 8192 --activation-checkpointing full --api ddp`)
#
# **Core path, about 45 minutes:** sections 1, 3 and 5, with the exercises marked *core*. The rest is
# there if you like.
#
# **What is real:** every call on two ranks, every error message, torch's own FSDP1 and FSDP2, the `torchrun`
# at the end. **What is modelled:** step times and memory of GPUs (there is none here); they say *simulated*.

# %%
import argparse
import contextlib
import inspect

import torch
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as wrappers
import torch.distributed.fsdp as fsdp
from IPython.display import HTML
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, wrap
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import fsdp_sim.mini
from fsdp_sim import simulate, viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.find import load
from fsdp_sim.learn.pictures.migration import RAISES, RUNS, WARNS, MarkStyle, marks
from fsdp_sim.ranks import Network, run
from fsdp_sim.spec import Cluster, Plan
from labs.cluster.torchrun import torchrun
from labs.config import TrainConfig
from labs.experiments import ddp_to_fsdp2

# %% [markdown]
# ## 1. From DDP: the diff
#
# Lab 1 has one training loop in two files: one with DDP, one with `fully_shard`. How far apart are they?

# %% predict="new_lines_of_fsdp2"

# %%
new = [line for line in ddp_to_fsdp2.changed_lines() if line.startswith("+") and not line.startswith(("+++", '+"'))]
assert len(new) == 9
ddp_to_fsdp2.diff()

# %% [markdown] covers=["coverage 000.23", "coverage 004.41", "coverage 004.55", "misconception 4.60"]
# Nine lines: imports, a mesh, a loop over the blocks and a call for the rest, `full_tensor()`, and how weights are
# saved. Look at what stays. Data: FSDP is data parallelism, so each rank takes its own rows. The learning rate:
# gradients are averaged, as DDP's are. And no `module.` in front of names: `model` is your model.
#
# Your loop may have more in it, so go through the checklist.

# %% tags=["hide-input"]
checklist = (
    ("start, samplers, schedule, logging", "stay", "the ranks do what they did"),
    ("DDP(model)", "fully_shard(block) for each, then fully_shard(model)", "a block is what is gathered at once"),
    ("model.module.x", "model.x", "nothing is wrapped; the class changes in place"),
    ("optimizer", "made after sharding", "it must hold the shards"),
    ("clip_grad_norm_", "stays: torch.nn.utils'", "a norm of DTensors is that of all ranks"),
    ("no_sync()", "set_requires_gradient_sync(last)", "whole gradients stay alive until the last"),
    ("autocast", "MixedPrecisionPolicy, or autocast: one of the two", "both cast, and not the same things"),
    ("copy.deepcopy(model) for an average", "average the shards", "FSDP modules cannot be copied"),
    ("if rank == 0: save(model.state_dict())", "get_model_state_dict on all ranks, rank 0 writes", "it gathers"),
    ("model.generate(...), model.other(...)", "register_fsdp_forward_method", "only forward has the hooks"),
)
HTML(viz.Table("Moving a loop from DDP to FSDP2", ("in the loop", "becomes", "because"), checklist).to_html())


# %% tags=["hide-input"]
def after_sharding():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    ours, names = model, list(model.state_dict())
    for module in (*model, model):
        fully_shard(module)
    methods = ("register_fsdp_forward_method", "no_sync", "clip_grad_norm_")
    has = {name: hasattr(model, name) or hasattr(torch.distributed.fsdp, name) for name in methods}
    try:
        __import__("copy").deepcopy(model)
    except AssertionError as error:
        return model is ours, type(model).__name__, list(model.state_dict()) == names, has, str(error)


same, kind, same_names, has, copied = run(after_sharding, 2, progress=False)[0]
print("the same object" if same else "another object", "the same names" if same_names else "other names", sep=", ")
print(f"its class: {kind};", ", ".join(f"{name}: {'yes' if there else 'no'}" for name, there in has.items()))
print(f"deepcopy: {copied}")
assert [same, same_names, kind, *has.values()] == [True, True, "FSDPSequential", True, False, False], copied

# %% [markdown]
# Only calling the model has the hooks, says the last row. What does `register_fsdp_forward_method` do about it? It
# puts the same two hooks around a method of yours. And of `no_sync` there is a flag left. You can read both in a
# minute:

# %%
in_torch(fsdp_sim.mini.register_fsdp_forward_method, fsdp_sim.mini.FSDPModule.set_requires_gradient_sync)

# %% [markdown]
# Your turn: the same step, with the wrap replaced. This is the DDP code (it is not run here):
#
#     model = DistributedDataParallel(model)
#     optimizer = torch.optim.SGD(model.parameters(), lr)
#     F.mse_loss(model(rows), targets).backward()
#     norm = clip_grad_norm_(model.parameters(), max_norm)
#     optimizer.step()

# %% exercise="ddp_step_to_fsdp2"

# %% [markdown]
# Stuck? `hint("ddp_step_to_fsdp2")` gives the next of three hints, `solution("ddp_step_to_fsdp2")` the solution.
#
# Here is what both steps send, over a slow wire, up to the norm. (What `full_tensor` gathers after it, so that we can
# compare the weights, is left out.) Compare the two beginnings. DDP's small all-gather asks whether all ranks have
# weights of the same shapes.

# %% tags=["nbval-ignore-output", "hide-input"]
step = load("ddp_step_to_fsdp2")
with_ddp = step.wrong[0].function  # a known wrong answer: it is still DDP
wire = Network(0.05, latency_us=200)
sent = {
    name: run(function, 2, each=step.judge.inputs(0), network=wire, progress=False, show_output=False)
    for name, function in (("DDP", with_ddp), ("FSDP2", checked.use))
}


def up_to_the_norm(timeline):
    end_s = max(event.end_s for event in timeline.ops if event.op != "ALL_GATHER")
    return timeline.select(lambda event: event.start_s < end_s)


both = viz.timeline({name: up_to_the_norm(results.timeline) for name, results in sent.items()}, ranks=[0])
both.titled("DDP first broadcasts its weights, FSDP2 begins with gathers")

# %%
ops = {name: [record.op for record in results.records[0]] for name, results in sent.items()}
print("DDP:  ", ", ".join(dict.fromkeys(ops["DDP"])))
print("FSDP2:", ", ".join(dict.fromkeys(ops["FSDP2"])))
assert "broadcast" in ops["DDP"]
assert "broadcast" not in ops["FSDP2"]
assert ops["FSDP2"][:4] == ["all_gather"] * 4
norms = [results[rank]["norm"] for results in sent.values() for rank in (0, 1)]
assert max(norms) - min(norms) < 1e-4 * norms[0]

# %% [markdown] covers=["coverage 002.27", "misconception 2.29"]
# One difference is easy to miss. DDP sends rank 0's weights when it wraps; `fully_shard` sends nothing. **All ranks
# must build the same weights**: one seed, or `set_model_state_dict` with `broadcast_from_rank0=True`.
#
# FSDP1 had `sync_module_states=True` for that: at construction, on GPUs only, and off by default.

# %% [markdown]
# ## 2. Old calls, today
#
# Guides are older than torch, and we copy from them. How many of these lines still run?


# %% tags=["hide-input"]
def tried(call):
    """What a line does on this rank: "runs", "warns: ..." or "raises: ..."."""
    import warnings

    names = {**vars(fsdp), **vars(wrap), "FSDP": FullyShardedDataParallel, "cpu": torch.device("cpu")}
    names |= {"model": torch.nn.Sequential(torch.nn.Linear(8, 8))}
    names |= {"policy": wrap.ModuleWrapPolicy({torch.nn.Linear})}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(call, names)
        except Exception as error:
            return f"raises: {type(error).__name__}"
    return "warns: FutureWarning" if FutureWarning in {w.category for w in caught} else "runs"


# %%
calls = [
    "FSDP(model, device_id=cpu)",
    "FSDP(model, device_id=cpu, auto_wrap_policy=policy)",
    "FSDP(model, device_id=cpu, auto_wrap_policy=transformer_auto_wrap_policy)",
    "transformer_auto_wrap_policy(transformer_layer_cls={FSDP})",
    "from torch.distributed.fsdp.wrap import default_auto_wrap_policy",
    "FSDP(model, device_id=cpu, fsdp_auto_wrap_policy=policy)",
    "FSDP(model, device_id=cpu, sharding_strategy='FULL_SHARD')",
    "FSDP(model, device_id=cpu, flatten_parameters=True)",
]

# %% predict="old_lines_that_run"

# %% tags=["hide-input"]
calls += [
    "FSDP(model, device_id=cpu, cpu_offload=CPUOffload(offload_params=True, offload_gradients=True))",
    "FSDP(model, device_id=cpu, sharding_strategy=ShardingStrategy.NO_SHARD)",
    "FSDP(model, device_id=cpu, sync_module_states=True)",
    "FSDP.state_dict_type(FSDP(model, device_id=cpu), StateDictType.FULL_STATE_DICT).__enter__()",
    "FSDP.StateDictType",
    "FSDP(model)",
    "fully_shard(model, auto_wrap_policy=policy)",
    "fully_shard(model).no_sync()",
]
today = run(lambda: {call: tried(call) for call in calls}, 2, progress=False)[0]
looks = {"runs": RUNS, "warns": WARNS, "raises": RAISES}
marks({call: {"": said_of} for call, said_of in today.items()}, looks, "Two of sixteen lines still run as they stand")

# %%
assert [call for call, result in today.items() if result == "runs"] == calls[:2]
warns = [call for call, result in today.items() if result.startswith("warns")]
assert ["NO_SHARD" in call or "state_dict_type" in call for call in warns] == [True, True]
threshold = inspect.signature(wrap.size_based_auto_wrap_policy).parameters["min_num_params"].default
assert threshold == 100_000_000
print(f"{len(today) - 2 - len(warns)} of {len(today)} raise; the policy by size begins at {threshold:,} parameters")

# %% [markdown] covers=["coverage 000.22", "coverage 001.3", "coverage 004.4", "coverage 004.6", "coverage 004.43"]
# Most of them fail, each for a reason of its own:
#
# - `FullyShardedDataParallel` still imports.
# - `default_auto_wrap_policy` became `size_based_auto_wrap_policy` in torch 1.12. (Its threshold is 100 *million*
#   parameters.)
# - A bare policy lacks arguments; called by itself it lacks others.
# - A strategy is an enum, not a string. `flatten_parameters` was FairScale's.
# - `CPUOffload` has one field, and is public in `torch.distributed.fsdp`. Gradients follow the parameters.

# %% [markdown] covers=["coverage 004.5", "coverage 004.72", "coverage 000.18", "coverage 004.127"]
# Must the model be on the GPU before you wrap it? You will read "crucial" in one guide and "don't" in the next. Neither
# is a rule. FSDP1 takes a model that is on its device, or moves each unit there by `device_id` as it wraps. (The plain
# `FSDP(model)` above raised because there is no GPU.) `fully_shard` moves each *shard* to its mesh's device.
#
# But if you move the whole model first, you need memory for all of it. Building on the **meta device** needs least
# (chapter 3).

# %% exercise="case_21" tags=["nbval-ignore-output"]

# %% [markdown]
# These are the units of the mended call, one all-gather each. Without the policy you would get one, of everything.

# %% tags=["nbval-ignore-output"]
mended = load("case_21")
mended_run = run(checked.use, 2, each=mended.judge.inputs(0), network=wire, progress=False, show_output=False)
viz.timeline(mended_run.timeline, ranks=[0]).titled("Four units, gathered one after the other")

# %%
units = mended_run[0]["units"]
assert units == 4
gathers = [record.numel for record in mended_run.records[0] if record.op == "all_gather"]
print(f"{units} units; forward gathers", *(f"{number:,}" for number in gathers[:units]), "numbers, one after the other")
assert len(set(gathers)) == 2  # the root, and three blocks of one size

# %% [markdown] covers=["coverage 004.131", "coverage 004.56", "coverage 001.58"]
# Is FSDP1 still the API to learn? Guides written for 1.12 call it "production ready". Torch's own
# [tutorial](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html) now teaches `fully_shard` and calls
# FSDP1 deprecated. (Lists of links age as well, and their titles mislead. Follow the link, read the date.) Does torch
# itself tell you when you use it? Find out:

# %% exercise="warned_of_fsdp1"

# %% tags=["hide-input"]
strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
one_layer = load("warned_of_fsdp1").judge.inputs(0)[0][0]
warned = {name: run(checked.use, 2, one_layer, [name], progress=False)[0][1] for name in strategies}
answers = {name: {"": "warns: FutureWarning" if n else "runs: without a word"} for name, n in warned.items()}
assert warned == {"FULL_SHARD": 0, "SHARD_GRAD_OP": 0, "NO_SHARD": 1}
marks(answers, looks, "Wrapping in FullyShardedDataParallel: torch warns of one strategy")

# %% [markdown]
# ## 3. Argument by argument
#
# FSDP1's constructor has sixteen arguments, `fully_shard` eight. Which of the sixteen became a method, which a plain
# Python loop, and which are simply gone?

# %% predict="what_became_of_auto_wrap_policy"

# %% tags=["hide-input"]
rosetta = {
    "module": ("module", "a block, a list of them, or the model; several calls"),
    "process_group": ("mesh", "a DeviceMesh; by default of all ranks"),
    "device_mesh": ("mesh", ""),
    "sharding_strategy": ("reshard_after_forward, mesh", "see the exercise below"),
    "auto_wrap_policy": ("(a loop)", "for block in model.layers: fully_shard(block)"),
    "cpu_offload": ("offload_policy", "CPUOffloadPolicy(pin_memory=True)"),
    "mixed_precision": ("mp_policy", "MixedPrecisionPolicy; buffers are yours to cast"),
    "ignored_modules": ("ignored_params", "a set of parameters"),
    "ignored_states": ("ignored_params", ""),
    "device_id": ("mesh", "the mesh has a device"),
}

# %% tags=["hide-input"]
rosetta |= {
    "backward_prefetch": ("(a method)", "set_modules_to_backward_prefetch; on by default"),
    "forward_prefetch": ("(a method)", "set_modules_to_forward_prefetch"),
    "limit_all_gathers": ("(gone)", "events bound the memory, the CPU is never blocked"),
    "use_orig_params": ("(gone)", "always: each parameter is cut by itself, none flattened"),
    "sync_module_states": ("(gone)", "set_model_state_dict(broadcast_from_rank0=True)"),
    "param_init_fn": ("(gone)", "meta device, to_empty, then your initialisation"),
}
arguments, now = (list(inspect.signature(api).parameters) for api in (FullyShardedDataParallel, fully_shard))
assert set(rosetta) == set(arguments)
assert rosetta["auto_wrap_policy"][0] == "(a loop)"
assert not any("policy" in name and "wrap" in name for name in now)
assert (len(arguments), len(now)) == (16, 8)
replacements = " ".join(where for where, _ in rosetta.values())
print("fully_shard alone has", *(name for name in now if name not in replacements))
assert all(hasattr(fsdp.FSDPModule, f"set_modules_to_{way}_prefetch") for way in ("backward", "forward"))

# %%
table = tuple((name, *rosetta[name]) for name in rosetta)
HTML(viz.Table("FSDP1's arguments, and FSDP2's", ("FullyShardedDataParallel", "fully_shard", ""), table).to_html())

# %% [markdown] covers=["coverage 000.15", "coverage 002.33", "coverage 004.108", "coverage 002.28"]
# You told FSDP1 once, for the whole model. FSDP2 is told unit by unit, and what was a flag is a call you can see. Two
# arguments are new: `shard_placement_fn` chooses another dimension to cut, and `dp_mesh_dims` is for models that are
# DTensors already.
#
# `use_orig_params` never chose between flat and not. FSDP1 always flattens a unit into one parameter, and cuts it in
# equal parts wherever the cut falls. `True` shows you views of it under the old names. Look:


# %%
def parameters_of(api):
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 6))
    if api == "fully_shard":
        fully_shard(model)
    else:
        options = {"use_orig_params": api == "use_orig_params=True", "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(model, **options)
    return {name: tuple(getattr(p, "_local_tensor", p).shape) for name, p in model.named_parameters()}


# %% tags=["hide-input"]
apis = ("use_orig_params=False", "use_orig_params=True", "fully_shard")
stored = {api: run(parameters_of, 2, api, progress=False) for api in apis}
for api, (first, second) in stored.items():
    print(api)
    for rank, shapes in enumerate((first, second)):
        print(f"  rank {rank}:", ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
assert len(stored[apis[0]][0]) == 1
assert all(len(shape) == 1 for shape in stored[apis[1]][0].values())
assert stored["fully_shard"][0] == {"0.weight": (2, 6), "0.bias": (2,), "1.weight": (3, 4), "1.bias": (3,)}

# %% [markdown] covers=["coverage 001.8"]
# One dimension! So a weight-decay rule like `p.dim() >= 2` decays nothing under FSDP1, views or not.
#
# And the prefix in the names is why scripts keep a `raw_model`. FSDP2's model is your model, and its parameters keep
# their dimensions.

# %% exercise="strategy_in_fsdp2"

# %% tags=["hide-input"]
setting = checked.use("SHARD_GRAD_OP", 1, 8)
eight = Cluster("A100-SXM-80GB", gpus=8)
work = {"micro_batch": 4, "param_dtype": "bf16"}
old = simulate("gpt2-124m", eight, Plan(api="fsdp1", sharding_strategy="SHARD_GRAD_OP", **work))
new_plan = Plan(reshard_after_forward=setting["reshard_after_forward"], shard_size=setting["mesh"][-1], **work)
translated = simulate("gpt2-124m", eight, new_plan)
counts = [sum(str(i.op) == "ALL_GATHER" for i in sim.program.ops) for sim in (old, translated)]
assert counts == [13, 13]
titles = ("FSDP1, SHARD_GRAD_OP", f"FSDP2, {setting['reshard_after_forward']}")
viz.compare(old.timeline, translated.timeline, titles=titles).titled("Thirteen all-gathers in either")

# %% [markdown] covers=["coverage 004.91", "coverage 004.92", "coverage 004.94", "misconception 4.100"]
# Simulated, and the same collectives. (FSDP1's bars are longer for another reason. In backward its CPU issues these
# small kernels too late, and the GPU waits for it.)
#
# ## 4. Translate a whole step
#
# FSDP1 and FSDP2 are two implementations: neither calls the other, and their states, checkpoints and methods differ.
# So don't mix them. What does torch say if you do, and put FSDP1 around a model given to `fully_shard`?


# %% predict="fsdp1_around_fsdp2"


# %%
def mixed():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    fully_shard(model)
    try:
        FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        return "nothing"
    except RuntimeError as error:
        return str(error)


complaint = run(mixed, 2, progress=False)[0]
print("torch says:", complaint)
assert "resize_()" in complaint

# %% [markdown]
# A complaint, but not one that would tell you what you did. So translate the whole step.
#
# Two micro-batches, mixed precision, clipping: a step as an FSDP1 script has it. Which lines change?


# %%
def fsdp1_step(model, micro_batches, lr, max_norm):
    low = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"auto_wrap_policy": wrap.ModuleWrapPolicy({torch.nn.TransformerEncoderLayer}), "mixed_precision": low}
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr), []
    for i, (rows, targets) in enumerate(micro_batches, start=1):
        with model.no_sync() if i < len(micro_batches) else contextlib.nullcontext():
            torch.nn.functional.mse_loss(model(rows).float(), targets).backward()
        kept += [(str(p.grad.dtype), p.grad.numel() / p.numel()) for p in model.parameters()]
    norm = model.clip_grad_norm_(max_norm)
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return {"norm": norm.item(), "weights": [p.detach().clone() for p in model.parameters()], "kept": kept[0]}


# %% predict="kept_by_no_sync"

# %%
translation = load("fsdp1_step_to_fsdp2")
each = translation.judge.inputs(0)
with_fsdp1 = run(fsdp1_step, 2, each=each, network=wire, progress=False)
print(f"norm {with_fsdp1[0]['norm']:.2f} on rank 0, {with_fsdp1[1]['norm']:.2f} on rank 1")
assert with_fsdp1[0]["norm"] == with_fsdp1[1]["norm"]
dtype, times = with_fsdp1[0]["kept"]
print(f"kept on each rank after the first micro-batch: gradients in {dtype}, {times:g} times as many as its shard has")
assert with_fsdp1[0]["kept"] == ("torch.bfloat16", 2)

# %% exercise="fsdp1_step_to_fsdp2"

# %% tags=["nbval-ignore-output"]
with_fsdp2 = run(checked.use, 2, each=each, network=wire, progress=False, show_output=False)
both = {"FSDP1": up_to_the_norm(with_fsdp1.timeline), "FSDP2": up_to_the_norm(with_fsdp2.timeline)}
viz.timeline(both, ranks=[0]).titled("The same step twice: four reduce-scatters in each, in fp32")

# %%
pairs = zip(with_fsdp1[0]["weights"], with_fsdp2[0]["weights"], strict=True)
apart = max(float((a - b.detach().reshape(a.shape)).abs().max()) for a, b in pairs)
moved = max(float(w.abs().max()) for w in with_fsdp1[0]["weights"])
reduced = [[r.dtype for r in ran.records[0] if r.op == "reduce_scatter"] for ran in (with_fsdp1, with_fsdp2)]
print("norms {:.3f} and {:.3f}".format(*(found[0]["norm"] for found in (with_fsdp1, with_fsdp2))))
print("reduce-scatters: {} and {}".format(*map(len, reduced)))
assert abs(with_fsdp1[0]["norm"] / with_fsdp2[0]["norm"] - 1) < 0.01
assert apart < 0.01 * moved
assert reduced == [["fp32"] * 4] * 2

# %% [markdown] covers=["misconception 4.7", "misconception 4.51"]
# These changed: the policy of dtypes, the wrap, `no_sync`, the method that clips, and `summon_full_params` (now
# `full_tensor`).
#
# The numbers agree, but not to the last bit. FSDP1 adds up micro-batches in bf16, FSDP2 in `reduce_dtype`. And mind
# the memory: FSDP2 has no `no_sync`, but in both what you skip is the reduce-scatter. **Whole** gradients stay on
# every rank until the last micro-batch.

# %% [markdown]
# ## 5. DDP or FSDP?
#
# "FSDP above a billion parameters"? But gpt2-1.5b fits DDP on an A100. Let's try 8 GPUs with NVLink, and then more, in
# nodes with 25 Gbit/s between them.

# %% predict="fastest_on_slow_network"

# %%
ways = {"DDP": Plan(api="ddp", param_dtype="bf16"), "FSDP2": Plan(param_dtype="bf16")}
ways |= {"HSDP": Plan(param_dtype="bf16", shard_size=8)}
poor = Cluster("A100-SXM-80GB", gpus=8, bandwidth_gbps=25)
lines = {name: ("gpt2-1.5b", poor, plan) for name, plan in ways.items()}
viz.scaling(lines, gpus=[8, 16, 32, 64]).titled("Over a slow network HSDP is fastest and FSDP slowest")

# %%
at = {n: {w: simulate("gpt2-1.5b", Cluster("A100-SXM-80GB", gpus=n, bandwidth_gbps=25), ways[w]) for w in ways}
      for n in (8, 32)}  # fmt: skip
for n, sims in at.items():
    print(f"{n:2} GPUs:", ", ".join(f"{way} {1e3 * sim.step_time_s:.0f} ms" for way, sim in sims.items()))
assert at[8]["FSDP2"].step_time_s < at[8]["DDP"].step_time_s
assert at[32]["HSDP"].step_time_s < at[32]["DDP"].step_time_s < at[32]["FSDP2"].step_time_s

# %% [markdown] covers=["coverage 000.24", "coverage 000.25", "misconception 0.27", "misconception 1.13"]
# Simulated. Within a node FSDP is the faster one: it gathers in bf16, and every rank steps an eighth of AdamW. Over a
# slow network DDP is faster: it sends its gradients once, FSDP its parameters twice besides. So:
#
# - **FSDP when it does not fit**: 16 bytes per parameter, plus activations and logits of your micro-batch, on one GPU.
# - **DDP when it fits and the network is slow**, or simply when it is no slower: it is easier to debug.
# - **HSDP** on several nodes, if a node can hold the shards: the fastest of the three here. One script can do all.

# %% exercise="ddp_or_fsdp"

# %% tags=["hide-input"]
names, batches = ("gpt2-124m", "gpt2-350m", "gpt2-1.5b", "llama2-7b"), (1, 4, 16)
decided = {
    f"{gpu}, {name}": {f"micro-batch {mb}": checked.use(name, gpu, 8, mb) for mb in batches}
    for gpu in ("A100-SXM-80GB", "RTX-4090")
    for name in names
}
found = {"ddp": MarkStyle("circle", "#0072B2"), "fsdp2": MarkStyle("square", "#E69F00")}
found["neither"] = MarkStyle("x", "#D55E00")
marks(decided, found, "8 GPUs: no row and no column decides alone (simulated)")

# %%
assert decided["RTX-4090, gpt2-350m"] == {"micro-batch 1": "ddp", "micro-batch 4": "ddp", "micro-batch 16": "fsdp2"}
assert set(decided["A100-SXM-80GB, gpt2-1.5b"].values()) == {"ddp", "fsdp2"}

# %% [markdown] covers=["coverage 004.106", "coverage 004.114"]
# ## 6. An old script, line by line
#
# A tutorial of 2022 fine-tunes T5 to summarise, with six features of FSDP1. Its plan is still right. Three of its lines
# are not. What does `len(batch)` count if a batch is a dict? What does `--run_validation` give you, declared with
# `action="store_false"`? Is there an `apply_activation_checkpointing_wrapper` to import? (For T5 and a tokenizer
# without downloads, see lab 8.)

# %% predict="len_of_a_batch"

# %% tags=["hide-input"]
batch = {"source_ids": torch.zeros(4, 128), "source_mask": torch.zeros(4, 128), "target_ids": torch.zeros(4, 48)}
print("fsdp_loss[1] += len(batch)   counts", len(batch), "rows of 4")
parser = argparse.ArgumentParser()
parser.add_argument("--run_validation", action="store_false", default=True, help="run validation")
print("--run_validation             gives", parser.parse_args(["--run_validation"]).run_validation)

there = hasattr(wrappers, "apply_activation_checkpointing_wrapper")
print("apply_activation_checkpointing_wrapper", "is there" if there else "is no more")
assert len(batch) == 3
assert not parser.parse_args(["--run_validation"]).run_validation
assert hasattr(wrappers, "apply_activation_checkpointing")
assert not hasattr(wrappers, "apply_activation_checkpointing_wrapper")

# %% [markdown] covers=["coverage 004.111", "coverage 004.112", "coverage 004.115", "coverage 004.122"]
# `len` of a dict counts its keys, so the average loss was wrong. `store_false` switches off what the help says it
# switches on. One import has lost its suffix since. It says T5-3B and loads `t5-base`, 220 million parameters. And
# `loss.item()` in every step makes the CPU wait for the GPU: keep the sum in a tensor.
#
# The rest, as you would do it now:

# %% [markdown] covers=["coverage 004.113", "coverage 004.119", "coverage 003.18", "coverage 004.42"]
# 1. torchrun sets `RANK`, `LOCAL_RANK`, `WORLD_SIZE`. Call `set_device(LOCAL_RANK)`, then `init_process_group("nccl")`.
#    On several nodes `RANK` is not the number of the GPU.
# 2. A sampler by rank, or rows by rank. Without it every rank trains on the same data, and no error says so.
# 3. Model (meta, or one seed) and tokenizer; blocks, then the root. A bare `FSDP(model)` makes one unit, and without a
#    process group it does not start.
# 4. AdamW after that, then a schedule such as `StepLR`: it works with any optimizer.

# %% [markdown] covers=["coverage 004.109", "coverage 004.54", "coverage 004.81", "coverage 004.116"]
# 5. The loop: forward, backward, (unscale,) clip, step, schedule. Metrics: sum and count in one tensor, one
#    `all_reduce`.
# 6. Validation: `eval()` and `no_grad`, *all* ranks, equally many batches, because each forward gathers. Then back to
#    `train()`.
# 7. Save on all ranks (chapter 9). At the end `destroy_process_group()`. Helpers that format dates and bytes stay
#    yours.

# %% [markdown] covers=["coverage 004.50", "coverage 004.117", "coverage 004.79", "coverage 001.12"]
# Data loaders do not change from DDP to FSDP. Take ten rows, four ranks and `DistributedSampler`. How many rows are
# drawn, and does the second epoch shuffle anew by itself?

# %% predict="rows_of_an_epoch"

# %% tags=["hide-input"]
samplers = [DistributedSampler(range(10), num_replicas=4, rank=rank) for rank in range(4)]
epochs = [[list(sampler) for sampler in samplers] for _ in range(2)]
for sampler in samplers:
    sampler.set_epoch(1)
shuffled = [list(sampler) for sampler in samplers]
rows_seen = [row for rows in epochs[0] for row in rows]
print(f"{len(rows_seen)} rows seen, {len(set(rows_seen))} different; without set_epoch the order is the same")
assert (len(rows_seen), len(set(rows_seen))) == (12, 10)
assert epochs[0] == epochs[1] != shuffled
loader = DataLoader(range(10), batch_size=4, sampler=samplers[0], drop_last=True)
assert (loader.pin_memory, loader.num_workers, loader.persistent_workers) == (False, 0, False)

# %% [markdown]
# The sampler pads, so that all ranks do equally many steps. Drop the rest in training, mask it in evaluation, and call
# `set_epoch`. With GPUs set three options that are off by default: `num_workers` (reading beside the step),
# `pin_memory` (copies that do not block), `persistent_workers` (not started anew each epoch).
#
# Prepare data *before* the job, as nanoGPT's
# [`prepare.py`](https://github.com/karpathy/nanoGPT/blob/master/data/openwebtext/prepare.py) does. If rank 0 tokenises
# while the others wait in a collective, you get a timeout. Here `labs.data` cuts torch's own source into bytes, once,
# into a file that all ranks map.

# %% [markdown]
# What people say about moving to FSDP. Decide before you open one:

# %%
misconceptions("migration")

# %% tags=["nbval-ignore-output"]
board("migration")

# %% [markdown] covers=["coverage 001.14", "coverage 001.15", "coverage 001.16", "coverage 004.12", "coverage 004.123"]
# ## 7. Lab: from laptop to many nodes
#
# torchrun starts the ranks. `--nproc_per_node` is how many on this machine (2, 4, 8: its GPUs), `--nnodes` how many
# machines. `--standalone` means one, with a free port instead of a fixed one that a dead job may still hold.
#
# One file, `labs/train.py`, and one command.

# %% predict="changes_for_two_nodes"

# %% tags=["hide-input"]
commands = (
    ("one process, nothing sharded", "python -m labs.train --api=single"),
    ("2 ranks, CPU or GPUs", "torchrun --standalone --nproc_per_node=2 -m labs.train"),
    ("4 or 8 GPUs of a node", "torchrun --standalone --nproc_per_node=8 -m labs.train --model=gpt2"),
    ("the same with DDP, or FSDP1", "... -m labs.train --api=ddp (or fsdp1)"),
    ("other units", "... -m labs.train --wrap=1000000 (or root)"),
    ("less memory", "... -m labs.train --activation_checkpointing=full"),
    ("faster kernels", "... -m labs.train --compile=true"),
    ("go on where it stopped", "... -m labs.train --out=runs/a --save_every=10 (the same command again)"),
    ("two nodes, on each", "torchrun --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 ..."),
    ("two nodes, by hand", "torchrun --nnodes=2 --node_rank=0|1 --master_addr=HOST --master_port=29500 ..."),
    ("Slurm", "sbatch --nodes=2 labs/cluster/launch/train.sbatch"),
    ("Kubernetes", "kubectl create -f labs/cluster/launch/train-job.yaml"),
)
HTML(viz.Table("The command grows, the script does not", ("", "command"), commands).to_html())

# %%
options = set(TrainConfig().by_key())
assert not any("node" in option for option in options)  # torchrun says how many there are
assert {"api", "wrap", "activation_checkpointing", "compile", "out", "save_every", "model"} <= options

# %% [markdown] covers=["coverage 001.4", "coverage 001.6", "coverage 001.11"]
# Your own trainer may have the model in one file, the loop in another, settings in a third, as a port of nanoGPT
# does. Flags choose FSDP or DDP, units, checkpointing. Name units by class there. A flag like
# `fsdp_min_num_params=1e6` makes units of single Linears, and tears tied embeddings apart.
#
# Now the real thing, two ranks on this machine:

# %% tags=["nbval-ignore-output"]
lab = torchrun("-m", "labs.train", "--steps=4", "--global_batch=16", "--n_layer=3", ranks=2)
print("torch's fully_shard, started by torchrun. Losses:", ", ".join(f"{loss:.3f}" for loss in lab.losses))

# %%
assert len(lab.losses) == 4
assert lab.losses[-1] < lab.losses[0]


# %% tags=["nbval-ignore-output"]
def seconds_to_shard():
    import time

    from labs.loop.minimal import shard
    from labs.model import build
    from labs.model.gpt import GPTConfig

    model, start = build(GPTConfig.preset("teaching")), time.perf_counter()
    shard(model, fully_shard)
    return time.perf_counter() - start


took_s = run(seconds_to_shard, 2, progress=False)
print(f"sharding 6 units took {1e3 * max(took_s):.0f} ms, measured")

# %%
assert max(took_s) < 10

# %% [markdown] covers=["coverage 001.26", "coverage 001.45", "misconception 1.15"]
# Does FSDP take long to start? The number above says that sharding is not it. Starting processes takes long, and
# imports, and reading weights. That last one shrinks with one reader and a broadcast, or shard by shard. Measure your
# own start.
#
# Go on with **lab 1** (`lab_01_ddp_to_fsdp2.ipynb`: one GPU `python -m labs.experiments.ddp_to_fsdp2 --ranks 1`, many
# `--ranks N`) and **lab 8** (`lab_08_hugging_face.ipynb`: `torchrun --nproc_per_node=N -m
# labs.experiments.hugging_face`).

# %% [markdown]
# ## What you have seen
#
# - Nine lines take a DDP loop to `fully_shard`. The optimizer comes after, and all ranks take part in a save.
# - FSDP1's arguments became a loop, a mesh, policies and setters. Most old lines raise; fear the others.
# - What fits, and the wire, decide between DDP and FSDP. The number of parameters does not.
# - From one process to two nodes the command changes, the script does not.

# %% [markdown]
# > **Our 8B model** took nine new lines. Where DDP wanted about 136 GiB, FSDP2 holds about 27 GiB (the same command
# > without `--api ddp`). One morning its 64 GPUs stand still, and no log says why.
#
# Next: `12_bug_hunt.ipynb`. What each knob buys, and `torch.compile`, Accelerate and Lightning, have a notebook of
# their own: `15_every_knob.ipynb`.
