"""`corrected`: what a speaker meant who took a number back: "13, no, 26 GB" is 26 GB, "not 13 but 26 GB" too."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from fsdp_sim.learn.quantity import COUNT, SCALES, SPOKEN

NUMBER = re.compile(
    r"(?<![\w.,/*^])[~\u2248]?[-+]?(?:\d+(?:[,_]\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?!\d)|"
    r"(?:two|three|four|five|six|seven|eight|nine|ten|twelve)\b)",
    re.IGNORECASE,
)
PAUSE = r"[\s,.:;?!\u2026\u2013\u2014-]"
FILLER = (
    r"(?:(?:(?:it|that|which|the answer)(?:'?s| is| was| should be| would be| must be)|about|around|roughly|more like|"
    r"closer to|i think|i'd say|let'?s say|let me (?:see|think)|you know|uh+|um+|er+|h+m+|well|then|again|to)\b"
    rf"{PAUSE}*)*"
)
MARK = (
    r"(?:(?:or rather|rather|no+|nope|sorry|i meant?(?: to say)?|make (?:that|it)|correction|actually|scratch that|"
    r"strike that|i misspoke|i was wrong|pardon(?: me)?|excuse me|oops|my (?:mistake|bad)|(?:that|this)(?:'s| is| was) "
    r"(?:not right|wrong)|not quite|wrong|wait(?: a (?:second|moment|minute))?|hold on|hang on|let me correct "
    rf"(?:that|myself)|correct (?:that|it) to|instead)\b{PAUSE}*{FILLER})+"
)
TAKES_BACK = re.compile(rf"(?P<rest>.*?)(?P<gap>(?:(?<!\w)|{PAUSE}+)){FILLER}{MARK}$", re.IGNORECASE | re.DOTALL)
PUTS_RIGHT = re.compile(
    rf"(?P<rest>.*?)(?P<gap>{PAUSE}+)(?:but{PAUSE}*|(?<=[,.;:\u2013\u2014-] ))(?:{MARK}|{FILLER})$",
    re.IGNORECASE | re.DOTALL,
)
"""After "not 13": what comes before the number that is put in its place."""
BEGINS = re.compile(rf"\s*{FILLER}{MARK}(?={NUMBER.pattern})", re.IGNORECASE)
"""An answer that begins with what takes the one before it back: "sorry, make that 26 GB"."""
FAR, LONGEST = 60, 6000
"""Characters between a number and the one that replaces it, and of a text that is looked at."""
JOINS = re.compile(
    r"\b(?:and|but|is|are|was|has|have|with|of|which|then|plus|times|over|by|for|per)\s*$", re.IGNORECASE
)
OF = re.compile(r"\s*(?:%\s*)?of (?:them|those|these|that|it|which)\b", re.IGNORECASE)
PLAIN = re.compile(
    "per|each|every|a|an|on|in|of|for|because|since|as|so|if|when|with|at|by|from|that|which|to|total|and|or|is"
)
"""Words behind a number that name nothing it could be a number of."""


def corrections(text: str) -> Iterator[tuple[int, int, str]]:
    """Where a text takes a number back, up to the number that replaces it, and what was meant in place of both."""
    for old, new in itertools.pairwise(NUMBER.finditer(text)):
        between, denied = text[old.end() : new.start()], re.search(r"\bnot\s+$", text[: old.start()])
        named = re.search(r"[\w-]+\s+$", text[: old.start()])
        if named and between.lower().endswith(f" {named[0].lower()}"):  # "micro-batch 1, no, micro-batch 2"
            between = between[: -len(named[0])]
        if len(between) > FAR or not (found := (PUTS_RIGHT if denied else TAKES_BACK).match(between)):
            continue
        after = text[new.end() :]
        was, now = _kind(found["rest"]), _kind(after)
        if (
            (was and now and was != now)
            or OF.match(after)
            or (not found["gap"].strip() and JOINS.search(found["rest"]))
        ):
            continue
        carried = found["rest"].rstrip() if now is None else ""
        yield denied.start() if denied else old.start(), new.end(), new.group() + carried


def corrected(text: str) -> str:
    """The text as it was meant.

    Example:
        >>> corrected("13, no, 26 GB"), corrected("13 GB per GPU... wait, 26"), corrected("it is not 13 but 26 GB")
        ('26 GB', '26 GB per GPU', 'it is 26 GB')
        >>> corrected("micro-batch 1, no, make that micro-batch 2")
        'micro-batch 2'
        >>> corrected("16 bytes, no two ranks keep the same"), corrected("not 13 GB")
        ('16 bytes, no two ranks keep the same', 'not 13 GB')
    """
    if len(text) > LONGEST:
        return text
    if begun := BEGINS.match(text[:FAR]):
        text = text[begun.end() :]
    while found := next(corrections(text), None):
        start, end, meant = found
        text = text[:start] + meant + text[end:]
    return text


def _kind(rest: str) -> str | None:
    """Of what the words behind a number say it is: a dimension, or the name of a thing; empty of "million", None if of
    nothing."""
    word = re.match(r"[\s-]*([a-z%\u00b5]+(?:/s)?)", rest, re.IGNORECASE)
    if not word or PLAIN.fullmatch(word[1].lower()):
        return None
    said, low = word[1], word[1].lower()
    for unit, scales in SCALES.items():
        if said in scales or low in SPOKEN.get(unit, {}) or low.rstrip("s") in SPOKEN.get(unit, {}):
            return unit
    return "" if said in COUNT or low in SPOKEN[""] else low.rstrip("s")
