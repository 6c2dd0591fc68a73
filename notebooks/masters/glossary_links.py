"""Links the first use of each term of the glossary in a notebook."""

from __future__ import annotations

import functools
import re
from pathlib import Path

GLOSSARY = Path(__file__).parents[1] / "glossary.md"
HEADING = re.compile(r"^### (.+)$", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
STRONG = re.compile(r"(?<![\[*])\*\*([^*]+)\*\*(?![\]*])")
ENDINGS = (("", ""), ("s", ""), ("es", ""), ("ies", "y"), ("d", ""), ("ed", ""))
OTHER_WORDS = {  # as the notebooks say it: the term
    "alpha + beta × bytes": "alpha-beta model",
    "caching allocator": "allocator",
    "clipping": "gradient clipping",
    "exposed": "exposed communication",
    "frozen": "frozen parameter",
    "hybrid sharding": "hsdp",
    "mesh": "device mesh",
    "meta": "meta device",
    "offload": "cpu offload",
    "optimizer's state": "optimizer state",
    "padded": "padding",
    "pipeline": "pipeline parallel",
    "tensor": "tensor parallel",
    "tied": "tied embedding",
    "zero-1": "zero",
    "zero-2": "zero",
    "zero-3": "zero",
}


@functools.cache
def terms() -> dict[str, str]:
    """The terms of the glossary in small letters, and the anchor of each."""
    found = HEADING.findall(GLOSSARY.read_text(encoding="utf-8"))
    return {term.lower(): anchor(term) for term in found}


def anchor(heading: str) -> str:
    """The anchor that GitHub, and the HTML edition, give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def term_of(word: str) -> str | None:
    """The term that a word is a form of, whatever its case: ``Micro-batches`` is ``micro-batch``."""
    word = " ".join(word.lower().split()).rstrip(".,:;")
    word = OTHER_WORDS.get(word, word)
    forms = (word.removesuffix(ending) + stem for ending, stem in ENDINGS if word.endswith(ending))
    return next((form for form in forms if form in terms()), None)


def linked(source: str, seen: set[str], to: str = "glossary.md") -> str:
    """A markdown cell in which each term in bold, where it is the first in its notebook, is a link to the glossary.

    Args:
        source: the cell's text; code between fences stays as it is.
        seen: terms that the notebook has linked already; those of this cell are added.
        to: where the glossary is, from the notebook.

    Example:
        >>> linked("A **unit** and another **unit**.", set())
        'A [**unit**](glossary.md#unit) and another **unit**.'
    """

    def link(match: re.Match[str]) -> str:
        term = term_of(match[1])
        if term is None or term in seen:
            return match[0]
        seen.add(term)
        return f"[{match[0]}]({to}#{terms()[term]})"

    parts = FENCED.split(source)
    return "".join(part if number % 2 else STRONG.sub(link, part) for number, part in enumerate(parts))
