"""``python -m web.build [--out FOLDER] [--no-live] [--no-pages]``: the site, static files that any web server serves.

Start page and what runs in it (`web.live`), course, reference and search (`web.pages`). Nothing in it asks another
host. The live parts are made of Python for the browser, which comes from npm: without it, ``--no-live``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from web import live as live_parts
from web import start
from web.words import WORDS

OUT = Path(__file__).parents[1] / "build" / "site"
COURSE = {"course.html": "course", "labs.html": "labs", "reference/index.html": "reference", "search.html": "search"}
"""Pages of `web.pages` that all others link to, and the word that each is called by."""


def build(out: Path = OUT, live: bool = True, pages: bool = True) -> Path:
    """Make the site in a folder, which is emptied before, and return the folder.

    Args:
        live: the parts that run Python in the page too.
        pages: course, reference and search too.

    Raises:
        RuntimeError: something that it takes is missing; says what, and what to do.
    """
    files = live_parts.gathered() if live else {}  # before anything is emptied
    if out.exists():
        if any(out.iterdir()) and not (out / ".site").exists():
            raise RuntimeError(f"{out} is not empty and was not made by web.build; name another folder with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / ".site").touch()
    (out / ".nojekyll").touch()  # GitHub Pages leaves out folders with an underscore in front otherwise
    live_pages = {f"{name}.html": WORDS[title] for name, title in live_parts.PAGES.items()} if live else {}
    links = {**{page: WORDS[title] for page, title in COURSE.items()}, **live_pages} if pages else live_pages
    if pages:
        from web import pages as page_parts  # Sphinx, which the start page does not need

        page_parts.write(out, live=live_pages)
    if live:
        live_parts.write(out, files)
        from web.live import forms  # anywidget, which a page that stands still does not need

        forms.write(out, {"index.html": WORDS["start"], **links})
    start.write(out, live, links)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="where the site goes  [default: build/site]")
    parser.add_argument("--no-live", action="store_true", help="without what runs in the page: needs no npm")
    parser.add_argument("--no-pages", action="store_true", help="without course, reference and search: needs no Sphinx")
    arguments = parser.parse_args()
    try:
        out = build(arguments.out, not arguments.no_live, not arguments.no_pages)
    except (RuntimeError, ModuleNotFoundError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(f"Wrote {out}; to look at it: python -m http.server -d {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
