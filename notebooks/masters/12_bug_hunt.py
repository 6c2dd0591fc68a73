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
# # The bug hunt: who waits for whom, and which number is wrong first?
#
# You get code with a fault in it and its symptoms, eighteen times: jobs that hang, jobs that die, and jobs
# that train on in silence with wrong numbers. Afterwards you can go from a symptom to its cause in four
# steps: **symptom → who waits where, or which number differs first → the smallest experiment → the cause**.
#
# **Core path, about 45 minutes:** sections 1 and 2, with the exercises marked *core*. The rest, with the eight
# hunts at the end, is there if you like: take the section whose symptom is yours.
#
# **What is real:** every hang, every error and every wrong number, on real ranks with gloo and torch's own
# `fully_shard`. **What is modelled:** the memory of large models in section 7, by the simulator.

# %%
import errno
import inspect
import itertools
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import time

import cloudpickle
import psutil
import torch
import torch.distributed as dist
from IPython.display import HTML
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import fsdp_sim.mini.group
from fsdp_sim import Cluster, Plan, simulate, viz
from fsdp_sim.learn import board, check, hint, in_torch, misconceptions, predict, solution  # noqa: F401
from fsdp_sim.learn.find import load
from fsdp_sim.learn.hunts import hand_in, hunt  # noqa: F401
from fsdp_sim.learn.judges.account import sent_bytes
from fsdp_sim.learn.pictures.bug_hunt import Box, BoxStyle, agreement, boxes, error_of, where_ranks_stand
from fsdp_sim.learn.tried import tried
from fsdp_sim.ranks import run
from fsdp_sim.timeline import Op
from labs.cluster.flight_recorder import diagnose, read
from labs.experiments.compile.transform_orders import EXPECTED
from labs.experiments.ladder import LadderConfig, climb
from labs.experiments.nodes import hang as hang_for_real


# %% tags=["hide-input"]
def table(caption, header, rows):
    head, *cells = (tuple(map(str, row)) for row in (header, *rows))
    return HTML(viz.Table(caption, head, tuple(cells)).to_html())


def compared(name, names, caption):
    """The results of the faulty and of the mended code on rank 0, against one process."""
    right = by_name(load(name).judge.truth(load(name).judge.inputs(0))[0], names)
    runs = {"faulty": load(name).stub, "mended": checked.use}
    found = {who: by_name(tried(name, function)[0], names) for who, function in runs.items()}
    assert all(torch.allclose(found["mended"][tensor], right[tensor], atol=1e-4) for tensor in names)
    return HTML(agreement(right, found, caption).to_html())


def by_name(result, names):
    """The tensors of a result, which is one, a list or a dict of them."""
    tensors = [result] if isinstance(result, torch.Tensor) else result
    return tensors if isinstance(tensors, dict) else dict(zip(names, tensors, strict=True))


# %% [markdown] covers=["misconception 35", "pitfall 6"]
# ## 1. It hangs: who is missing?
#
# A collective ends when *every* rank has called it. So a hang is seldom the network. Some rank called one
# collective too few, one too many, or another one. Ask: **who waits where, and who never came?**
#
# Three ranks, three all-reduces, then rank 0 alone calls a barrier. Who hangs, who is at fault?


# %% predict="who_waits_in_the_barrier"


# %% tags=["nbval-ignore-output"]
def validates():
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    if dist.get_rank() == 0:
        dist.barrier()


hang = error_of(run, validates, 3, progress=False)
print(hang.verdict.headline)
assert "returned without calling #4 barrier" in hang.verdict.headline
where_ranks_stand(hang)

# %% [markdown] covers=["pitfall 6"]
# Rank 0 waits, and the fault is its own: one call too many on one rank looks like one too few on the others. Here a
# **watchdog** says so at once, since it sees what all ranks issue. On a cluster you wait ten minutes for NCCL's
# watchdog. It says "caught collective operation timeout" with `SeqNum=4`, the number in the group.

# %% [markdown] covers=["pitfall 1"]
# **Your turn.** Two jobs that hang. Run the check on the faulty code, read what the watchdog says, then mend it.
# `hint("case_22")` helps in three steps; `solution("case_22")` tells. Whatever makes whole what is sharded is a
# collective: a full state dict, a `full_tensor()`, a norm.

# %% exercise="case_22"

# %%
done = tried("case_22", checked.use)
assert [len(weights) for weights in done] == [4, 0]
rows = [(f"rank {rank}", *(record.op for record in of[-5:])) for rank, of in enumerate(done.records)]
assert [ops[-4:] for ops in rows] == [("all_gather",) * 4] * 2
end = len(done.records[0])
table("The end of each rank's record", ("", *(f"#{n}" for n in range(end - 4, end + 1))), rows)

