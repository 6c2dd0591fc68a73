"""``fsdp-sim program``: what torch's FSDP issues for the toy model, in the line format of the recordings."""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import replace

import click
import msgspec
from msgspec import UNSET, UnsetType

from fsdp_sim.cli.options import Command, json_option, option, plan_option, print_json, schema_option, with_pairs
from fsdp_sim.schedule import Program, build, toy
from fsdp_sim.spec import TORCH_VERSIONS, Plan, plan_fields
from fsdp_sim.timeline import Op, read_text

MOST_UNITS = 10_000
SHOWN = 6  # lines before and after the first difference


class ProgramRequest(msgspec.Struct):
    """A program of the toy model; ``plan`` as the options give it."""

    layers: int = 4
    world_size: int = 8
    steps: int = 1
    plan: dict[str, str] = {}
    every_op: bool = False


class ProgramResult(msgspec.Struct, omit_defaults=True):
    """A program, line by line; with a recording, whether they are equal and the first line (from 0) that differs."""

    lines: list[str]
    equal: bool | UnsetType = UNSET
    first_difference: int | UnsetType | None = UNSET


@click.command(
    cls=Command, epilog="Exit status: 0; with --diff 1 if the programs differ; 2 for what was asked wrongly."
)
@option("--layers", default=4, show_default=True, type=click.IntRange(min=1), help="Layers, each one unit.")
@option("--world-size", default=8, show_default=True, type=click.IntRange(min=1), help="Ranks.")
@option("--steps", default=1, show_default=True, type=click.IntRange(min=1), help="Optimizer steps.")
@plan_option
@option(
    "--torch", "version", type=click.Choice(TORCH_VERSIONS), help="This version's program, and where 2.13's differs."
)
@option("--every-op", is_flag=True, help="Also operations that the recorded format leaves out (h2d, d2h, accumulate).")
@option("--diff", "recording", metavar="FILE", help="Compare with a recording; show the first difference.")
@json_option
@schema_option("program")
def program(
    layers: int,
    world_size: int,
    steps: int,
    plan: tuple[str, ...],
    version: str | None,
    every_op: bool,
    recording: str | None,
    as_json: bool,
) -> None:
    """Print the program of a training step: operations, streams and waits in the order in which torch issues them.

    \b
    The model is that of the recordings: embed, layers and head, each one 4 x 4 weight.
    \b
    Examples:
      fsdp-sim program --layers 2 --world-size 4
      fsdp-sim program --layers 4 --world-size 8 --steps 1 --plan forward_prefetch=1
      fsdp-sim program --plan api=fsdp1 --plan limit_all_gathers=false --json
      fsdp-sim program --torch 2.15 --plan param_dtype=bf16
    """
    asked = Plan(**plan_fields(with_pairs({"torch": version} if version else {}, plan)))
    if (units := layers * steps * asked.grad_accum) > MOST_UNITS:
        raise ValueError(
            f"{units:,} units to run (layers, steps and micro-batches); a program has up to {MOST_UNITS:,}"
        )
    made = build(toy(layers), asked, world_size, steps)
    lines = made.lines(every_op=every_op)
    difference = None if recording is None else first_difference(lines, _recorded(recording))
    if as_json:
        found = ProgramResult(lines)
        if recording is not None:
            found.equal, found.first_difference = difference is None, difference
        print_json("program", found)
    elif recording is None:
        click.echo("\n".join(lines))
        if version:
            click.echo(
                _since_first(
                    asked, made, build(toy(layers), replace(asked, torch=TORCH_VERSIONS[0]), world_size, steps)
                )
            )
    elif difference is None:
        click.echo(f"The {len(lines)} lines are equal.")
    else:
        click.echo(explain(lines, _recorded(recording), difference, recording))
    if difference is not None:
        sys.exit(1)


def _since_first(plan: Plan, made: Program, before: Program) -> str:
    """How a torch version differs from the oldest known one: the lines that differ, and the bytes reduced."""
    first = TORCH_VERSIONS[0]
    differs = list(difflib.unified_diff(_renumbered(before.lines()), _renumbered(made.lines()), n=1, lineterm=""))[2:]
    if not differs:
        return f"\ntorch {plan.torch} issues what torch {first} issues."
    bytes_before, bytes_now = (
        sum(i.bytes for i in program.ops if i.op is Op.REDUCE_SCATTER) for program in (before, made)
    )
    reduced = f"its reduce-scatters are given {bytes_now:,} bytes, those of {first} {bytes_before:,}"
    if bytes_now == bytes_before:
        reduced = f"its reduce-scatters are given {bytes_now:,} bytes, as in {first}"
    return "\n".join([f"\nWhat torch {plan.torch} (+) does otherwise than {first} (-): {reduced}.", *differs])


def _recorded(path: str) -> list[str]:
    """Lines of a recording without its remarks."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ValueError(f"--diff {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--diff {path} is not a text file") from None
    return [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def first_difference(lines: list[str], recorded: list[str]) -> int | None:
    """Place of the first line that differs, numbers of events apart; None if none does.

    An event is the one recorded where the other program records it, whatever its number.
    """
    ours, theirs = _renumbered(lines), _renumbered(recorded)
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _renumbered(lines: list[str]) -> list[str]:
    """The same lines with events numbered in the order in which they first appear."""
    names: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return names.setdefault(match[1], f"e{len(names) + 1}") + "@"

    return [re.sub(r"\b(e\d+)@", number, line.rstrip()) for line in lines]


def explain(lines: list[str], recorded: list[str], place: int, path: str) -> str:
    """The lines around the first difference, as a unified diff."""
    first = max(0, place - SHOWN)
    ours, theirs = _renumbered(lines), _renumbered(recorded)
    part = (
        "" if len(lines) == len(recorded) else f" (this program has {len(lines)} lines, the recording {len(recorded)})"
    )
    opened = next((line for line in reversed(recorded[: place + 1]) if line.startswith("---")), "the start")
    shown = difflib.unified_diff(
        theirs[first : place + SHOWN], ours[first : place + SHOWN], path, "this program", lineterm="", n=2 * SHOWN
    )
    heading = f"The first difference is line {place + 1}, in {opened.strip('- ')}{part}:"
    return "\n".join([heading, *(line for line in shown if not line.startswith("@@"))])
