"""``fsdp-sim migrate``: from FSDP1 and DDP to FSDP2, as a diff to review and what to expect of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from fsdp_sim.cli.options import (
    CLUSTER,
    MODEL,
    PLAN,
    Command,
    json_option,
    option,
    print_json,
    request_options,
    schema_option,
    working,
)
from fsdp_sim.cli.written import drawn
from fsdp_sim.lint import rules
from fsdp_sim.migrate import (
    Migration,
    both_jobs,
    calls_a_trainer,
    is_enough,
    jobs_of_configuration,
    migration_of_configuration,
    migration_of_script,
    numbers_of,
    order_of,
    torch_script,
)
from fsdp_sim.requests import Job, Request
from fsdp_sim.simulation import Simulation
from fsdp_sim.words import human_bytes, human_ms

MOST_BYTES = 2_000_000
CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
EPILOG = (
    "Exit status: 0 for changes and where there is nothing to do; 2 for what was refused: a file that cannot be "
    "read, or "
    "--write where something is left to do by hand. Nothing is written without --write, -o or --page."
)


class MigrateRequest(Request, forbid_unknown_fields=True, kw_only=True):  # type: ignore[call-arg]
    """A script or a configuration, and what is simulated.

    Attributes:
        file: its path. block: classes of the modules that become units; none finds them out.
    """

    file: str
    block: list[str] = msgspec.field(default_factory=list)


@click.command(cls=Command, epilog=EPILOG)
@click.argument("path", type=click.Path(), metavar="FILE")
@option(
    "--block", "blocks", multiple=True, metavar="CLASS", help="A module of this class is a unit.  [default: found out]"
)
@option("--write", is_flag=True, help="Change the file in place; FILE.orig keeps what it was.")
@option("-o", "--output", metavar="FILE", help="Write the new text there.")
@option(
    "--as",
    "form",
    type=click.Choice(["torch"]),
    help="Of a configuration: print a script of torch with fully_shard that trains so, and nothing else.",
)
@option("--page", metavar="FILE", help="Write both steps, simulated, on one page that opens without a network.")
@request_options(MODEL, CLUSTER, PLAN)
@json_option
@schema_option("migrate")
def migrate(
    path: str, blocks: tuple[str, ...], write: bool, output: str | None, form: str | None, page: str | None,
    texts: dict[str, str], as_json: bool,
) -> None:  # fmt: skip
    """Rewrite a script or a configuration for FSDP2: a diff, what stays the same, what differs, what to test.

    A script has FSDP1 or DDP, or calls TrainingArguments or TRL's; it is read, never run. A configuration, with FSDP1,
    DDP or DeepSpeed, is Accelerate's, transformers', TRL's, LLaMA-Factory's, axolotl's or verl's, or a DeepSpeed JSON,
    which becomes Accelerate's YAML. With a model and GPUs both steps are simulated: milliseconds, memory, bytes on
    the wire.

    \b
    Examples:
      fsdp-sim migrate train.py
      fsdp-sim migrate train.py --block TransformerBlock --write
      fsdp-sim migrate accelerate.yaml --model llama3-8b --gpu H100
      fsdp-sim migrate ds.json --model llama3-8b --gpu H100 --gpus 8 --as torch -o train_fsdp2.py
      fsdp-sim migrate train.py --model llama3-8b --gpu H100 --gpus 64 --seq-len 8192 --page both.html
    """
    if {"config", "torchtitan"} & set(texts):
        raise ValueError("the configuration is named without --config: fsdp-sim migrate FILE")
    text = _read(path)
    if form:
        for name, given in (("--write", write), ("--page", page), ("--json", as_json), ("--block", blocks)):
            if given:
                raise ValueError(f"--as torch makes a script and nothing else: leave out {name}, and write it with -o")
        _as_torch(path, texts, output)
        return
    found, jobs = _migrated(path, text, blocks, texts)
    if jobs is not None:
        with working("simulating both steps"):
            sims = jobs[0].simulate(), jobs[1].simulate()
            found.before, found.after = numbers_of(sims[0]), numbers_of(sims[1])
            found.order = order_of(sims[0].timeline, sims[1].timeline)
        if page:
            _page(page, sims, found)
    elif page and found.source:
        raise ValueError(
            "--page draws two simulated steps; name the model and the GPUs: --model llama3-8b --gpu H100 --gpus 8"
        )
    if write or output:
        _write(path, text, found, output)
    if as_json:
        print_json("migrate", found)
    else:
        _print(found, jobs)


def _read(path: str) -> str:
    try:
        if os.path.getsize(path) > MOST_BYTES:
            raise ValueError(f"{path} has more than {MOST_BYTES:,} bytes, which no script has")
        with open(path, encoding="utf-8", newline="") as file:  # lines end as they did
            return file.read()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text (UTF-8)") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _migrated(
    path: str, text: str, blocks: tuple[str, ...], texts: dict[str, str]
) -> tuple[Migration, tuple[Job, Job] | None]:
    if Path(path).suffix.lower() in CONFIGURATIONS:
        return _of_configuration(path, text, blocks, texts)
    found, old = migration_of_script(text, path, blocks)
    if not found.source and not found.look and calls_a_trainer(text):
        return _of_configuration(path, text, blocks, texts)
    return found, both_jobs(texts, old) if found.source and is_enough(texts) else None


def _of_configuration(
    path: str, text: str, blocks: tuple[str, ...], texts: dict[str, str]
) -> tuple[Migration, tuple[Job, Job] | None]:
    if blocks:
        raise ValueError(f"--block is for scripts; {path} is a configuration, whose key names the blocks")
    given = int(texts["gpus"]) if texts.get("gpus", "").isdigit() else None
    found, _ = migration_of_configuration(path, text, given)
    return found, jobs_of_configuration(path, found, texts) if found.changed else None


def _as_torch(path: str, texts: dict[str, str], output: str | None) -> None:
    if not path.lower().endswith(CONFIGURATIONS) and not calls_a_trainer(_read(path)):
        raise ValueError(f"--as torch is for a configuration; {path} is a script, which is changed where it stands")
    code = torch_script(path, texts)
    if output:
        Path(output).write_text(code, "utf-8", newline="")
        click.echo(f"Wrote {output}. Its model, data and learning rate are stand-ins: put yours in their place.")
    else:
        click.echo(code, nl=False)


def _write(path: str, old: str, found: Migration, output: str | None) -> None:
    if not found.changed and not found.by_hand:
        return
    if output and found.changed:
        Path(output).write_text(found.new, "utf-8", newline="")
        found.notes.append(f"Wrote {output}.")
        return
    if found.by_hand:
        lines = ", ".join(str(one.line) for one in found.by_hand)
        raise ValueError(
            f"{path} is not written: a person has to see to line {lines} first. Look at the diff without --write, "
            f"or write "
            "what can be changed elsewhere with -o FILE"
        )
    if found.new_file:
        raise ValueError(f"{path} becomes another file; write it with -o {found.new_file}")
    kept = Path(f"{path}.orig")
    if kept.exists():
        raise ValueError(f"{kept} is there already, and would be lost; move it away")
    kept.write_text(old, "utf-8", newline="")
    Path(path).write_text(found.new, "utf-8", newline="")
    found.notes.append(f"Wrote {path}; {kept} is what it was.")


def _page(path: str, sims: tuple[Simulation, Simulation], found: Migration) -> None:
    viz = drawn("--page")
    before, after = sims
    names = (f"before ({before.plan.api})", f"after ({after.plan.api})")
    sections = [
        viz.Section.of(
            viz.compare(before.timeline, after.timeline, titles=names), "Both steps on one axis", found.order
        ),
        viz.Section.of(
            viz.timeline(dict(zip(names, (s.timeline for s in sims), strict=True))), "Each step, with its memory", ""
        ),
    ]
    viz.save_html(path, sections, title=f"{found.file}: from {before.plan.api} to FSDP2")
    found.notes.append(f"Wrote both steps to {path}.")


def _print(found: Migration, jobs: tuple[Job, Job] | None) -> None:
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    if found.diff and sys.stdout.isatty():
        console.print(Syntax(found.diff, "diff", theme="ansi_dark", background_color="default", word_wrap=True))
    elif found.diff:
        click.echo(found.diff)  # as it is, for patch
    for note in found.notes:
        console.print(note, markup=False, soft_wrap=True)
    if found.defaults:
        count = len(found.defaults)
        console.print(f"{count} defaults were filled in; --json lists them.", style="dim", soft_wrap=True)

    def section(title: str, lines: list[tuple[str, str]], style: str = "bold") -> None:
        if lines:
            console.print(f"\n{title}", style=style)
            for mark, line in lines:
                console.print(Text(f"{mark} {line}"), soft_wrap=True)

    by_hand = [(f"  line {one.line}:", one.what + _rule(one.rule)) for one in found.look if one.must]
    section("To do by hand, before it runs", by_hand, "bold red")
    section(
        "Look here", [(f"  line {o.line}:", o.what + _rule(o.rule)) for o in found.look if not o.must], "bold yellow"
    )
    section("Stays the same", [("  =", one) for one in found.same])
    section("Differs", [("  ~", one.what + _rule(one.rule)) for one in found.differs])
    if jobs is not None:
        _print_numbers(console, found, jobs)
    elif found.changed:
        console.print(
            "\nIn numbers: name the model and the GPUs, such as --model llama3-8b --gpu H100 --gpus 8.", style="dim"
        )
    section("Test this", [("  -", one) for one in found.test])


def _rule(id: str) -> str:
    return f" [{id}: {rules()[id].title}]" if id in rules() else ""


def _print_numbers(console: Any, found: Migration, jobs: tuple[Job, Job]) -> None:
    from rich.table import Table

    before, after = found.before, found.after
    assert before is not None
    assert after is not None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", f"before ({before.api})", f"after ({after.api})"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("a step", human_ms(before.step_time_s), human_ms(after.step_time_s))
    table.add_row("  of it exposed communication", human_ms(before.exposed_comm_s), human_ms(after.exposed_comm_s))
    table.add_row("peak memory of a rank", human_bytes(before.peak_memory_bytes), human_bytes(after.peak_memory_bytes))
    table.add_row("sent by a rank", human_bytes(before.wire_bytes), human_bytes(after.wire_bytes))
    for op in dict.fromkeys([*before.collectives, *after.collectives]):
        table.add_row(op.replace("_", "-"), *(f"{side.collectives.get(op, 0):,}" for side in (before, after)))
    job = jobs[1]
    console.print(
        f"\nIn numbers: {job.model.name} on {job.cluster.gpus} x {job.cluster.gpu.name}, simulated", style="bold"
    )
    console.print(table)
    console.print(found.order, markup=False, soft_wrap=True)