# %% [markdown] covers=["pitfall 2"]
# Both ranks end with the same four all-gathers, one for each weight. Next: a data set that does not divide.

# %% exercise="case_23" tags=["nbval-ignore-output"]

# %% tags=["hide-input"]
done = tried("case_23", checked.use)
steps = done[0]["steps"]
had = [len(batches) for _, batches, _ in load("case_23").judge.inputs(0)]
assert steps == min(had) < max(had)
rows = [(f"rank {rank}", batches, steps, batches - steps) for rank, batches in enumerate(had)]
table("Steps, and batches left over", ("", "batches", "steps", "left over"), rows)

# %% [markdown] covers=["pitfall 8"]
# ## 2. Read the record
#
# With collectives an error is often far from its cause, because nothing checks that they match. Two tools do.
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` compares operation and shape before each collective, and costs time. Let one rank
# broadcast, and the other all-reduce.


# %% predict="mismatch_in_detail"


# %%
def in_detail():
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # what the environment variable does
    checked_group = dist.new_group()._get_backend(torch.device("cpu"))  # past our own watchdog
    collective = checked_group.allreduce if dist.get_rank() else checked_group.broadcast
    try:
        collective([torch.ones(4)]).wait()
    except RuntimeError as error:
        return str(error)


detail = run(in_detail, 2, progress=False)[0]
print(*(f"rank {rank}: {op}" for rank, op in enumerate(re.findall(r"OpType=(\w+)", detail))), sep="\n")
assert "Detected mismatch" in detail
assert "ALLREDUCE" in detail
assert "BROADCAST" in detail

# %% [markdown] covers=["pitfall 8", "pitfall 6"]
# Both operations by name, BROADCAST and ALLREDUCE, on both ranks. The other tool is a **flight recorder**: each rank
# keeps its last collectives, and after a hang you lay the dumps side by side. The last line of each says who
# *waits*; the first line that differs says who is *off*. Read them from the beginning.

# %% exercise="first_to_differ"

# %% tags=["hide-input"]
((case,),) = load("first_to_differ").judge.trial(0).each[0][1:2]
found = checked.use(case)
start = max(0, found["number"] - 4)
rows = {f"rank {rank}": [Box(label.replace("(", "<br>").rstrip(")")) for label in of[start:]]
        for rank, of in enumerate(case)}  # fmt: skip
for rank in found["ranks"]:
    here = rows[f"rank {rank}"]
    here[found["number"] - 1 - start] = here[found["number"] - 1 - start]._replace(style=BoxStyle.WRONG)
assert len(found["ranks"]) == 1
boxes(rows, f"Rank {found['ranks'][0]} is off, from #{found['number']} on",
      [f"#{number + 1}" for number in range(start, max(map(len, case)))])  # fmt: skip

# %% [markdown] covers=["pitfall 9"]
# ## 3. It dies
#
# A death is easier than a hang if it says why. Some do not: when sizes do not match *between* ranks, gloo ends the
# process (SIGABRT, exit status -6, no traceback), and a notebook's kernel with it, unless the ranks are processes of
# their own, as here. NCCL waits, or writes past the end. Let two ranks gather 4 and 5 numbers.


# %% predict="who_sees_uneven_sizes"


# %% tags=["nbval-ignore-output"]
def gathers_unevenly():
    mine = torch.ones(4 + dist.get_rank())
    dist.all_gather([torch.empty_like(mine) for _ in range(2)], mine)


hang = error_of(run, gathers_unevenly, 2, progress=False, show_output=False)
print(hang.verdict.headline, hang.verdict.why, sep="\n")
assert "called a different size" in hang.verdict.headline

# %% [markdown] covers=["pitfall 25"]
# Our watchdog, for it saw both sizes before gloo did. (It counts what comes out: twice 4, twice 5.) Now one job that
# dies in the last batch, one with an error that is true and no help ("inference tensor"), and one that dies on busy
# days only.

# %% exercise="case_27" tags=["nbval-ignore-output"]

# %% tags=["hide-input"]
counts = [len(rows) for rows, _ in load("case_27").judge.inputs(0)]
assert len(tried("case_27", checked.use)[0]) == sum(counts)
rows = [(f"rank {rank}", n, max(counts) - n, max(counts)) for rank, n in enumerate(counts)]
table("Padded, sent, and cut again", ("", "own rows", "padding", "sent"), rows)

# %% exercise="case_28" tags=["nbval-ignore-output"]

# %% tags=["hide-input"]
done = tried("case_28", checked.use)
rows = [(f"rank {rank}", *(f"{record.op} {record.unit}" for record in of[:6])) for rank, of in enumerate(done.records)]
table("The look at the loss is the first forward there is", ("", *(f"#{n}" for n in range(1, 7))), rows)

# %% [markdown] covers=["pitfall 10"]
# The first three all-gathers are those of the look, and the training uses their buffers again. Now a job with two
# threads: one trains, one saves. Each process group numbers its collectives in the order in which they come,
# whichever thread issues them.

# %% exercise="case_29"

# %% tags=["hide-input"]
done = tried("case_29", checked.use)
groups = sorted({record.group for of in done.records for record in of if record.op == "all_reduce"})
rows = [
    (f"rank {rank}", *(f"{record.op}, {'training' if record.group in groups else 'checkpoint'}" for record in of
                       if record.op in ("all_reduce", "all_gather")))
    for rank, of in enumerate(done.records)
]  # fmt: skip
assert rows[0][1:] == rows[1][:0:-1]
table("Two groups, so that the order between them is free", ("", "first", "then"), rows)

# %% [markdown] covers=["coverage 000.32", "coverage 001.43", "pitfall 11", "pitfall 12"]
# ## 4. It trains, and does not learn
#
# "Adjust the learning rate, add clipping" is the usual advice for a run that does not converge. Do it last.
# FSDP computes what one process computes, so *there is something to compare with*: the same seed and batch on
# one rank. If the losses differ by more than rounding, it is a bug, and a smaller learning rate hides it.
#
# **The smallest experiment:** two blocks, two ranks, three steps, on CPU. Faults do not need a large model.

# %% tags=["nbval-ignore-output"]
broken = climb(LadderConfig(ranks=2, steps=1), ["one-process", "torch-fsdp2"], broken={"torch-fsdp2": "stale-shard"})
first = broken["torch-fsdp2"].against_one.beyond
print("differs first:", str(first).partition(" (")[0])
broken

# %%
assert (first.step, first.what, first.tensor, first.shard_of) == (1, "parameter", "mlp.fc.weight", (1,))

# %% [markdown]
# (`climb` is the **parity ladder** of chapter 4: each rung is a way to train, compared with the one process.)
# That is the method: not "the loss is off" but the **first number that is off**. After the first step one
# parameter differs, in the rows of one rank; loss and gradients of that step were right. So it is the update of
# one shard. (Here one rank was made to leave it out on purpose.) Three faults for you, all silent.

# %% exercise="case_30"

# %% tags=["nbval-ignore-output", "hide-input"]
faulty, mended = (tried("case_30", f)[0] for f in (load("case_30").stub, checked.use))
assert mended[-1] < faulty[-1]
rows = [(f"{step}", f"{old:.4f}", f"{new:.4f}") for step, (old, new) in enumerate(zip(faulty, mended, strict=True), 1)]
table("The loss", ("step", "optimizer made first", "sharded first"), rows)

# %% exercise="case_31"

# %% tags=["hide-input"]
weights = ["embed", "layers.0", "layers.1", "head"]
compared("case_31", weights, "Every weight is off")

# %% exercise="case_32"

# %% tags=["hide-input"]
before = list(load("case_32").judge.inputs(0)[0][0].parameters())
stays = {}
for who, function in {"faulty": load("case_32").stub, "mended": checked.use}.items():
    after = tried("case_32", function)[0]["weights"]
    stays[who] = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
assert stays == {"faulty": [True, False, False, True], "mended": [False] * 4}

right = load("case_31").judge.truth(load("case_31").judge.inputs(0))[0]
differs = [
    not torch.allclose(a, b, 1e-4) for a, b in zip(tried("case_31", load("case_31").stub)[0], right, strict=True)
]
assert all(differs)


# %% tags=["hide-input"]
def part(name, wrong, words=("right", "off")):
    return Box(f"{name}<br>{words[wrong]}", BoxStyle.WRONG if wrong else BoxStyle.RIGHT)


learned = zip(weights, stays["faulty"], strict=True)
rows = {
    "a shard left out": [part(f"rows of rank {rank}", rank in first.shard_of) for rank in range(2)],
    "divided twice": [part(name, wrong) for name, wrong in zip(weights, differs, strict=True)],
    "optimizer too early": [part(name, still, ("has learned", "as it was")) for name, still in learned],
}
picture = boxes(rows, "What is off names the cause: one rank's rows, everything, or one unit")
picture.figure.update_xaxes(showticklabels=False)
picture

# %% [markdown] covers=["pitfall 12"]
# The picture is the diagnosis. A wrong factor shows everywhere, a wrong shard in one rank's rows. In the last row
# embedding and head are off: both are the root's, so it is *one unit*.

# %% [markdown] covers=["pitfall 3"]
# ## 5. The ranks part
#
# Ranks can part long before anybody waits. In the next job rank 0's evaluation meets the others' next training
# step, whose first all-gathers look just the same.

# %% exercise="case_24"

# %% tags=["nbval-ignore-output"]
after = tried("case_24", checked.use)[0].tolist()
assert after[-1] < after[0]
header = ("after step", *(str(step + 1) for step in range(len(after))))
table("All ranks evaluate, each its own rows", header, [("validation loss", *(f"{loss:.4f}" for loss in after))])

# %% [markdown] covers=["pitfall 4", "pitfall 5"]
# Where did they part? At an `if`, as mostly. A branch that depends on *this rank's* data (its loss, its rows, its
# random number) sends ranks different ways. Two rules: what every rank can run, every rank runs; and what
# only some can know, all must agree on first. Below one exercise for each.

# %% exercise="case_25"

# %% tags=["hide-input"]
inputs = load("case_25").judge.inputs(0)
counts = [torch.bincount(route, minlength=3).tolist() for _, _, route, _ in inputs]
mended = tried("case_25", checked.use)
gathers = [sum(record.op == "all_gather" for record in of) for of in mended.records]
assert gathers == [9, 9]  # forward, backward, result
assert min(map(min, counts)) == 0
rows = [(f"rank {rank}", *of, gathers[rank]) for rank, of in enumerate(counts)]
table("Rows of each expert: one without rows runs too",
      ("", "expert 0", "expert 1", "expert 2", "all-gathers"), rows)  # fmt: skip

# %% exercise="case_26" tags=["nbval-ignore-output"]

# %% tags=["hide-input"]
done = tried("case_26", checked.use)[0]["steps"]
losses = [(values, limit) for values, _, limit in load("case_26").judge.inputs(0)]
rows = [
    (f"rank {rank}", *(f"{loss:.1f}{' is bad' if loss > limit else ''}" for loss in values[: done + 1]))
    for rank, (values, limit) in enumerate(losses)
]
assert sum(" is bad" in cell for row in rows for cell in row[-1:]) == 1
table(f"All ranks stop after {done} steps", ("loss", *range(1, done + 2)), rows)

# %% [markdown]
# Other ranks part in silence: each has numbers that look right to itself. Compare *between* ranks: seeds, scales,
# decisions, weights of a token. Anything that one rank decides or draws alone is a suspect.

# %% exercise="case_33"

# %% tags=["hide-input"]
faulty, mended = (tried("case_33", f)[0]["weight"].chunk(4) for f in (load("case_33").stub, checked.use))
right = load("case_33").judge.truth(load("case_33").judge.inputs(0))[0]["weight"].chunk(4)
names = [f"rows of rank {rank}" for rank in range(4)]
found = {"a seed per rank": dict(zip(names, faulty, strict=True)), "one seed": dict(zip(names, mended, strict=True))}
right = dict(zip(names, right, strict=True))
HTML(agreement(right, found, "A mosaic of four models").to_html())

# %% exercise="case_34"

# %% tags=["hide-input"]
right = load("case_34").judge.truth(load("case_34").judge.inputs(0))
names = [f"shard of rank {rank}" for rank in range(2)]
found = {
    who: {name: result["shard"] for name, result in zip(names, tried("case_34", f), strict=True)}
    for who, f in {"each alone": load("case_34").stub, "together": checked.use}.items()
}
right = dict(zip(names, (of["shard"] for of in right), strict=True))
HTML(agreement(right, found, "One rank has skipped a step").to_html())

# %% exercise="case_35"

# %%
compared("case_35", ["gradient"], "A mean of means is off")

# %% [markdown]
# ## 6. Inside an FSDP made by hand
#
# Now the faults that torch has been through so that you need not: read before it arrived, reduced in another
# order, overwritten too early, sent too often. They teach what each line of a real FSDP is there for.
#
# Of these four, which can hang? Which changes no number at all?

# %% predict="fault_without_wrong_numbers"

# %% exercise="case_36"

# %% tags=["nbval-ignore-output"]
done = tried("case_36", checked.use)
assert all(
    after.start_s >= before.end_s
    for rank in (0, 1)
    for before, after in itertools.pairwise(done.timeline.select(rank=rank).ops)
)
viz.timeline(done.timeline, ranks=[0, 1]).titled("No forward begins before its all-gather has ended")

# %% [markdown]
# Every forward begins after its all-gather has ended, on both ranks. Without the wait the two bars would start
# together, and the result would depend on which is faster.

# %% exercise="case_37"

# %%
compared("case_37", ["query", "key", "value", "output"], "Queries added to keys")

# %% [markdown]
# No hang and no error: all were all-reduces of one size. (The order of names in a dict or a set is a common
# way to get there.)

# %% exercise="case_38"

# %% tags=["hide-input"]
function = {"all-reduce": load("case_38").stub, "yours": checked.use}
least = load("case_38").judge.checks[0].at_least(None)
sent = {name: sent_bytes(tried("case_38", f).records[0]) for name, f in function.items()}
assert sent["all-reduce"] == 2 * sent["yours"] == 2 * least
rows = [(name, f"{n / 1e3:.0f} kB") for name, n in {**sent, "the least possible": least}.items()]
table("Twice what a shard needs", ("", "sent by a rank"), rows)

# %% exercise="case_39"

# %% tags=["nbval-ignore-output"]
compared("case_39", [f"unit {n}" for n in range(4)], "Overwritten before backward")

# %% [markdown]
# None of the four hangs, and the all-reduce changes no number: only what is sent. In torch all of this is
# handled in a few functions, which you can now read with other eyes:

# %%
group = fsdp_sim.mini.group.FSDPParamGroup
in_torch(group.unshard, group.wait_for_unshard, group.post_backward)

# %% [markdown] covers=["coverage 000.30"]
# ## 7. Out of memory, and: is it sharded at all?
#
# "Offload to the CPU, or use a smaller batch" is what people try first. First look at what the peak is *made
# of*. Take Llama-3 8B on 8 GPUs of 80 GB, 4 sequences of 8,192 tokens each. (All simulated.)

# %% predict="what_makes_it_fit"

# %%
hopper = Cluster("H100-SXM-80GB", gpus=8)
large = {"micro_batch": 4, "seq_len": 8192, "param_dtype": "bf16"}
plans = {
    "as it is": simulate("llama3-8b", hopper, Plan(**large)),
    "offload": simulate("llama3-8b", hopper, Plan(**large, cpu_offload=True)),
    "checkpointing": simulate("llama3-8b", hopper, Plan(**large, activation_checkpointing="full")),
}
peak_gib = {name: simulation.peak_memory_bytes / 2**30 for name, simulation in plans.items()}
assert peak_gib["offload"] > 0.9 * peak_gib["as it is"]
assert peak_gib["checkpointing"] < min(78, peak_gib["as it is"] / 3) < peak_gib["offload"]
viz.memory_waterfall(plans).titled("Offloading saves a twentieth, checkpointing two thirds")

# %% [markdown] covers=["coverage 000.30"]
# Activations, and FSDP does not shard them. Offloading states saves a twentieth, and the job still does not fit.
# Checkpointing saves over two thirds. So ask in this order. Is every block a unit? Are activations recomputed? Are
# whole gradients kept between micro-batches? Only then take a smaller batch, and offload last.

# %% [markdown]
# Take the same model with one sequence, wrapped as a whole instead of block by block.

# %% predict="one_unit_with_one_sequence"

# %%
small = {"micro_batch": 1, "seq_len": 8192, "param_dtype": "bf16"}
whole, blocks = (simulate("llama3-8b", hopper, Plan(**small, wrap=wrap)) for wrap in ("root", "block"))
for name, simulation in {"one unit": whole, "a unit per block": blocks}.items():
    print(f"{name:17} {simulation.peak_memory_bytes / 2**30:4.0f} of {simulation.memory_limit_bytes / 2**30:.0f} GiB")
assert 1.3 < whole.peak_memory_bytes / blocks.peak_memory_bytes < 1.5
assert blocks.peak_memory_bytes < blocks.memory_limit_bytes < whole.peak_memory_bytes

# %% [markdown] covers=["coverage 001.38"]
# So ask the model. A log line "FSDP is enabled" says that a line of code ran; what counts is the state of every
# parameter before the first step. Three questions, which catch an unsharded model, an unsharded layer and an
# optimizer made too early:


# %%
def is_it_sharded():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for unit in (*model, model):
        fully_shard(unit)
    held = torch.optim.AdamW(model.parameters()).param_groups[0]["params"]
    return {
        "every layer is a unit": all(isinstance(unit, FSDPModule) for unit in model),
        "every parameter is a DTensor": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "the optimizer has these parameters": set(map(id, held)) == set(map(id, model.parameters())),
    }


# %%
answers = run(is_it_sharded, 2, progress=False)[0]
print(*(f"{question}: {'yes' if answer else 'no'}" for question, answer in answers.items()), sep="\n")
assert all(answers.values())

# %% [markdown]
# ## 8. Before the first step: the environment
#
# Five faults that have nothing to do with your model. The first: a rank that never comes because it is busy with
# something else. Does its report look like that of section 1?

# %% predict="report_of_a_busy_rank"


# %% tags=["nbval-ignore-output"]
def prepares_data():
    if dist.get_rank() == 0:
        time.sleep(60)  # downloads, tokenises, holds a lock ...
    dist.barrier()


hang = error_of(run, prepares_data, 3, timeout_s=0.5, progress=False)
print(hang.verdict.headline, hang.verdict.why, sep="\n")
assert "outside any collective" in hang.verdict.why

# %% [markdown] covers=["pitfall 7"]
# No mismatch, and no rank has left: rank 0 is not in a collective at all. If your job dies *before step 1*
# after exactly 30 minutes (10 with NCCL), look there: rank 0 prepares data while the others wait in a
# barrier. Prepare it before the job, or give that one group a longer timeout. It is no hang, only patience
# that ran out.

# %%
print("a process group waits", dist.default_pg_timeout)
assert dist.default_pg_timeout.total_seconds() == 30 * 60

# %% [markdown] covers=["pitfall 50", "pitfall 53"]
# Next, a job crashed, you start it again, and it says
# `EADDRINUSE`. What still runs? First the port: whoever comes second cannot have it. `torchrun --standalone`,
# or port 0, takes a free one. (On Windows an older torch asks for libuv, which it was built without: set
# `USE_LIBUV=0`. 2.13 does not ask.)

# %%
with socket.create_server(("127.0.0.1", 0)) as first_job:
    try:
        socket.create_server(first_job.getsockname())
    except OSError as error:
        said_second = errno.errorcode[error.errno]
print("the second job:", said_second)
assert said_second == "EADDRINUSE"
assert "USE_LIBUV" in inspect.getsource(sys.modules["torch.distributed.rendezvous"])

# %% [markdown] covers=["pitfall 51"]
# Why was it taken? Because workers outlive a launcher that is killed: they are in sessions of their own, and
# SIGKILL gives nobody the chance to tell them. They hold the port, and on GPUs the memory. Look for them and
# end them before you start again. (The ranks of this notebook watch their parent, and go when it goes.)

# %% predict="who_holds_the_port"

# %%
start_and_wait = """
import subprocess, time
print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)
time.sleep(60)"""
launcher = subprocess.Popen([sys.executable, "-c", start_and_wait], stdout=subprocess.PIPE, text=True)
worker = psutil.Process(int(launcher.stdout.readline()))
launcher.kill()
launcher.wait()
print("the launcher is gone; its worker is", "alive" if worker.is_running() else "gone")
assert worker.is_running()
worker.kill()

# %% [markdown] covers=["pitfall 52"]
# In a notebook: `Can't get attribute 'train' on <module '__main__'>`. Python's `spawn` sends a function as a
# *name*, to be imported, and a cell cannot be imported. (And `fork` after CUDA was initialised fails too.) Put
# the function into a file that `torchrun` starts, or send it by value, as `fsdp_sim.ranks.run` does.


