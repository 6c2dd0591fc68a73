"""What was heard, shown: an answer with the words that counted underlined, and a question's points with their marks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from fsdp_sim.learn.drill.listening import Quote
from fsdp_sim.learn.drill.listening.follow import Conversation, Part, Spoke
from fsdp_sim.learn.drill.question import with_letters

HOLD = "To overrule the listener type a letter and why, such as: c I said that it is dropped. Enter goes on."


def marked(said: str, quotes: Iterable[Quote], mark: Callable[[str], str], plain: Callable[[str], str] = str) -> str:
    """A text with its quotes marked; where two overlap, as one."""
    parts, last = [], 0
    for start, end in _merged(sorted((quote.start, quote.end) for quote in quotes)):
        parts += [plain(said[last:start]), mark(said[start:end])]
        last = end
    return "".join([*parts, plain(said[last:])])


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
    return "I have not heard a point in that."


def _on_follow_up(spoke: Spoke) -> str:
    if spoke.good:
        return "✓ Yes."
    if spoke.answer:
        return f"✗ You said “{spoke.answer.text}”, and that is not so."
    return "✗ I did not hear it in that." if spoke.said.strip() else ""


def summary(talk: Conversation) -> list[str]:
    """The points of a question, each with a mark and the words that made it, or why it counts."""
    lines = []
    for place, point in enumerate(with_letters(talk.source.points)):
        if place in talk.made:
            when = "" if place in talk.first else ", when asked"
            lines.append(f"✓ {point} You{when}: “{talk.made[place].text}”")
        elif place in talk.overruled:
            lines.append(f"○ {point} You claim it: {talk.overruled[place]}")
        elif place in talk.against:
            lines.append(f"✗ {point} You said the contrary: “{talk.against[place].text}”")
        else:
            lines.append(f"✗ {point}")
    return lines


def summary_html(talk: Conversation) -> str:
    """The same as HTML."""
    return "".join(f"<br>{escape(line)}" for line in summary(talk))


def lead(talk: Conversation) -> str:
    """What stands before the interviewer's next question."""
    return {Part.MISSING: "What is missing: ", Part.LADDER: "Next: "}.get(talk.part, "")
