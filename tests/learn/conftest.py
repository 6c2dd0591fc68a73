"""Every test has a record of progress and a my_fsdp.py of its own."""

from pathlib import Path

import pytest

from fsdp_sim.learn import mine, progress


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "learner" / "progress.json"
    monkeypatch.setenv(progress.VARIABLE, str(path))
    monkeypatch.setenv(mine.VARIABLE, str(path.with_name(mine.FILE)))
    return path
