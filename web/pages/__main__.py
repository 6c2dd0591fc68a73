"""``python -m web.pages OUT [NAME ...]``: the pages alone, for looking at some while one works on them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from web.pages.build import write


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder of the site")
    parser.add_argument("names", nargs="*", help="notebooks, for example 00_start_here  [default: all]")
    arguments = parser.parse_args()
    try:
        pages = write(arguments.out, arguments.names)
    except (ValueError, RuntimeError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    start = arguments.out / "index.html"
    if not start.exists():  # which `web.build` makes
        start.write_text('<!doctype html><meta http-equiv="refresh" content="0; url=course.html">', encoding="utf-8")
    print(f"{len(pages)} pages; open {start}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
