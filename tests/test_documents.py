"""Every command and code block of README, CONTRIBUTING and the instructor's pages runs as it is written.

A block, or a command within a sentence, is run in a folder in which the checkout's files can be seen, so that what it
writes does not stay; `make` in the checkout. A new command needs a line here: what it promises to print, or why it is
not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
MOVED = ("simulator", "figures", "diagnose", "mini", "trainer", "labs", "gpu_day", "systems", "hosts")
MOVED += ("lint", "migrate", "interview")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / f"{name}.md" for name in MOVED)]
PAGES += [*sorted((ROOT / "notebooks" / "instructor").rglob("*.md"))]
TRACES = ROOT / "tests" / "timeline" / "kineto" / "recorded"

PROMISES = {
    "fsdp-sim simulate --model llama3-70b": r"tokens/s",
    "fsdp-sim fit --model llama3-8b": r"micro.batch",
    "fsdp-sim tune --model llama3-8b": r"What each change is worth",
    "fsdp-sim sweep --model llama3-8b": r"GiB",
    "fsdp-sim explain --model llama3-8b": r"no block is computed again",
    "fsdp-sim program --layers 4": r"all_gather|ALL_GATHER",
    "fsdp-sim diagnose trace.json": r"exposed",
    "fsdp-sim lint train.py": r"",
    "fsdp-sim migrate train.py": r"\+\s+fully_shard\(module",
    "fsdp-sim migrate accelerate.yaml": r"peak memory of a rank",
    ". .venv/bin/activate": r"",
    "torchrun --standalone --nproc_per_node=2 -m labs.train --out=/tmp/run --steps=20": r"step +19 ",
    "torchrun --standalone --nproc_per_node=4 -m labs.train --out=/tmp/run --steps=30": r"step +29 ",
    "python -m torch.distributed.run --standalone": r"torch's: equal bit for bit",
    "python -m labs.checkpoint.convert": r"",
    "fsdp-sim teach rollup handed_in": r"",
    "sed '/^---$/,$d' notebooks/instructor/assistants.md": r"",
    "make help": r"make demo .*predict the same step",
    "make lint": r"no issues found",
    "pip config list": r"",
    "fsdp-sim exercises": r"exercises . mutants",
    "fsdp-sim mine": r"0 of 9 parts are yours",
    "fsdp-sim coverage": r"05_overlap",
    "python -m notebooks.masters.counts": r"\| all \|",
    "fsdp-sim doctor": r"torch",
    "fsdp-sim drill sheet": r"all-gather",
    "fsdp-sim program --torch 2.15": r"ALL_GATHER\(root\)",
    "python -m torch.utils.collect_env": r"PyTorch version",
}
"""The beginning of a command, without ``.venv/bin/``; what stands in what it prints.

