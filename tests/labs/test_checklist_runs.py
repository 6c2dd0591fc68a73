"""What the checklist tells of a run that failed."""

from labs.checklist_runs import what_it_said


def test_of_what_torchrun_prints_the_trainers_words_are_told():
    stderr = (
        "W0101 torch/distributed/run.py:852] \nlabs.train: the disk is full\nTraceback\nChildFailedError:\n" + "=" * 900
    )
    assert what_it_said(stderr) == "the disk is full"
    assert len(what_it_said("x" * 9000)) == 500
