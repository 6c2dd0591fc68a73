"""``fsdp-sim course`` and ``lab``: the learner's folder, and what an update leaves alone."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fsdp_sim.cli import course_files as course_files_module
from fsdp_sim.cli.course import FIRST, WRITTEN, write_course
from fsdp_sim.cli.course_files import course_files
from fsdp_sim.cli.schema import schema_of
from tests.cli.commands import call


@pytest.fixture
def shipped(tmp_path):
    """Writes a version's files, and gives them by their place."""

    def write(version: str, **texts: str) -> dict[str, Path]:
        files = {name.replace("__", "/") + ".py": text for name, text in texts.items()}
        for name, text in files.items():
            path = tmp_path / version / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {name: tmp_path / version / name for name in files}

    return write


@pytest.fixture
def here(tmp_path):
    return tmp_path / "here"


def texts(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != WRITTEN]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_an_update_replaces_what_is_as_it_was_written(shipped, here):
    write_course(here, shipped("1", a="old", labs__b="old"), "1")

    changes = write_course(here, shipped("2", a="new", labs__b="old"), "2")

    assert texts(here) == {"a.py": "new", "labs/b.py": "old"}
    assert changes.written == ["a.py"]


def test_what_the_learner_changed_stays_and_its_new_version_lies_beside(shipped, here):
    write_course(here, shipped("1", labs__a="old"), "1")
    (here / "labs" / "a.py").write_text("mine")

    changes = write_course(here, shipped("2", labs__a="new"), "2")

    assert texts(here) == {"labs/a.py": "mine", "labs/a.2.py": "new"}
    assert changes.beside == {"labs/a.py": "labs/a.2.py"}


def test_where_the_course_has_nothing_newer_nothing_comes_to_lie_beside(shipped, here):
    write_course(here, shipped("1", a="old"), "1")
    (here / "a.py").write_text("mine")

    for version in ("2", "3"):
        changes = write_course(here, shipped(version, a="old"), version)

    assert texts(here) == {"a.py": "mine"}
    assert changes.kept == ["a.py"]


def test_a_changed_version_that_lies_beside_stays_too(shipped, here):
    write_course(here, shipped("1", a="old"), "1")
    (here / "a.py").write_text("mine")
    write_course(here, shipped("2", a="new"), "2")
    (here / "a.2.py").write_text("mine as well")

    changes = write_course(here, shipped("2b", a="newer"), "2")

    assert texts(here) == {"a.py": "mine", "a.2.py": "mine as well", "a.2-2.py": "newer"}
    assert changes.beside == {"a.py": "a.2-2.py"}


def test_a_file_that_was_there_before_is_the_learners(shipped, here):
    here.mkdir()
    (here / "a.py").write_text("mine")

    write_course(here, shipped("1", a="new"), "1")

    assert texts(here) == {"a.py": "mine", "a.1.py": "new"}


def test_what_was_removed_comes_back_and_what_the_course_lost_goes_unless_it_is_the_learners(shipped, here):
    write_course(here, shipped("1", a="old", b="old", c="old"), "1")
    (here / "a.py").unlink()
    (here / "c.py").write_text("mine")

    changes = write_course(here, shipped("2", a="old"), "2")

    assert texts(here) == {"a.py": "old", "c.py": "mine"}
    assert (changes.written, changes.removed) == (["a.py"], ["b.py"])


@pytest.mark.parametrize("name", ["../secret.py", "/etc/secret.py"])
def test_a_list_that_names_what_is_outside_of_the_folder_is_refused(name, shipped, here):
    here.mkdir()
    (here / WRITTEN).write_text(json.dumps({"version": "1", "files": {name: "0"}}))

    with pytest.raises(ValueError, match="outside of its folder"):
        write_course(here, shipped("2", a="new"), "2")


def test_a_damaged_list_is_named_with_the_remedy(shipped, here):
    here.mkdir()
    (here / WRITTEN).write_text("{")

    with pytest.raises(ValueError, match=r"cannot be read .*: remove it"):
        write_course(here, shipped("1", a="new"), "1")


def test_the_folder_has_the_notebooks_the_solutions_the_labs_and_the_launch_files(here):
    done = call("course", str(here), "--json")

    assert done.exit_code == 0, done.output
    jsonschema.validate({"result": json.loads(done.stdout)}, schema_of("course"))
    assert set(json.loads(done.stdout)["written"]) == texts(here).keys() == course_files().keys()
    assert {FIRST, f"solutions/{FIRST}", "glossary.md", "labs/cluster/launch/train.sbatch"} <= texts(here).keys()


@pytest.mark.tail
def test_in_the_folder_the_trainer_is_the_folders_own(here):
    call("course", str(here))
    (here / "labs" / "config.py").write_text((here / "labs" / "config.py").read_text() + "\nprint('mine', __file__)\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    done = subprocess.run(
        [sys.executable, "-m", "labs.train", "--help"], cwd=here, env=env, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert f"mine {here / 'labs' / 'config.py'}" in done.stdout


def test_programs_that_a_process_starts_find_the_labs_that_it_brought(tmp_path, monkeypatch):
    """torchrun is one, as from a cell in Colab."""
    (tmp_path / "labs").mkdir()
    for name in ("__init__.py", "train.py"):
        (tmp_path / "labs" / name).touch()
    monkeypatch.setattr(course_files_module, "CHECKOUT", tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))

    course_files_module.bring_labs()
    child = [sys.executable, "-c", "import labs; print(labs.__file__)"]
    said = subprocess.run(child, cwd=tmp_path.parent, capture_output=True, text=True, check=True).stdout

    assert said.strip() == str(tmp_path / "labs" / "__init__.py")


@pytest.mark.parametrize("folder", ["notebooks", "."])
def test_it_writes_nothing_to_where_the_course_is_kept(folder):
    done = call("course", str(Path(__file__).parents[2] / folder))

    assert done.exit_code == 2
    assert "is where the course is kept: name a folder of your own" in done.stderr


def test_lab_says_how_to_get_a_course_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert "no 00_start_here.ipynb: fsdp-sim course here writes the course into here/" in call("lab").stderr


def answer(address: str) -> Any:
    """What a server says that prints its address before it listens."""
    for _ in range(100):
        try:
            return urllib.request.urlopen(address)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.1)
    raise AssertionError(f"nobody listens at {address}")


@pytest.mark.slow
def test_lab_answers_on_this_machine_behind_its_token_and_kernels_find_the_folders_labs(here):
    call("course", str(here))
    command = [sys.executable, "-m", "fsdp_sim.cli.main", "lab", str(here), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/lab/tree/(\S+)\?token=(\w+)", said)):
            line = server.stdout.readline()
            assert line, said
            said += line
        try:
            address = found[0].replace(f"lab/tree/{found[1]}", "api/contents")
            contents = json.load(answer(address))
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(address.partition("?")[0])
            env = Path(f"/proc/{server.pid}/environ").read_bytes().decode()
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=30)

    assert found[1] == FIRST
    assert FIRST in {one["name"] for one in contents["content"]}
    assert f"\0PYTHONPATH={here}" in f"\0{env}"