It ends with status 0, and the files that it names as its output are there.
"""
OUTPUT = re.compile(r"(?:--out|-o|--html|--chrome|--csv|--picture|>)[ =](\S+)|(\bweights/)")

NOT_RUN = {
    "make demo": "the test at the end of this file",
    "make test": "it is what runs this",
    "make check": "lint is run; the rest is a part of `make test`",
    "fsdp-sim course": "tests/cli/test_course.py",
    "fsdp-sim lab": "tests/cli/test_course.py",
    "pip install": "tests/test_base_install.py builds the wheel and runs every command on it",
    "python -m web.hosts": "writes README: tests/test_hosts.py",
    "python -m tests.faked_gpus.decisions": "tests/labs/gpu_day/test_sizes.py compares the page with what it prints",
    "pip wheel": "tests/test_base_install.py builds the wheel and runs every command on it",
    "python -m labs.train": "tests/cli/test_course.py",
    "make gpu-day": "tests/labs/gpu_day rehearses a part of it; whole it takes half an hour",
    "make lab": "tests/notebooks/test_browser.py starts JupyterLab",
    "make html": "tests/web/test_pages.py makes the pages",
    "python -m web.pages build/html 05_overlap": "the same",
    "make slides": "tests/notebooks/test_slides.py makes a deck, and tries them all in `make test-all`",
    "make notebooks": "tests/notebooks/test_notebooks.py compares them with their masters, and runs every cell",
    "make chaos": "`make test-all` ends with it",
    "make mutation": "runs tests for a quarter of an hour; tests/test_mutation.py sees that every fault can be seeded",
    "make matrix": "gigabytes of other versions of torch",
    "make bench": "measures for many minutes and promises no number",
    "python -m tests.bench": "measures for minutes; the numbers that it prints are another machine's",
    "make lock": "asks the index for newer packages",
    "make clean": "removes what runs this",
    "make TORCH=": "tests/test_setup.py",
    "make": "tests/test_setup.py has what it says when something is missing",
    "pre-commit install": "changes the checkout",
    "conda env create": "needs conda",
    "pip install .": "tests/test_base_install.py builds the wheel and runs every command on it",
    "sudo apt install": "changes the machine",
    "fsdp-sim drill": "asks questions: tests/cli/test_drill.py answers them",
    "fsdp-sim calibrate": "tests/cli/test_calibrate.py",
    "fsdp-sim diagnose traces/": "tests/cli/test_diagnose.py",
    "fsdp-sim diagnose after/": "tests/cli/test_diagnose.py",
    "fsdp-sim diagnose trace.json --memory": "tests/cli/test_diagnose.py; a snapshot takes a GPU",
    "fsdp-sim diagnose --memory": "tests/cli/test_diagnose.py; a snapshot takes a GPU",
    "fsdp-sim lint": "tests/lint/test_command.py",
    "fsdp-sim migrate": "tests/cli/test_migrate.py",
    "fsdp-sim puzzle": "serves a page until it is stopped: tests/cli/test_puzzle.py",
    "fsdp-sim teach write": "tests/learn/classroom looks at the pages that it writes",
    "fsdp-sim simulate --gpu NAME": "NAME is the reader's",
    "fsdp-sim simulate --config": "FILE is the reader's: tests/configurations",
    "sudo .venv/bin/fsdp-sim teach grade": "tests/learn/classroom/test_grading.py, as another user",
    "fsdp-sim teach rollup /home": "the homes of a class",
    "python -m labs.experiments.memory": "lab 2's notebook runs the lab; test_memory.py of tests/labs has its command",
    "python -m labs.experiments.nodes --hang": "lab 9's notebook; tests/labs/experiments/test_nodes.py has its command",
    "python -m labs.experiments.overlap": "lab 4's notebook; tests/labs/experiments/test_overlap.py has its command",
    "python -m labs.cluster.pretend": "tests/labs/cluster/test_pretend.py",
    "fsdp-sim ladder": "tests/cli/test_ladder.py",
    "fsdp-sim validate --leave-out model": "tests/cli/test_validate.py",
    "make setup": "`make demo` at the end of this file does it where nothing is there",
    "make dev": "it is what installs this",
    "python -m tests.mutants": "takes hours, and wants cosmic-ray",
    "torchrun --standalone --nproc_per_node=8 --max-restarts=9": "GPT-2 takes GPUs; tests/labs reads its configuration",
    "python -m labs.experiments.checklist": "tests/labs/experiments runs it; 8 ranks on two cores take a quarter hour",
    "python -m labs.experiments.gpu_results": "needs a GPU",
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
    "optimizer = AdamW": "from types import SimpleNamespace; AdamW, model = list, SimpleNamespace(parameters=list)",
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


INLINE = re.compile(r"(sudo |\.venv/bin/)*(make|fsdp-sim|python|pip|conda|torchrun|pre-commit|apt|jupyter)( |$)")


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, and each command within its sentences."""
    found = []
    for token in MarkdownIt().parse(page.read_text()):
        if token.map and token.type in ("fence", "code_block"):
            found.append(Block(page, token.map[0] + 1, token.info == "python", token.content))
        elif token.map:
            code = [child.content for child in token.children or [] if child.type == "code_inline"]
            found += [Block(page, token.map[0] + 1, False, text) for text in code if INLINE.match(text)]
    return found


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
    """A folder in which the checkout can be seen, a trace, somebody's script, and what learners handed in."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("build", "out", "notebooks", "tests"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "notebooks").mkdir()
    for path in (ROOT / "notebooks").iterdir():
        (tmp_path / "notebooks" / path.name).symlink_to(path)
    (tmp_path / "trace.json").symlink_to(min(TRACES.rglob("*.json*")))
    (tmp_path / "train.py").symlink_to(ROOT / "tests" / "migrate" / "scripts" / "nanogpt.py")
    (tmp_path / "accelerate.yaml").symlink_to(ROOT / "tests" / "configurations" / "shipped" / "accelerate-fsdp1.yaml")
    (tmp_path / "handed_in").mkdir()
    (tmp_path / "handed_in" / "ada.ipynb").symlink_to(ROOT / "notebooks" / "solutions" / "05_overlap.ipynb")
    return tmp_path


def run(
    command: list[str], folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment or os.environ | {"PYTHONPATH": str(ROOT), "FSDP_SIM_PROGRESS": str(folder / "progress.json")},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=1500,
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


def is_run(command: str) -> bool:
    return (known(command, PROMISES) or "") > (known(command, NOT_RUN) or "")


def to_run() -> list[Block]:
    """The blocks with something to run, and of sentences what no block has, once."""
    found: dict[str, Block] = {}
    for block in sorted(CONSOLE, key=lambda block: "\n" not in block.text):
        commands = [command.removeprefix(".venv/bin/") for command in block.commands if is_run(command)]
        if {*commands} - found.keys():
            found |= dict.fromkeys(commands, block)
    return list(dict.fromkeys(found.values()))


@pytest.mark.tail
@pytest.mark.parametrize("block", to_run(), ids=lambda block: f"{block.page.relative_to(ROOT)}:{block.line}")
def test_the_commands_of_a_block_run_one_after_the_other_and_do_what_they_promise(block: Block, folder: Path) -> None:
    """In one shell. Only ``/tmp/run`` is put elsewhere: somebody may have a run of their own there."""
    commands = list(filter(is_run, block.commands))
    script = []
    for number, command in enumerate(commands):
        here = command.replace("/tmp/run", str(folder / "run"))
        here = here.replace("make ", f"make -C {ROOT} ", 1) if command.startswith("make ") else here
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


@pytest.mark.tail
def test_make_demo_sets_up_a_bare_checkout_and_writes_its_page(tmp_path: Path) -> None:
    """README's first command, where nothing is there yet: the environment comes from the index."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    path = [folder for folder in os.environ["PATH"].split(":") if not Path(folder).is_relative_to(sys.prefix)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "PYTHON", "VIRTUAL_ENV"))}

    done = run(["make", "demo"], tmp_path, kept | {"PATH": ":".join(path)})

    assert done.returncode == 0, done.stdout
    assert "Every rank issued the predicted operations" in done.stdout
    assert (tmp_path / "demo.html").stat().st_size <= 2_000_000
    files = [file for file in (tmp_path / ".venv").rglob("*") if "torch" not in file.parts and file.is_file()]
    assert sum(file.stat().st_blocks * 512 for file in files) <= 1_200_000_000
