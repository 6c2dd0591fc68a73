"""On a machine with GPUs notebooks show what they show without; only a lab's last cell asks for them. All are faked."""

import re
from collections import Counter

import nbformat
import pytest
from nbclient import NotebookClient

from labs.cluster.process_group import n_ranks
from notebooks.masters import build
from tests.faked_gpus import ROOT, environ, python

KERNEL = """
import os, subprocess, sys
import torch, torch.distributed as dist
from labs.model.gpt import GPTConfig

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


def displayed(cell):
    """Texts and figures, by kind: without the image beside a stored figure, and a widget, which is not stored."""
    data = [(output.output_type, dict(output.data)) for output in cell.outputs if "data" in output]
    return [
        (how, {kind: of for kind, of in found.items() if kind not in ("image/jpeg", build.WIDGET)})
        for how, found in data
    ]


def kinds(cell):
    """Of what is shown; of what is printed whether anything is, once bars are gone that the next line overwrites."""
    left = re.sub(r"^.*\r", "", printed(cell), flags=re.MULTILINE).strip()
    return [(how, sorted(found)) for how, found in displayed(cell)], bool(left)


def texts(cell):
    return [{kind: of for kind, of in found.items() if kind.startswith("text/")} for _, found in displayed(cell)]


def words(cell):
    """How often it speaks of GPUs, in warnings and figures too; numbers of figures are base64, which says anything."""
    streams = [output.text for output in cell.outputs if output.output_type == "stream"]
    said = re.sub("'bdata': '[^']*'", "", f"{streams} {displayed(cell)}")
    return Counter(re.findall("cuda|gpu|nvidia|nccl", said.lower()))


def saw(log):
    return [line for line in log.read_text().splitlines() if line]


def test_a_kernel_and_what_it_starts_see_no_gpu(tmp_path):
    log = tmp_path / "log"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(KERNEL)])
    (cell,) = execute(notebook, 8, log, tmp_path)

    assert printed(cell) == SEEN
    assert saw(log) == []


@pytest.mark.tail
@pytest.mark.parametrize(("name", "gpus"), [("00_start_here", 8), ("lab_02_memory", 1)])
def test_a_notebook_shows_what_it_shows_without_gpus(name, gpus, tmp_path):
    master = build.MASTERS / f"{name}.py"
    folder = ROOT / "notebooks" / "solutions"  # the edition that keeps every output
    notebook, before = build.edition(master, solutions=True), nbformat.read(folder / f"{name}.ipynb", as_version=4)
    if name.startswith("lab"):
        asks = notebook.cells.pop()
        assert asks.source.startswith("result_of("), "only the last cell of a lab asks for GPUs"
    cells = execute(notebook, gpus, tmp_path / "log", folder)

    for cell, was in zip(cells, [cell for cell in before.cells if cell.cell_type == "code"], strict=False):
        assert (kinds(cell), words(cell)) == (kinds(was), words(was))
        if "nbval-ignore-output" not in cell.metadata.get("tags", []):
            assert (printed(cell), texts(cell)) == (printed(was), texts(was))
    assert saw(tmp_path / "log") == [], "something found the GPUs"


@pytest.mark.tail
@pytest.mark.parametrize(("lab", "gpus"), [("ddp_to_fsdp2", 1), ("memory", 8), ("overlap", 1)])
def test_the_last_cell_of_a_lab_starts_one_rank_on_each_gpu(lab, gpus, tmp_path):
    """A faked GPU computes nothing, so the lab gets no further, and says so."""
    log = tmp_path / "log"
    code = f"from labs.experiments.gpu_results import result_of; found = result_of({lab!r})"
    code += "; print(found.rows, found.notes[0])"
    said = python(code, gpus, log)
    ranks = 0 if (lab, gpus) == ("overlap", 1) else gpus

    assert said.startswith("() The lab did not run on the GPU that is here (")
    assert f"python -m labs.experiments.gpu_results {lab} makes it" in said
    if lab == "ddp_to_fsdp2":
        assert "that is here (FailedError: torchrun -m labs.experiments.scripts." in said
    if ranks:
        assert f" on {n_ranks(gpus)} " in said.partition("ended with status 1")[0]
    else:
        assert "one rank has nobody to send to" in said
    assert sorted(line for line in saw(log) if line.startswith("set")) == [f"set_device {n}" for n in range(ranks)]
    assert saw(log).count("nccl") == ranks