# %%
def train():
    return "from a cell"


by_name, by_value = pickle.dumps(train), cloudpickle.dumps(train)
print(f"sent by name it takes {len(by_name)} bytes: there is no code in them")
assert b"__main__" in by_name
assert b"from a cell" not in by_name
assert b"from a cell" in by_value

# %% [markdown] covers=["pitfall 46", "pitfall 49"]
# On GPUs, two more. **Duplicate GPU detected**: NCCL refuses two ranks on one GPU. Either `set_device(LOCAL_RANK)`
# is missing, or there are more ranks than GPUs; with one GPU use one rank, or gloo on the CPU. (That takes a GPU
# to see, so it is told, not shown.) And `torch.compile` that gains nothing: the order is checkpoint, then
# compile each block, then shard. Otherwise the compiler sees hooks it cannot trace, and gives up in silence. Lab
# 7 measures the table below.

# %%
rows = tuple((order, *map(str, counts)) for order, counts in EXPECTED.items())
assert EXPECTED["right"] == (2, 1, 0)
assert EXPECTED["sharded too early"][1:] == (0, 1)
HTML(viz.Table("What the compiler sees", ("order", "graphs", "checkpointed regions", "breaks"), rows).to_html())

# %% [markdown] covers=["coverage 004.64", "coverage 004.80"]
# ## 9. Say it: FSDP in an interview
#
# In an interview, as in a post-mortem, say what is stored, what travels and when. *What is FSDP, against DDP?* Both
# are data parallel: every rank computes the whole model on its own rows. DDP keeps everything on every rank and
# all-reduces gradients. FSDP keeps 1/N of parameters, gradients and optimizer state, gathers a unit at a time, and
# reduce-scatters. It trades traffic for memory: 3 passes over the parameters instead of 2. What is no state, such as
# activations, is not divided.

