"""Set-up says what is wrong in one sentence, before it starts, and a set-up cut short starts over.

The runs below are real ones of `make` and `setup.py`, in a copy of the few files they need.
"""

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fsdp_sim import setup

ROOT = Path(setup.__file__).parents[1]
OLDEST = (2, 11)
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture
def checkout(tmp_path):
    """A folder with the files that a set-up reads, and no .venv."""
    for name in (
        "Makefile", "pyproject.toml", "requirements.lock", "requirements-dev.lock", "fsdp_sim/setup.py",
        "notebooks/instructor/nbgrader.lock",
    ):  # fmt: skip
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    return tmp_path / "checkout"


@pytest.fixture
def tools(tmp_path):
    """A folder for PATH that holds what make's recipes need, and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("sh", "make", "id", "find", "rm", "sort"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def python_where(tools, statements):
    """Put a python3 into `tools` that is this one, but for `statements`, which it runs at its start."""
    site = tools.parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(statements)
    python = tools / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)


def make(checkout, tools, *arguments, **env):
    """Run make; what the make that runs these tests was told must not reach it."""
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "TORCH", "PORT", "PYTHON", "ARGS")
    run = subprocess.run(
        ["make", "-s", *arguments],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if name not in outer} | {"PATH": str(tools)} | env,
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout, run.stderr


def module_of(checkout):
    """The setup.py of that checkout, imported: its paths are the checkout's."""
    spec = importlib.util.spec_from_file_location("setup_of_checkout", checkout / "fsdp_sim" / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- what is wrong is said before anything is made ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("statements", "arguments", "sentence"),
    [
        (
            "import sys; sys.version_info = (3, 9, 2, 'final', 0)",
            ["setup"],
            "is Python 3.9.2, and 3.11 or newer is needed: install one (Debian, Ubuntu: sudo apt install python3.11",
        ),
        (
            "import sys; sys.version_info = (3, 15, 0, 'final', 0)",
            ["setup"],
            "is Python 3.15.0, and torch has no builds for it yet: name an older one, as in make PYTHON=",
        ),
        (
            "import sys; sys.modules['ensurepip'] = None",
            ["setup"],
            "cannot make a virtual environment: install its venv package (Debian, Ubuntu: sudo apt install "
            f"python{sys.version_info[0]}.{sys.version_info[1]}-venv), then run the same command again.",
        ),
        (
            "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(0, 0, 10**9)",
            ["setup", "TORCH=cpu"],
            "GB of disk under",
        ),
        (
            "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(0, 0, 2**20)",
            ["setup"],
            "/dev/shm has 1 MiB free and 64 are needed: make it larger (sudo mount -o remount,size=1G /dev/shm;",
        ),
        ("", ["setup", "TORCH=gpu"], "TORCH=gpu is not a choice: take one of auto, keep, cpu, cuda."),
        ("import sys; sys.modules['torch'] = None", ["setup", "TORCH=keep"], "TORCH=keep found no torch in "),
        ("", ["lab", "PORT=eighty"], "PORT=eighty is not a port: give a number from 1 to 65535"),
    ],
    ids=["old Python", "new Python", "no venv", "no disk", "no shm", "no such build", "nothing to keep", "no port"],
)
def test_what_is_wrong_is_one_sentence_and_nothing_is_made(checkout, tools, statements, arguments, sentence):
    if "/dev/shm" in sentence and not os.path.isdir("/dev/shm"):
        pytest.skip("needs /dev/shm")
    python_where(tools, statements)

    status, out, err = make(checkout, tools, *arguments)

    said = [line for line in err.splitlines() if not line.startswith("make: ***")]
    assert status != 0
    assert len(said) == 1, err
    assert sentence in said[0]
    assert out == ""
    assert not (checkout / ".venv").exists()


def test_no_python_at_all(checkout, tools):
    status, _, err = make(checkout, tools, "setup")

    assert status != 0
    assert "there is no python3: install Python 3.11 or newer (Debian, Ubuntu: sudo apt install python3" in err


def test_an_old_python_beside_a_new_one_is_passed_over(checkout, tools):
    python_where(tools, "import sys; sys.version_info = (3, 9, 2, 'final', 0)")
    (tools / "python3.12").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python3.12").chmod(0o755)

    _, _, err = make(checkout, tools, "setup", "TORCH=gpu")

    assert "TORCH=gpu is not a choice" in err


def test_a_python_that_uv_has_will_do(checkout, tools):
    (tools / "uv").write_text(f'#!/bin/sh\n[ "$1 $2" = "python find" ] && echo "{sys.executable}"\n')
    (tools / "uv").chmod(0o755)

    _, _, err = make(checkout, tools, "setup", "TORCH=gpu")

    assert "TORCH=gpu is not a choice" in err


