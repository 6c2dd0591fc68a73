"""The course as pages: its saved notebooks, prepared for Sphinx. Nothing is executed.

Figures are their pictures, with their words; what is folded stays folded; a prediction becomes a form that ``pages.js``
fills.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_markdown_cell

from notebooks.masters.build import FOLDED_CODE, IMAGES, WITHHELD, told
from web.pages import predictions
from web.pages.figures import MIME, Figures
from web.pages.needed import needed
from web.words import WORDS

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PARTS = {"course": "[0-9][0-9]_*.ipynb", "labs": "lab_*.ipynb", "solutions": "solutions/*.ipynb"}
DOWNLOADS = "notebooks"
"""The folder of the site in which the notebooks themselves lie."""


def stage(notebooks: Path, folder: Path, names: list[str], figures: Figures, puzzle: str) -> dict[str, list[str]]:
    """Write what becomes pages into a folder, for Sphinx.

    Args:
        figures: where those that answer the mouse are collected.
        puzzle: the page on which the schedule puzzle is played; empty if the site has none.
        names: only notebooks of these names; all if there are none.

    Returns:
        the pages of each part, without their endings.
    """
    (folder / "solutions").mkdir()
    for path in sorted([*notebooks.glob("*.ipynb"), *notebooks.glob("solutions/*.ipynb")]):
        if not names or path.stem in names:
            nbformat.write(prepared(path, figures, puzzle), folder / path.relative_to(notebooks))
    shutil.copy(notebooks / "glossary.md", folder)
    parts = {
        part: [str(page.relative_to(folder).with_suffix("")) for page in sorted(folder.glob(pattern))]
        for part, pattern in PARTS.items()
    }
    for part, pages in parts.items():
        (folder / f"{part}.md").write_text(overview(part, pages, folder), encoding="utf-8")
    return parts


def prepared(path: Path, figures: Figures, puzzle: str) -> nbformat.NotebookNode:
    """A notebook as its page shows it."""
    notebook = told(path.stem, path.parent)
    notebook.cells[0].source = titled(notebook.cells[0].source, path)
    solved = path.parent.name == "solutions"
    place = f"../{DOWNLOADS}/solutions" if solved else DOWNLOADS
    link = f'<a href="{place}/{path.name}" download>{WORDS["open_notebook"]}</a>'
    cells: list[nbformat.NotebookNode] = []
    code: list[str] = []
    for cell in notebook.cells:
        asks = cell.metadata.get("predict") or cell.metadata.get("cause")
        if asks and not solved:
            cells.append(new_markdown_cell(predictions.markup(predictions.asked(asks))))
            continue
        cells.append(cell)
        if cell.cell_type != "code":
            continue
        cell.metadata["mystnb"] = {}
        if FOLDED_CODE in cell.metadata.get("tags", []):
            cell.metadata["mystnb"] |= {"code_prompt_show": WORDS["show_code"], "code_prompt_hide": WORDS["hide_code"]}
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output.data["text/html"] = accessible(output.data["text/html"])
        shown = [output.data for output in cell.get("outputs", []) if IMAGES & output.get("data", {}).keys()]
        if shown:
            words = " ".join(" ".join(data["text/plain"].split()) for data in shown)
            cell.metadata["mystnb"] |= {"image": {"alt": words}}
            closer = "" if solved else "".join(closely(path.stem, data, figures) for data in shown)
            tools = f"{closer}{copied(code, cell.source)}{link}"
            cells.append(new_markdown_cell(f'<div class="figure-tools">{tools}</div>'))
        if puzzle and cell.source.strip() == "puzzle()" and not solved:
            cells.append(new_markdown_cell(f'<p><a href="{puzzle}">{WORDS["puzzle"]}</a></p>'))
        if WITHHELD in cell.metadata.get("tags", []):
            cell.metadata["tags"] = [*cell.metadata["tags"], "hide-output"]
        code.append(cell.source)
    other = f"../{path.stem}" if solved else f"solutions/{path.stem}"
    if solved or (path.parent / f"{other}.ipynb").exists():
        link += f'<a href="{other}.html">{WORDS["see_unsolved" if solved else "see_solved"]}</a>'
    cells.insert(1, new_markdown_cell(f'<div class="page-tools">{link}</div>'))
    notebook.cells = cells
    return notebook


def accessible(markup: str) -> str:
    """An output's HTML as WCAG has it.

    Without links inside of what is pressed to unfold, empty headings of columns, headings out of the page's order, and
    the green that rich prints, which is too light on white.
    """
    markup = re.sub(r"<th\b[^>]*></th>", "<td></td>", markup)
    markup = re.sub(r"<(/?)h[1-6]\b([^>]*)>", lambda tag: "</b></p>" if tag[1] else f"<p{tag[2]}><b>", markup)
    markup = markup.replace("#00a000", "#007a00")
    return re.sub(
        r'<summary>([^<]*(?:<(?!a |/summary)[^<]*)*)(<a [^>]*>)(.*?)</a>(.*?)</summary>',
        r"<summary>\1\3\4</summary>\2\3</a>", markup, flags=re.DOTALL,
    )  # fmt: skip


def closely(page: str, data: dict[str, Any], figures: Figures) -> str:
    """The button that shows a figure as large as the window, where it answers the mouse."""
    if MIME not in data:
        return ""
    return f'<button type="button" hidden data-figure="{figures.add(page, data[MIME])}">{WORDS["closer"]}</button>'


def copied(before: list[str], source: str) -> str:
    """The button that copies a figure's code, which ``pages.js`` shows; none if the code is more than Python."""
    try:
        code = needed(before, source)
    except SyntaxError:
        return ""
    data = escape(code).replace("\n", "&#10;")  # an empty line would end the block of HTML
    return f'<button type="button" hidden data-copy="{data}">{WORDS["copy_python"]}</button>'


def titled(source: str, path: Path) -> str:
    """The first cell with the chapter's number in its title, so that lists of pages and search tell them apart."""
    number = re.match(r"\d+", path.stem)
    before = f"{number[0]} · " if number else ""
    after = f" {WORDS['with_solutions']}" if path.parent.name == "solutions" else ""
    return re.sub(r"^# (.+)$", rf"# {before}\1{after}", source, count=1, flags=re.MULTILINE)


def overview(part: str, pages: list[str], folder: Path) -> str:
    """The page of a part: each of its pages with the sentences that it opens with."""
    listed = [f"# {WORDS[part]}\n\n{WORDS[f'{part}_about']}\n"]
    for page in pages:
        title, _, rest = nbformat.read(folder / f"{page}.ipynb", as_version=4).cells[0].source.partition("\n")
        listed.append(f"**[{title.removeprefix('# ')}]({page}.ipynb)**")
        if part != "solutions":
            listed[-1] += f"\\\n{rest.strip().split(chr(10) * 2)[0]}"
    return "\n\n".join([*listed, toctree(pages)])


def toctree(pages: Sequence[str]) -> str:
    """What Sphinx makes the order and the list at the side of."""
    return "\n".join(["```{toctree}\n:hidden:\n:maxdepth: 1\n", *pages, "```\n"])
