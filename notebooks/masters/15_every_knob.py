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
# # Every knob: what does it buy, and what does it cost?
#
# FSDP has about a dozen settings, and every guide turns them all on. By the end you know what each one takes from time
# and from memory, and where `torch.compile`, Accelerate, Lightning and an engine that generates fit in.

# %% [markdown]
# > **Our 8B model** trains. A colleague sends a list of ten flags "that save memory". Which would you turn?
#
# **Real:** torch's own names and messages. **Modelled:** every time and byte that says *simulated*. You need chapters
# 05 and 07 first.

# %%
import inspect
import json
from importlib.util import find_spec
from pathlib import Path

import torch
from IPython.display import HTML, Code

from fsdp_sim import Cluster, Plan, simulate, viz
from fsdp_sim.learn import check, hint, in_torch, predict, solution  # noqa: F401
from fsdp_sim.learn.exercises.migration.plan_without_offload import CLUSTER, FIXED, MODEL
from fsdp_sim.learn.pictures.migration import knobs
from fsdp_sim.mini import FSDPModule
from labs.experiments.hugging_face import with_accelerate, with_fabric, with_fully_shard
from labs.experiments.hugging_face.run_hugging_face import WRITTEN, lines_of

# %% [markdown]
# ## 1. Every knob, and what it costs
#
# You have room to save, or time to save. Here is each knob as FSDP2 has it, one change at a time.

# %% tags=["hide-input"]
forty = Cluster("A100-SXM-40GB", gpus=8)
base = {"micro_batch": 2, "seq_len": 2048, "param_dtype": "bf16", "reduce_dtype": "fp32"}
changes = {
    "as a start": {},
    "cpu_offload": {"cpu_offload": True},
    "reduce_dtype bf16": {"reduce_dtype": "bf16"},
    "reshard_after_forward False": {"reshard_after_forward": False},
    "one unit: the whole model": {"wrap": "root"},
    "forward prefetch of 2": {"forward_prefetch": 2},
    "backward prefetch of 2": {"backward_prefetch": 2},
    "recompute every block": {"activation_checkpointing": "full"},
    "recompute selectively": {"activation_checkpointing": "selective"},
}
tried_plans = {name: simulate("llama2-7b", forty, Plan(**base | change)) for name, change in changes.items()}

# %% predict="knob_that_saves_most"

# %%
GIB = 2**30
limit_gib = next(iter(tried_plans.values())).memory_limit_bytes / GIB
measures = {name: (1e3 * sim.step_time_s, sim.peak_memory_bytes / GIB) for name, sim in tried_plans.items()}
headline = "Recomputing every block saves the most memory (llama2-7b on 8 A100 of 40 GB, simulated)"
knobs(measures, headline, base="as a start", limit_gib=limit_gib)

# %% tags=["hide-input"]
ms, gib = ({name: pair[i] for name, pair in measures.items()} for i in (0, 1))
start_ms, start_gib = measures["as a start"]
assert ms["cpu_offload"] > 1.9 * start_ms
assert 0.6 * start_gib < gib["cpu_offload"] < 0.8 * start_gib
assert gib["recompute every block"] < 0.6 * start_gib
assert min(gib, key=gib.get) == "recompute every block"
assert 1.2 < ms["recompute every block"] / start_ms < 1.4
assert gib["one unit: the whole model"] > 1.4 * start_gib
assert gib["reshard_after_forward False"] > start_gib + 10
assert abs(ms["forward prefetch of 2"] / start_ms - 1) < 0.01
in_fp32 = simulate("llama2-7b", forty, Plan(**base | {"param_dtype": None}))
assert in_fp32.step_time_s > 8e-3 * start_ms
assert in_fp32.peak_memory_bytes / GIB > limit_gib
print(f"the start: {start_ms:.0f} ms, {start_gib:.1f} of {limit_gib:.1f} GiB; in fp32 {in_fp32.step_time_s:.1f} s")

# %% [markdown] covers=["coverage 002.34", "coverage 000.29", "coverage 004.78", "misconception 2.34"]
# - **Offload** takes states away, a third of the peak here, and doubles the step. Try it last.
# - **Precision**: bf16 halves what is gathered and kept for backward. The states stay fp32. In fp32 these GPUs compute
#   ten times slower (torch leaves TF32 off), and it does not fit.
# - **Checkpointing** (each block, not the model) takes more than offload does, for about a quarter more time.
# - **Units**: one per block. One for the whole model gathers everything at once.
# - **Clipping** and the **batch** are no knobs of FSDP. A larger batch is what you saved the memory *for*.
# - **Monitor** the peak of every rank and phase: `torch.cuda.max_memory_allocated`, not what `nvidia-smi` shows.