# %%
kib, params = {}, 1_000_000
for ranks in (1, 8):
    kib[ranks] = 16 * params / ranks / 2**10
print(f"states of a million parameters: {kib[1]:,.0f} KiB with DDP, {kib[8]:,.0f} KiB on each of 8 ranks with FSDP")
assert kib[1] == 8 * kib[8]

# %% [markdown] covers=["coverage 004.77"]
# Five answers that you will hear, and what is missing in them:
#
# 1. *FSDP when the model does not fit.* True; "fits" means 16 bytes a parameter and the activations.
# 2. *Checkpoints must be full.* No: sharded ones scale and reshard. Full or not, all ranks take part.
# 3. *Accumulation must use `no_sync`.* No: without it the result is the same, with more traffic and less memory.
# 4. *Forward gathers and frees, backward gathers and reduces.* True, but for the root, kept after forward.
# 5. *Build the model on the CPU first.* No: a model on the meta device is sharded before it has any memory.

# %%
eight, four_times = Cluster("H100-SXM-80GB", gpus=8), {"seq_len": 8192, "param_dtype": "bf16", "grad_accum": 4}
often, last = (
    simulate("llama3-8b", eight, Plan(**four_times, activation_checkpointing="full", requires_gradient_sync=sync))
    for sync in (True, "last")
)
reductions = [sum(i.op is Op.REDUCE_SCATTER for i in simulation.program.ops) for simulation in (often, last)]
print(f"reduce in every micro-batch: {reductions[0]} reductions, {often.peak_memory_bytes / 2**30:.0f} GiB")
print(f"reduce in the last one only: {reductions[1]} reductions, {last.peak_memory_bytes / 2**30:.0f} GiB")
assert reductions[0] == 4 * reductions[1]
assert last.peak_memory_bytes > often.peak_memory_bytes


