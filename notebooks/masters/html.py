"""The course as pages to read: ``python -m notebooks.masters.html [--out FOLDER] [NAME ...]``.

Made of the saved notebooks by Sphinx with MyST-NB and Furo; nothing is executed. Figures are their pictures, what is
folded stays folded, and the search is a file beside the pages: it works from ``file://``, and no page asks a host for
anything.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from sphinx.application import Sphinx

from notebooks.masters.build import IMAGES, WITHHELD, told

NOTEBOOKS = Path(__file__).parents[1]
OUT = NOTEBOOKS.parent / "build" / "html"
CONFIGURATION = {
    "project": "Learn FSDP",
    "html_title": "Learn FSDP",
    "extensions": ["myst_nb"],
    "html_theme": "furo",
    "nb_execution_mode": "off",
    "nb_ipywidgets_js": {},  # else every page asks other hosts for scripts
    "nb_merge_streams": True,
    "nb_code_prompt_show": "What happens? Answer first",
    "nb_code_prompt_hide": "What happens",
    "myst_heading_anchors": 3,
    "html_copy_source": False,
    "html_show_copyright": False,
    "html_show_sphinx": False,
    "html_show_search_summary": False,  # a page that is a file may not read other files
    # A notebook may begin below the next level; of an interactive figure the page shows the picture.
    "suppress_warnings": ["myst.header", "mystnb.unknown_mime_type"],
}
PARTS = {  # heading: which pages
    "The course": "[0-9][0-9]_*.ipynb",
    "Labs": "lab_*.ipynb",
    "To look up": "g*",
    "Solutions": "solutions/*.ipynb",
}
INDEX = """\
# Learn FSDP

The whole course to read, without a kernel: its notebooks as they were saved, with their outputs and pictures. To run
the cells and to have your answers checked, open the notebooks themselves: `make lab`.
"""


def stage(notebooks: Path, folder: Path, names: list[str]) -> list[str]:
    """Copy what becomes pages into a folder: notebooks whose pictures say what they show, glossary and index.

    Args:
        names: only notebooks of these names; all if there are none.

    Returns:
        the pages, without their endings.
    """
    for path in sorted([*notebooks.glob("*.ipynb"), *notebooks.glob("solutions/*.ipynb")]):
        if names and path.stem not in names:
            continue
        notebook = told(path.stem, path.parent)
        notebook.cells[0].source = titled(notebook.cells[0].source, path)
        for cell in notebook.cells:
            shown = [output.data for output in cell.get("outputs", []) if IMAGES & output.get("data", {}).keys()]
            if shown:
                words = " ".join(" ".join(data["text/plain"].split()) for data in shown)
                cell.metadata["mystnb"] = {"image": {"alt": words}}
            if WITHHELD in cell.metadata.get("tags", []):
                cell.metadata["tags"] = [*cell.metadata["tags"], "hide-output"]
        target = folder / path.relative_to(notebooks)
        target.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, target)
    shutil.copy(notebooks / "glossary.md", folder)
    parts = [
        (heading, [str(page.relative_to(folder).with_suffix("")) for page in sorted(folder.glob(pattern))])
        for heading, pattern in PARTS.items()
    ]
    trees = (
        "\n".join([f"```{{toctree}}\n:caption: {heading}\n:maxdepth: 1\n", *listed, "```\n"])
        for heading, listed in parts
        if listed
    )
    (folder / "index.md").write_text("\n".join([INDEX, *trees]), encoding="utf-8")
    return [page for _, listed in parts for page in listed]


def titled(source: str, path: Path) -> str:
    """The first cell with the chapter's number in its title, so that lists of pages and search tell them apart."""
    number = re.match(r"\d+", path.stem)
    before = f"{number[0]} · " if number else ""
    after = " (with solutions)" if path.parent.name == "solutions" else ""
    return re.sub(r"^# (.+)$", rf"# {before}\1{after}", source, count=1, flags=re.MULTILINE)


def build(out: Path, names: list[str] | None = None, notebooks: Path = NOTEBOOKS) -> list[str]:
    """Make the pages, and return their names.

    Raises:
        ValueError: there is no notebook of a name.
        RuntimeError: Sphinx could not make one of them.
    """
    unknown = set(names or ()) - {path.stem for path in notebooks.glob("*.ipynb")}
    if unknown:
        raise ValueError(f"there is no notebook {min(unknown)!r} in {notebooks}")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        source.mkdir()
        pages = stage(notebooks, source, names or [])
        sphinx = Sphinx(
            source, None, out, Path(scratch, "doctrees"), "html", confoverrides=CONFIGURATION, status=None,
            warning=sys.stderr, freshenv=True,
        )  # fmt: skip
        sphinx.build()
    if sphinx.statuscode:
        raise RuntimeError("Sphinx could not make every page; see above")
    return pages


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="notebooks, for example 00_start_here  [default: all]")
    parser.add_argument("--out", type=Path, default=OUT, help="where the pages go  [default: build/html]")
    arguments = parser.parse_args()
    try:
        pages = build(arguments.out, arguments.names)
    except (ValueError, RuntimeError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(f"{len(pages)} pages; open {arguments.out / 'index.html'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