# %% [markdown] covers=["coverage 002.25", "misconception 2.20", "misconception 2.26", "misconception 2.27"]
# And prefetch? In FSDP2 implicit prefetch is on, forward and backward. The setters only ask for more, earlier. FSDP1
# had three settings for backward: `BACKWARD_PRE`, `BACKWARD_POST`, None.

# %% predict="none_against_post"

# %%
slow = Cluster("A100-SXM-80GB", gpus=16, bandwidth_gbps=100)
old_way = {"api": "fsdp1", "micro_batch": 2, "seq_len": 2048, "param_dtype": "bf16"}
settings = ("BACKWARD_PRE", "BACKWARD_POST", "none")
prefetch = {how: simulate("llama2-7b", slow, Plan(**old_way, backward_prefetch=how)) for how in settings}
for how, sim in prefetch.items():
    print(f"{how:14} {1e3 * sim.step_time_s:5.0f} ms {sim.peak_memory_bytes / GIB:6.2f} GiB")
pre, post, none = prefetch.values()
assert abs(pre.step_time_s / post.step_time_s - 1) < 0.01
assert none.step_time_s > 1.1 * post.step_time_s
assert pre.peak_memory_bytes > post.peak_memory_bytes == none.peak_memory_bytes

# %% [markdown]
# `BACKWARD_PRE` holds one gathered unit more. `BACKWARD_POST` gathers when the current unit is free, before its
# reduce-scatter; here that is early enough. None gains no memory against POST, and queues each gather behind a
# reduce-scatter. There is no reason to choose it.
#
# A knob of FSDP2 is a setter of one unit, so you can turn it for some blocks and not for others. What does it turn?

# %%
in_torch(FSDPModule.set_reshard_after_forward, FSDPModule.set_modules_to_forward_prefetch)

# %% [markdown]
# The next exercise takes a plan with everything switched on.

# %% exercise="plan_without_offload"

# %% tags=["hide-input"]
guide = {**checked.use(), "cpu_offload": True, "activation_checkpointing": "full", "micro_batch": 1}
plans = {"all that saves memory": guide, "for speed": checked.use()}
compared = {name: simulate(MODEL, CLUSTER, Plan(**FIXED | plan)) for name, plan in plans.items()}
for name, sim in compared.items():
    print(f"{name}: {sim.tokens_per_s_per_gpu:,.0f} tokens/s per GPU")
assert compared["all that saves memory"].peak_memory_bytes < 0.25 * compared["for speed"].peak_memory_bytes
assert compared["all that saves memory"].peak_memory_bytes < 0.3 * compared["for speed"].memory_limit_bytes
viz.memory_waterfall(compared).titled("Everything switched on, and most of the memory is empty")

# %% [markdown] covers=["coverage 001.57"]
# Memory left over is speed you have not bought. The other way to speed is fused kernels (Triton,
# [FlashAttention](https://arxiv.org/abs/2205.14135), a fused loss). The two do not get in each other's way: kernels
# change what a unit computes, FSDP when it is whole. Here is attention without fusion:

# %%
fused, plain = (
    simulate("llama2-7b", forty, Plan(**base | {"micro_batch": 1, "attention_impl": impl})) for impl in ("sdpa", "math")
)
bytes_sent = [sum(i.bytes for i in sim.program.ops if str(i.op) == "ALL_GATHER") for sim in (fused, plain)]
print(f"fused {1e3 * fused.step_time_s:.0f} ms, not fused {1e3 * plain.step_time_s:.0f} ms; gathered: the same bytes")
assert bytes_sent[0] == bytes_sent[1]
assert fused.step_time_s < plain.step_time_s

# %% [markdown]
# ## 2. torch.compile, Accelerate, Lightning
#
# `torch.compile(model)` gives you back a *wrapper*; `model.compile()` compiles in place. What is a weight called then?

# %% predict="which_compile_keeps_names"

