"""Where the course opens: all of it follows from the repository's address, which pyproject.toml has.

``python -m web.hosts`` writes README's links and CITATION.cff's line anew. While there is no address, there are none.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = "notebooks/00_start_here.ipynb"
BEGIN, END = "<!-- links: python -m web.hosts -->\n", "<!-- end of links -->\n"


def repository(pyproject: Path = ROOT / "pyproject.toml") -> str | None:
    """The address as ``[project.urls]`` has it, or None."""
    found: str | None = tomllib.loads(pyproject.read_text())["project"].get("urls", {}).get("Repository")
    return found


def links(address: str) -> dict[str, str]:
    """The addresses of the site and of the first notebook on other people's computers, by what a reader is told.

    Raises:
        ValueError: the repository is not on GitHub, from which Colab, Binder and Codespaces take it.
    """
    on_github = re.fullmatch(r"https://github\.com/([\w.-]+)/([\w.-]+)", address)
    if not on_github:
        raise ValueError(
            f"[project.urls] has Repository = {address!r}, and links can be made for https://github.com/OWNER/NAME only"
        )
    owner, name = on_github.groups()
    return {
        "In your browser, nothing to install": f"https://{owner.lower()}.github.io/{name}/",
        "Colab": f"https://colab.research.google.com/github/{owner}/{name}/blob/main/{FIRST}",
        "Binder": f"https://mybinder.org/v2/gh/{owner}/{name}/main?urlpath=lab/tree/{FIRST}",
        "Codespaces": f"https://codespaces.new/{owner}/{name}",
    }


def readme(text: str, address: str | None) -> str:
    """README with its links."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    line = " · ".join(f"[{told}]({url})" for told, url in links(address).items()) if address else ""
    return f"{before}{BEGIN}{f'{chr(10)}**Open it:** {line}{chr(10)}{chr(10)}' if address else ''}{END}{after}"


def citation(text: str, address: str | None) -> str:
    """CITATION.cff with the address."""
    others = re.sub(r"^repository-code: .*\n", "", text, flags=re.MULTILINE)
    return others + (f'repository-code: "{address}"\n' if address else "")


def main() -> int:
    try:
        for name, written in (("README.md", readme), ("CITATION.cff", citation)):
            (ROOT / name).write_text(written((ROOT / name).read_text(), repository()))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
