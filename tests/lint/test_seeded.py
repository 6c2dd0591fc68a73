"""Faults that are seeded into scripts of many styles are named, each by its rule and nothing else."""

import tomllib
from pathlib import Path

import pytest

from fsdp_sim.lint import lint

SEEDED = tomllib.loads((Path(__file__).parent / "seeded.toml").read_text())


@pytest.mark.parametrize("fault", SEEDED)
def test_the_fault_is_named_and_nothing_else(fault, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SEEDED[fault]["script"])

    [report] = lint(str(path))

    assert {finding.rule for finding in report.findings} == {fault.partition(",")[0]}


def test_the_labs_have_no_trap():
    reports = lint(str(Path(__file__).parents[2] / "labs"))

    assert [(report.target, finding.rule) for report in reports for finding in report.findings] == []
