"""The examples in docstrings run as printed."""

import doctest
import importlib
from pathlib import Path

import pytest

import fsdp_sim

ROOT = Path(fsdp_sim.__file__).parent
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FSDP_SIM_PROGRESS", str(tmp_path / "progress.json"))
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert failed == 0
    assert attempted
