"""Is loading a checkpoint safe?"""

from __future__ import annotations

import contextlib
import operator
import pickle
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.folders import new_folder
from fsdp_sim.learn.judges import Inputs, OnRanks

WORDS = "written by code, number {}."
WORDS_IN: dict[str, str] = {}  # by folder; what the code has left there is not asked


def code_in_a_checkpoint(folder):
    ways = {
        "torch.load": lambda: torch.load(f"{folder}/weights.pt", weights_only=True),
        "torch.load, weights_only=False": lambda: torch.load(f"{folder}/weights.pt", weights_only=False),
        "dcp.load": lambda: dcp.load({"weight": torch.zeros(2)}, checkpoint_id=f"{folder}/sharded"),
    }
    note, found = Path(folder, "note.txt"), {}
    for name, load in ways.items():
        note.unlink(missing_ok=True)
        with contextlib.suppress(Exception):
            load()
        found[name] = note.read_text() if note.exists() else ""
    return {"claim": not (found["torch.load"] or found["dcp.load"]), **found}


class Later:
    """Stands for what a call returns, where it is unpickled."""

    def __init__(self, call: Callable[..., Any], *given: Any) -> None:
        self.call, self.given = call, given

    def __reduce__(self) -> Any:
        return self.call, self.given


def surprise(stands_for: Any, note: Path, numbers: tuple[int, ...]) -> Later:
    """Stands for another object: where it is unpickled that object comes out, and a note is written, whose words are in
    no file: they are worked out then."""
    words = Later(str.format, WORDS, Later(pow, *numbers))
    return Later(operator.itemgetter(1), (Later(Path.write_text, note, words), stands_for))


def inputs(seed: int) -> Inputs:
    """A folder with two checkpoints that somebody has prepared, and the note that their code will write."""
    folder, draw, weights = new_folder(), random.Random(seed), {"weight": torch.ones(2)}
    numbers = tuple(draw.randrange(2**30, 2**31) for _ in range(3))
    WORDS_IN[folder] = WORDS.format(pow(*numbers))
    note, sharded = Path(folder, "note.txt"), Path(folder, "sharded")
    torch.save(surprise(weights, note, numbers), Path(folder, "weights.pt"))
    with warnings.catch_warnings(action="ignore"):  # that it is one process alone
        metadata = dcp.save(weights, checkpoint_id=sharded, no_dist=True)
    (sharded / ".metadata").write_bytes(pickle.dumps(surprise(metadata, note, numbers)))
    return [(folder,)]


def notes(inputs: Inputs) -> list[dict[str, Any]]:
    return [seen(inputs, claim=False, torch_load="", dcp_load=words_of(inputs))]


def words_of(inputs: Inputs) -> str:
    """What the prepared checkpoint would write."""
    return WORDS_IN[inputs[0][0]]


def seen(inputs: Inputs, claim: bool, torch_load: str, dcp_load: str) -> dict[str, Any]:
    unsafe = words_of(inputs)
    return {
        "claim": claim, "torch.load": torch_load, "torch.load, weights_only=False": unsafe, "dcp.load": dcp_load
    }  # fmt: skip


def read_and_not_loaded(folder):
    """Looks for the words in the files."""
    found = re.search(rb"written by code, number \d+\.", Path(folder, "sharded", ".metadata").read_bytes())
    words = found[0].decode() if found else ""
    return {"claim": False, "torch.load": "", "torch.load, weights_only=False": words, "dcp.load": words}


EXERCISE = Exercise(
    title="Settle whether weights_only makes loading safe",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=4,
    minutes=15,
    contract='"torch.load has weights_only=True by default, so loading a checkpoint cannot run code." The folder has '
    "two checkpoints of a stranger: weights.pt, written by torch.save, and sharded, of torch.distributed.checkpoint. "
    "Code in them writes folder/note.txt, if it runs. Load each and return what stands in the note (else \"\") for "
    "'torch.load' (weights_only=True), 'torch.load, weights_only=False' and 'dcp.load', and 'claim': whether the "
    "statement holds for all that is loaded with defaults.",
    reference=code_in_a_checkpoint,
    why="A pickle is a program, run by whoever opens it; these two even return the right weights. weights_only allows "
    "few names, and twice somebody found a way around it (CVE-2025-32434, mended in 2.6; CVE-2026-24747, in 2.10). "
    "DCP's index, .metadata, is a plain pickle that no such argument reaches. So load only what your own jobs wrote; "
    "share weights as safetensors, which are a header and bytes. This project's checkpoints have an index in JSON.",
    hints=(
        "What is a pickle: a description of data, or a list of things to do?",
        "Try each way to load, catch what it raises, and look whether the note is there. Remove it in between.",
        "For each way: unlink the note, load inside contextlib.suppress(Exception), read the note if it exists.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=notes,
        causes=(
            (
                lambda inputs: [seen(inputs, True, "", words_of(inputs))],
                "the notes are right, and dcp.load's shows that the statement is false",
            ),
            (
                lambda inputs: [seen(inputs, True, "", "")],
                "dcp.load has no weights_only: its .metadata is a pickle, and opening it runs what is in it",
            ),
            (
                lambda inputs: [seen(inputs, False, words_of(inputs), words_of(inputs))],
                "weights_only=True refused to run it: was the note left from another load?",
            ),
        ),
    ),
    wrong=(
        mutant(
            {'not (found["torch.load"] or found["dcp.load"])': "True"},
            "shows that the statement is false", name="believed",
        ),
        mutant({'not (found["torch.load"] or found["dcp.load"]), **found': (
'True, **found, "dcp.load": ""'
)}, "dcp.load has no weights_only", name="dcp thought safe"),
        mutant(
            {"**found": '**found, "torch.load": found["dcp.load"]'},
            "was the note left from another load?", name="note left lying",
        ),
    ),
    shortcuts=(
        Wrong(read_and_not_loaded, "expected 'written by code, number"),
        Wrong(lambda folder: {"claim": False}, "there is no 'torch.load'"),
        Wrong(
            lambda folder: {
                "claim": False, "torch.load": "", "torch.load, weights_only=False": "it ran", "dcp.load": "it ran"
            },
            "expected",
        ),
    ),
    covers=("misconception 30",),
)  # fmt: skip
