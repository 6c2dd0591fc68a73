"""Builds the notebooks from their masters: ``python -m notebooks.masters.build [NAME ...] [--text]``.

A master (jupytext's percent format) with exercises becomes two notebooks: the students' edition, with stubs, and the
solutions; one without becomes one. An exercise is one empty cell, ``# %% exercise="name"``: see `exercise_cells`. All
are executed, and every figure gets an image beside its interactive form, so that a saved notebook shows its pictures
without being run. Of a widget, which lives only as long as its kernel, the saved notebook keeps the picture beside it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image
from rich.console import Console

from fsdp_sim.learn.coverage import notebooks
from notebooks.masters.exercise_cells import expanded
from notebooks.masters.glossary_links import linked

MASTERS = Path(__file__).parent
STUDENTS = MASTERS.parent
SOLUTIONS = STUDENTS / "solutions"
PICTURES = STUDENTS / "pictures"
WIDGET = "application/vnd.jupyter.widget-view+json"
IMAGES = {"image/png", "image/jpeg"}
JPEG_WIDTH = 1000


def masters() -> list[Path]:
    """The masters, in the order of the course."""
    return notebooks(MASTERS)


def exercises(master: Path) -> list[str]:
    """The names of the exercises in it."""
    return [cell.metadata["exercise"] for cell in jupytext.read(master).cells if "exercise" in cell.metadata]


def edition(master: Path, *, solutions: bool) -> nbformat.NotebookNode:
    """The notebook of a master, not yet executed. Cell ids follow from the content, so that diffs stay small."""
    notebook = jupytext.read(master)
    notebook.cells = [
        made
        for cell in notebook.cells
        for made in (expanded(cell, solutions=solutions) if "exercise" in cell.metadata else [cell])
    ]
    terms: set[str] = set()
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, terms, "../glossary.md" if solutions else "glossary.md")
        name = hashlib.sha256(cell.source.encode()).hexdigest()[:12]
        seen[name] += 1
        cell.id = f"{name}-{seen[name]}"
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells in ``folder``; figures bring an image along (see `fsdp_sim.viz.Picture.show`)."""
    os.environ["FSDP_SIM_PNG"] = "1"
    kept = tempfile.mkdtemp()
    os.environ["FSDP_SIM_PROGRESS"] = str(Path(kept, "progress.json"))  # new, and not the user's
    os.environ["FSDP_SIM_SEED"] = "0"  # so that what a check says can be compared
    os.environ.setdefault("BROWSER_PATH", "/usr/bin/chromium")
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
        store_widget_state=False, coalesce_streams=True,
    )  # fmt: skip
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if not is_noise(o)]
            for output in cell.outputs:
                for kind in IMAGES & output.get("data", {}).keys():
                    output.data[kind] = smaller(output.data[kind], kind)
            for output in (o for o in cell.outputs if WIDGET in o.get("data", {})):
                del output.data[WIDGET]
            for output in cell.outputs:
                for text in (output.get("data", {}), output):
                    for kind in ("text/plain", "text/html", "text") & text.keys():
                        text[kind] = text[kind].replace(f"{STUDENTS.parent}/", "")  # whose folder it was built in
                        text[kind] = text[kind].replace(kept, "~/.local/share/fsdp_sim")
            for output in (o for o in cell.outputs if o.output_type == "stream"):
                output.text = re.sub(r"^.*\r", "", output.text, flags=re.MULTILINE)  # as a terminal would show it


def is_noise(output: nbformat.NotebookNode) -> bool:
    """Nothing printed, or what the package that talks to the browser for the PNGs has logged."""
    noise = ("choreographer", "unclean kill browser")
    return output.output_type == "stream" and (not output.text.strip() or any(word in output.text for word in noise))


def smaller(image: str, kind: str) -> str:
    """An image in base64 in a quarter of its bytes: of a PNG flat colours need no more than 256, a JPEG less detail."""
    reduced = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB")
    if kind == "image/png":
        picture.quantize(256, dither=Image.Dither.NONE).save(reduced, "PNG", optimize=True)
    else:
        size = (JPEG_WIDTH, round(picture.height * JPEG_WIDTH / picture.width))
        picture.resize(size).save(reduced, "JPEG", quality=70, optimize=True, progressive=True)
    return base64.b64encode(reduced.getvalue()).decode()


def save_last_picture(notebook: nbformat.NotebookNode, path: Path) -> None:
    """The last figure of a notebook as a file, for the README."""
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    pictures = [o["data"][kind] for o in outputs for kind in IMAGES & o.get("data", {}).keys()]
    if pictures:
        path.parent.mkdir(exist_ok=True)
        picture = Image.open(io.BytesIO(base64.b64decode(pictures[-1]))).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(path, "PNG", optimize=True)


def with_outputs(notebook: nbformat.NotebookNode, saved: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a saved one.

    Raises:
        ValueError: their code is not the same.
    """
    executed = nbformat.read(saved, as_version=4)
    old, new = ([cell for cell in n.cells if cell.cell_type == "code"] for n in (executed, notebook))
    if [cell.source for cell in old] != [cell.source for cell in new]:
        raise ValueError(f"the code of {saved.name} has changed: build it without --text")
    for was, cell in zip(old, new, strict=True):
        cell.outputs, cell.execution_count = was.outputs, was.execution_count
    notebook.metadata = executed.metadata
    return notebook


def build(master: Path, *, run: bool) -> list[Path]:
    """Write the editions of a master and return their paths; without ``run`` with the outputs they have."""
    written = []
    for folder in (STUDENTS, SOLUTIONS) if exercises(master) else (STUDENTS,):
        notebook, path = edition(master, solutions=folder is SOLUTIONS), folder / f"{master.stem}.ipynb"
        if run:
            execute(notebook, folder)
            if folder is STUDENTS:
                save_last_picture(notebook, PICTURES / f"{master.stem}.png")
        else:
            notebook = with_outputs(notebook, path)
        folder.mkdir(exist_ok=True)
        nbformat.write(notebook, path)
        written.append(path)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="masters to build, for example 00_start_here  [default: all]")
    parser.add_argument("--text", action="store_true", help="only text has changed: keep the outputs, execute nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {m.stem for m in masters()}:
        print(f"there is no master {sorted(unknown)[0]!r}; there are {[m.stem for m in masters()]}", file=sys.stderr)
        return 2
    console = Console()
    for master in masters():
        if not arguments.names or master.stem in arguments.names:
            with console.status(f"building {master.stem}"):
                written = build(master, run=not arguments.text)
            for path in written:
                console.print(f"{path.relative_to(STUDENTS.parent)}: {path.stat().st_size / 1024:,.0f} KiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