# %%
wrapper = torch.compile(torch.nn.Linear(2, 2))
inside = torch.nn.Linear(2, 2)
inside.compile()
print("torch.compile(m):", *wrapper.state_dict(), " m.compile():", *inside.state_dict())
assert list(wrapper.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
assert list(inside.state_dict()) == ["weight", "bias"]
registry = json.loads(
    Path(find_spec("torch").origin).with_name("_dynamo").joinpath("graph_break_registry.json").read_text()
)
reasons = [entry["Explanation"] for entries in registry.values() for entry in entries]
print("why the compiler gives up:", next(why for why in reasons if "use_orig_params" in why))
assert "Dynamo only supports FSDP with use_orig_params=True" in reasons

# %% [markdown] covers=["coverage 001.2", "coverage 001.18", "coverage 001.33", "coverage 001.46"]
# FSDP works with torch.compile, and both come with torch.
#
# - FSDP1 needs `use_orig_params=True`. Otherwise the compiler gives up at its units, and *no error says so*. (The cell
#   above found the reason in torch's own list: "Dynamo only supports FSDP with use_orig_params=True".)
# - FSDP2: checkpoint each block, `block.compile()`, then `fully_shard` it, in this order.
#
# In other orders the losses are equal, and lab 7 counts what was lost. So look at the counters of graphs and breaks
# before you say that it works. In the trainer: `--compile=true`.

# %% [markdown]
# The same model three ways: by hand, through Accelerate, through Lightning Fabric. Here is what you write in lab 8.

# %%
sources = [
    inspect.getsource(f) for f in (with_fully_shard.start_fsdp2, with_accelerate.plugin, with_fabric.start_fabric)
]
Code("\n".join(sources), language="python")

# %% tags=["hide-input"]
side = (
    ("units", "your loop", "transformer_cls_names_to_wrap, in a plugin or a yaml", "your loop, in a function"),
    ("the version", "-", "fsdp_version=2", "ModelParallelStrategy; FSDPStrategy is FSDP1"),
    ("frees after forward", "reshard_after_forward", "reshard_after_forward=True", "yours"),
    ("backward", "loss.backward()", "accelerator.backward(loss)", "fabric.backward(loss)"),
    ("optimizer", "after sharding", "prepare() exchanges its parameters", "set up after the model"),
    ("clipping", "torch.nn.utils", "accelerator.clip_grad_norm_", "fabric.clip_gradients"),
    ("lines, in lab 8", *(str(lines_of(WRITTEN[way])) for way in ("fully_shard", "accelerate", "fabric"))),
)
HTML(viz.Table("Side by side", ("", "by hand", "Accelerate", "Lightning Fabric"), side).to_html())

# %% [markdown] covers=["coverage 004.82", "misconception 4.96"]
# Lab 8 runs all three and compares losses and collectives. A framework hides the launch, the device and the loop. It
# does not hide your choices: units, precision, what is kept, what is saved. And it can choose silently. On CPU ranks
# Accelerate takes an FSDP plugin and trains with DDP, as lab 8 shows.
#
# (The `lightning` package, with its Trainer, is *not* installed here, so we run nothing of it. `Trainer(gpus=4)` of
# older tutorials was removed in version 2. Today it is `Trainer(accelerator="gpu", devices=4, strategy=...)`.)

# %% slideshow={"slide_type": "skip"}
for package in ("lightning", "lightning_fabric"):
    print(package, "is installed" if find_spec(package) else "is not installed")
assert find_spec("lightning") is None
assert find_spec("pytorch_lightning") is None

# %% [markdown]
# ### Weights for an engine that generates
#
# In reinforcement learning the model trains and generates in turn. FSDP holds shards; an engine such as
# [vLLM](https://github.com/vllm-project/vllm) wants whole weights, after every update. A full state dict on every rank
# would put our 8B model's 16 GB of bf16 beside the training. So go through the parameters one by one, on *all* ranks:
# cast the shard, gather it (`full_tensor()`), hand it over, let it go. No more than 1.05 GB is whole then, the
# embedding.

# %% [markdown]
# On eight H100 our model of NVLink gives 48 ms for these 291 gathers, and 39 ms for one gather of everything: small
# tensors pay latency, so frameworks send buckets. The traps are elsewhere. The engine has other names, and fuses q, k
# and v into one weight. Tied weights must arrive once. And it may still generate with the old ones. (Threads: [trl
# #7131](https://github.com/huggingface/trl/issues/7131), [verl #6468](https://github.com/volcengine/verl/issues/6468).)

# %% [markdown]
# ## What you have seen
#
# - Each knob is one change in time and in memory. Offload is the last one to turn.
# - FSDP2 prefetches by itself; its setters ask for more, earlier.
# - A framework hides the launch, the device and the loop. Your choices it does not hide, and it can choose silently.
#
# Next: `lab_10_tune.ipynb`, in which a search turns the knobs.