def test_a_taken_port_is_named_with_another_to_take(checkout, tools):
    python_where(tools, "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        status, _, err = make(checkout, tools, "lab", f"PORT={port}")

    assert status != 0
    assert f"Port {port} is taken by another program" in err
    assert f"take another port with make lab PORT={port + 1}." in err
    assert not (checkout / ".venv").exists()


def test_a_free_port_passes():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    setup.check_port(str(port))


def test_an_old_python_can_read_setup_as_far_as_its_sentence():
    ast.parse(Path(setup.__file__).read_text(), feature_version=(3, 6))


def test_disk_needs_on_one_file_system_add_up():
    setup.check_disk([("/home", 2 * 10**9, 3 * 10**9, 1), ("/tmp", 2 * 10**9, 3 * 10**9, 2)])

    with pytest.raises(setup.SetupError, match=r"about 4\.0 GB of disk under /home and 3\.0 GB are free"):
        setup.check_disk([("/home", 2 * 10**9, 3 * 10**9, 1), ("/tmp", 2 * 10**9, 3 * 10**9, 1)])


# ---- which torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "found", "has_driver", "build"),
    [
        ("auto", None, False, "cpu"),
        ("auto", None, True, "cuda"),
        ("auto", "2.12.1+cu126", False, "keep"),
        ("auto", "2.11.0", True, "keep"),
        ("auto", "2.10.2", False, "cpu"),
        ("auto", "2.99.0a0+git1234", True, "keep"),
        ("keep", "2.13.0", False, "keep"),
        ("cpu", "2.13.0", True, "cpu"),
        ("cuda", None, False, "cuda"),
    ],
)
def test_a_usable_torch_is_kept_else_the_driver_decides(request_, found, has_driver, build):
    assert setup.choose_torch(request_, found, OLDEST, has_driver) == build


def test_keep_says_what_it_found_and_what_would_do():
    with pytest.raises(setup.SetupError, match=r"found torch 2\.9\.1 in .*, and it must be 2\.11 or newer, with gloo"):
        setup.choose_torch("keep", "2.9.1", OLDEST, True)


def test_the_oldest_torch_is_read_from_pyproject():
    assert setup.oldest_torch() == OLDEST


@pytest.mark.parametrize(
    ("build", "torch", "sentence"),
    [
        ("cpu", None, "does not import, or lacks gloo"),
        ("cpu", {"gloo": False}, "does not import, or lacks gloo"),
        ("cuda", {"gloo": True, "version": "2.13.0+cpu", "cuda": None}, "gave torch 2.13.0[+]cpu, a CPU build"),
    ],
)
def test_a_torch_that_is_not_what_was_asked_for_is_an_error(build, torch, sentence):
    with pytest.raises(setup.SetupError, match=sentence):
        setup.check_torch(build, torch)


def test_a_kept_torch_runs_from_where_it_is_behind_what_venv_has_itself(checkout):
    module = module_of(checkout)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", module.VENV], check=True)
    own = next(module.VENV.glob("lib/python3*/site-packages")) / "click.py"
    own.write_text("whose = 'own'")
    kept = module.ask_for_torch(sys.executable)

    module.install_torch(None, "keep", kept)

    assert module.ask_for_torch(module.VENV / "bin" / "python")["version"] == kept["version"]
    python = module.VENV / "bin" / "python"
    assert subprocess.run([python, "-c", "import click; print(click.whose)"], capture_output=True).stdout == b"own\n"


# ---- a set-up that did not end ------------------------------------------------------------------------------------


def test_without_an_index_pip_says_so_names_its_log_and_starts_over_what_was_begun(checkout, tools):
    python_where(tools, "")
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "begun").touch()

    status, out, err = make(checkout, tools, "setup", "TORCH=cpu", **NO_INDEX)

    assert status != 0
    assert "1/4 creating .venv" in out
    assert not (checkout / ".venv" / "begun").exists()
    first = setup.LOCK.read_text().splitlines()[2].split()[0]
    assert f"set-up failed: pip found no version at all of {first}: check that it can reach" in err
    assert err.count("(log: .venv/setup.log)") == 1
    assert "No matching distribution" in (checkout / ".venv" / "setup.log").read_text()
    assert not (checkout / ".venv" / "setup.json").exists()


def test_an_interrupt_is_a_sentence_and_leaves_no_stamp(checkout):
    command = [sys.executable, checkout / "fsdp_sim" / "setup.py", "--torch", "cpu"]
    env = {**os.environ, **NO_INDEX, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert "1/4" in process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: every process of the terminal's foreground gets it
        err = process.stderr.read()

    assert process.returncode == 130
    assert err.strip() == "set-up interrupted: the same command starts it over."
    assert not module_of(checkout).is_ready("auto")


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk filled up"),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError('...: Failed to "
            "establish a new connection')'\nERROR: No matching distribution found for numpy",
            "pip cannot reach its package index",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: 2.2.2)\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "pip's index has no torch==2.13.0 for Python",
        ),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package "
            "versions, please update the hashes.\n    six==1.17.0 from file:///wheels/six-1.17.0-py2.py3-none-any.whl:\n"
            "        Expected sha256 00\n             Got        ff\n",
            "pip's index gives another file for six==1.17.0 than the one the lock names by its SHA-256",
        ),
        ("ERROR: something new", "pip could not install what is needed: its last words are above"),
    ],
)
def test_pips_words_become_a_sentence(log, sentence):
    assert sentence in setup.explain(log)