# %%
def from_meta():
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    fully_shard(model)
    return model.weight.is_meta, tuple(model.to_empty(device="cpu").weight.to_local().shape)


on_meta, given = run(from_meta, 2, progress=False)[0]
print(f"sharded {'on the meta device' if on_meta else 'in memory'}, then given memory for {given[0]} of 64 rows")
assert (on_meta, given) == (True, (32, 64))

# %% [markdown]
# ### What people say

# %%
misconceptions("bug_hunt")

# %% [markdown]
# ## 10. Lab: a real hang, found in the dumps
#
# Four ranks train a GPT with torch's own `fully_shard`. In the second step rank 1 stops before the forward of
# block 2, as a rank does that waits for a file or a lock. Nobody prints anything. In which collective
# of which unit do the others wait? Torch's flight recorder knows, without any help from this notebook.

# %% predict="where_the_others_wait"

# %%
found = hang_for_real(rank=1, unit="layers.2", step=1)
print(found.findings[0])
assert found.findings[0].missing == (1,)
assert found.findings[0].waiting == (0, 2, 3)
assert (found.findings[0].kind, found.findings[0].unit) == ("all-gather", "layers.2")

# %% tags=["hide-input"]
of = {rank: {e.collective_seq_id: e for e in dump.entries} for rank, dump in sorted(found.dumps.items())}
last = max(max(entries) for entries in of.values())
numbers = range(last - 4, last + 1)


