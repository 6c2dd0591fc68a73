"""`number_in`: what an answer comes to where somebody reckons aloud: "2 x 134, so 268 MB, because ..."."""

from __future__ import annotations

import math
import re

from fsdp_sim.learn.corrected import NUMBER, corrected
from fsdp_sim.learn.numerals import in_digits
from fsdp_sim.learn.quantity import READ, SCALES, in_unit, written

WORDS = dict(zero=0, one=1, two=2, three=3, four=4, five=5, six=6, seven=7, eight=8, nine=9, ten=10, twelve=12)
REASON = re.compile(r"[:(]|\b(?:because|since|given|assuming|where|as (?:the|there|each|it))\b", re.IGNORECASE)
CONCLUDES = re.compile(
    r"(?:=|\u2248|~|\bi\.e\.|\b(?:so|thus|therefore|hence|is|are|it'?s|that'?s|makes?|means|gives?|gets?|got|equals?|"
    r"comes? to|ends? up (?:at|with)|total(?: of)?|in all|altogether|answer|say|call it|about|around|roughly|almost|"
    r"approximately|nearly|just|only|still|at most|at least|has|have|needs?|takes?|holds?|keeps?|leaves?))"
    r"[\s:,]*(?:the|a|an)?\s*$",
    re.IGNORECASE,
)
"""What stands before the number that an answer comes to."""
UNFINISHED = re.compile(
    r"\d[\d.,]*(?:e\d+)? ?[a-z/]*\s*(?:[*/x\u00d7\u00f7]| [-+] |times|divided by|plus|minus)\s*\d[\d.,]* ?[a-z/]*\W*",
    re.IGNORECASE,
)
"""A sum that says not what it comes to."""
NEAR, LONGEST = 0.05, 2000
DENIES = re.compile(r"(?:\bnot|n't|\bnever)(?: (?:about|be|really))?\s*$", re.IGNORECASE)
JOINS = re.compile(r"(?:\bor|\bto|[-\u2013])\s*$|^\s*and\s*$", re.IGNORECASE)


def number_in(typed: str, unit: str) -> tuple[float, str]:
    """The quantity of an answer, and the words that were taken for it; these are empty where they are all of it.

    Raises:
        ValueError: there is none, it has no unit, or several could be meant; says what to type.
    """
    typed = typed.strip()
    if len(typed) > LONGEST:
        raise ValueError(f"that is long, with {len(typed):,} characters: say the number, such as {_such(unit)}")
    text = corrected(in_digits(typed))
    if UNFINISHED.fullmatch(text.strip()):
        raise ValueError(f"say what that comes to, such as {_such(unit)}")
    if not re.search(r"\d", text):
        text = re.sub(r"\b[a-z]+\b", lambda word: str(WORDS.get(word[0].lower(), word[0])), text, flags=re.IGNORECASE)
    reckoned = REASON.split(text)[0]
    said = reckoned if NUMBER.search(reckoned) else text
    numbers = list(NUMBER.finditer(said))
    may_be, why = _candidates(said, numbers, unit)
    last = max(may_be, default=0)
    concluded = bool(CONCLUDES.search(said[:last]))
    try:
        whole = float(in_unit(text, unit))
        if len(may_be) < 2 or not (concluded or unit in SCALES) or math.isclose(whole, may_be[last], rel_tol=NEAR):
            return whole, "" if text == typed else text
    except ValueError as error:
        if list(may_be) == [0]:
            return may_be[0], _words(said)
        if not numbers:
            raise ValueError(f"I hear no number in that; answer with one, such as {_such(unit)}") from None
        if len(numbers) == 1 and not numbers[0].start():
            raise
        if not may_be:
            raise ValueError(f"I hear no answer in that: {why or error}") from None
    heard = _words(said[last:])
    if DENIES.search(said[:last]):
        raise ValueError(f"I hear what it is not, {heard}: say what it is")
    before = max((number for number in numbers if number.start() < last), key=lambda n: n.start(), default=None)
    if before and JOINS.search(said[before.end() : last]):
        many = f"{said[before.start() : last]}{heard}"
        raise ValueError(f"I hear more than one number, {many}; name one, for near is near enough")
    if not (concluded or (len(may_be) == 1 and (unit in SCALES or len(numbers) == 1))):
        raise ValueError(f"I hear several numbers, and not which is the answer; end with it, as in: so {_such(unit)}")
    return may_be[last], heard


def _candidates(text: str, numbers: list[re.Match[str]], unit: str) -> tuple[dict[int, float], str]:
    """The numbers that can be read in the unit, by their places, and why another one cannot."""
    may_be, why = {}, ""
    for number in numbers:
        try:
            may_be[number.start()] = float(in_unit(text[number.start() : number.start() + READ], unit))
        except ValueError as error:
            why = str(error)
    return may_be, why


def _such(unit: str) -> str:
    return written(1.5e9, unit) if unit.startswith("bytes") else written(12, unit)


def _words(text: str) -> str:
    """A quantity's own words, without what follows it."""
    ends = r"[,;:(?!](?!\d)|\.(?!\d)|\b(?:and|plus|per|for|with|on|in|of|if|when|each|i think|i guess|or so)\b"
    return re.split(ends, text, flags=re.IGNORECASE)[0].strip()
