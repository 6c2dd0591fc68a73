"""Each reading stands alone: it imports torch and the standard library, and torchrun runs it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_sim.mini import readings
from tests.warm import ADDRESS, CLIENT

FILES = {path.stem: path for path in Path(readings.__file__).parent.glob("[a-z]*.py")}


@pytest.mark.parametrize("name", FILES)
def test_it_imports_nothing_but_torch_and_the_standard_library(name):
    packages = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            packages.add(str(node.module).partition(".")[0])
    assert "torch" in packages
    assert packages - {"torch"} <= sys.stdlib_module_names


PROMISES = {
    "one_idea": ["step 4   one process 5.57"],
    "one_loop": ["ddp   ", "fsdp   ", "overlapped   "],
    "fsdp": ["one process: equal to 1e-05", "torch's: equal bit for bit"],
}


@pytest.mark.parametrize("name", FILES)
def test_torchrun_runs_it(name, warm_server, tmp_path, monkeypatch):
    monkeypatch.setenv(ADDRESS, warm_server)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(FILES[name])]
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *torchrun],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Warning" not in done.stdout
    for promise in PROMISES[name]:
        assert promise in done.stdout


@pytest.mark.parametrize(("chapter", "name"), [("04_the_life_of_a_unit", "fsdp"), ("05_overlap", "one_loop")])
def test_a_chapter_shows_lines_that_are_in_the_file(chapter, name):
    master = Path(__file__).parents[3] / "notebooks" / "masters" / f"{chapter}.py"
    (shown,) = re.findall(rf"readings/{name}\.py.*?```python\n(.*?)# ```", master.read_text(), re.DOTALL)
    lines = [line.removeprefix("# ").strip() for line in shown.splitlines()]
    assert "\n".join(lines) in "\n".join(line.strip() for line in FILES[name].read_text().splitlines())
