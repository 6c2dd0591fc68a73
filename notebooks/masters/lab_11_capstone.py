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
# # Lab 11: your model, your cluster
#
# Ten labs gave you a model and asked a question. This time you bring both. Choose a model, a cluster and a budget. Say
# what a step will take, let the simulator say it too, and find a better plan. Then run that plan here, small, and
# defend it. At the end you have a page to show, and a row on your scoreboard. (About an hour; the cells run in three
# minutes.)
#
# **What is real:** the ranks of section 4, torch's FSDP2 on them, everything *measured*.
# **What is modelled:** your cluster, and everything *predicted*.

# %%
from fsdp_sim import Plan, viz
from fsdp_sim.learn import predict  # noqa: F401
from fsdp_sim.measure.calibrate import calibrate
from labs.experiments import capstone
from labs.experiments.pictures import bars

# %%
MODEL = "llama3-8b"  # a name of the catalogue, such as gpt2-124m, or the path of a config.json
CLUSTER = "8 H100"  # or "64 H100, 400 Gb/s per GPU"; or the path of a cluster's TOML
BUDGET = {"tokens": 1e9, "days": 1, "usd": 500, "usd_per_gpu_hour": 2.5, "memory_gib": 64}

# %%
start = Plan(seq_len=8192, micro_batch=1, grad_accum=2, param_dtype="bf16", reduce_dtype="fp32")
choice = capstone.chosen(MODEL, CLUSTER, BUDGET, start)
print(f"{choice.model.name} on {choice.cluster.gpus} {choice.cluster.gpu.name}")

# %% [markdown]
# ## 1. Commit
#
# How long does a step take? How much memory does it need at its peak, and which share of the GPU's FLOPs is useful?
# Give each as an interval that you would bet on, four to one. A wide one is safe, and says little.
#
# The numbers below are somebody's first try. **Write yours before you run the next cell.**

# %%
MINE = {"step_s": (1.0, 3.0), "peak_gib": (40, 70), "mfu": (0.3, 0.5)}

# %% tags=["nbval-ignore-output"]
before = choice.simulate()
guessed = capstone.compared(MINE, before)
guessed

# %% [markdown]
# Where an interval missed: did you forget a term (logits, the optimizer, a second gather)? Or did you count on a rate
# that no kernel reaches?

# %% tags=["nbval-ignore-output"]
capstone.bill(choice, before)

# %% [markdown]
# ## 2. Find a better plan
#
# The search may keep parameters after forward, prefetch, recompute activations, and divide the rows into other
# micro-batches. The tokens of a step stay, so it learns the same. Below and to the left is better.

# %%
found = choice.tune()
best = (found.best or found.nearest).plan
print(f"{found.simulations} plans simulated")

# %% tags=["nbval-ignore-output"]
front = capstone.front(choice, found)
front.show()

# %% [markdown]
# What is each change worth? Take one back, leave the others, and look at the step.

# %% tags=["nbval-ignore-output"]
worth = capstone.worth(found)
worth

# %%
print("torch's defaults fit" if choice.fits(before) else "torch's defaults do not fit")
after = choice.simulate(best)
assert not choice.fits(before)
assert choice.fits(after)
assert any("activation_checkpointing" in one.after for one in found.worth)

# %% [markdown]
# ## 3. Look at its step
#
# Watch where compute waits. If nothing waits, a faster network is worth nothing to you.

# %% tags=["nbval-ignore-output"]
step = viz.timeline({choice.model.name: after.timeline})
step.show()

# %% tags=["nbval-ignore-output"]
bill = capstone.bill(choice, after)
bill

# %% [markdown]
# ## 4. Run it here, small
#
# First write it down: your model and the plan as a script, with torch's own calls. Lint reads it, and runs none of it.
# A trap that it finds now costs nobody a GPU.

# %% tags=["nbval-ignore-output"]
code = capstone.script(choice, best)
found_traps = capstone.traps(code)
assert [rule for _, rule, _ in found_traps.rows] == ["none"]
found_traps

