"""The cheat sheet: the rules behind the templates on one sheet; so it holds nothing that is not asked and tested."""

from __future__ import annotations

from html import escape

from fsdp_sim.learn.drill.template import TOPICS, templates

TITLE = "FSDP on one sheet"
HARDEST = 2
"""The level up to which a template's rule is on the sheet: with more its type would be too small to read."""
LETTERS = (
    "Ψ: parameters. N, W: ranks. L: blocks. M: micro-batches. d: width, V: vocabulary. alpha: latency, B: bandwidth, "
    "F: FLOP/s. AG, RS: all-gather, reduce-scatter. FWD, BWD: forward, backward."
)
STYLE = """
@page { size: A4; margin: 8mm }
body { font: 9.5pt/1.2 "DejaVu Sans", Arial, sans-serif; color: #000; background: #fff; margin: 0 }
h1 { font-size: 14pt; margin: 0 0 1.5mm }
h1 + p { margin: 0 0 1.5mm }
main { columns: 3; column-gap: 4mm }
section { margin: 0 0 1.5mm }
h2 { font-size: 11pt; margin: 0 0 .4mm; color: #0072B2; break-after: avoid }
ul { margin: 0; padding-left: 3.2mm }
li { break-inside: avoid }
@media screen { body { font-size: 13px; max-width: 70rem; margin: 2rem auto; padding: 0 1rem } }
"""


def rules() -> dict[str, list[str]]:
    """The rules of each topic, in the order of the course; what everyone is asked stands first."""
    found: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for template in sorted(templates().values(), key=lambda template: template.level):
        if template.level <= HARDEST:
            found[template.topic].append(template.rule)
    return found


def as_markdown() -> str:
    """The sheet as Markdown."""
    parts = [f"# {TITLE}", LETTERS]
    for topic, some in rules().items():
        parts += [f"## {headed(topic)}", "\n".join(f"- {rule}" for rule in some)]
    return "\n\n".join(parts)


def as_html() -> str:
    """The sheet as a page that prints on two sides of A4."""
    sections = ""
    for topic, some in rules().items():
        items = "".join(f"<li>{escape(rule)}</li>" for rule in some)
        sections += f"<section><h2>{headed(topic)}</h2><ul>{items}</ul></section>"
    head = f'<meta charset="utf-8"><title>{TITLE}</title><style>{STYLE}</style>'
    body = f"<h1>{TITLE}</h1><p>{LETTERS}</p><main>{sections}</main>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def headed(topic: str) -> str:
    """A topic as a heading."""
    return "API" if topic == "api" else topic.capitalize()


class Sheet:
    """The sheet in a notebook and in a terminal."""

    def __str__(self) -> str:
        return as_markdown()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = ""
        for topic, some in rules().items():
            items = "".join(f"<li>{escape(rule)}</li>" for rule in some)
            parts += f"<details><summary><b>{headed(topic)}</b> ({len(some)})</summary><ul>{items}</ul></details>"
        return parts


def sheet() -> Sheet:
    """The cheat sheet: one rule for each question; in a notebook folded by topic."""
    return Sheet()
