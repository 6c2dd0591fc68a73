"""DDP's parts in C++ must not be the last to hold its group, whose threads may be waiting for the GIL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENDS = """
import sys, time, torch, torch.distributed as dist
from labs.config import TrainConfig
from labs.cluster.process_group import RankPlace
from labs.wrapping import wrap

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = TrainConfig(api="ddp", n_layer=1)
wrapped = wrap(config, config.model_config, RankPlace(), torch.device("cpu"))
sys.setswitchinterval(1000)  # whoever has the GIL keeps it, as a busy machine may have it
sent, received = torch.zeros(20_000_000), torch.zeros(20_000_000)
dist.group.WORLD.allgather([[received]], [sent])  # its thread will want the GIL when it is done
dist.destroy_process_group()
begin_s = time.monotonic()
while time.monotonic() < begin_s + 1:
    pass
del wrapped
print("ended")
"""


@pytest.mark.tail
def test_a_model_that_is_freed_after_its_group_does_not_wait_for_ever():
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run([sys.executable, "-c", ENDS], env=env, capture_output=True, text=True, timeout=120)
    assert "ended" in ended.stdout, ended.stderr
