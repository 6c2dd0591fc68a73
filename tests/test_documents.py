"""Every command and code block of README, CONTRIBUTING and the instructor's pages runs as it is written.

A block is run in a folder in which the checkout's files can be seen, so that what it writes does not stay. A new
command needs a line here: what it promises to print, or why it is not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "notebooks" / "instructor").rglob("*.md"))]
TRACES = ROOT / "tests" / "timeline" / "kineto" / "recorded"

PROMISES = {
    "fsdp-sim simulate --model llama3-70b": r"tokens/s",
    "fsdp-sim fit --model llama3-8b": r"micro.batch",
    "fsdp-sim sweep --model llama3-8b": r"GiB",
    "fsdp-sim program --layers 4": r"all_gather|ALL_GATHER",
    "fsdp-sim validate --leave-out model": r"%",
    "fsdp-sim calibrate": r"Wrote ",
    "fsdp-sim diagnose trace.json": r"exposed",
    "fsdp-sim ladder": r"All \d+ rungs agree",
    ". .venv/bin/activate": r"",
    "torchrun --standalone --nproc_per_node=2 -m labs.train --out=/tmp/run --steps=40": r"step +39 ",
    "torchrun --standalone --nproc_per_node=4 -m labs.train --out=/tmp/run --steps=60": r"step +59 ",
    "python -m labs.convert": r"",
    "python -m labs.lab.memory": r"MiB",
    "python -m labs.lab.nodes --hang": r"rank \d never came to",
    "python -m labs.pretend --ranks 8 64": r"64",
    "fsdp-sim calibrate --ranks 2 -o here.toml": r"Wrote here\.toml",
    "python -m labs.lab.overlap --cluster here.toml": r"ms",
    "fsdp-sim teach rollup handed_in": r"",
    "sed '/^---$/,$d' notebooks/instructor/assistants.md": r"",
}
"""The beginning of a command, without ``.venv/bin/``; what stands in what it prints.

It ends with status 0, and the files that it names as its output are there.
"""
OUTPUT = re.compile(r"(?:--out|-o|--html|--chrome|--csv|--picture|>)[ =](\S+)|(\bweights/)")

NOT_RUN = {
    "make demo": "`.ci` and a newcomer's first hour begin with it; tests/cli/test_demo.py runs the demo",
    "make test": "it is what runs this",
    "torchrun --standalone --nproc_per_node=8 --max-restarts=9": "GPT-2 takes GPUs; tests/labs reads its configuration",
    "python -m labs.checklist": "tests/labs/test_checklist.py runs it; on 8 ranks of two cores it takes a quarter hour",
    "python -m labs.record": "needs a GPU",
    "make assignments": "tests/notebooks/test_assignments.py makes a course, and has nbgrader grade it",
    "nbgrader=": "tests/notebooks/test_assignments.py",
    "$nbgrader": "tests/notebooks/test_assignments.py",
    "sudo $nbgrader": "tests/notebooks/test_assignments.py",
    "sudo git clone": "changes the machine",
    "cd /srv/fsdp_sim": "changes the machine",
    "sudo .venv/bin/": "changes the machine",
    "sudo cp notebooks": "needs The Littlest JupyterHub",
    "sudo tljh-config": "needs The Littlest JupyterHub",
    "pip download": "takes gigabytes from the network",
    "PIP_NO_INDEX=1": "needs what the line above it took from the network",
}
"""The beginning of a command; why it is not run."""

BEFORE = {
    "from fsdp_sim.timeline import read_timeline": "import os; os.chdir({folder!r})",
    "from fsdp_sim.mini import fully_shard": """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Module()
model.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
""",
}
"""The beginning of a block of Python; what it takes for granted."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    python: bool
    text: str

    @property
    def commands(self) -> list[str]:
        """Without comments and prompts."""
        lines = [line for line in self.text.splitlines() if line.strip() and not line.startswith("#")]
        if self.text.startswith("$ "):
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [re.sub(r"\s+# .*", "", line) for line in lines]