# %% [markdown]
# (`print(code)` shows it.) Now two processes of this machine train a small model with the same plan, on torch's own
# FSDP2. First the machine is measured, as `fsdp-sim calibrate` does it. From that the simulator predicts the small
# step; then it runs.

# %% predict="closest_of_three"

# %% tags=["nbval-ignore-output"]
machine = calibrate(2, device="cpu", quick=True).cluster
result = capstone.run_here(choice.model, best, machine)
result

# %% tags=["nbval-ignore-output"]
errors = {row.quantity: abs(row.error) for row in result.rows}
assert errors["peak memory"] < 0.05
assert errors["bytes sent per rank"] < 0.01
print(*(f"{quantity}: off by {error:.1%}" for quantity, error in errors.items()), sep="\n")

# %% [markdown]
# Bytes follow from the program, so they are almost exact. Time follows from your machine, and from what else it does.

# %% [markdown]
# ## 5. Your scoreboard
#
# There is one row for each time you ran this lab, kept beside your progress on this machine. Try another plan or
# another model. Do predictions get closer? In the grey band they are within a quarter.

# %% tags=["nbval-ignore-output"]
what = f"{choice.model.name} on {choice.cluster.gpus} {choice.cluster.gpu.name}"
print(capstone.keep(what, (after.step_time_s, *after.step_time_interval_s), result))
scores = capstone.scoreboard()
scores.show()

# %% [markdown]
# ## 6. Defend
#
# Somebody who pays for the GPUs asks three questions. Answer with a factor, from and to: 1 is "as now".
#
# - `slow_link`: all links carry half as much. How many times as long does a step take?
# - `twice_gpus`: twice as many GPUs, each with as many tokens as before. How many times as long?
# - `twice_tokens`: twice as many sequences in each micro-batch. How many times the peak memory?

# %%
ANSWERS = {"slow_link": (1.0, 1.2), "twice_gpus": (1.0, 1.3), "twice_tokens": (1.2, 1.8)}

# %% tags=["nbval-ignore-output"]
defended = capstone.defence(choice, best, ANSWERS)
defended

# %% [markdown]
# Now in your own words: your assumptions, your plan, your numbers, the risks, what you would measure first. The
# simulator runs the plan that it reads, and judges your numbers; the rest it listens for.

# %%
WORDS = """
Fully sharded over 8 GPUs in bf16, micro-batch 1 of 8,192 tokens, gradient accumulation 2, full recomputation.
States take 12 GB per GPU, the peak is 40 GB, a step takes 2.5 s.
The risk: GPUs fail every few days, so we save checkpoints every hour. First I would profile a step on one node.
"""

# %% tags=["nbval-ignore-output"]
review = capstone.in_words(choice, WORDS).review()
print("\n".join(review))

# %% [markdown]
# ## 7. The page
#
# All of it in one file, which opens without a network: your words, the plan, the figures, the scoreboard.

# %% tags=["nbval-ignore-output"]
tables = [guessed, bill, worth, defended]
words = f"{WORDS}\n\n" + "\n\n".join(review)
measured = [bars(result.rows, row.quantity, f"Here: {row.quantity}") for row in result.rows]
page = capstone.report(words, [front, step, *measured, scores], tables, title=f"{what}: a report")
print(f"{page.name} lies beside your progress; board() says where that is.")

# %% [markdown]
# ## With GPUs
#
# Make `CLUSTER` your own: `fsdp-sim calibrate --device cuda -o here.toml` measures it, and `CLUSTER = "here.toml"`
# reads it. The small run of section 4 is this command of the labs' own trainer, which logs, saves, and goes on after a
# failure. Where there are GPUs it uses them; a larger `--model` is one key. With an hour on a GPU, `make gpu-day`
# writes what others can read.

# %% tags=["nbval-ignore-output"]
small, _ = capstone.scaled(choice.model, best)
print(capstone.command(small))
