"""A real run of the mini-FSDP on two ranks, and a predicted one."""

import pytest

from fsdp_sim import Cluster, Plan, ranks, simulate
from fsdp_sim.timeline import Timeline
from tests.viz.debugger.training import train


@pytest.fixture(scope="session")
def run() -> Timeline:
    """Two steps on two ranks."""
    return ranks.run(train, 2, progress=False, show_output=False).timeline


@pytest.fixture(scope="session")
def predicted() -> Timeline:
    return simulate("gpt2-124m", Cluster("H100-SXM-80GB", gpus=8), Plan(micro_batch=64, seq_len=1024)).timeline