def box(entry):
    return Box(entry.kind, BoxStyle.DONE if entry.retired else BoxStyle.WAITS) if entry else Box("", BoxStyle.NOTHING)


rows = {f"rank {rank}": [box(entries.get(n)) for n in numbers] for rank, entries in of.items()}
assert rows["rank 1"][-1].style is BoxStyle.NOTHING
boxes(rows, f"Three ranks wait in #{last}, which rank 1 has not issued", [f"#{n}" for n in numbers])

# %% [markdown]
# **On your machines:** `python -m labs.experiments.nodes --hang` does this from a terminal; Lab 9
# (`lab_09_nodes.ipynb`) explains the dumps. **One GPU:** one rank cannot wait for another; use the CPU. **Many GPUs:**
# set `TORCH_FR_DUMP_TEMP_FILE=/shared/fr_` before `torchrun`, and after a hang `python -m labs.cluster.flight_recorder
# /shared`. Where you stand in the course:

# %% tags=["nbval-ignore-output"]
board()

# %% [markdown]
# ## Eight hunts
#
# *Not on the core path. Take half an hour for each, one a day.* Now whole trainings. In each, one fault was drawn
# from a catalogue, with your seed: your neighbour hunts another one. What each is meant to do stands below its `def`;
# what a real run of it left behind stands below the code, beside what was planned. Name the cause first. Then copy
# the training into a cell, mend it and hand it in: it runs beside the sound one, on a seed that nobody knows before.
# `board()` counts your tries. (You want a picture of hunt 4, 7 or 8? `hunt(7).draw()`.)
#
# **Hunt 1.** "The loss goes down. It just ends too high, and I cannot say since when."

