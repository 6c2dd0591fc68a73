"""Builds the notebooks from their masters: ``python -m notebooks.masters.build [NAME ...] [--text]``.

A master (jupytext's percent format) becomes two notebooks: the students' edition, with stubs and without the asserts
that hold its text true, and the solutions. An exercise is one empty cell, ``# %% exercise="name"``, a prediction
another, ``# %% predict="name"``: see `exercise_cells`. All are executed, but the students' edition shows no answer
before one has committed to one's own: see `withhold`. Every figure gets an image beside its interactive form, so that
a saved notebook shows its pictures without being run. Of a widget, which lives only as long as its kernel, the saved
notebook keeps the picture beside it.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import io
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image
from rich.console import Console

from fsdp_sim.learn.coverage import notebooks
from notebooks.masters.exercise_cells import PREDICT, expanded, prediction
from notebooks.masters.glossary_links import linked

MASTERS = Path(__file__).parent
STUDENTS = MASTERS.parent
SOLUTIONS = STUDENTS / "solutions"
PICTURES = STUDENTS / "pictures"
WIDGET = "application/vnd.jupyter.widget-view+json"
IMAGES = {"image/png", "image/jpeg"}
JPEG_WIDTH = 1000
FOLDED_CODE = "hide-input"  # tag of a cell whose code a student sees as one line, Jupyter Book's word
WITHHELD = "withheld"  # tag of a cell whose output the students' edition does not show
FOLDED = "<details>\n<summary>Read on when you have run it</summary>\n\n{}\n\n</details>"
MOST_IMPORTS = 3  # that a reader sees
NO_ANSWER = ("#", PREDICT)  # so begins a paragraph that belongs to what comes next


def masters() -> list[Path]:
    """The masters, in the order of the course."""
    return notebooks(MASTERS)


def exercises(master: Path) -> list[str]:
    """The names of the exercises in it."""
    return [cell.metadata["exercise"] for cell in jupytext.read(master).cells if "exercise" in cell.metadata]


def edition(master: Path, *, solutions: bool, folds: bool = True) -> nbformat.NotebookNode:
    """The notebook of a master, not yet executed. Cell ids follow from the content, so that diffs stay small.

    Args:
        folds: the students' edition withholds answers.
    """
    notebook = jupytext.read(master)
    makers = {"exercise": partial(expanded, solutions=solutions), "predict": prediction}
    notebook.cells = [
        made
        for cell in notebook.cells
        for made in next((make(cell) for of, make in makers.items() if of in cell.metadata), [cell])
    ]
    if not solutions:
        if folds:
            withhold(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.source = without_claims(cell.source)
                if FOLDED_CODE in cell.metadata.get("tags", []) or sets_up(cell.source):
                    cell.metadata |= {"jupyter": {"source_hidden": True}}
                    cell.metadata["tags"] = sorted({*cell.metadata.get("tags", []), FOLDED_CODE})
        notebook.cells = [cell for cell in notebook.cells if cell.source]
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


def withhold(notebook: nbformat.NotebookNode) -> None:
    """Mark whose output gives an answer away, and fold the text that does.

    That is all code between a prediction or an exercise's stub and the next text, and that text, up to a heading or the
    next question. The output is left out when the notebook is written (`shown`), and nbval does not compare it.
    """
    waits, fold = False, False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            asks = {"exercise", "predict", "cause"} & cell.metadata.keys()
            if asks:
                waits, fold = True, "predict" in cell.metadata
            elif waits:
                cell.metadata["tags"] = sorted({*cell.metadata.get("tags", []), WITHHELD, "nbval-ignore-output"})
        elif waits:
            if fold:
                paragraphs = cell.source.split("\n\n")
                told = next((i for i, p in enumerate(paragraphs) if p.startswith(NO_ANSWER)), len(paragraphs))
                answer = ["\n\n".join(paragraphs[:told])] if told else []
                cell.source = "\n\n".join([*map(FOLDED.format, answer), *paragraphs[told:]])
            waits = fold = False


def without_claims(source: str) -> str:
    """Code without the asserts that hold the text true: they are for the tests, as notes to linters are."""
    source = re.sub(r" +# (?:noqa|fmt: skip).*$", "", source, flags=re.MULTILINE)
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of IPython
        return source

    def claims(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """The statements that do nothing but claim."""
        for statement in body:
            parts = [getattr(statement, name, []) for name in ("body", "orelse")]
            inside = [claim for part in parts for claim in claims(part)]
            if isinstance(statement, ast.Assert) or (inside and len(inside) == sum(map(len, parts))):
                yield statement
            else:
                yield from inside

    lines = source.splitlines()
    for claim in sorted(claims(tree.body), key=lambda claim: -claim.lineno):
        del lines[claim.lineno - 1 : claim.end_lineno]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n")


def sets_up(source: str) -> bool:
    """Whether code is mostly imports: the students' edition folds it to a line, which still runs with the others."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # of IPython
        return False
    imports = [statement for statement in body if isinstance(statement, ast.Import | ast.ImportFrom)]
    names = [statement for statement in body if isinstance(statement, ast.Assign)]
    return len(imports) > MOST_IMPORTS and len(imports) + len(names) == len(body)


