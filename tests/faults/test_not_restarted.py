"""What cannot work is said once, and torchrun does not try again, however many restarts it has left."""

import psutil
import pytest

from tests.faults.runs import checkpoints
from tests.faults.test_damaged import flip_a_bit


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (
            "--seq_len=4096",
            "labs.train: seq_len=4096: teaching has a context of 128; use seq_len <= 128",
        ),  # all ranks know
        ("--resume=must", "labs.train: resume=must, and there is no checkpoint in out="),  # rank 0 alone looks
    ],
)
def test_a_refusal(start, argument, says):
    job = start(argument, max_restarts=9)
    assert job.wait(60) == 1
    assert job.printed.count(says) == 1, job.printed
    assert "not to try 9 times more" in job.printed
    _, alive = psutil.wait_procs(job.ranks(), timeout=10)  # told by both ranks, the agent does not wait for the second
    assert not alive


def test_when_no_checkpoint_is_good(start):
    first = start("--steps=2")
    assert first.wait() == 0, first.printed
    for path in checkpoints(first):
        flip_a_bit(path / "shard-0.bin")
    job = start(max_restarts=9)
    assert job.wait(60) == 1
    assert job.printed.count("There is no good checkpoint") == 1
