"""``fsdp-sim drill``: interview questions in the terminal, one after another or as a mock interview."""

from __future__ import annotations

import textwrap
import time
from collections import Counter

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdp_sim.cli.options import print_json
from fsdp_sim.learn.drill import record
from fsdp_sim.learn.drill.interview import SKIP, STOP, Interview, InterviewTurn, Source
from fsdp_sim.learn.drill.question import UnreadableError, with_letters
from fsdp_sim.learn.drill.report import InterviewReport
from fsdp_sim.learn.drill.spoken import VERDICTS, SpokenQuestion, spoken
from fsdp_sim.learn.drill.template import LEVELS, TOPICS, templates

WIDTH = 100
HELP = "Type your answer; ? if you do not know; q to stop."


@click.group(
    invoke_without_command=True, epilog="Exit status: 0, also when you stop early; 2 for what was asked wrongly."
)
@click.option("--topic", "topics", multiple=True, type=click.Choice(TOPICS), help="Only this topic; may be repeated.")
@click.option("--level", type=click.IntRange(LEVELS[0], LEVELS[-1]), default=1, help="Of the first question, 1 to 3.")
@click.option("--questions", type=click.IntRange(1), default=10, show_default=True, help="How many.")
@click.option("--seed", type=int, help="The same questions with the same numbers.")
@click.pass_context
def drill(context: click.Context, topics: tuple[str, ...], level: int, questions: int, seed: int | None) -> None:
    """Answer interview questions; the numbers are drawn anew, and what you missed comes back.

    \b
    Examples:
      fsdp-sim drill
      fsdp-sim drill --topic memory --topic overlap --questions 5
      fsdp-sim drill mock
      fsdp-sim drill sheet > sheet.md
      fsdp-sim drill list
    """
    if context.invoked_subcommand is None:
        asked = topics or TOPICS
        _hold(Interview(questions=questions, topics=asked, level=level, with_spoken=False, due_first=True, seed=seed))


@drill.command()
@click.option("--minutes", type=click.FloatRange(1, 240), default=30, show_default=True)
@click.option("--seed", type=int, help="The same questions with the same numbers.")
def mock(minutes: float, seed: int | None) -> None:
    """Hold a mock interview: all topics, harder when you are right, some questions to be answered aloud."""
    click.echo(f"{minutes:g} minutes, all topics. Some questions you answer aloud; then you say which points you made.")
    _hold(Interview(limit_s=60 * minutes, seed=seed))


@drill.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def list_(as_json: bool) -> None:
    """List the questions and count them by topic."""
    found, aloud = list(templates().values()), list(spoken().values())
    every: list[Source] = [*found, *aloud]
    if as_json:
        entries = [{"name": t.name, "topic": t.topic, "level": t.level, "section": t.section} for t in every]
        print_json("drill list", {"templates": len(found), "spoken": len(aloud), "list": entries})
        return
    console = Console()
    listed = Table("question", "topic", "level", "seconds", "section")
    for source in every:
        name = f"{source.name} (aloud)" if isinstance(source, SpokenQuestion) else source.name
        listed.add_row(escape(name), source.topic, "●" * source.level, str(source.seconds), source.section)
    counted = Table("topic", "templates", "aloud")
    by, by_aloud = Counter(t.topic for t in found), Counter(t.topic for t in aloud)
    for topic in TOPICS:
        counted.add_row(topic, str(by[topic]), str(by_aloud[topic]))
    counted.add_section()
    counted.add_row("all", str(len(found)), str(len(aloud)))
    console.print(listed, counted)


@drill.command()
@click.option("--html", is_flag=True, help="A page to print instead of Markdown.")
def sheet(html: bool) -> None:
    """Print the cheat sheet of one page, made of the rules behind the questions."""
    from fsdp_sim.learn.drill.sheet import as_html, as_markdown

    click.echo(as_html() if html else as_markdown())


@drill.command()
def due() -> None:
    """Say what was asked so far and when it comes again."""
    kept = record.read()
    if not kept:
        click.echo("Nothing was asked yet: fsdp-sim drill")
        return
    table = Table("question", "right", "comes again")
    for name, asked in sorted(kept.items(), key=lambda item: item[1].due):
        table.add_row(
            escape(name), f"{asked.right} of {asked.times}", asked.due.astimezone().strftime("%Y-%m-%d %H:%M")
        )
    Console().print(table)


def _hold(interview: Interview) -> None:
    """Ask until the time, the questions or the patience is used up, then report."""
    click.echo(HELP)
    try:
        while (turn := interview.ask()) is not None and _one(interview, turn):
            pass
    except (click.Abort, EOFError, KeyboardInterrupt):
        click.echo()
    click.echo(f"\n{InterviewReport(tuple(interview.results))}")
    for trouble in dict.fromkeys(result.trouble for result in interview.results if result.trouble):
        click.echo(trouble, err=True)


def _one(interview: Interview, turn: InterviewTurn) -> bool:
    """One question and its answer; False where one wants to stop."""
    source = turn.source
    click.secho(
        f"\n{turn.number}. {source.topic}, level {source.level}, {source.seconds} s{interview.time_left}", bold=True
    )
    click.echo(_filled(turn.text))
    return _aloud(interview, turn, turn.source) if isinstance(turn.source, SpokenQuestion) else _typed(interview, turn)


def _typed(interview: Interview, turn: InterviewTurn) -> bool:
    question = turn.question
    for option in question.lettered if question else ():
        click.echo(_filled(option, "  "))
    while True:
        typed = click.prompt(">", prompt_suffix=" ", default="", show_default=False).strip()
        if typed.lower() in STOP:
            return False
        if typed.lower() in SKIP and question is not None:
            interview.skip()
            click.echo(_filled(f"It is {question.expected}. {question.why}"))
            return True
        try:
            reply = interview.answer(typed)
        except UnreadableError as error:
            click.echo(f"{error}. Asked for is {question.how if question else ''}.")
            continue
        click.secho(_filled(str(reply)), fg="green" if reply.right else "red")
        if not reply.right:
            click.echo(f"   {interview.results[-1].read}")
        return True


def _aloud(interview: Interview, turn: InterviewTurn, source: SpokenQuestion) -> bool:
    since_s = time.monotonic()
    typed = click.prompt("Say it aloud, then press Enter (? or q)", prompt_suffix=" ", default="", show_default=False)
    answer = typed.strip().lower()
    if answer in STOP:
        return False
    click.echo(f"{time.monotonic() - since_s:.0f} s. A strong answer says:")
    for point in with_letters(source.points):
        click.echo(_filled(point, "  "))
    if number := source.example(turn.seed):
        click.echo(_filled(number, "  the number: "))
    if answer in SKIP:
        interview.skip()
    while interview.turn is not None:
        typed = click.prompt(
            "Which did you say? Letters, or Enter for none", prompt_suffix=" ", default="", show_default=False
        )
        if typed.strip().lower() in STOP:
            return False
        try:
            good = interview.made(typed)
        except UnreadableError as error:
            click.echo(f"{error}.")
            continue
        click.secho(VERDICTS[good], fg="green" if good else "red")
    click.echo("What comes next in an interview:")
    for step in source.ladder:
        click.echo(_filled(step.question, "  - "))
        click.echo(_filled(step.strong, "      "))
    return True


def _filled(text: str, lead: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))
