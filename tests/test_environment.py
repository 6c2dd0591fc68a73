"""pyproject.toml, requirements.lock, environment.yml and .venv say the same; and in CI a skip is a failure."""

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

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
DEPENDENCIES = [
    Requirement(line)
    for group in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for line in group
    if not line.startswith("fsdp-sim[")
]


def pins() -> dict[str, Requirement]:
    """The lines of requirements.lock that are meant for this machine, by package."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and line[0] != "#"]
    found = [Requirement(line) for line in lines]
    assert len({pin.name for pin in found}) == len(found)
    return {canonicalize_name(pin.name): pin for pin in found if pin.marker is None or pin.marker.evaluate()}


def version_of(pin: Requirement) -> Version:
    return Version(next(iter(pin.specifier)).version)


def needs_of(name: str, extras: set[str]) -> list[Requirement]:
    """What an installed package says it needs, on this machine, with these extras."""
    needs = [Requirement(line) for line in metadata.requires(name) or []]
    return [
        need
        for need in needs
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or {""})
    ]


def test_the_lock_pins_one_exact_version_of_each_package():
    for pin in pins().values():
        assert [part.operator for part in pin.specifier] == ["=="], pin
        assert not version_of(pin).local, f"{pin}: the build is chosen at set-up, not here"


def test_each_pinned_package_runs_on_the_oldest_python_that_pyproject_allows():
    """Debian 12 has 3.11.2, and some packages ask for a later 3.11."""
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    pythons = {name: metadata.metadata(name).get("Requires-Python") for name in pins()}
    assert {name: asked for name, asked in pythons.items() if asked and oldest not in SpecifierSet(asked)} == {}


@pytest.mark.parametrize("dependency", DEPENDENCIES, ids=str)
def test_the_lock_pins_a_version_that_pyproject_allows(dependency):
    assert version_of(pins()[canonicalize_name(dependency.name)]) in dependency.specifier


def test_the_lock_holds_all_that_its_packages_need_and_nothing_else():
    lock, reached = pins(), set()
    ahead = [(canonicalize_name(need.name), frozenset(need.extras)) for need in DEPENDENCIES]
    while ahead:
        name, extras = ahead.pop()
        if (name, extras) in reached:
            continue
        reached.add((name, extras))
        # What the CUDA build of torch needs besides, it pins itself.
        needs = [need for need in needs_of(name, set(extras)) if not (name == "torch" and need.name not in lock)]
        for need in needs:
            needed = canonicalize_name(need.name)
            assert needed in lock, f"{name} needs {need}, which requirements.lock does not have"
            if name != "torch" or version_of(lock["torch"]) == Version(metadata.version("torch")):
                assert need.specifier.contains(version_of(lock[needed]), prereleases=True), f"{name} needs {need}"
            ahead.append((needed, frozenset(need.extras)))

    assert {name for name, _ in reached} == set(lock)


def test_what_is_installed_is_what_the_lock_says():
    torch = Version(metadata.version("torch"))
    allowed = next(need.specifier for need in DEPENDENCIES if need.name == "torch")
    wrong = {
        name: metadata.version(name)
        for name, pin in pins().items()
        if name != "torch" and not pin.specifier.contains(metadata.version(name), prereleases=True)
    }

    assert wrong == {}, "make setup brings .venv up to date"
    assert allowed.contains(torch.base_version), "a kept torch may be another than the lock's, within pyproject's range"


def test_conda_installs_the_lock_on_a_python_that_pyproject_and_setup_allow():
    *packages, pip_section = CONDA["dependencies"]
    python = next(Requirement(package) for package in packages if package.startswith("python"))
    allowed = SpecifierSet(PROJECT["requires-python"])

    assert CONDA["channels"] == ["conda-forge", "nodefaults"]
    assert packages[1:] == ["pip"]
    assert pip_section["pip"][1:] == ["-r requirements.lock", "-e ."]
    assert pip_section["pip"][0].startswith("--extra-index-url ")
    for minor in range(5, 20):
        tried = minor < 15  # setup.py refuses newer ones: torch has no builds for them
        assert python.specifier.contains(f"3.{minor}") == (allowed.contains(f"3.{minor}") and tried)


def test_make_and_setup_agree_on_which_python_will_do():
    from fsdp_sim.cli import setup

    will_do = re.search(r"(\(3, \d+\)) <= sys.version_info < (\(3, \d+\))", (ROOT / "Makefile").read_text())

    assert will_do.groups() == (str(setup.OLDEST_PYTHON), str(setup.FIRST_UNTRIED_PYTHON))
    assert PROJECT["requires-python"] == ">={}.{}".format(*setup.OLDEST_PYTHON)
    assert f"--extra-index-url {setup.CPU_INDEX}" in CONDA["dependencies"][-1]["pip"]


@pytest.mark.parametrize("module", ["fsdp_sim", "labs"])
def test_both_packages_import_from_anywhere(module, tmp_path):
    answer = subprocess.run([sys.executable, "-c", f"import {module}"], cwd=tmp_path, capture_output=True, text=True)

    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize(
    ("body", "on_ci", "status"),
    [
        ("pytest.skip('needs chromium')", "true", 1),
        ("pytest.skip('needs chromium')", "", 0),
        ("pytest.skip('needs a GPU')", "true", 0),
        ("pytest.skip('needs torch 2.11 beside 2.13')", "true", 0),
        ("pytest.xfail('known')", "true", 0),
        ("pytest.importorskip('no_such_package')", "true", 1),
    ],
)
def test_in_ci_a_skip_is_a_failure_unless_no_such_machine_has_it(body, on_ci, status, tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text(f"import pytest\ndef test_one():\n    {body}\n")
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n")

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "CI": on_ci, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )

    assert run.returncode == status, run.stdout
    assert ("in CI only what needs a GPU or needs torch 2.x may be" in run.stdout) == (status == 1)


def test_in_ci_a_module_that_skips_whole_is_a_failure(tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "CI": "true", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )

    assert run.returncode != 0
    assert "1 error" in run.stdout
    assert "no_such_package" in run.stdout
