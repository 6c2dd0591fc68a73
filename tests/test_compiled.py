"""``FSDP_SIM_COMPILED=1``: the engine's inner loops compiled from the same files say the same, to the last digit."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_sim

ROOT = Path(fsdp_sim.__file__).parents[1]
SAYS = r"""
import sys
from fsdp_sim import Cluster, Plan, simulate
bf16 = {"param_dtype": "bf16"}
for model, cluster, plan in [
    ("gpt2-124m", Cluster("A100", gpus=8), Plan(micro_batch=8, **bf16)),
    ("gpt2-124m", Cluster("CPU", gpus=2), Plan(micro_batch=2)),
    ("llama3-8b", Cluster("H100", gpus=64), Plan(seq_len=8192, forward_prefetch=2, **bf16)),
    ("llama3-8b", Cluster("H100", gpus=64), Plan(shard_size=8, grad_accum=2, reshard_after_forward=False, **bf16)),
    ("llama3-8b", Cluster("A100", gpus=8), Plan(api="fsdp1", activation_checkpointing="full", **bf16)),
    ("llama3-70b", Cluster("H100", gpus=512), Plan(seq_len=8192, activation_checkpointing="selective", **bf16)),
    ("mixtral-8x7b", Cluster("H100", gpus=64), Plan(cpu_offload=True, **bf16)),
]:
    sim = simulate(model, cluster, plan)
    print(repr((sim.step_time_s, sim.exposed_comm_s, sim.peak_memory_bytes)))
    print(sim, sim.explain(), *sim.timeline.events, sep="\n")
print(sys.modules["fsdp_sim.engine.contended_rank"].__file__, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package beside which its inner loops are compiled."""
    folder = tmp_path_factory.mktemp("compiled")
    shutil.copytree(ROOT / "fsdp_sim", folder / "fsdp_sim", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, env=os.environ | {"FSDP_SIM_COMPILED": "1"}, check=True, capture_output=True)
    return folder


def said(folder: Path) -> tuple[list[str], str]:
    """What some predictions say on the package in a folder, line by line, and the file of one of the loops."""
    ran = subprocess.run(
        [sys.executable, "-c", SAYS], cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return ran.stdout.splitlines(), ran.stderr.splitlines()[-1]


@pytest.mark.tail
def test_compiled_loops_say_the_same_to_the_last_digit(compiled: Path) -> None:
    plain, source = said(ROOT)
    fast, extension = said(compiled)

    assert source.endswith(".py")
    assert Path(extension).is_relative_to(compiled)
    assert not extension.endswith(".py")
    assert len(plain) > 10_000
    assert [pair for pair in zip(fast, plain, strict=True) if pair[0] != pair[1]][:1] == []
