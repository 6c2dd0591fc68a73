"""python -m labs.checkpoint.convert: what it prints, and its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labs.checkpoint.convert import main
from labs.model import build, model_config


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A file of weights of a teaching model with one layer."""
    torch.save(build(model_config("teaching", n_layer=1)).state_dict(), tmp_path / "theirs.pt")
    return tmp_path / "theirs.pt"


def test_converted(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine"
    assert main([str(theirs), str(target), "--to=hf", "--model=teaching", "--n_layer=1"]) == 0
    assert capsys.readouterr().out == f"{target} is {theirs} as hf\n"
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to=hf"], "does not say what its weights are of; say it, as in --model=gpt2"),
        (["--to=hf", "--model=teachin"], "did you mean 'teaching'?"),
        (["--to=hf", "--model=gpt2"], "another vocabulary; use tokenizer=bytes"),
        (["--to=sharded"], "has weights alone"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else "",
)
def test_asked_wrongly(
    arguments: list[str], message: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(theirs), str(tmp_path / "mine"), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("labs.checkpoint.convert: ")
    assert message in said
    assert said.count("\n") == said.count("%|") + 1  # one line, besides a bar's
    assert list(tmp_path.iterdir()) == [theirs]


@pytest.mark.tail
def test_a_disk_that_does_not_take_it(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); import signal; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from labs.checkpoint.convert import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-B", "-c", limited, str(theirs), str(tmp_path / "mine"), "--to=full"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"labs.checkpoint.convert: {tmp_path / 'mine'} could not be written: " in done.stderr
    assert list(tmp_path.iterdir()) == [theirs]


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert "python -m labs.checkpoint.convert SOURCE TARGET" in said
    assert said.count(" --to=") >= 5
    assert "--to {full,sharded,hf}" in said
