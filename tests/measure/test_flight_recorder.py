"""A rank that issues nothing more writes what its recorder holds; one that goes on writes nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from fsdp_sim.measure.flight_recorder import recorded
from fsdp_sim.ranks import run
from labs.cluster.flight_recorder import read

pytestmark = pytest.mark.skipif(
    not hasattr(c10d, "_dump_fr_trace_json"), reason="needs torch 2.13: gloo's dumps are written as JSON there"
)


@pytest.fixture(autouse=True)
def buffer(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")  # a rank reads it when its first group is made


def idle(folder: Path) -> None:
    """On a rank: one collective, then none until the dump is there."""
    with recorded(folder, dist.get_rank(), idle_s=0.2):
        dist.all_reduce(torch.ones(3))
        give_up_s = time.monotonic() + 60
        while not (folder / f"rank{dist.get_rank()}.json").exists():
            assert time.monotonic() < give_up_s
            time.sleep(0.02)


def busy(folder: Path) -> None:
    """On a rank: an end before it counts as idle."""
    with recorded(folder, dist.get_rank(), idle_s=600):
        dist.all_reduce(torch.ones(3))


def test_an_idle_rank_writes_what_it_has_issued(tmp_path):
    run(idle, 2, tmp_path, record=False, progress=False, timeout_s=90)
    for dump in read(tmp_path).values():
        assert dump.entries[-1].signature == ("all-reduce", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.json", "rank1.json"]


def test_a_rank_that_ends_in_time_leaves_nothing(tmp_path):
    run(busy, 1, tmp_path, record=False, progress=False, timeout_s=90)
    assert not list(tmp_path.iterdir())
