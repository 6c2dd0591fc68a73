"""The reference, made when the site is built: nothing of it is written twice.

Rooms from their docstrings, commands from their ``--help``, fields from their classes, the catalogue from its tables;
papers of the repository as they are.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import click

from fsdp_sim.cli.main import COMMANDS, main
from fsdp_sim.learn.drill.sheet import as_markdown
from fsdp_sim.spec import (
    SETTINGS_OF,
    Cluster,
    Gpu,
    Link,
    Model,
    Plan,
    gpu,
    gpu_names,
    link,
    link_names,
    stack_names,
)  # fmt: skip
from fsdp_sim.spec.catalogue import tables
from web.pages.course import toctree
from web.words import WORDS

ROOT = Path(__file__).parents[2]
PAPERS = {
    "architecture": "docs/architecture.md",
    "accuracy": "fsdp_sim/ACCURACY.md",
    "tune": "docs/tune.md",
    "one_gpu": "docs/one_gpu.md",
    "gpu_day": "docs/gpu_day.md",
    "configurations": "docs/configurations.md",
    "diagnose": "docs/diagnose.md",
    "lint": "docs/lint.md",
    "migrate": "docs/migrate.md",
    "changelog": "CHANGELOG.md",
}
ROOMS = (
    "timeline", "spec", "schedule", "cost", "engine", "diagnose", "simulation", "configurations", "requests", "forms",
    "explore", "validate", "mini", "ranks", "measure", "lint", "migrate", "viz", "learn",
)  # fmt: skip
SPECS = (Plan, Model, Cluster, Gpu, Link)
"""Whose fields are listed one by one."""
WITHOUT_THEIR_FIELDS = ", ".join(cls.__name__ for cls in SPECS)


def stage(folder: Path, rooms: Sequence[str] = ROOMS) -> list[str]:
    """Write the sources of the reference's pages into a folder, for Sphinx, and return the pages."""
    (folder / "api").mkdir(parents=True)
    papers = {name: paper(ROOT / path) for name, path in PAPERS.items()}
    shutil.copytree(ROOT / "fsdp_sim/accuracy", folder / "accuracy")
    markdown = papers | {"interview": as_markdown()}
    texts = {
        **{f"{name}.md": text for name, text in markdown.items()},
        "fields.rst": heading(WORDS["fields"], "=") + "\n".join(fields_of(cls) for cls in SPECS),
        "catalogue.rst": catalogue(),
        "commands.rst": commands(),
        **{f"api/{room}.rst": api(room) for room in rooms},
    }
    texts["api/index.md"] = "\n\n".join([
        f"# {WORDS['rooms']}\n\n{WORDS['rooms_about']}",
        *(f"[`fsdp_sim.{room}`]({room}.rst): {first_sentence(room)}" for room in rooms),
        toctree(rooms),
    ])  # fmt: skip
    pages = ["fields", "catalogue", "commands", "api/index", "/glossary", "interview", *PAPERS]
    looked_up = [f"- {{doc}}`{page}`: {WORDS['page_' + page.split('/')[-1]]}" for page in pages]
    texts["index.md"] = "\n\n".join([
        f"# {WORDS['reference']}\n\n{WORDS['reference_about']}", "\n".join(looked_up), toctree(pages),
    ])  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [f"reference/{name.rpartition('.')[0]}" for name in texts]


# ---- fields


def meanings(cls: type) -> dict[str, str]:
    """What the docstring of a class says of each of its attributes.

    Raises:
        ValueError: of one of its fields it says nothing.
    """
    docstring = inspect.getdoc(cls) or ""
    section = re.search(r"^Attributes:\n((?:    .*\n|\n)+)", docstring, flags=re.MULTILINE)
    entries = re.findall(
        r"^    (\w[\w, ]*): ((?:.|\n(?=     |\n))*)", section[1] if section else "", flags=re.MULTILINE
    )
    found = {name.strip(): " ".join(text.split()) for names, text in entries for name in names.split(",")}
    silent = [field.name for field in shown_fields(cls) if field.name not in found]
    if silent and cls is Plan:
        raise ValueError(f"the docstring of {cls.__name__} says nothing of {silent[0]}")
    return found


