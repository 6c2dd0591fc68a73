"""What was heard, shown: an answer with the words that counted underlined, and a question's points with their marks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from html import escape
from string import ascii_lowercase

from fsdp_sim.learn.drill.listening import Quote
from fsdp_sim.learn.drill.listening.follow import Conversation, Part, Spoke
from fsdp_sim.learn.drill.question import with_letters
from fsdp_sim.learn.drill.spoken import ENOUGH

HOLD = (
    "To overrule the listener type a letter, or the number of a follow-up, and why, such as: c I said that it is "
    "dropped. A minus gives back what I heard wrongly: -c that was about DDP. Enter goes on."
)
KEPT = "Kept, with your reason."

ENDS = re.compile(r"[.?!](?=\s)\s*")
AROUND = 150
"""Characters of a sentence that are shown on each side of a quote."""


def marked(said: str, quotes: Iterable[Quote], mark: Callable[[str], str], plain: Callable[[str], str] = str) -> str:
    """A text with its quotes marked; where two overlap, as one."""
    parts, last = [], 0
    for start, end in _merged(sorted((quote.start, quote.end) for quote in quotes)):
        parts += [plain(said[last:start]), mark(said[start:end])]
        last = end
    return "".join([*parts, plain(said[last:])])


def sentence(said: str, quote: Quote) -> str:
    """The sentence in which a quote stands, or of a long one what is around the quote."""
    start = max((found.end() for found in ENDS.finditer(said, 0, quote.start)), default=0)
    ends = ENDS.search(said, max(quote.end - 1, 0))
    end = ends.start() + 1 if ends else len(said)
    first = said.rfind(" ", start, max(start, quote.start - AROUND)) + 1 if quote.start - start > AROUND else start
    last = said.find(" ", min(end, quote.end + AROUND), end)
    until = last if last > 0 and end - quote.end > AROUND else end
    return f"{'... ' * (first > start)}{said[first:until].strip()}{' ...' * (until < end)}"


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def remark(talk: Conversation, spoke: Spoke) -> str:
    """What the interviewer says to a turn, before asking on."""
    return " ".join(filter(None, (spoke.note, _remark(talk, spoke))))


def _remark(talk: Conversation, spoke: Spoke) -> str:
    if spoke.good is not None:
        rung = talk.source.ladder[sum(turn.good is not None for turn in talk.turns) - 1]
        return f"{_on_follow_up(spoke)} A strong answer: {rung.strong}".strip()
    if spoke.against:
        contrary = ", ".join(f"“{quote.text}”" for quote in spoke.against.values())
        return f"Are you sure? You said {contrary}."
    if spoke.made:
        many = len(spoke.made)
        return f"✓ {many} point{'s' if many > 1 else ''} made, by the words that are marked."
    return "I have not heard a point in that." if spoke.said.strip() else "Then let us leave that."


def _on_follow_up(spoke: Spoke) -> str:
    if spoke.good:
        return "✓ Yes."
    if spoke.answer:
        return f"✗ You said “{spoke.answer.text}”, and that is not so."
    return "✗ I did not hear it in that." if spoke.said.strip() else ""


def summary(talk: Conversation) -> list[str]:
    """The points of a question and the follow-ups that were asked, each with a mark and the words that made it, or why
    it counts."""
    lines = []
    for place, (letter, point) in enumerate(zip(ascii_lowercase, with_letters(talk.source.points), strict=False)):
        if place in talk.made:
            when = "" if place in talk.first else ", when asked"
            lines.append(f"✓ {point} You{when}: “{talk.made[place].text}”")
        elif letter in talk.overruled:
            lines.append(f"○ {point} You claim it: {talk.overruled[letter]}")
        elif letter in talk.given_back:
            lines.append(f"✗ {point} You gave it back: {talk.given_back[letter]}")
        elif place in talk.against:
            lines.append(f"✗ {point} You said the contrary: “{talk.against[place].text}”")
        else:
            lines.append(f"✗ {point}")
    for number, spoke in talk.follow_ups.items():
        asked = f"{number}) {spoke.asked}"
        if number in talk.overruled:
            lines.append(f"○ {asked} You claim it: {talk.overruled[number]}")
        elif number in talk.given_back:
            lines.append(f"✗ {asked} You gave it back: {talk.given_back[number]}")
        elif spoke.good and spoke.answer:
            lines.append(f"✓ {asked} You: “{spoke.answer.text}”")
        else:
            lines.append(f"✗ {asked}")
    return lines


def summary_html(talk: Conversation) -> str:
    """The same as HTML."""
    return "".join(f"<br>{escape(line)}" for line in summary(talk))


def verdict(talk: Conversation) -> str:
    """Whether it was a good answer, and what it takes."""
    total, made = len(talk.source.points), len(talk.source.points) - len(talk.missing)
    if talk.good:
        return f"✓ A good answer: {made} of {total} points."
    return f"✗ {made} of {total} points: a good answer makes {math.ceil(ENOUGH * total)}, with a) among them."


def lead(talk: Conversation) -> str:
    """What stands before the interviewer's next question."""
    return {Part.MISSING: "What is missing: ", Part.LADDER: "Next: "}.get(talk.part, "")
