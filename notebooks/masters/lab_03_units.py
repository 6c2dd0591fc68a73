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

# %% [markdown]
# # Lab: how large should a unit be?
#
# A unit is what FSDP gathers, computes and frees together. `fully_shard` on the model alone makes one unit
# of everything; on each linear layer it makes dozens.
#
# *Predict:* the same bytes must travel either way. What speaks for few large units, what for many small ones?

# %%
from fsdp_sim import viz
from fsdp_sim.timeline import Op
from labs.lab import units
from labs.lab.memory import PEAK

asked = units.settings(ranks=2, rows=8, seq_len=64)
for name, setting in asked.items():
    issued = [i.bytes for i in setting.simulation.program.ops if i.op in units.WIRE]
    print(f"{name:18s} {len(issued):2d} collectives, the largest {max(issued) / 2**20:4.2f} MiB, "
          f"{sum(issued) / 2**20:.1f} MiB in all")  # fmt: skip

# %% [markdown]
# Every collective costs a latency, whatever its size: that speaks for few. But the whole of a unit must be
# there before it can be computed, and it takes memory while it is: that speaks for many. With one unit
# there is nothing to compute while the wire works.
#
# The wire below has 2 ms of latency and 0.32 Gbit/s. *Predict:* which of the four has the shortest step?

# %%
network = units.SLOW
for name, setting in asked.items():
    sizes = [(i.op, i.bytes) for i in setting.simulation.program.ops if i.op in units.WIRE]
    wire_s = sum(network.seconds("all_gather" if op is Op.ALL_GATHER else "reduce_scatter", n, 2) for op, n in sizes)
    latency_s = len(sizes) * network.latency_us * 1e-6
    print(f"{name:18s} {1e3 * wire_s:4.0f} ms on the wire, of which {1e3 * latency_s:3.0f} ms are latency")

# %% [markdown]
# Now run each: first every piece of a step alone, from which the simulator predicts the step; then the step
# itself, where a block's all-gather travels while the block before it is computed.

# %% tags=["nbval-ignore-output"]
result = units.run(network, ranks=2, rows=8, seq_len=64)

# %% tags=["nbval-ignore-output"]
result

# %%
rows = {(row.name, row.quantity): row for row in result.rows}
for name in asked:
    for quantity in (units.COLLECTIVES, units.LARGEST):
        assert rows[name, quantity].predicted == rows[name, quantity].measured
    assert abs(rows[name, PEAK].error) < 0.05
peaks = [rows[name, PEAK].measured for name in asked]
assert peaks == sorted(peaks, reverse=True)
print("Number and bytes of collectives as predicted; memory within 5%, and the smaller the units the less.")

# %% [markdown]
# Look at one unit against one per block. In the upper picture the wire and the core take turns; in the
# lower they work at once. The red boxes are communication that nothing hides.

# %% tags=["nbval-ignore-output"]
shown = {name: result.timelines[f"{name}, measured"] for name in ("one unit", "each block")}
viz.show(shown, ranks=[0])

# %% tags=["nbval-ignore-output"]
for name in asked:
    step = rows[name, units.STEP]
    print(f"{name:18s} {step.predicted:4.0f} ms predicted, {step.measured:4.0f} ms measured")
print("the shortest, as predicted:", units.sweet_spot(result))

# %% [markdown]
# Times of CPU ranks hold on a machine that does nothing else; if they look odd, run the cells again.
# A unit per block is the usual choice: large enough that latency counts little, small enough that two of
# them fit. With less latency the optimum moves to smaller units, with more to larger ones.
#
# **One unit may not be cut anywhere:** tied weights, such as an embedding that is also the head, must be in
# the same unit, or each unit would train a copy of its own.

# %%
from labs.models import empty, model_config
from labs.wrapping.units import find_units, ties

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
# blocks; when small models on many GPUs become latency-bound, put several blocks into one unit
# (`fully_shard([a, b])`).
