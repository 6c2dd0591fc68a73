"""The mini's steps under torch's names: in a profile, in what reads a profile, and in the log."""

import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.distributed.fsdp
from torch.profiler import ProfilerActivity, profile

import fsdp_sim.mini
from fsdp_sim.timeline import Op
from fsdp_sim.timeline.kineto import read_kineto
from tests.mini.models import Toy

TORCH, MINI = torch.distributed.fsdp, fsdp_sim.mini


def profiled(impl, path):
    """The trace of a step in mixed precision, its second, with an explicit prefetch; and what was logged in it."""
    torch.manual_seed(0)
    model = Toy(3)
    for layer in model.layers:
        impl.fully_shard(layer, mp_policy=impl.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    logger, lines = logging.getLogger("torch.distributed.fsdp.fully_shard"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)
    profiler.export_chrome_trace(path)
    return lines


def profiles(ranks, tmp_path):
    def run():
        rank = torch.distributed.get_rank()
        return [profiled(impl, str(tmp_path / f"{impl.__name__}.{rank}.json")) for impl in (TORCH, MINI)]

    logged = ranks(2, run)
    return [(tmp_path / f"{impl.__name__}.0.json", lines) for impl, lines in zip((TORCH, MINI), logged[0], strict=True)]


def test_profile_log_and_timeline_are_those_of_torch(ranks, tmp_path):
    (torchs, torchs_log), (minis, minis_log) = profiles(ranks, tmp_path)

    def ranges(path):
        events = json.loads(path.read_text())["traceEvents"]
        named = sorted((e["ts"], e["name"]) for e in events if e.get("name", "").startswith("FSDP::"))
        return [name for _, name in named]

    assert ranges(minis) == ranges(torchs)
    assert "FSDP::all_gather (layers.1)" in ranges(minis)
    assert minis_log == torchs_log
    assert "FSDP::pre_backward (layers.2)" in minis_log

    found = Counter((e.op, e.unit) for e in read_kineto(minis).ops)
    assert found == Counter((e.op, e.unit) for e in read_kineto(torchs).ops)
    assert (
        found[Op.ALL_GATHER, "layers.1"] == found[Op.AG_COPY_IN, "layers.1"] == found[Op.AG_COPY_OUT, "layers.1"] == 2
    )
    assert found[Op.REDUCE_SCATTER, "root"] == found[Op.RS_COPY_IN, "root"] == 1


STEP = """
import sys, torch, torch.distributed as dist
from torch.distributed import fsdp
import fsdp_sim.mini

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for impl in (fsdp, fsdp_sim.mini):
    print("===", file=sys.stderr)
    layer = impl.fully_shard(torch.nn.Linear(4, 4))
    layer(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.tail
def test_torch_logs_logs_the_minis_hooks_as_torchs():
    """As a learner turns it on: by a variable of the process, which torch reads when it is imported."""
    command, environ = [sys.executable, "-c", STEP], os.environ | {"TORCH_LOGS": "+fsdp"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    before, torchs, minis = (re.findall(r"\] (FSDP::\w+)", part) for part in done.stderr.split("==="))
    assert (before, minis) == ([], torchs)
    assert {"FSDP::pre_forward", "FSDP::post_backward"} <= set(minis)
