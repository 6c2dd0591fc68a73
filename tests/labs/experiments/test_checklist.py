"""The checklist, run as a user runs it: what it prints when all is well, and that it can say no."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from labs.cluster.torchrun import FailedError, TrainingRun
from labs.experiments import checklist
from labs.experiments.checklist_runs import ChecklistOptions

ROOT = Path(__file__).parents[3]
SMALLEST = ChecklistOptions(ranks=(2,), steps=2, rows=2, seq_len=16)
SETTINGS = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
LINES = [
    "one process, no FSDP", "2 ranks, FSDP2", "loss like DDP's", "FSDP1 too", "memory is divided by the ranks",
    "a checkpoint is written", "and gone on from, bit for bit", "and by one process", "torch.compile", "clipping",
    "mixed precision, bf16",
]  # fmt: skip


@pytest.fixture
def printed(warm_torchrun, tmp_path, monkeypatch, capsys):
    """Its exit status and what it prints, with some variables set. Its runs start warm."""

    def run(**env: str) -> tuple[int, str]:
        for name, value in (SETTINGS | {"FSDP_SIM_CACHE": str(tmp_path / "cache")} | env).items():
            monkeypatch.setenv(name, value)
        return checklist.main(SMALLEST), capsys.readouterr().out

    return run


def table(printed: str) -> dict[str, tuple[str, str]]:
    """Verified or not, and what was seen, of each line."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    found: dict[str, tuple[str, str]] = {}
    last = ""
    for title, answer, seen, _ in rows:
        last = title or last
        before = found.get(last, ("", ""))
        found[last] = (before[0] or answer, f"{before[1]} {seen}".strip())  # long ones are folded
    return found


@pytest.mark.slow
@pytest.mark.tail
def test_everything_is_verified_here(printed, tmp_path):
    no_compiler = tmp_path / "bin"  # so that nothing is compiled, which takes longer than all else
    no_compiler.mkdir()
    status, printed = printed(PATH=str(no_compiler))
    assert status == 0, printed
    found = table(printed)
    assert list(found) == LINES
    assert {answer for answer, _ in found.values()} == {"yes"}
    assert re.fullmatch(r"loss 5\.\d+ to 5\.\d+", found["one process, no FSDP"][1])
    assert found["and gone on from, bit for bit"][1].endswith("the losses of steps 1 to 1 are the very same")
    whole, each = (float(n) for n in re.findall(r"([\d.]+) MB", found["memory is divided by the ranks"][1]))
    assert each == pytest.approx(whole / 2, rel=0.01)
    assert "11 of 11 verified in " in printed
    assert f"gloo; torch {torch.__version__}" in printed
    unverified = printed.partition("Not verified here:")[2]
    for what in (
        "NCCL",
        "no GPU",
        "tensor cores",
        "fp16",
        "peak memory",
        "inductor",
        "network between machines",
        "speed",
    ):
        assert what in unverified


