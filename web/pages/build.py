"""Builds the pages with Sphinx, MyST-NB and Furo.

Every page works from ``file://`` and asks no host for anything; the search is a file beside the pages.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sphinx.application import Sphinx

from fsdp_sim.learn.predictions.ask import RIGHT, TRUTH, WRONG
from fsdp_sim.viz import theme
from web.colours import DARK, LIGHT
from web.pages import course, reference
from web.pages.figures import Figures
from web.words import WORDS, script

HERE = Path(__file__).parent
ROOT = "contents"
"""The page that lists all others; the start page, `index.html`, is not made here."""
DARK_CODE = {
    "keyword": "#79C0FF", "string": "#7EE787", "comment": "#9BA7B4", "number": "#79C0FF", "def": "#D2A8FF",
    "builtin": "#D2A8FF", "meta": "#FFA657",
}  # fmt: skip
CONFIGURATION: dict[str, Any] = {
    "project": WORDS["title"],
    "html_title": WORDS["title"],
    "root_doc": ROOT,
    "language": "en",
    "extensions": ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "web.pages.build"],
    "templates_path": [str(HERE / "templates")],
    "html_theme": "furo",
    "html_theme_options": {
        "light_css_variables": {
            "font-stack": theme.FONT,
            "color-right": RIGHT,
            "color-wrong": WRONG,
            "color-truth": TRUTH,
            **LIGHT,
        },
        "dark_css_variables": {
            **DARK,
            # Of the code that `in_torch` shows, which in JupyterLab has the editor's colours.
            **{f"jp-mirror-editor-{part}-color": colour for part, colour in DARK_CODE.items()},
        },
    },
    "html_css_files": ["site.css", "pages.css"],
    "html_js_files": ["words.js", "pages.js"],
    "html_search_scorer": str(HERE / "scorer.js"),
    "html_sidebars": {
        "**": [
            "sidebar/brand.html", "sidebar/search.html", "sidebar/scroll-start.html", "start.html",
            "sidebar/navigation.html", "sidebar/scroll-end.html",
        ]
    },
    "pygments_style": "a11y-high-contrast-light",
    "default_role": "py:obj",
    "add_module_names": False,
    "autodoc_member_order": "bysource",
    "autodoc_typehints_format": "short",
    "napoleon_use_ivar": True,
    "nb_execution_mode": "off",
    "nb_ipywidgets_js": {},  # else every page asks other hosts for scripts
    "nb_merge_streams": True,
    "nb_code_prompt_show": WORDS["folded"],
    "nb_code_prompt_hide": WORDS["unfolded"],
    "myst_heading_anchors": 3,
    "html_copy_source": False,
    "html_show_copyright": False,
    "html_show_sphinx": False,
    "html_show_search_summary": False,  # a page that is a file may not read other files
    # A notebook may begin below the next level; of an interactive figure the page shows the picture.
    "suppress_warnings": ["myst.header", "mystnb.unknown_mime_type", "ref.python"],
}  # fmt: skip


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls, since this module is one of the extensions."""

    def starts_at_index(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
        context["master_doc"] = "index"
        context["words"] = WORDS
        context["live"] = app.config.live_pages
        no_icon = '<link rel="icon" href="data:,">'  # else a browser asks for one that is not there
        context["metatags"] = context.get("metatags", "") + no_icon
        if page == "course":
            context["prev"] = {"link": "./index.html", "title": WORDS["start"]}

    def dark_code(app: Sphinx) -> None:  # Furo's own setting, which Sphinx does not know before the theme is there
        app.config.pygments_dark_style = "a11y-high-contrast-dark"

    app.add_config_value("live_pages", {}, "html", dict)
    app.connect("builder-inited", dark_code, priority=100)

    def search_leaves_out_solutions(app: Sphinx, doctree: object) -> None:  # they say what their chapters say
        if app.env.docname.startswith("solutions"):
            app.env.metadata[app.env.docname]["nosearch"] = "true"

    app.connect("doctree-read", search_leaves_out_solutions)
    app.connect("html-page-context", starts_at_index)
    return {"parallel_read_safe": True}


def write(
    out: Path,
    names: list[str] | None = None,
    rooms: Sequence[str] = reference.ROOMS,
    live: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Make the pages, and return their names.

    Args:
        names: of notebooks, to make only these pages of the course; all if there are none.
        rooms: of which there are pages of the reference.
        live: the site's pages that live, by their files with their titles: all link to them.

    Raises:
        ValueError: there is no notebook of a name.
        RuntimeError: Sphinx could not make one of them.
    """
    notebooks = course.NOTEBOOKS
    unknown = set(names or ()) - {path.stem for path in notebooks.glob("*.ipynb")}
    if unknown:
        raise ValueError(f"there is no notebook {min(unknown)!r} in {notebooks}")
    with tempfile.TemporaryDirectory() as scratch:
        source, static = Path(scratch, "source"), Path(scratch, "static")
        source.mkdir()
        shutil.copytree(HERE / "static", static)
        shutil.copy(HERE.parent / "site.css", static)
        (static / "words.js").write_text(script(), encoding="utf-8")
        figures = Figures(static)
        parts = course.stage(notebooks, source, names or [], figures, "puzzle.html" if "puzzle.html" in live else "")
        figures.finish()
        gallery = ["gallery"] if (source / "gallery.ipynb").exists() else []
        notebook_pages = [*(page for listed in parts.values() for page in listed), *gallery]
        looked_up = reference.stage(source / "reference", rooms)
        top = ["course", "labs", *gallery, "reference/index", "solutions"]
        (source / f"{ROOT}.md").write_text(f"# {WORDS['contents']}\n\n{course.toctree(top)}", encoding="utf-8")
        sphinx = Sphinx(
            source, None, out, Path(scratch, "doctrees"), "html",
            confoverrides=CONFIGURATION | {"html_static_path": [str(static)], "live_pages": dict(live)},
            status=None, warning=sys.stderr, freshenv=True,
        )  # fmt: skip
        sphinx.build()
    if sphinx.statuscode:
        raise RuntimeError("Sphinx could not make every page; see above")
    for page in notebook_pages:
        target = (out / course.DOWNLOADS / page).with_suffix(".ipynb")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy((notebooks / page).with_suffix(".ipynb"), target)
    return [*notebook_pages, *looked_up]
