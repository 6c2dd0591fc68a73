"""`InterviewReport`: what an interview showed, topic by topic, and where in the course to read on."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from fsdp_sim.learn.coverage import masters, notebooks
from fsdp_sim.learn.drill.committee import decision, evidence, gaps, of_design, this_week
from fsdp_sim.learn.drill.design import Design
from fsdp_sim.learn.drill.result import QuestionResult, place

STRONG = 2 / 3
"""The part of right answers from which on a topic counts as a strength."""
PLACE = re.compile(r"notebook (\d\d), section [\w]+")
"""A section as `place` writes it."""
HEADER = ("Topic", "Right", "Hardest right", "Time used", "Read")


@dataclass(frozen=True)
class TopicScore:
    """A topic: right of asked, the hardest level that was right, seconds taken and given, sections to read."""

    topic: str
    right: int
    asked: int
    level: int
    took_s: float
    given_s: float
    sections: tuple[str, ...]

    @property
    def strong(self) -> bool:
        return self.right >= STRONG * self.asked

    @property
    def cells(self) -> tuple[str, ...]:
        level = "●" * self.level or "-"
        read = ", ".join(map(place, self.sections)) or "-"
        return self.topic, f"{self.right} of {self.asked}", level, f"{self.took_s / self.given_s:.0%}", read


@dataclass(frozen=True, repr=False)
class InterviewReport:
    """The report of an interview, as a table in a notebook and in a terminal; time as a part of what was given.

    Attributes:
        design: the open question at its end, if one was answered.
    """

    results: tuple[QuestionResult, ...]
    design: Design | None = None

    @property
    def rows(self) -> tuple[TopicScore, ...]:
        """Topics in the order in which they came, the weakest first."""
        topics = dict.fromkeys(result.topic for result in self.results)
        rows = [_row(topic, [r for r in self.results if r.topic == topic]) for topic in topics]
        return tuple(sorted(rows, key=lambda row: row.right / row.asked))

    @property
    def headline(self) -> str:
        if not self.results:
            return "One open design question was answered." if self.design else "No question was answered."
        right = sum(result.right for result in self.results)
        strong = ", ".join(row.topic for row in self.rows[::-1] if row.strong) or "none yet"
        weak = ", ".join(row.topic for row in self.rows if not row.strong) or "none found"
        return f"{right} of {len(self.results)} right. Strengths: {strong}. Gaps: {weak}."

    @property
    def causes(self) -> tuple[str, ...]:
        """What stood behind wrong answers, the most frequent first."""
        causes = [result.cause for result in self.results if result.cause]
        return tuple(sorted(dict.fromkeys(causes), key=causes.count, reverse=True))

    @property
    def committee(self) -> dict[str, tuple[str, ...]]:
        """What a hiring committee would write, by its headings: level, evidence, gaps, what to do this week."""
        if not self.results and not self.design:
            return {}
        verdict, shown, lacking, read = of_design(self.design) if self.design else ((), (), (), ())
        parts = {
            "Level": (decision(self.results), *verdict),
            "Evidence": (*evidence(self.results), *shown),
            "Gaps": (*gaps(self.results), *lacking),
            "This week": (*read, *this_week(self.results)),
        }
        return {heading: lines for heading, lines in parts.items() if lines}

    def __str__(self) -> str:
        parts = {**self.committee, "What stood behind wrong answers": self.causes}
        listed = [
            line
            for heading, lines in parts.items()
            if lines
            for line in ("", heading, *(f"  - {each}" for each in lines))
        ]
        columns = list(zip(HEADER, *(row.cells for row in self.rows), strict=True)) if self.rows else []
        widths = [max(map(len, column)) for column in columns]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*columns, strict=True)]
        return "\n".join([self.headline, *listed, *([""] * bool(table)), *table])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._html(linked)

    def _html(self, told: Callable[[str], str]) -> str:
        """The report, with ``told`` for what becomes of a line of it."""
        from fsdp_sim.viz.table import LEFT, cell, row, table_html  # plotly takes a while

        head = row(cell(text, f' scope="col"{LEFT}', "th") for text in HEADER)
        rows = []
        for topic in self.rows:
            first, *rest = map(escape, topic.cells)
            rows.append(row([cell(first, f' scope="row"{LEFT}', "th"), *(cell(text, LEFT) for text in rest)]))
        table = table_html(rows, head, f"<caption{LEFT}>{escape(self.headline)}</caption>")
        parts = {**self.committee, "What stood behind wrong answers": self.causes}
        written = "".join(
            f"<h4>{heading}</h4><ul>{''.join(f'<li>{told(line)}</li>' for line in lines)}</ul>"
            for heading, lines in parts.items()
            if lines
        )
        return table + written

    def page(self) -> str:
        """The report as a page of its own, which may lie anywhere: it names notebooks without a link."""
        style = "body{font:16px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;padding:0 1em}"
        style += "td,th{padding:.2em .8em;text-align:left}"
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>Interview report</title><style>{style}</style><h1>Interview report</h1>{self._html(escape)}</html>"
        )


def linked(line: str) -> str:
    """A line as HTML, with each notebook that it names linked, relative to the folder of the notebooks."""
    names = _notebooks()
    return PLACE.sub(lambda m: f'<a href="{names[m[1]]}">{m[0]}</a>' if m[1] in names else m[0], escape(line))


@functools.cache
def _notebooks() -> dict[str, str]:
    """The files of the chapters by number; none where this is no checkout."""
    try:
        return {file.stem[:2]: f"{file.stem}.ipynb" for file in notebooks(masters())}
    except ValueError:
        return {}


def _row(topic: str, results: Sequence[QuestionResult]) -> TopicScore:
    right = [result for result in results if result.right]
    missed = dict.fromkeys(result.section for result in results if not result.right)
    hardest = max((result.level for result in right), default=0)
    took, given = (sum(getattr(result, of) for result in results) for of in ("took_s", "given_s"))
    return TopicScore(topic, len(right), len(results), hardest, took, given, tuple(missed))