@pytest.mark.slow
@pytest.mark.tail
def test_a_broken_trainer_is_found_and_told_in_its_own_words(printed):
    """Each run that fails is tried once, or this would take as long as the lines that need it."""
    status, printed = printed(FSDP_SIM_FAULTS="nan:loss@1")
    assert status == 1, printed
    found = table(printed)
    assert list(found) == LINES
    assert {answer for answer, _ in found.values()} == {"NO"}
    assert (
        "ended with status 1: step 1: the loss is nan and the gradients' norm nan" in found["one process, no FSDP"][1]
    )
    assert "0 of 11 verified" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"rows": 6}, r"rows=6 does not divide into 4 ranks; use --rows 8"),
        ({"ranks": (3, 2), "rows": 4}, r"rows=4 does not divide into 3 ranks; use --rows 6"),
        ({"ranks": ()}, r"ranks=: give one number or more"),
        ({"ranks": (0,)}, r"ranks=0: give one number or more"),
        ({"steps": 1}, r"steps=1: a run is stopped halfway"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(asked, says, capsys):
    with pytest.raises(ValueError, match=says):
        ChecklistOptions(**asked).check()
    assert checklist.main(ChecklistOptions(**asked)) == 2
    assert re.search(f"labs.experiments.checklist: {says}", capsys.readouterr().out)


class Fake:
    """Runs whose results are given, by their arguments: what the lines make of numbers that are wrong."""

    def __init__(self, folder: Path, **of: TrainingRun) -> None:
        self.options, self.folder, self.of = ChecklistOptions(ranks=(2,)), folder, of

    def run(self, ranks: int, *arguments: str) -> TrainingRun:
        for word, trained in self.of.items():
            if any(word in argument for argument in arguments):
                return trained
        return self.of["plain"]

    def gone_on(self, step: int, ranks: int, other_ranks: int, *arguments: str) -> TrainingRun:
        return self.of.get("again", self.of["plain"])


def trained(losses, norms=(1.0, 1.0, 1.0), out=Path(), **report) -> TrainingRun:
    report = {"state_bytes": [100], "resumed_from": 3} | report
    return TrainingRun(list(losses), list(norms), steps=[], report=report, out=out, printed="")


GOOD = trained([3.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("line", "runs", "says"),
    [
        ("one process, no FSDP", {"plain": trained([1.0, 2.0])}, r"the loss went from 1\.000 to 2\.000"),
        ("2 ranks, FSDP2", {"single": GOOD, "plain": trained([3.0, 2.0, 1.001])}, "differ by 1.0e-03, more than 1e-05"),
        ("2 ranks, FSDP2", {"single": GOOD, "plain": trained([3.0, 2.0, math.nan])}, "differ by inf"),
        ("2 ranks, FSDP2", {"single": GOOD, "plain": trained([3.0, 2.0])}, "2 steps and 3"),
        ("loss like DDP's", {"plain": GOOD, "ddp": trained([3.0, 2.0, 1.1])}, "not the losses of DDP"),
        ("FSDP1 too", {"plain": GOOD, "fsdp1": trained([3.0, 2.0, 1.1])}, "not the losses of one process"),
        ("memory is divided by the ranks", {"plain": GOOD}, "a rank of 2 keeps 100.0% of what one process keeps"),
        ("a checkpoint is written", {"plain": GOOD}, "there is no checkpoint in"),
        ("and gone on from, bit for bit", {"plain": GOOD, "again": trained([3.0, 2.0, 1.1])}, "losses differ from"),
        ("and gone on from, bit for bit", {"plain": GOOD, "again": trained(GOOD.losses, resumed_from=None)},
         "went on from None, not from step 3"),
        ("and by one process", {"plain": GOOD, "again": trained(GOOD.losses, resumed_from=None)},
         "went on from None, not from step 3"),
        ("torch.compile", {"plain": GOOD, "compile": trained([3.0, 2.0, 1.1])}, "not the losses of eager"),
        ("clipping", {"plain": GOOD}, "losses are the same with and without clip=0.5"),
        ("clipping", {"fsdp1": trained([3.0, 2.1, 1.0], norms=[9.0, 1.0, 1.0]), "clip": trained([3.0, 2.1, 1.0]),
                      "plain": GOOD}, r"norms of one process \(fsdp1\): they differ"),
        ("mixed precision, bf16", {"plain": GOOD}, "nothing was computed in bf16"),
        ("mixed precision, bf16", {"plain": GOOD, "bf16": trained([3.0, 2.0, 2.0])}, "differ by 1.0e"),
    ],
)  # fmt: skip
def test_a_line_says_no(line, runs, says, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    runs = {name: replace(run, out=tmp_path) for name, run in runs.items()}
    lines = dict(checklist.checks(Fake(tmp_path, **runs)))
    with pytest.raises(FailedError, match=says):
        lines[line]()
