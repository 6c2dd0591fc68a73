"""On a machine with GPUs notebooks show what they show without; only a lab's last cell asks for them. All are faked."""

import nbformat
import pytest
from nbclient import NotebookClient

from notebooks.masters import build
from tests.faked_gpus import ROOT, environ, python

KERNEL = """
import os, subprocess, sys
import torch, torch.distributed as dist
from labs.gpt import GPTConfig

print("CUDA", torch.cuda.is_available(), torch.accelerator.current_accelerator())
child = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
print("in a child", subprocess.run(child, capture_output=True, text=True).stdout.strip())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.fsdp import fully_shard
layer = fully_shard(torch.nn.Linear(4, 4))
print(layer.weight.device_mesh.device_type, layer(torch.ones(2, 4)).device)
"""
SEEN = "CUDA False None\nin a child 0\ncpu cpu\n"


def execute(notebook, gpus, log, folder):
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    more = {"FSDP_SIM_SEED": "0", "FSDP_SIM_PROGRESS": str(log.with_name("progress"))}
    client.execute(env=environ(gpus, log, **more))
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def saw(log):
    return [line for line in log.read_text().splitlines() if line]


def test_a_kernel_and_what_it_starts_see_no_gpu(tmp_path):
    log = tmp_path / "log"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(KERNEL)])
    (cell,) = execute(notebook, 8, log, tmp_path)

    assert printed(cell) == SEEN
    assert saw(log) == []


@pytest.mark.tail
@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize(
    "name", ["00_start_here", "04_the_life_of_a_unit", "lab_01_ddp_to_fsdp2", "lab_02_memory", "lab_04_overlap"]
)
def test_a_notebook_shows_what_it_shows_without_gpus(name, gpus, tmp_path):
    master = build.MASTERS / f"{name}.py"
    solutions = bool(build.exercises(master))
    folder = ROOT / "notebooks" / ("solutions" if solutions else "")
    notebook, before = build.edition(master, solutions=solutions), nbformat.read(folder / f"{name}.ipynb", as_version=4)
    if name.startswith("lab"):
        asks = notebook.cells.pop()
        assert asks.source.startswith("result_of("), "only the last cell of a lab asks for GPUs"
    cells = execute(notebook, gpus, tmp_path / "log", folder)

    for cell, was in zip(cells, [cell for cell in before.cells if cell.cell_type == "code"], strict=False):
        if "nbval-ignore-output" not in cell.metadata.get("tags", []):
            assert printed(cell) == printed(was)
    assert saw(tmp_path / "log") == [], "something found the GPUs"


@pytest.mark.tail
@pytest.mark.parametrize("gpus", [1, 8])
def test_the_last_cell_of_a_lab_starts_one_rank_on_each_gpu(gpus, tmp_path):
    """A faked GPU computes nothing, so the lab gets no further, and says so."""
    log = tmp_path / "log"
    code = "from labs.record import result_of; found = result_of('ddp_to_fsdp2'); print(found.rows, found.notes[0])"
    said = python(code, gpus, log)

    assert said.startswith("() The lab did not run on the GPU that is here (FailedError: torchrun -m labs.lab.scripts.")
    assert "on 1 rank ended" in said or "on 8 ranks ended" in said
    assert sorted(line for line in saw(log) if line.startswith("set")) == [f"set_device {n}" for n in range(gpus)]
    assert saw(log).count("nccl") == gpus
