"""What holds for every test and notebook: which of them belong to which command, and what runs first.

In continuous integration (CI=true) a skip is a failure. A test that needs what this machine lacks skips and says why.
In CI everything it could lack is installed, so there a skip is a hole, but for what no such machine has (a GPU, a
second version of torch beside the pinned one), or need not have (npm).
"""

import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.warm import ADDRESS, CLIENT, LATE, listening, preload, serving

ROOT = Path(__file__).parent
if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are taken: threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # and where there are more, as in a notebook, not by spinning

# A shell starts background jobs with SIGINT ignored, and so would be every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTS = {"browser", "chromium", "server", "start", "undisturbed", "warm_server", "ranks"}  # fixtures with processes
SLOW = (
    "notebooks", "tests/notebooks", "tests/browser", "tests/faults", "tests/measure", "tests/labs",
    "tests/learn/classroom", "tests/learn/test_check.py", "tests/learn/drill/test_templates.py",
    "tests/mini/parity", "tests/mini/readings", "tests/mini/siblings", "tests/mini/test_programs.py",
    "tests/mini/test_program_by_hand.py",
    "tests/schedule/test_fsdp1.py", "tests/schedule/test_fsdp2.py", "tests/viz/explorer",
    "tests/ranks/test_edges.py", "tests/ranks/test_kernel.py", "tests/ranks/test_limits.py",
    "tests/ranks/test_other_user.py", "tests/ranks/test_watchdog.py",
    "tests/cli/test_calibrate.py", "tests/cli/test_demo.py", "tests/cli/test_ladder.py", "tests/test_setup.py",
    "tests/test_base_install.py", "tests/test_accelerators.py", "tests/web",
)  # fmt: skip
"""Where tests take seconds, or start ranks without a fixture."""
QUICK = (
    "notebooks/solutions/03_sharding_a_tensor.ipynb", "tests/labs/test_config.py", "tests/labs/data/test_loader.py",
    "tests/labs/loop/test_metrics.py", "tests/labs/wrapping/test_check.py", "tests/labs/checkpoint/test_manifest.py",
)  # fmt: skip
"""What is not slow of what is there: every room has something that `make check` runs."""
LONGEST = (
    "tests/test_documents.py",
    "notebooks",
    "tests/labs",
    "tests/faults",
    "tests/browser",
    "tests/learn",
    "tests/mini",
    "tests/ranks",
)
"""Begin first, in this order."""
FOLDER, SERVER, WARM = pytest.StashKey[Path](), pytest.StashKey[str](), pytest.StashKey[dict[str, str]]()
settings.register_profile("some", deadline=None, max_examples=25)
settings.register_profile("many", deadline=None, max_examples=60)  # make test-all
settings.load_profile("some")
# A lab's editions, and the gallery's, differ in answered predictions alone: the same training need not run twice.
collect_ignore_glob = ["notebooks/lab_*.ipynb", "notebooks/gallery.ipynb"]
MAY_SKIP = ("needs npm", "needs a GPU", "needs torch 2.")


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what follows from a test's place or fixtures; what takes longest begins first, so that no core waits.

    The two editions of a notebook differ in the exercises alone: `make test` runs the one that has them solved.
    """

    @cache  # of thousands of items there are hundreds of files
    def place(path: Path, places: Sequence[str]) -> int:
        return next((n for n, one in enumerate(places) if path.is_relative_to(ROOT / one)), len(places))

    for item in items:
        starts = STARTS & set(getattr(item, "fixturenames", ()))
        if starts or (place(item.path, SLOW) < len(SLOW) and place(item.path, QUICK) == len(QUICK)):
            item.add_marker("slow")
        if item.path.suffix == ".ipynb" and (item.path.parent / "solutions" / item.path.name).exists():
            item.add_marker("tail")
    items.sort(key=lambda item: place(item.path, LONGEST))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ranks need not import what tests on ranks import, nor what slow ones do."""
    if hasattr(session.config, "workerinput"):
        preload("pytest", *_late(session.config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """The workers of pytest-xdist share a server."""
    node.workerinput[ADDRESS] = _server(node.config)


@pytest.fixture(scope="session")
def warm_server(request: pytest.FixtureRequest) -> str:
    """The address of a server that forks torchrun's agents and ranks, see `tests.warm`."""
    return listening(_server(request.config))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """A notebook's kernel starts with the first of its cells: in the environment in which its outputs were made."""
    if item.path.suffix != ".ipynb":
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setenv("FSDP_SIM_SEED", "0")
        patch.setenv("FSDP_SIM_PROGRESS", str(_folder(item.config) / f"{item.path.parent.name}-{item.path.stem}.json"))
        own = _folder(item.config) / f"{item.path.parent.name}-{item.path.stem}" / "my_fsdp.py"  # each begins its own
        patch.setenv("FSDP_SIM_MINE", str(own))
        for name, value in _warm(item.config).items():
            patch.setenv(name, value)
        patch.setattr("ipykernel.kernelspec.get_kernel_dict", _forked_kernel)
        return (yield)


def _folder(config: pytest.Config) -> Path:
    """For what the kernels of notebooks read and write."""
    if FOLDER not in config.stash:
        folder = tempfile.TemporaryDirectory(prefix="fsdp_sim-")
        config.add_cleanup(folder.cleanup)
        config.stash[FOLDER] = Path(folder.name)
    return config.stash[FOLDER]


def _forked_kernel() -> dict[str, object]:
    from ipykernel.kernelspec import make_ipkernel_cmd

    return {"argv": [sys.executable, "-c", CLIENT, *make_ipkernel_cmd()], "display_name": "", "language": "python"}


def _late(config: pytest.Config) -> tuple[str, ...]:
    """What nobody trains with where slow tests are left out."""
    return () if "slow" in config.option.markexpr else LATE


def _server(config: pytest.Config) -> str:
    """Where it listens, or will; see `tests.warm`."""
    if SERVER not in config.stash:
        stack = ExitStack()
        config.add_cleanup(stack.close)
        shared = getattr(config, "workerinput", {}).get(ADDRESS)
        config.stash[SERVER] = shared or stack.enter_context(serving(_folder(config), *_late(config)))
    return config.stash[SERVER]


def _warm(config: pytest.Config) -> dict[str, str]:
    """For a kernel that starts by a fork, and torchrun's agent and its ranks in it."""
    if WARM not in config.stash:
        startup = _folder(config) / "profile_default" / "startup"
        startup.mkdir(parents=True)
        (startup / "warm.py").write_text(f"from labs.cluster import torchrun\n\ntorchrun.TIED = {CLIENT!r}\n")
        config.stash[WARM] = {"IPYTHONDIR": str(_folder(config)), ADDRESS: listening(_server(config))}
    return config.stash[WARM]


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI") != "true" or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    longrepr = report.longrepr  # of a skip: (file, line, "Skipped: reason")
    reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
    if not reason.startswith(MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = f"skipped, and in CI only what {' or '.join(MAY_SKIP)}x may be: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How long each notebook took, and all of them."""
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        file = getattr(report, "nodeid", "").partition("::")[0]
        if file.endswith(".ipynb"):
            seconds[file] += getattr(report, "duration", 0.0)  # those left out have none
    if seconds:
        terminalreporter.section("seconds per notebook")
        for file, spent_s in seconds.most_common():
            terminalreporter.write_line(f"{spent_s:6.1f}  {file}")
        terminalreporter.write_line(f"{seconds.total():6.1f}  all, one after another")
