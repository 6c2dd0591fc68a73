"""What the cells of a notebook show: code with what it printed, figures, tables, what people say, exercises."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from html import escape

import nbformat

from fsdp_sim.learn.classroom import expect
from fsdp_sim.learn.find import load
from fsdp_sim.learn.verdict import WORDS, Grade
from notebooks.masters.slides import figures, words
from notebooks.masters.slides.deck import HEIGHT_PX, Slide

MOST_CODE_LINES, MOST_OUTPUT_LINES, MOST_ROWS, MOST_STATEMENTS = 14, 14, 11, 6
LONGEST_LINE, LONGEST_OUTPUT_LINE, LONGEST_TITLE = 96, 260, 128  # characters
LINE = 64
"""Characters of a headline in one line."""
ROOM_ABOVE_PX = {1: 176, 2: 232, 3: 256}
"""What a headline of so many lines, with all around a figure, takes of a slide."""
VERBS = ("run", "simulate", "Plan", "Cluster", "fully_shard", "diagnose", "record", "torchrun")
"""What makes a line of code worth a look, beside what defines something: the verbs of the course."""
CLEARED = ("board(", "clock", "predict(", "interview = mock(")  # what belongs to the one who sits at the notebook
WHOSE = re.compile(r"<(your|reference) (\w+)>")
"""How a checked function says whose it is."""


def shown(cell: nbformat.NotebookNode, heading: str, *, as_it_is: bool = False) -> Iterator[Slide]:
    """The slides of a code cell.

    Args:
        heading: of its section, as HTML: for what has no headline of its own.
        as_it_is: its code is shown whatever it prints.
    """
    if "exercise" in cell.metadata:
        yield exercise(cell.metadata["exercise"])
        return
    if "check" in cell.metadata.get("tags", ()) or cell.source.startswith(CLEARED):
        return  # the choices of a question stand on its own slide
    draws = any(figures.MIME in output.get("data", {}) for output in cell.outputs)
    code = cell.source if as_it_is else "" if draws else telling(cell.source)
    text = WHOSE.sub(r"\1 \2", words.of_dicts("".join(map(printed, cell.outputs)).strip("\n")))
    if text or as_it_is:
        body = words.code(code) if code else ""
        yield Slide("output", heading, body + (words.preformatted(cut(text), "printed") if text else ""))
    for before, output in itertools.pairwise([{}, *cell.outputs]):
        data = output.get("data", {})
        if figures.MIME in data:
            yield figure(data, heading)
        elif "text/html" in data and figures.MIME not in before.get("data", {}):  # those are a figure's own words
            yield from of_html(data["text/html"], heading)


def printed(output: nbformat.NotebookNode) -> str:
    """What an output says in plain text, if that is all it has."""
    data = output.get("data", {})
    text = str(output.get("text") or data.get("text/plain", ""))
    unsolved = text.startswith(("Not yet", WORDS[Grade.NOT_YET]))  # said to the stub of the saved notebook
    timed = text.startswith("Right after ")  # said by a clock that ran while the notebook was made
    return "" if output.get("name") == "stderr" or data.keys() - {"text/plain"} or unsolved or timed else text


def figure(data: dict[str, object], heading: str) -> Slide:
    """A figure on a slide of its own; its title is the headline."""
    content = dict(data[figures.MIME])  # type: ignore[call-overload]
    said = str(data.get("text/plain", ""))
    title = figures.headline(content)
    above = shortened(title)
    room_px = HEIGHT_PX - ROOM_ABOVE_PX[number_of_lines(above)]
    alt = said if title in said else f"{title} {said}"
    notes = (f"What it shows: {said}",) if said else ()
    drawn = figures.for_slide(content, room_px)
    return Slide("figure", escape(above, quote=False) or heading, figure=drawn, alt=" ".join(alt.split()), notes=notes)


def shortened(title: str) -> str:
    """A title without its explanation after a colon, where it is long; a list of several stays whole."""
    if len(title) <= LONGEST_TITLE or ";" in title:
        return title
    ends = [found.start() for found in re.finditer(r"[.:] ", title)]
    balanced = [end for end in ends if end >= LONGEST_TITLE // 3 and title[:end].count("“") == title[:end].count("”")]
    return title[: balanced[0]] if balanced else title


def number_of_lines(title: str) -> int:
    """How many lines a headline over a figure takes; in three lines its type is smaller."""
    return 1 if len(title) <= LINE else 2 if len(title) <= 2 * LINE else 3


def of_html(markup: str, heading: str) -> Iterator[Slide]:
    """A table, statements of which each is wrong, or a card; anything else is for the one at the notebook."""
    if "In truth:" in markup:
        yield statements(markup)
        return
    if markup.startswith("<div") and "<table" not in markup:
        yield card(markup, heading)
        return
    if "github.com/pytorch" in markup:  # where torch has the same: to follow, not to look at
        return
    for table in re.findall(r"<table.*?</table>", markup, re.DOTALL):
        caption = re.search(r"<caption>(.*?)</caption>", table, re.DOTALL)
        table = re.sub(r"<caption>.*?</caption>", "", table, flags=re.DOTALL)
        rows = re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
        for row in rows[MOST_ROWS + 1 :]:
            table = table.replace(row, "", 1)
        more = len(rows) - 1 - MOST_ROWS
        below = f'<p class="more">and {more} more in the notebook</p>' if more > 0 else ""
        yield Slide("table", caption[1] if caption else heading, f'<div class="fit">{table}{below}</div>')


def statements(markup: str) -> Slide:
    """What people say, as a list; the notes have what is true."""
    found = re.findall(r"<summary[^>]*>(“.*?”)</summary>.*?<b>In truth:</b>(.*?)</p>", markup, re.DOTALL)
    some = found[:MOST_STATEMENTS]
    items = "".join(f"<li>{statement}</li>" for statement, _ in some)
    notes = [f"{words.plain(statement)} In truth: {words.plain(truth)}" for statement, truth in some]
    left = f"The notebook has {len(found) - len(some)} more." if len(found) > len(some) else ""
    return Slide(
        "text", "What is wrong with each of these?", f'<ul class="statements fit">{items}</ul>',
        notes=tuple(text for text in (*notes, left) if text),
    )  # fmt: skip


def card(markup: str, heading: str) -> Slide:
    """A question of a drill, or what is said to an answer; what is folded in it is in the notes."""
    open_part, _, folded = markup.partition("<details")
    body = re.sub(r' style="[^"]*"', "", open_part)
    hidden = words.plain(f"<details{folded}") if folded else ""
    return Slide("text", heading, f'<div class="card fit">{body}</div>', notes=(hidden,) if hidden else ())


def exercise(name: str) -> Slide:
    """An exercise: what is to be done; the notes have what goes wrong, and the sentence that helps."""
    found = load(name)
    by_hand = expect.notes().get(found.chapter)
    helps = by_hand.sentence_for(name) if by_hand else ""
    notes = [f"`{name}`: {found.kind.value}, difficulty {found.difficulty} of 5, {found.minutes} minutes."]
    notes += [f"What usually helps: {helps}"] if helps else []
    wrong = [
        f"- {who or 'another'}: {expect.whole_message(found, answer.message)}"
        for answer, who in zip(found.wrong, expect.who(found.wrong, found), strict=True)
    ]
    notes += ["Common wrong answers, and what each is told:", "\n".join(wrong)]
    notes += [f'Who is stuck asks for hint("{name}"): there are three, from the concept to almost the code.']
    targets = f"<p><b>Targets.</b> {words.inline(found.targets)}</p>" if found.targets else ""
    body = f'<div class="fit">{words.html(found.contract)}{targets}</div>'
    return Slide("exercise", words.inline(found.title), body, f"Your turn: {found.minutes} minutes", notes=tuple(notes))


def telling(source: str) -> str:
    """What of a cell's code is worth seeing: no imports, no checks, no prints; nothing if it is long all the same."""
    lines = source.splitlines()
    statements = ast.parse("\n".join("" if line.startswith(("!", "%")) else line for line in lines)).body
    kept = [node for node in statements if not _is_plumbing(node)]
    texts = []
    for node, after in itertools.zip_longest(kept, kept[1:]):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        texts.append("\n".join(lines[first - 1 : node.end_lineno]))
        gap = after is not None and after.lineno - (node.end_lineno or 0) > 1
        texts += [""] if gap else []
    code = re.sub(r"  # (noqa|fmt|type).*$", "", "\n".join(texts), flags=re.MULTILINE).strip("\n")
    works = any(isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.With, ast.For)) for node in kept)
    works = works or any(name in VERBS for node in kept for name in _called(node))
    lines = code.splitlines()
    return code if works and len(lines) <= MOST_CODE_LINES and max(map(len, lines)) <= LONGEST_LINE else ""


def _is_plumbing(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert)):
        return True
    if isinstance(node, ast.Assign) and ast.unparse(node.value) in ("{}", "[]"):
        return True
    return "print" in _called(node) and not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.With))


def _called(node: ast.stmt) -> list[str]:
    return [n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]


def cut(text: str) -> str:
    """The first lines of what was printed."""
    lines = [_cut_line(line.rstrip()) for line in text.splitlines()]
    return "\n".join([*lines[:MOST_OUTPUT_LINES], *(["..."] if len(lines) > MOST_OUTPUT_LINES else [])])


def _cut_line(line: str) -> str:
    """A line, or of a long one whole sentences, or else whole words."""
    if len(line) <= LONGEST_OUTPUT_LINE:
        return line
    fits = line[:LONGEST_OUTPUT_LINE]
    end = max(fits.rfind(". "), fits.rfind("; "))
    return f"{fits[:end]}." if end > LONGEST_OUTPUT_LINE / 2 else f"{fits.rpartition(' ')[0]} ..."
