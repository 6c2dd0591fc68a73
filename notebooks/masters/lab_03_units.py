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
# # Lab 3: how large should a unit be?
#
# A unit is what FSDP gathers, computes and frees together. Call `fully_shard` on the model alone, and everything is one
# unit. Call it on each linear layer, and you get dozens. The same bytes travel either way. So does it matter?
#
# Take GPT-2 medium on 16 A100 in two nodes, 200 Gbit/s between them. (About 20 minutes.)

# %%
from fsdp_sim import viz
from fsdp_sim.learn import predict  # noqa: F401

# %% predict="fastest_cut_of_gpt2_medium"
# %% tags=["nbval-ignore-output"]
from fsdp_sim.timeline import Op
from fsdp_sim.timeline.analysis import overlap
from labs.experiments import units
from labs.experiments.memory import PEAK

simulated = units.on_a_cluster()
units.picture(simulated, "Predicted for 16 A100: a unit for each block is fastest")

# %%
peaks = [row.predicted for row in simulated if row.quantity == PEAK]
assert units.sweet_spot(simulated) == "each block"
assert peaks == sorted(peaks, reverse=True)
assert peaks[0] > 1.3 * peaks[1]
assert peaks[-1] > 0.98 * peaks[1]
print("One unit needs over 30% more memory than one per block; units smaller than a block save less than 2%.")

# %% [markdown]
# Every collective costs a latency, whatever its size: few units are better. But a whole unit must be there before you
# can compute it, and it takes memory while it is: many are better. With a single unit there is nothing to compute while
# the network works.
#
# Now for real: two CPU ranks, and between them a wire with 2 ms of latency and 0.32 Gbit/s. Here is once more what to
# expect, from what the wire alone takes:

# %%
network, asked = units.SLOW, units.settings(ranks=2, rows=8, seq_len=64)
for name, setting in asked.items():
    sizes = [(i.op, i.bytes) for i in setting.simulation.program.ops if i.op in units.WIRE]
    wire_s = sum(network.seconds("all_gather" if op is Op.ALL_GATHER else "reduce_scatter", n, 2) for op, n in sizes)
    latency_s = len(sizes) * network.latency_us * 1e-6
    print(f"{name:18s} {len(sizes):2d} collectives, {sum(n for _, n in sizes) / 2**20:.1f} MiB: "
          f"{1e3 * wire_s:4.0f} ms on the wire, of which {1e3 * latency_s:3.0f} ms are latency")  # fmt: skip

# %% [markdown]
# First we time every piece of a step alone, and the simulator predicts the step from the pieces. Then we run the step
# itself, where a block's all-gather travels while the block before it computes.

# %% tags=["nbval-ignore-output"]
result = units.run(network, ranks=2, rows=8, seq_len=64)
units.picture(result.rows, "Two CPU ranks on a slow wire: step time and memory over the number of units")

# %%
rows = {(row.name, row.quantity): row for row in result.rows}
for name in asked:
    for quantity in (units.UNITS, units.COLLECTIVES, units.LARGEST):
        assert rows[name, quantity].predicted == rows[name, quantity].measured
    assert abs(rows[name, PEAK].error) < 0.05
peaks = [rows[name, PEAK].measured for name in asked]
assert peaks == sorted(peaks, reverse=True)
print("Units, collectives and their bytes as predicted; memory within 5%, and the smaller the units the less.")

# %% [markdown]
# Compare one unit with one per block. In the upper picture the wire and the core take turns; in the lower they work at
# the same time. Red is communication that nothing hides.
#
# (Times of CPU ranks hold on a machine that does nothing else. If they look odd, run the cells again.)

# %% tags=["nbval-ignore-output"]
shown = {name: result.timelines[f"{name}, measured"] for name in ("one unit", "each block")}
alone, blocks = (result.timelines[f"{name}, predicted"].select(step=1) for name in shown)
assert overlap(alone, rank=0) < 0.01 < overlap(blocks, rank=0)
viz.timeline(shown, ranks=[0]).titled("One unit takes turns with the wire; units of a block overlap with it")

# %% [markdown]
# So a unit per block is the usual choice: large enough that latency counts little, small enough that two of them fit.
# Try your own cluster: `units.on_a_cluster(Cluster(...))`.
#
# **One place you may not cut:** tied weights, such as an embedding that is also the head, must stay in one unit.
# Otherwise each unit would train a copy of its own.

# %%
from labs.model import empty, model_config
from labs.wrapping.wrap_policy import find_units, ties

gpt2 = empty(model_config("gpt2"))
found = find_units(gpt2, "Embedding,Linear")
print("tied:", *ties(gpt2))
print("asked to be units of their own, and refused:", *found.tied)
assert ties(gpt2) == [["tok_emb.weight", "head.weight"]]
assert set(found.tied) == {"tok_emb", "head"}

# %% [markdown]
# Both went to the root, which holds the one tensor that both names mean.
#
# **On one GPU:** the collectives of one rank move nothing, so only memory changes: train with
# `labs.train --wrap=root`, `--wrap=block`, `--wrap=Linear`. **On many:** compare their step times. Start with
# blocks. Small models on many GPUs may become latency-bound; then put several blocks into one unit
# (`fully_shard([a, b])`).