# %% tags=["nbval-ignore-output"]
hunt(1)

# %% tags=["nbval-ignore-output"]
predict("hunt_1")

# %%
# Copy the training into this cell, mend it, then:  hand_in(1, hunt_1)

# %% [markdown]
# **Hunt 2.** "It was fine for a few steps. Now nothing moves, and nobody complains."

# %% tags=["nbval-ignore-output"]
hunt(2)

# %% tags=["nbval-ignore-output"]
predict("hunt_2")

# %%
# Copy the training into this cell, mend it, then:  hand_in(2, hunt_2)

# %% [markdown]
# **Hunt 3.** "It learns what it should. It should also fit into less memory, by my sums."

# %% tags=["nbval-ignore-output"]
hunt(3)

# %% tags=["nbval-ignore-output"]
predict("hunt_3")

# %%
# Copy the training into this cell, mend it, then:  hand_in(3, hunt_3)

# %% [markdown]
# **Hunt 4.** "The job stood still over night. All I have is a folder with three files." No watchdog this time: the
# three ranks run on plain gloo, and each wrote the dump of its flight recorder. `hunt(4).save(folder)` gives you the
# files; below, section 10's reader opens them. It says where the ranks stand. Why they part there is up to you.

# %% tags=["nbval-ignore-output"]
left = hunt(4)
with tempfile.TemporaryDirectory() as folder:
    waits = diagnose(read(left.save(folder)))