def shown_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields that one gives, in their order."""
    return [
        field for field in dataclasses.fields(cls) if not field.name.startswith("_") and "allowed" in field.metadata
    ]


def fields_of(cls: type) -> str:
    """A section with an entry for each field: what it means, what it takes, its default, who has it."""
    found = meanings(cls)
    lines = [heading(cls.__name__, "-"), (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " "), ""]
    for field in shown_fields(cls):
        default = "" if field.default is dataclasses.MISSING else f"; by default ``{field.default!r}``"
        lines += [f".. _{cls.__name__}.{field.name}:", "", heading(field.name, "~")]
        lines += [f"{found.get(field.name, '')}", ""]
        lines += [f"*Takes* {literal(field.metadata['allowed'].words)}{default}. *Type* ``{field.type}``."]
        if cls is Plan and field.name in SETTINGS_OF:
            lines[-1] += f" *Only with* {', '.join(f'``{api}``' for api in SETTINGS_OF[field.name])}."
        lines.append("")
    return "\n".join(lines)


def literal(words: str) -> str:
    """A sentence of plain text as reStructuredText."""
    return re.sub(r"([*`|_\\])", r"\\\1", words)


# ---- the catalogue


def catalogue() -> str:
    """Models, GPUs, links and software stacks by name."""
    models = [Model.preset(name) for name in Model.presets()]
    gpus, links = [gpu(name) for name in gpu_names()], [link(name) for name in link_names()]
    stacks = tables("stacks.toml")
    parts: Mapping[str, tuple[Sequence[str], Iterable[Sequence[str]]]] = {
        "models": (
            ("model", "parameters", "blocks", "width", "heads", "feed-forward", "vocabulary"),
            (
                (m.name, f"{m.param_count / 1e9:.3g} B", f"{m.n_layer}", f"{m.d_model:,}", f"{m.n_head}",
                 f"{m.d_ffn:,}", f"{m.vocab:,}")
                for m in models
            ),
        ),
        "gpus": (
            ("GPU", "memory", "its bandwidth", "bf16 peak", "in a node", "between nodes", "GPUs in a node"),
            (
                (g.name, f"{g.mem_bytes / 2**30:.0f} GiB", f"{g.mem_bytes_per_s / 1e9:,.0f} GB/s",
                 f"{g.bf16_flops / 1e12:,.4g} TFLOP/s" if g.bf16_flops else "none", f"{g.intra}", f"{g.inter}",
                 f"{g.gpus_per_node}")
                for g in gpus
            ),
        ),
        "links": (
            ("link", "joins", "per GPU and direction", "remark"),
            ((li.name, li.kind, f"{li.bytes_per_s / 1e9:.3g} GB/s", li.notes or "") for li in links),
        ),
        "stacks": (
            ("stack", "fields of Plan that it sets", "what it is"),
            (
                (name, ", ".join(f"{key}={value!r}" for key, value in stacks[name].get("plan", {}).items()),
                 stacks[name].get("source", ""))
                for name in stack_names()
            ),
        ),
    }  # fmt: skip
    lines = [heading(WORDS["catalogue"], "="), WORDS["catalogue_about"], ""]
    for part, (columns, rows) in parts.items():
        lines += [heading(WORDS[part], "-"), *list_table(columns, rows), ""]
    return "\n".join(lines)


def list_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table as reStructuredText."""
    yield from (".. list-table::", "   :header-rows: 1", "   :stub-columns: 1", "")
    for row in (columns, *rows):
        for n, cell in enumerate(row):
            yield f"   {'  -' if n else '* -'} {literal(cell)}"


# ---- commands


def commands() -> str:
    """Every command and what ``--help`` says of it."""
    lines = [heading(WORDS["commands"], "="), WORDS["commands_about"], ""]
    with click.Context(main, info_name="fsdp-sim", terminal_width=88, max_content_width=88) as top:
        lines += help_of("fsdp-sim", main, top)
        for name in COMMANDS:
            command = main.get_command(top, name)
            assert command is not None
            with click.Context(command, info_name=name, parent=top) as context:
                lines += [heading(f"fsdp-sim {name}", "-"), COMMANDS[name].help, ""]
                lines += help_of(f"fsdp-sim {name}", command, context)
                if isinstance(command, click.Group):
                    for inner in command.list_commands(context):
                        below = command.get_command(context, inner)
                        assert below is not None
                        with click.Context(below, info_name=inner, parent=context) as deeper:
                            lines += [heading(f"fsdp-sim {name} {inner}", "~")]
                            lines += help_of(f"fsdp-sim {name} {inner}", below, deeper)
    return "\n".join(lines)


def help_of(name: str, command: click.Command, context: click.Context) -> list[str]:
    """What ``--help`` prints, as a block."""
    text = command.get_help(context)
    return [".. code-block:: text", "", *(f"   {line}".rstrip() for line in text.splitlines()), ""]


# ---- rooms


def first_sentence(room: str) -> str:
    """What a room is about, from its docstring."""
    text = (importlib.import_module(f"fsdp_sim.{room}").__doc__ or "").split("\n\n")[0]
    return " ".join(text.split())


def api(room: str) -> str:
    """A page of what a room lists in its ``__init__``."""
    name = f"fsdp_sim.{room}"
    return (
        f"{heading(name, '=')}.. automodule:: {name}\n   :members:\n   :imported-members:\n"
        f"   :exclude-members: {WITHOUT_THEIR_FIELDS if room == 'spec' else '__init__'}\n"
        + ("\n.. seealso:: :doc:`../fields`\n" if room == "spec" else "")
    )


# ---- papers


def paper(path: Path) -> str:
    """A file of the repository: links to what the site does not have are their words, its diagrams are drawn."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?://|#)[^)]*\)", r"\1", text)
    return re.sub(r"^```mermaid\n(.*?)^```$", lambda found: drawn(found[1]), text, flags=re.MULTILINE | re.DOTALL)


def drawn(diagram: str) -> str:
    """A flow chart of mermaid as lists, which style sheets draw as rows of boxes with arrows between.

    Raises:
        ValueError: a line of it is of another kind.
    """
    named: dict[str, str] = dict(re.findall(r"(\w+) ?\[([^\]]+)\]", diagram))
    rows = []
    for line in (line.strip() for line in diagram.splitlines()):
        if not line or line == "end" or line.startswith("flowchart"):
            continue
        if part := re.fullmatch(r"subgraph (\w+)(?: \[.*\])?", line):
            rows.append(f"<p>{escape(named.get(part[1], part[1]))}</p>")
        elif "-->" in line:
            boxes = [re.sub(r"\[[^\]]*\]", "", box).split("&") for box in line.split("-->")]
            shown = (", ".join(escape(named.get(n.strip(), n.strip())) for n in box) for box in boxes)
            rows.append(f"<ol>{''.join(f'<li><span>{box}</span></li>' for box in shown)}</ol>")
        else:
            raise ValueError(f"a diagram has the line {line!r}: only chains and subgraphs are drawn")
    return f'<div class="flow">{"".join(rows)}</div>'


def heading(text: str, line: str) -> str:
    """A heading in reStructuredText."""
    return f"{literal(text)}\n{line * (len(literal(text)) + 1)}\n\n"
