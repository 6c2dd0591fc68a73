"""`fsdp-sim doctor`: every part is really tried, and what is missing comes with its remedy."""

import json
import sys

import pytest
from click.testing import CliRunner

from fsdp_sim.cli import doctor as module
from fsdp_sim.cli.doctor import CHECKS, Finding, doctor, examine, package


def test_all_is_well_where_the_tests_run():
    result = CliRunner().invoke(doctor, ["--json"])

    found = {check["part"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 0, found
    assert len(found) == len(CHECKS)
    assert found["ranks on this machine"]["found"] == "2 processes summed a tensor over gloo"
    assert found["torch"]["state"] == "works"
    for check in found.values():
        assert check["remedy"] or check["state"] == "works"


def test_the_table_names_each_part(monkeypatch):
    monkeypatch.setattr(module, "CHECKS", (module.python, package("no_such_package", "extra", "nothing")))

    result = CliRunner().invoke(doctor, [])

    assert result.exit_code == 0  # absent is not broken
    assert "Python" in result.stdout
    assert "absent" in result.stdout


def test_what_is_not_installed_says_what_brings_it():
    found = package("no_such_package", "explore", "tables")()

    assert found == Finding(
        "no_such_package", "absent", "not installed", "tables",
        "pip install 'fsdp-sim[explore]', or run make setup in a checkout",
    )  # fmt: skip


def test_a_check_that_raises_has_found_something():
    def ranks() -> Finding:
        raise OSError("[Errno 98] Address already in use\nand more")

    found = examine(ranks)

    assert (found.part, found.state) == ("ranks", "broken")
    assert found.found == "OSError: [Errno 98] Address already in use"


def test_something_broken_is_exit_status_1(monkeypatch):
    monkeypatch.setattr(module, "CHECKS", (lambda: Finding("wheel", "broken", "flat", "driving", "pump it"),))

    result = CliRunner().invoke(doctor, [])

    assert result.exit_code == 1
    assert "pump it" in result.stdout


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_a_python_that_will_not_do(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", (*version, 0, "final", 0))

    assert module.python().state == "broken"