print(*waits, sep="\n")
assert waits
left

# %% tags=["nbval-ignore-output"]
predict("hunt_4")

# %%
# Copy the training into this cell, mend it, then:  hand_in(4, hunt_4)

# %% [markdown]
# **Hunt 5.** "On my machine it fits. With the large model it dies, I think later than at the first step." Look at the
# shape first: does memory climb from step to step, stand on a higher floor, or only peak higher?

# %% tags=["nbval-ignore-output"]
hunt(5)

# %% tags=["nbval-ignore-output"]
predict("hunt_5")

# %%
# Copy the training into this cell, mend it, then:  hand_in(5, hunt_5)

# %% [markdown]
# **Hunt 6.** "The numbers are right to the last digit. It is only slow." Two real ranks over a slow link; each bar is
# what a unit computed, or a collective on the wire. Computing is stretched to a fixed length, so that a busy machine
# draws the same. Look at the sequence: what is issued, how often, and what waits for it.

# %% tags=["nbval-ignore-output"]
hunt(6)

# %% tags=["nbval-ignore-output"]
predict("hunt_6")

# %%
# Copy the training into this cell, mend it, then:  hand_in(6, hunt_6)

# %% [markdown]
# **Hunt 7.** "We lost one of two machines, went on with the other, and since then the curve has a kink." Find the
# first step at which the two logs differ. Something that is needed there did not come back.

# %% tags=["nbval-ignore-output"]
hunt(7)

# %% tags=["nbval-ignore-output"]
predict("hunt_7")

# %%
# Copy the training into this cell, mend it, then:  hand_in(7, hunt_7)

# %% [markdown]
# **Hunt 8.** "bf16 is never exact, so I did not worry." Worry when it is more than rounding: the same seed and batches
# on one process give the other log. Which differs first, the loss or the norm of the gradients? In which digit?

# %% tags=["nbval-ignore-output"]
hunt(8)

# %% tags=["nbval-ignore-output"]
predict("hunt_8")

# %%
# Copy the training into this cell, mend it, then:  hand_in(8, hunt_8)

# %% [markdown]
# ## What you have seen
#
# - A hang is a missing, extra or misordered collective. Ask who waits where and who never came, then read the
#   record from the beginning: where ranks wait is seldom where they parted.
# - What depends on one rank's data must not decide what is communicated: run it everywhere, or agree first.
# - A silent fault is found by comparing with one process, down to the first number that differs. What is off
#   (a unit, one rank's rows, everything) names the cause.
# - Keep the experiment small: two blocks, two ranks, three steps. It runs in a second, and shows the fault.
