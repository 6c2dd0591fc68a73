"""What an install may lack: each package by the extra that pyproject.toml gives it, and a torch nobody has tried."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fsdp_sim
from fsdp_sim import packages

ROOT = Path(fsdp_sim.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"fsdp_sim", "labs", "tests", "notebooks"}
DISTRIBUTIONS = metadata.packages_distributions()


@pytest.mark.parametrize(("extra", "name"), [(e, name) for e, names in packages.EXTRAS.items() for name in names])
def test_each_package_is_in_the_extra_that_is_named(extra, name):
    lines = [line for line in PROJECT["optional-dependencies"][extra] if not line.startswith("fsdp-sim[")]
    asked = {Requirement(line).name for line in lines}
    brought = asked | {Requirement(need).name for one in asked for need in metadata.requires(one) or ()}

    assert {dist.lower() for dist in DISTRIBUTIONS[name]} & brought


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - OWN


@pytest.mark.parametrize("package", ["fsdp_sim", "labs"])
def test_every_import_is_of_the_base_install_or_of_an_extra_that_is_known(package):
    base = {Requirement(line).name for line in PROJECT["dependencies"]}
    others = {name: path for path in (ROOT / package).rglob("*.py") for name in imported(path) - base}

    assert {name: str(path) for name, path in others.items() if packages.extra_of(name) is None} == {}


def told_of_make(path: Path) -> list[str]:
    """A file's texts that name a target of the Makefile, but for docstrings and what `in_checkout` says in one."""
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "in_checkout" in ast.unparse(node.func)]
    notes = [n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    within = {id(part) for node in [*(call.args[0] for call in calls), *notes] for part in ast.walk(node)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.compile(rf"\bmake (\[.*?\])?({'|'.join(targets)}|[A-Z]+=)(?![\w-])")
    return [node.value for node in texts if named.search(node.value) and id(node) not in within]


@pytest.mark.parametrize("package", ["fsdp_sim", "labs"])
def test_whoever_has_no_checkout_is_told_of_no_make(package):
    files = [path for path in (ROOT / package).rglob("*.py") if path != ROOT / "fsdp_sim" / "setup.py"]

    assert {str(path): told for path in files if (told := told_of_make(path))} == {}


@pytest.mark.parametrize(("version", "untried"), [("2.11.0", False), ("2.13.0+cpu", False), ("2.99.0a0+git1", True)])
def test_a_newer_torch_than_those_tried_is_one(version, untried):
    assert packages.is_untried(version) is untried


@pytest.mark.tail
def test_an_untried_torch_warns_once_and_works():
    script = (
        "import torch; torch.__version__ = '2.99.0'\n"
        "import fsdp_sim.mini, importlib\n"
        "from fsdp_sim.ranks import run\n"
        "def late():\n    import fsdp_sim.mini\n    return 1\n"
        "print(sum(run(late, world_size=2)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)

    assert run.stdout == "2\n", run.stderr
    assert run.stderr.count("torch 2.99.0 is newer than") == 1
