"""`in_digits`: numbers as people write them, in digits that a reader of quantities knows: "13,5 GB" is "13.5 GB"."""

from __future__ import annotations

import re

SPELT = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|"
    "eighteen|nineteen"
)
TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
VALUES = {word: value for value, word in enumerate(SPELT.split("|"))}
VALUES |= {word: 10 * n for n, word in enumerate(TENS.split("|"), 2)}
SMALL = 12
"""A word alone up to here is left: "one GPU" and "the two of them" count things, and are no answer."""
_WORD = rf"(?:{'|'.join(sorted(VALUES, key=len, reverse=True))}|hundred)"
_SPELT = re.compile(rf"\b(?:a )?{_WORD}(?:(?:[ -]| and ){_WORD})*\b", re.IGNORECASE)
_POWERS = dict(thousand="e3", million="e6", billion="e9", trillion="e12")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SECONDS = {"h": 3600, "m": 60, "s": 1}
_N = r"\d+(?:\.\d+)?"
_UNIT = r"(?:(?:giga|mega|kilo|tera|gibi|mebi)?bytes?|(?:milli)?seconds?|minutes?|hours?)"


def _power(found: re.Match[str]) -> str:
    return f"e{found[1].translate(_SUPERSCRIPTS)}"


_CHANGES = tuple(
    (re.compile(pattern, re.IGNORECASE), new)
    for pattern, new in (
        (r"\*\*|`|(?<!\w)_(?=\d)", ""),  # Markdown
        (r"(?<![\d.,])(\d{1,3}(?:[ \u00a0\u202f'\u2019]\d{3})+)(?![\d.,]?\d)", lambda m: re.sub(r"\D", "", m[1])),
        (r"(?<![\d,.])(0,\d+|\d+,\d{1,2})(?![\d,])", lambda m: m[1].replace(",", ".")),
        (r"(?<=\d)\s*[x\u00d7*\u00b7]\s*10\s*(?:\^|\*\*)?\s*(-?\d+|[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)\b", _power),
        (rf"\b({_N}) and a half\b", lambda m: f"{float(m[1]) + 0.5:g}"),
        (r"(?<![\d/.,])(\d+) ([1-9])/([2-9])(?![\d/])", lambda m: f"{int(m[1]) + int(m[2]) / int(m[3]):g}"),
        (rf"\b(?:an?|one) ({_UNIT}) and a half\b", r"1.5 \1"),
        (rf"\bhalf (?:an? |of an? )?(?={_UNIT}\b)", "0.5 "),
        (rf"\b(?:a )?quarter (?:of )?(?:an? )?(?={_UNIT}\b)", "0.25 "),
        (rf"^(\W*(?:about |roughly |around )?)an? (?={_UNIT}\b)", r"\g<1>1 "),
        (rf"\b({_N})\s*(h|m)(?:ours?|in(?:ute)?s?)?,?\s*(?:and )?({_N})\s*(m|s)(?:in(?:ute)?s?|ec(?:ond)?s?)?\b",
         lambda m: f"{float(m[1]) * _SECONDS[m[2].lower()] + float(m[3]) * _SECONDS[m[4].lower()]:g} s"),
        (r"\b(\d[\d,]*(?:\.\d+)?) (thousand|million|billion|trillion) (?=bytes?\b|flops?\b)",
         lambda m: f"{m[1]}{_POWERS[m[2].lower()]} "),
        (r"(?<=\w)[- ]?ish\b", ""),
        (r"\b(giga|mega|kilo|tera|milli|micro) (?=bytes?\b|seconds?\b|flops?\b)", r"\1"),
        (r"\s*/\s*(?=(?:gpu|rank|card|device|node|process|step|layer|block|unit|micro-?batch)(?:e?s)?\b)", " per "),
    )
)  # fmt: skip


def in_digits(text: str) -> str:
    """The text with its numbers in digits, grouped by commas or not at all, with a point before their decimals.

    Example:
        >>> in_digits("13,5 GB"), in_digits("13 000 MB"), in_digits("1.3 x 10^10 bytes"), in_digits("13 GB/GPU")
        ('13.5 GB', '13000 MB', '1.3e10 bytes', '13 GB per GPU')
        >>> in_digits("twenty-six gigabytes"), in_digits("2 min 30 s"), in_digits("8,192 tokens on one GPU")
        ('26 gigabytes', '150 s', '8,192 tokens on one GPU')
    """
    text = _SPELT.sub(_spelt, text)
    for pattern, new in _CHANGES:
        text = pattern.sub(new, text)
    return text


def _spelt(found: re.Match[str]) -> str:
    """The value of number words; where they are no one number, or a small one alone, as they stand."""
    words = [word for word in re.split(r"[ -]+", found[0].lower()) if word not in ("a", "and")]
    value, room = 0, 10**4
    for word in words:
        if word == "hundred":
            value, room = 100 * max(value, 1), 100
        elif VALUES[word] >= room:
            return found[0]
        else:
            value += VALUES[word]
            room = 10 if VALUES[word] >= 20 else 0
    alone = len(words) == 1 and words[0] != "hundred" and value <= SMALL
    joined = " and " in found[0].lower() and "hundred" not in words
    return found[0] if alone or joined else str(value)
