"""The cells of one exercise and of one prediction, made from their files.

An exercise has a header, a stub or solution, and a check; a seeded fault also the question after its cause.
"""

from __future__ import annotations

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

from fsdp_sim.learn.exercise import Exercise
from fsdp_sim.learn.find import is_core, load
from fsdp_sim.learn.predictions import load as load_prediction
from fsdp_sim.learn.sources import imports, solution_source, stub_source

CHECK = 'checked = check("{name}", {name})\nchecked'
PREDICT = "**Predict.** "
PASSES = 'checked = check("{name}", {name})\nassert checked.passed, checked\nchecked'


def expanded(cell: nbformat.NotebookNode, *, solutions: bool) -> list[nbformat.NotebookNode]:
    """The cells in place of ``cell``, whose metadata name an exercise.

    Raises:
        ValueError: there is no such exercise, or the cell is not empty.
    """
    name, tags = cell.metadata["exercise"], cell.metadata.get("tags", [])
    if cell.source.strip():
        raise ValueError(f"the cell of exercise {name!r} is not empty; its code comes from the exercise's file")
    exercise = load(name)
    code = solution_source(exercise) if solutions else stub_source(exercise)
    written = "\n\n\n".join(text for text in (imports(exercise), code) if text)
    cells = [
        new_markdown_cell(header(exercise)),
        new_code_cell(written, metadata={"exercise": name, "tags": ["exercise"]}),
        new_code_cell((PASSES if solutions else CHECK).format(name=name), metadata={"tags": ["check", *tags]}),
    ]
    return [*cells, new_code_cell(f'predict("{name}")', metadata={"cause": name})] if exercise.cause else cells


def prediction(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells in place of ``cell``, whose metadata name a prediction.

    Raises:
        ValueError: there is no such prediction, or the cell is not empty.
    """
    name = cell.metadata["predict"]
    if cell.source.strip():
        raise ValueError(f"the cell of prediction {name!r} is not empty; its question comes from its file")
    asked = load_prediction(name)
    return [
        new_markdown_cell(f"{PREDICT}{asked.question}"),
        new_code_cell(f'predict("{name}")', metadata={"predict": name}),
    ]


def header(exercise: Exercise) -> str:
    """What is asked, whether it is on the core path, how hard and how important it is, and how long it takes."""
    core = "*core* · " if is_core(exercise) else ""
    lines = [
        f"### Exercise: {exercise.title}",
        f"{core}*{exercise.kind.value}* · difficulty {dots(exercise.difficulty)} · importance "
        f"{dots(exercise.importance)} · about {exercise.minutes} minutes",
        "",
        exercise.contract,
    ]
    return "\n".join([*lines, "", f"**Targets.** {exercise.targets}"] if exercise.targets else lines)


def dots(number: int) -> str:
    return "●" * number + "○" * (5 - number)
