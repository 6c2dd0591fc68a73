"""Every test has a record of progress of its own."""

from pathlib import Path

import pytest

from fsdp_sim.learn import progress


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "learner" / "progress.json"
    monkeypatch.setenv(progress.VARIABLE, str(path))
    return path