def shown(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as it is written: without the outputs that are withheld."""
    for cell in notebook.cells:
        if WITHHELD in cell.metadata.get("tags", []):
            cell.outputs = []
    return notebook


def pairs(students: nbformat.NotebookNode, solved: nbformat.NotebookNode) -> Iterator[tuple[Any, Any]]:
    """The code cells of the students' edition beside those of the other one, which has some that only claim besides."""
    first, second = ([cell for cell in n.cells if cell.cell_type == "code"] for n in (students, solved))
    return zip(first, [cell for cell in second if without_claims(cell.source)], strict=True)


def told(name: str, folder: Path | None = None) -> nbformat.NotebookNode:
    """The students' edition with the outputs that it withholds, for pages and slides."""
    folder = folder or STUDENTS
    notebook, path = nbformat.read(folder / f"{name}.ipynb", as_version=4), folder / "solutions" / f"{name}.ipynb"
    if path.exists():
        solved = nbformat.read(path, as_version=4)
        for cell, other in pairs(notebook, solved):
            if WITHHELD in cell.metadata.get("tags", []):
                cell.outputs = other.outputs
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells in ``folder``; figures bring an image along (see `fsdp_sim.viz.Picture.show`)."""
    os.environ["FSDP_SIM_PNG"] = "1"
    kept = tempfile.mkdtemp()
    os.environ["FSDP_SIM_PROGRESS"] = str(Path(kept, "progress.json"))  # new, and not the user's
    os.environ["FSDP_SIM_MINE"] = str(Path(kept, "my_fsdp.py"))
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


def with_outputs(notebook: nbformat.NotebookNode, executed: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    """The notebook with the outputs of a saved one.

    Raises:
        ValueError: their code is not the same.
    """
    old, new = ([cell for cell in n.cells if cell.cell_type == "code"] for n in (executed, notebook))
    if [cell.source for cell in old] != [cell.source for cell in new]:
        raise ValueError(f"the code of {name} has changed: build it without --text")
    for was, cell in zip(old, new, strict=True):
        cell.outputs, cell.execution_count = was.outputs, was.execution_count
    notebook.metadata = executed.metadata
    return notebook


def build(master: Path, *, run: bool) -> list[Path]:
    """Write the editions of a master and return their paths; without ``run`` with the outputs they have."""
    made = {folder: edition(master, solutions=folder is SOLUTIONS) for folder in (SOLUTIONS, STUDENTS)}
    for folder, notebook in made.items():
        path = folder / f"{master.stem}.ipynb"
        if not run:
            with_outputs(notebook, nbformat.read(path, as_version=4), path.name)
        elif folder is SOLUTIONS or exercises(master):
            execute(notebook, folder)
        else:
            for cell, other in pairs(notebook, made[SOLUTIONS]):
                cell.outputs, cell.execution_count = other.outputs, other.execution_count
        if run and folder is STUDENTS:
            save_last_picture(made[SOLUTIONS], PICTURES / f"{master.stem}.png")
        folder.mkdir(exist_ok=True)
        nbformat.write(shown(notebook), path)
    return [folder / f"{master.stem}.ipynb" for folder in made]


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