# ---- what is locked ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "arguments", "env"),
    [
        ("", [], {}),
        ("global.index-url='https://mirror.example/simple'\nglobal.timeout='60'",
         ["--default-index", "https://mirror.example/simple"], {}),
        ("install.extra-index-url='\\nhttps://one.example\\nhttps://two.example'\nglobal.trusted-host='one.example'",
         ["--index", "https://one.example", "--index", "https://two.example",
          "--allow-insecure-host", "one.example"], {}),
        (":env:.find-links='/mine'\nglobal.find-links='/everybodys'\n:env:.no-index='1'",
         ["--find-links", "/mine", "--no-index"], {}),
        ("global.cert='/etc/ca.crt'\nglobal.proxy='http://proxy.example:3128'", [],
         {"SSL_CERT_FILE": "/etc/ca.crt", "ALL_PROXY": "http://proxy.example:3128"}),
    ],
    ids=["none", "a mirror", "more indexes", "the environment wins", "certificate and proxy"],
)  # fmt: skip
def test_uv_looks_where_pip_is_told_to_look(settings, arguments, env):
    assert setup.for_uv(settings) == (["--index-strategy", "unsafe-best-match", *arguments], env)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with one package, "tiny", as a wheel; no index is asked."""
    folder = tmp_path_factory.mktemp("wheels")
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return folder


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture(params=["uv", "pip, where uv fails"])
def installer(request, checkout, tools, wheels, monkeypatch):
    """The setup.py of a checkout where both tools find `wheels` and no index; each time another of them installs."""
    if request.param == "uv":
        if not shutil.which("uv"):
            pytest.skip("needs uv: make setup installs it")
        (tools / "uv").symlink_to(shutil.which("uv"))
    else:
        (tools / "uv").write_text("#!/bin/sh\nexit 2\n")
        (tools / "uv").chmod(0o755)
    for name, value in {**NO_INDEX, "PIP_FIND_LINKS": str(wheels), "PATH": str(tools)}.items():
        monkeypatch.setenv(name, value)
    return module_of(checkout)


@pytest.mark.parametrize("right", [True, False], ids=["its hash", "another hash"])
def test_a_locked_package_is_installed_by_its_hash_alone(installer, empty_venv, wheels, tmp_path, right):
    sha256 = hashlib.sha256((wheels / "tiny-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    lock = tmp_path / "tiny.lock"
    lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{sha256 if right else '0' * 64}\n")
    for left in empty_venv.glob("lib/python3*/site-packages/tiny*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()

    with (
        open(os.devnull, "w") as log,
        contextlib.nullcontext() if right else pytest.raises(installer.SetupError) as said,
    ):
        installer.install_lock(log, empty_venv, lock)

    assert [path.name for path in empty_venv.glob("lib/python3*/site-packages/tiny.py")] == ["tiny.py"] * right
    assert right or "another file for tiny==1.0 than the one the lock names by its SHA-256" in str(said.value)


# ---- the second call ----------------------------------------------------------------------------------------------


@pytest.fixture
def ready(checkout):
    """A checkout whose .venv has the stamp of a complete set-up with the CPU build."""
    module = module_of(checkout)
    (module.VENV / "bin").mkdir(parents=True)
    (module.VENV / "bin" / "python").symlink_to(sys.executable)
    done = {"digest": module.digest(module.LOCK, module.PYPROJECT), "dev": module.digest(module.DEV_LOCK)}
    module.STAMP.write_text(json.dumps({**done, "torch": "cpu"}))
    return module


@pytest.mark.parametrize(("request_", "skipped"), [("auto", True), ("cpu", True), ("cuda", False), ("keep", False)])
def test_a_second_call_skips_the_set_up_unless_another_torch_is_asked_for(ready, request_, skipped):
    assert ready.is_ready(request_) is skipped


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_a_changed_lock_or_project_file_sets_up_again(ready, name):
    with (ready.ROOT / name).open("a") as file:
        file.write("# changed\n")

    assert not ready.is_ready("auto")


def test_changed_developers_packages_are_theirs_alone(ready):
    assert ready.has_dev()

    with ready.DEV_LOCK.open("a") as file:
        file.write("# changed\n")

    assert not ready.has_dev()
    assert ready.is_ready("auto")


def test_a_python_that_is_gone_sets_up_again(ready):
    (ready.VENV / "bin" / "python").unlink()
    (ready.VENV / "bin" / "python").symlink_to("/no/such/python")

    assert not ready.is_ready("auto")


def test_a_moved_checkout_sets_up_again(ready, tmp_path):
    assert not module_of(ready.ROOT.rename(tmp_path / "moved")).is_ready("auto")