def blocks(page: Path) -> list[Block]:
    tokens = [t for t in MarkdownIt().parse(page.read_text()) if t.type in ("fence", "code_block")]
    return [Block(page, t.map[0] + 1, t.info == "python", t.content) for t in tokens if t.map]


ALL = [block for page in PAGES for block in blocks(page)]
CONSOLE = [block for block in ALL if not block.python]
COMMANDS = [command for block in CONSOLE for command in block.commands]


def known(command: str, table: dict[str, str]) -> str | None:
    """The longest beginning of a command that is in a table."""
    plain = command.removeprefix(".venv/bin/")
    return max((start for start in table if plain.startswith(start)), key=len, default=None)


def test_every_command_is_run_or_there_is_a_reason_why_not() -> None:
    unknown = [command for command in COMMANDS if not known(command, PROMISES | NOT_RUN)]
    assert not unknown, "say in this file what they promise, or why they are not run"


def test_nothing_is_listed_that_no_page_says() -> None:
    found = {known(command, PROMISES | NOT_RUN) for command in COMMANDS}
    assert {*PROMISES, *NOT_RUN} - found == set()
    assert all(any(block.text.startswith(start) for block in ALL) for start in BEFORE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which the checkout can be seen, and a trace, and what learners handed in."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("build", "out", "notebooks", "tests"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "notebooks").mkdir()
    for path in (ROOT / "notebooks").iterdir():
        (tmp_path / "notebooks" / path.name).symlink_to(path)
    (tmp_path / "trace.json").symlink_to(min(TRACES.rglob("*.json*")))
    (tmp_path / "handed_in").mkdir()
    (tmp_path / "handed_in" / "ada.ipynb").symlink_to(ROOT / "notebooks" / "solutions" / "05_overlap.ipynb")
    return tmp_path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FSDP_SIM_PROGRESS": str(folder / "progress.json")}
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1500
    )


@pytest.mark.tail
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.python for b in blocks(page))], ids=lambda p: p.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, folder: Path) -> None:
    code = []
    for block in blocks(page):
        if block.python:
            code += [text.format(folder=str(folder)) for start, text in BEFORE.items() if block.text.startswith(start)]
            code.append(block.text)
    script = folder / "page.py"
    script.write_text("\n".join(code))
    done = run([sys.executable, str(script)], folder)
    assert done.returncode == 0, done.stdout


RUN = [block for block in CONSOLE if any(known(command, PROMISES) for command in block.commands)]


@pytest.mark.tail
@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block.page.relative_to(ROOT)}:{block.line}")
def test_the_commands_of_a_block_run_one_after_the_other_and_do_what_they_promise(block: Block, folder: Path) -> None:
    """In one shell. Only ``/tmp/run`` is put elsewhere: somebody may have a run of their own there."""
    commands = [c for c in block.commands if (known(c, PROMISES) or "") >= (known(c, NOT_RUN) or "")]
    script = []
    for number, command in enumerate(commands):
        here = command.replace("/tmp/run", str(folder / "run"))
        script += [
            f"{{ {here}\n}} > {number}.said 2>&1",
            f"status=$?; cat {number}.said",
            f'echo "{number} $status" >> statuses',
        ]
    done = run(["bash", "-c", "\n".join(script)], folder)

    statuses = (folder / "statuses").read_text().split("\n")
    for number, command in enumerate(commands):
        said = (folder / f"{number}.said").read_text()
        assert statuses[number] == f"{number} 0", f"$ {command}\n{said}"
        promise = PROMISES[known(command, PROMISES) or ""]
        assert re.search(promise, said), f"$ {command}\nprinted nothing like {promise!r}:\n{said}"
        files = [folder / "".join(named).replace("/tmp/", "") for named in OUTPUT.findall(command)]
        assert all(file.exists() for file in files), f"$ {command}\n{said}"
    assert done.returncode == 0
