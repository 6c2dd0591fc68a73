"""pyproject.toml, the locks, environment.yml and .venv say the same; and in CI a skip is a failure."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import fsdp_sim
from fsdp_sim import setup

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
LEARNERS, DEVELOPERS = ROOT / "requirements.lock", ROOT / "requirements-dev.lock"


def asked_by(extra: str) -> list[Requirement]:
    """What an extra of pyproject.toml asks for, with the extras that it names, besides the base install."""
    lines = PROJECT["optional-dependencies"][extra]
    within = [name for line in lines if line.startswith("fsdp-sim[") for name in line[9:-1].split(",")]
    own = [Requirement(line) for line in lines if not line.startswith("fsdp-sim[")]
    return [*own, *(need for name in within for need in asked_by(name))]


BASE = [Requirement(line) for line in PROJECT["dependencies"]]
BY_LEARNERS = [*BASE, *asked_by("course"), *map(Requirement, PYPROJECT["dependency-groups"]["setup"])]
BY_ALL = [*BY_LEARNERS, *(need for extra in PROJECT["optional-dependencies"] for need in asked_by(extra))]


def pins(*locks: Path) -> dict[str, Requirement]:
    """The lines of some locks that are meant for this machine, by package."""
    lines = [line for lock in locks for line in lock.read_text().splitlines() if line and line[0] not in "# "]
    found = [Requirement(line.removesuffix("\\")) for line in lines]
    assert len({pin.name for pin in found}) == len(found)
    return {canonicalize_name(pin.name): pin for pin in found if pin.marker is None or pin.marker.evaluate()}


def version_of(pin: Requirement) -> Version:
    return Version(next(iter(pin.specifier)).version)


def needs_of(name: str, extras: set[str]) -> list[Requirement]:
    """What an installed package says it needs, on this machine, with these extras, but for what is left out."""
    needs = [Requirement(line) for line in metadata.requires(name) or []]
    return [
        need
        for need in needs
        if need.name not in PYPROJECT["tool"]["uv"]["exclude-dependencies"]
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or {""})
    ]


@pytest.mark.parametrize("lock", [LEARNERS, DEVELOPERS, setup.NBGRADER_LOCK], ids=lambda lock: lock.name)
def test_a_lock_pins_one_exact_version_of_each_package_by_its_hashes(lock):
    for pin in pins(lock).values():
        assert [part.operator for part in pin.specifier] == ["=="], pin
    for block in re.split(r"\n(?=\S)", lock.read_text()):
        assert block.startswith("#") or "--hash=sha256:" in block, block
    assert "torch" not in pins(lock), "its build is chosen at set-up"


def test_no_package_is_pinned_twice_and_nbgrader_has_the_versions_of_the_course():
    here, there = pins(LEARNERS, DEVELOPERS), pins(setup.NBGRADER_LOCK)

    assert {name for name in here.keys() & there.keys() if version_of(here[name]) != version_of(there[name])} == set()


def test_each_pinned_package_runs_on_the_oldest_python_that_pyproject_allows():
    """Debian 12 has 3.11.2, and some packages ask for a later 3.11."""
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    pythons = {name: metadata.metadata(name).get("Requires-Python") for name in pins(LEARNERS, DEVELOPERS)}
    assert {name: asked for name, asked in pythons.items() if asked and oldest not in SpecifierSet(asked)} == {}


@pytest.mark.parametrize("dependency", sorted(set(BY_ALL), key=str), ids=str)
def test_a_pinned_version_is_one_that_pyproject_allows(dependency):
    pinned = {**pins(LEARNERS, DEVELOPERS), "torch": Requirement(f"torch=={setup.TORCH}")}

    assert version_of(pinned[canonicalize_name(dependency.name)]) in dependency.specifier


@pytest.mark.parametrize(
    ("locks", "asked"), [([LEARNERS], BY_LEARNERS), ([LEARNERS, DEVELOPERS], BY_ALL)], ids=["learners", "all"]
)
def test_the_locks_hold_all_that_is_needed_and_nothing_else(locks, asked):
    lock, reached = pins(*locks), set()
    ahead = [(canonicalize_name(need.name), frozenset(need.extras)) for need in asked]
    while ahead:
        name, extras = ahead.pop()
        if (name, extras) in reached:
            continue
        reached.add((name, extras))
        # What the CUDA build of torch needs besides, it pins itself.
        needs = [need for need in needs_of(name, set(extras)) if not (name == "torch" and need.name not in lock)]
        for need in needs:
            needed = canonicalize_name(need.name)
            if needed != "torch":
                assert needed in lock, f"{name} needs {need}, which the lock does not have"
                assert need.specifier.contains(version_of(lock[needed]), prereleases=True), f"{name} needs {need}"
            ahead.append((needed, frozenset(need.extras)))

    assert {name for name, _ in reached} == {*lock, "torch"}


def test_what_is_installed_is_what_the_locks_say():
    wrong = {
        name: metadata.version(name)
        for name, pin in pins(LEARNERS, DEVELOPERS).items()
        if not pin.specifier.contains(metadata.version(name), prereleases=True)
    }

    assert wrong == {}, "make dev brings .venv up to date"
    torch = next(need for need in BY_ALL if need.name == "torch")
    assert torch.specifier.contains(Version(metadata.version("torch")).base_version), "a kept torch may be another"


def test_conda_brings_a_python_that_pyproject_and_setup_allow_and_make_and_leaves_the_rest_to_make():
    """So there is no second list of packages, and no index but conda-forge's for every one of them."""
    python, *others = CONDA["dependencies"]
    allowed = SpecifierSet(PROJECT["requires-python"])

    assert CONDA["channels"] == ["conda-forge", "nodefaults"]
    assert others == ["make"]
    assert "make demo" in (ROOT / "environment.yml").read_text()
    for minor in range(5, 20):
        tried = minor < 15  # setup.py refuses newer ones: torch has no builds for them
        said = Requirement(python).specifier.contains(f"3.{minor}")
        assert said == (allowed.contains(f"3.{minor}") and tried)


