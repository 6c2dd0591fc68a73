"""What holds for every test and notebook: in continuous integration (CI=true) a skip is a failure.

A test that needs what this machine lacks skips and says why. In CI everything it could lack is installed, so there a
skip is a hole, but for what no such machine has: a GPU, and a second version of torch beside the pinned one.
"""

import os
import signal
from collections import Counter
from collections.abc import Generator

import pytest

# A shell starts background jobs with SIGINT ignored, and so would be every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MAY_SKIP = ("needs a GPU", "needs torch 2.")


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
            seconds[file] += report.duration
    if seconds:
        terminalreporter.section("seconds per notebook")
        for file, spent_s in seconds.most_common():
            terminalreporter.write_line(f"{spent_s:6.1f}  {file}")
        terminalreporter.write_line(f"{seconds.total():6.1f}  all, one after another")
