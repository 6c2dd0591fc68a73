"""Exit statuses: 0 done, 1 the answer is no, 2 asked wrongly, 130 interrupted; here those that no other test sees."""

import json
import os
import signal
import subprocess
import sys

import pytest

from fsdp_sim.cli.main import COMMANDS
from tests.cli.commands import SMALL, call

BIG = ("--model", "llama3-70b", "--gpu", "A100", "--gpus", "8")
GOOD = {"model": "gpt2-124m", "gpu": "A100", "gpus": 8}
LARGE = GOOD | {"model": "llama3-70b"}
STRANGE = GOOD | {"modle": "gpt2-124m"}

STATUSES = [
    # simulate
    (1, ["simulate", "--from", "{large}"]),
    (2, ["simulate", "--from", "{strange_and_large}"]),
    # fit
    (1, ["fit", "--largest", "model", "--gpu", "T4", "--gpus", "1", "--seq-len", "1024", "--family", "gpt3-175b"]),
    # sweep
    (0, ["sweep", *SMALL[2:], "--vary", "model=gpt2-124m,llama3-70b"]),
    (1, ["sweep", *BIG, "--vary", "micro_batch=1,2"]),
    # validate
    (2, ["validate", "nowhere.csv"]),
    # diagnose
    (2, ["diagnose", "{good}"]),
    # the others
    (2, ["completion", "cmd.exe"]),
    (2, ["teach", "grade", "/dev/zero"]),
    (2, ["exercises", "--chapter", "no-such-chapter"]),
    (2, ["coverage", "--kind", "cooking"]),
    (2, ["ladder", "--rungs", "no-such-rung"]),
    (2, ["calibrate", "--output", "nowhere/cluster.toml"]),
    (2, ["drill", "no-such-topic"]),
    (2, ["doctr"]),
    *((2, [command, "--no-such-option"]) for command in COMMANDS),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("asked")
    texts = {
        "good": json.dumps([GOOD]), "large": json.dumps([GOOD, LARGE]),
        "strange_and_large": json.dumps([LARGE, STRANGE]),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: str(folder / name) for name in texts}


@pytest.mark.parametrize(("status", "arguments"), STATUSES, ids=[" ".join(words) for _, words in STATUSES])
def test_the_status_says_done_no_or_asked_wrongly(status, arguments, files):
    done = call(*(word.format(**files) if word.startswith("{") else word for word in arguments))

    assert done.exit_code == status, done.output


def test_help_documents_them():
    words = " ".join(call("--help").output.split())

    assert "Exit status of every command: 0 done; 1 the answer is no" in words
    assert "2 what was asked wrongly; 130 after Ctrl-C." in words


@pytest.mark.parametrize("option", ["--from", "--model-file", "--cluster"])
@pytest.mark.parametrize(("name", "says"), [("zero", "MB that are read"), ("pipe", ""), ("itself", "ymbolic link")])
def test_a_file_without_an_end_or_that_nobody_writes_is_refused_at_once(option, name, says, tmp_path):
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "itself").symlink_to("itself")
    os.mkfifo(tmp_path / "pipe")
    done = call("simulate", *(SMALL[:2] if option == "--cluster" else ()), option, str(tmp_path / name))
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: ")
    assert says in done.stderr


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_of_a_name_as_long_as_a_book_an_error_quotes_both_ends(as_json):
    done = call("simulate", "--model", "x" * 200_000, "--gpu", "A100", "--gpus", "8", *as_json)
    assert done.exit_code == 2
    assert "more characters" in done.stderr
    assert len(done.output) < 20_000


def test_ctrl_c_is_no_answer(tmp_path):
    """A real SIGINT, while a command waits for what it is to read."""
    os.mkfifo(tmp_path / "requests")
    command = [sys.executable, "-m", "fsdp_sim.cli.main", "simulate", "--from", str(tmp_path / "requests")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with child, open(tmp_path / "requests", "w"):  # opens once the command has opened it
        child.send_signal(signal.SIGINT)
        said = child.communicate()

    assert (child.returncode, said) == (130, ("", "Interrupted.\n"))
