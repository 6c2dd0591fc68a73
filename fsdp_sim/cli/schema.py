"""The JSON schemas of requests and results, built from the structs and kept in ``fsdp_sim/schemas``.

``python -m fsdp_sim.cli.schema`` writes them again; a test checks that they are up to date.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import msgspec

from fsdp_sim.cli.diagnose import DiagnoseRequest, DiagnoseResult, MemoryResult
from fsdp_sim.cli.explain import ExplainRequest
from fsdp_sim.cli.migrate import MigrateRequest
from fsdp_sim.cli.options import VERSION
from fsdp_sim.cli.program import ProgramRequest, ProgramResult
from fsdp_sim.cli.results import (
    CalibrateResult,
    CalibrateTraceResult,
    CourseResult,
    CoverageResult,
    DoctorResult,
    DrillListResult,
    ExercisesResult,
    LadderResult,
    LintResult,
)
from fsdp_sim.cli.sweep import SweepRequest, SweepResult
from fsdp_sim.cli.tune import TuneRequest
from fsdp_sim.migrate import Migration
from fsdp_sim.requests import ExplainResult, Failure, FitResult, Request, Result, TuneResult
from fsdp_sim.requests.structs import FitRequest


class ValidateRequest(msgspec.Struct):
    """Measurements to compare with; ``leave_out`` refits without each group of that name."""

    file: str | None = None
    leave_out: Literal["model", "gpu_type", "n_gpus"] | None = None


class MeasuredRow(msgspec.Struct):
    """A published measurement beside its prediction."""

    id: str
    step_time_s: float | None
    predicted_step_time_s: float
    peak_memory_GiB: float | None  # noqa: N815
    predicted_peak_memory_GiB: float  # noqa: N815
    fits: bool
    source: str
    remark: str


class Errors(msgspec.Struct):
    """Absolute errors as fractions; null where no row has a measurement."""

    n: int
    mape: float | None
    median_abs_error: float | None
    p90_abs_error: float | None


class TimeAndMemory(msgspec.Struct):
    """Errors of the step time and of the peak memory."""

    time: Errors
    memory: Errors


class ValidateResult(msgspec.Struct):
    """Every row and its errors, in all and by source."""

    rows: list[MeasuredRow]
    summary: TimeAndMemory
    by_source: dict[str, TimeAndMemory]


# Of each command the request (None: its options are all) and the result of one, and whether it takes and gives lists.
COMMANDS: dict[str, tuple[Any, Any, bool]] = {
    "simulate": (Request, Result, True),
    "program": (ProgramRequest, ProgramResult, False),
    "sweep": (SweepRequest, SweepResult, False),
    "fit": (FitRequest, FitResult, False),
    "tune": (TuneRequest, TuneResult, False),
    "explain": (ExplainRequest, ExplainResult, False),
    "migrate": (MigrateRequest, Migration, False),
    "diagnose": (DiagnoseRequest, DiagnoseResult, False),
    "validate": (ValidateRequest, ValidateResult, False),
    "calibrate": (None, CalibrateResult, False),
    "ladder": (None, LadderResult, False),
    "lint": (None, LintResult, False),
    "course": (None, CourseResult, False),
    "doctor": (None, DoctorResult, False),
    "coverage": (None, CoverageResult, False),
    "exercises": (None, ExercisesResult, False),
    "drill list": (None, DrillListResult, False),
}


ALSO: dict[str, tuple[Any, ...]] = {"diagnose": (MemoryResult,), "calibrate": (CalibrateTraceResult,)}
"""Of a command the other results that it may give, for what was asked otherwise."""


def schema_of(command: str) -> dict[str, Any]:
    """The schema of an object with ``request`` and ``result`` of a command; each is also under ``$defs``.

    Where a command takes lists, ``requests`` and ``results`` are those; a result there may be a ``Failure``. Any
    command that cannot do what is asked prints a ``Failure``.
    """
    request, result, lists = COMMANDS[command]
    asked, others = [request] if request else [], ALSO.get(command, ())
    schemas, parts = msgspec.json.schema_components([*asked, result, Failure, *others], ref_template="#/$defs/{name}")
    names = ["request"] * len(asked) + ["result", "failure"]
    properties = dict(zip(names, schemas, strict=False))
    if others:
        properties["result"] = {"anyOf": [properties["result"], *schemas[len(names) :]]}
    label = {"schema": {"const": f"fsdp-sim {command}"}, "version": {"const": VERSION}}
    for kind in (result, *others):
        written = parts[kind.__name__]  # what `labelled` writes before its fields
        written["properties"] = label | written["properties"]
        written["required"] = [*label, *written.get("required", [])]
    if lists:
        properties["requests"] = {"type": "array", "items": properties["request"]}
        properties["results"] = {
            "type": "array", "items": {"anyOf": [properties["result"], properties["failure"]]}
        }  # fmt: skip
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"fsdp-sim {command} --json",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": parts,
    }


def file_of(command: str) -> Path:
    """Where the schema of a command is kept."""
    return Path(str(files("fsdp_sim"))) / "schemas" / f"{command.replace(' ', '_')}.json"


def text_of(command: str) -> str:
    """The schema as the file has it."""
    return json.dumps(schema_of(command), indent=2) + "\n"


def write() -> None:
    """Write every file."""
    for command in COMMANDS:
        file_of(command).write_text(text_of(command))


if __name__ == "__main__":
    write()
