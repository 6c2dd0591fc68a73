"""What commands print as JSON whose requests are no more than their options."""

from __future__ import annotations

from typing import Any

import msgspec

from fsdp_sim.cli.doctor_finding import DoctorFinding


class DoctorResult(msgspec.Struct):
    """Everything that was looked at."""

    checks: list[DoctorFinding]


class TaughtIn(msgspec.Struct):
    """Where a subject is taught, and whether by a text, an exercise or a drill."""

    row: str
    notebook: str
    section: str
    by: str


class CoverageRow(msgspec.Struct):
    """A subject, and every place that teaches it."""

    name: str
    heading: str
    covers: str
    status: str
    teach_in: str
    places: list[TaughtIn]


class CoverageResult(msgspec.Struct):
    """How many subjects were asked for, how many of them have no place, and each that is shown."""

    rows: int
    missing: int
    listed: list[CoverageRow] = msgspec.field(name="list")


class ExerciseCount(msgspec.Struct):
    """Exercises, and the wrong answers that they are known to refuse."""

    exercises: int
    mutants: int


class ExerciseRow(msgspec.Struct):
    """One exercise; minutes are its author's estimate."""

    name: str
    chapter: str
    title: str
    kind: str
    difficulty: int
    importance: int
    minutes: int
    covers: list[str]
    mutants: int


class ExercisesResult(msgspec.Struct):
    """All exercises, counted by chapter and by kind."""

    exercises: int
    mutants: int
    by_chapter: dict[str, ExerciseCount]
    by_kind: dict[str, ExerciseCount]
    listed: list[ExerciseRow] = msgspec.field(name="list")


class DrillEntry(msgspec.Struct):
    """One question; ``section`` is where the course answers it."""

    name: str
    topic: str
    level: int
    section: str


class DrillListResult(msgspec.Struct):
    """The questions with drawn numbers and those that are answered aloud."""

    templates: int
    spoken: int
    listed: list[DrillEntry] = msgspec.field(name="list")


class FirstDifference(msgspec.Struct):
    """The first number in which two trainings differ; ``text`` says it in words."""

    step: int
    what: str
    unit: str
    tensor: str
    error: float
    ranks: list[int]
    rows: tuple[int, int] | None
    shard_of: list[int]
    text: str


class RungAgainst(msgspec.Struct):
    """A rung beside another one: the first bit that differs, and the first number that differs by more than allowed."""

    rung: str
    error: float
    first_bit: FirstDifference | None
    beyond_tolerance: FirstDifference | None


class CountAndBytes(msgspec.Struct):
    """Collectives of one kind in one phase."""

    count: int
    bytes: int


class LadderRung(msgspec.Struct):
    """One way to train the same model."""

    rung: str
    ranks: int
    fault: str | None
    loss: list[float]
    grad_norm: list[float]
    parameter_norm: list[float]
    collectives: dict[str, dict[str, CountAndBytes]]
    peak_bytes: int
    against_above: RungAgainst | None
    against_one_process: RungAgainst | None
    same_collectives_as: str | None
    first_other_collective: FirstDifference | None
    more_memory: FirstDifference | None


class LadderResult(msgspec.Struct):
    """Whether every rung trains alike, and the first difference of each that does not."""

    setting: dict[str, Any]
    tolerance_to_one_process: float
    agree: bool
    divergences: list[str]
    not_compared_by_value: list[str]
    rungs: list[LadderRung]


class MeasuredCollective(msgspec.Struct):
    """The median time of one collective; ``fitted_s`` is what the file's numbers make of it."""

    op: str
    group_size: int
    n_bytes: int
    seconds: float
    fitted_s: float | None = None


class MeasuredKernel(msgspec.Struct):
    """The median time of one operation."""

    name: str
    dtype: str
    shape: list[int]
    flops: float
    bytes: float
    seconds: float


class FitErrors(msgspec.Struct):
    """How far the file's numbers are from what was measured, as fractions."""

    n: int
    median_abs: float
    max_abs: float


class CalibrateResult(msgspec.Struct):
    """What this machine's devices and wires were measured to do, and the file that says it."""

    file: str
    hardware: str
    ranks: int
    gpu: dict[str, Any]
    link: dict[str, Any]
    kernels: list[MeasuredKernel]
    training: list[dict[str, Any]]
    training_error: FitErrors | None
    sharded: list[dict[str, Any]]
    sharded_error: FitErrors | None
    collectives: list[MeasuredCollective]
    collective_error: FitErrors | None


class CalibrateTraceResult(msgspec.Struct):
    """What traces of a run say of its stack: each number, where in the trace it is from, and what keeps its default."""

    file: str
    numbers: dict[str, float]
    sources: dict[str, str]
    kept: dict[str, str]
    notes: list[str]
    measured_step_s: float
    fitted_step_s: float
    collectives: list[MeasuredCollective]


class LintFinding(msgspec.Struct, omit_defaults=True):
    """A trap, with its place where it has one, what it costs, the fix, and where that is from."""

    rule: str
    level: str
    title: str
    message: str
    costs: str
    simulated: str | None
    fix: str
    source: str
    line: int = 0
    column: int = 0
    end_column: int = 0


class LintFile(msgspec.Struct):
    """One file or model; ``ignored`` counts what its comments leave out."""

    target: str
    kind: str
    findings: list[LintFinding]
    ignored: int
    unread: list[str]
    notes: list[str]


class LintResult(msgspec.Struct):
    """What was found, and a sentence for each target that could not be read."""

    files: list[LintFile]
    failed: list[str]


class CourseResult(msgspec.Struct):
    """What was done to each file of the folder; ``beside``: a changed file, and where its new version lies."""

    folder: str
    course_version: str
    written: list[str]
    kept: list[str]
    beside: dict[str, str]
    removed: list[str]