def test_make_and_setup_agree_on_which_python_will_do():
    will_do = re.search(r"(\(3, \d+\)) <= sys.version_info < (\(3, \d+\))", (ROOT / "Makefile").read_text())

    assert will_do.groups() == (str(setup.OLDEST_PYTHON), str(setup.FIRST_UNTRIED_PYTHON))
    assert PROJECT["requires-python"] == ">={}.{}".format(*setup.OLDEST_PYTHON)


def test_the_first_cell_installs_this_version_with_all_that_the_course_needs_besides_jupyter():
    """Colab has Jupyter, and breaks where another version of its kernel or widgets is installed."""
    master = (ROOT / "notebooks" / "masters" / "00_start_here.py").read_text()
    (asked,) = map(Requirement, re.findall(r'"(fsdp-sim\[.*?)"', master))
    (extras,) = re.findall(r"^fsdp-sim\[(.*)\]$", "\n".join(PROJECT["optional-dependencies"]["course"]), re.MULTILINE)

    assert str(asked.specifier) == f"=={fsdp_sim.__version__}"
    assert asked.extras == set(extras.split(","))


@pytest.mark.parametrize("module", ["fsdp_sim", "labs"])
def test_both_packages_import_from_anywhere(module, tmp_path):
    answer = subprocess.run([sys.executable, "-c", f"import {module}"], cwd=tmp_path, capture_output=True, text=True)

    assert answer.returncode == 0, answer.stderr


LACKING = {  # a test that cannot run, and what becomes of it in CI and elsewhere
    "pytest.skip('needs chromium')": ("FAILED", "SKIPPED"),
    "pytest.importorskip('no_such_package')": ("FAILED", "SKIPPED"),
    "pytest.skip('needs a GPU')": ("SKIPPED", "SKIPPED"),
    "pytest.skip('needs npm and a network')": ("SKIPPED", "SKIPPED"),
    "pytest.skip('needs torch 2.11 beside 2.13')": ("SKIPPED", "SKIPPED"),
    "pytest.xfail('known')": ("XFAIL", "XFAIL"),
}


@pytest.mark.parametrize("in_ci", [True, False])
def test_in_ci_a_skip_is_a_failure_unless_no_such_machine_has_it(in_ci, tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    tests = [f"def test_{number}():\n    {body}\n" for number, body in enumerate(LACKING)]
    (tmp_path / "test_some.py").write_text("import pytest\n" + "".join(tests))
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")

    options = ["-v", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-c", os.devnull]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "CI": "true" if in_ci else "", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )

    became = re.findall(r"test_some.py::test_\d+ (\w+)", run.stdout)
    assert became == [there if in_ci else elsewhere for there, elsewhere in LACKING.values()], run.stdout
    assert ("1 error in" in run.stdout) == in_ci
    assert (run.returncode != 0) == in_ci
    assert ("in CI only what needs npm or needs a GPU or needs torch 2.x may be" in run.stdout) == in_ci
