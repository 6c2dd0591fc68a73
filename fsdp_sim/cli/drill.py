"""``fsdp-sim drill``: interview questions in the terminal, one after another or as a mock interview."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdp_sim.cli.options import print_json, schema_option
from fsdp_sim.learn.drill import record
from fsdp_sim.learn.drill.design import Design, designs
from fsdp_sim.learn.drill.design_answer import DesignAnswer
from fsdp_sim.learn.drill.heard import HOLD, KEPT, lead, marked, remark, summary, verdict
from fsdp_sim.learn.drill.interview import SKIP, STOP, Interview, InterviewTurn, Source
from fsdp_sim.learn.drill.listening.endpoint import endpoint
from fsdp_sim.learn.drill.listening.follow import Conversation, Part
from fsdp_sim.learn.drill.question import UnreadableError
from fsdp_sim.learn.drill.report import InterviewReport
from fsdp_sim.learn.drill.spoken import SpokenQuestion, spoken
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
      fsdp-sim drill design dense_70b
      fsdp-sim drill sheet > sheet.md
      fsdp-sim drill list
    """
    if context.invoked_subcommand is None:
        asked = topics or TOPICS
        _hold(Interview(questions=questions, topics=asked, level=level, with_spoken=False, due_first=True, seed=seed))


@drill.command()
@click.option("--minutes", type=click.FloatRange(1, 240), default=30, show_default=True)
@click.option("--seed", type=int, help="The same questions with the same numbers.")
@click.option("--page", type=click.Path(dir_okay=False, writable=True), help="Write the report as a page, too.")
@click.option("--design", "last", type=click.Choice(list(designs())), help="End with an open design question.")
@click.option("--endpoint", "url", metavar="URL", help="A model of your own that listens too; off by default.")
def mock(minutes: float, seed: int | None, page: str | None, last: str | None, url: str | None) -> None:
    """Hold a mock interview: all topics, harder when you are right; to some questions you talk, and it listens.

    \b
    Examples:
      fsdp-sim drill mock --minutes 20
      fsdp-sim drill mock --minutes 20 --design dense_70b --page report.html
    """
    click.echo(f"{minutes:g} minutes, all topics. To some questions you talk: type as you would speak.")
    try:
        listener = endpoint(url or "")
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if listener:
        click.echo(_filled(listener.notice))
    report = _hold(Interview(limit_s=60 * minutes, seed=seed, endpoint=listener), last)
    if page:
        Path(page).write_text(report.page(), encoding="utf-8")
        click.echo(f"The report is in {page}.")


@drill.command()
@click.argument("name", type=click.Choice(list(designs())), default=next(iter(designs())))
@click.option("--page", type=click.Path(dir_okay=False, writable=True), help="Write the review and the step as a page.")
def design(name: str, page: str | None) -> None:
    """Answer an open design question; the simulator judges the numbers of your own plan."""
    answer = _designed(name)
    if page and answer:
        shown = DesignAnswer(answer)
        from fsdp_sim import viz

        try:
            section = viz.Section.of(shown.picture(), "Your step", "\n\n".join(answer.review()))
        except ValueError as error:
            raise click.ClickException(f"no page: {error}") from error
        viz.save_html(page, [section], title=answer.question.question)
        click.echo(f"The step of your plan is in {page}.")


@drill.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@schema_option("drill list")
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
    """Print the cheat sheet, two sides of A4, made of the rules behind the questions."""
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


def _designed(name: str) -> Design | None:
    """Ask an open design question, and say how the simulator judges the answer; None where there was none."""
    answer = Design(designs()[name])
    try:
        while answer.asks:
            click.echo(_filled(answer.asks))
            said = _prompt()
            if said.lower() in STOP:
                return None
            if said or answer.texts:
                answer.say("" if said in SKIP else said)
    except (click.Abort, EOFError, KeyboardInterrupt):
        click.echo()
        if not answer.texts:
            return None
    for line in answer.review():
        click.secho(_filled(line, "  "), fg={"✓": "green", "✗": "red"}.get(line[0]))
    return answer


def _hold(interview: Interview, last: str | None = None) -> InterviewReport:
    """Ask until the time, the questions or the patience is used up, then the open design question, if there is one to
    be last; then report."""
    click.echo(HELP)
    try:
        while (turn := interview.ask()) is not None and _one(interview, turn):
            pass
    except (click.Abort, EOFError, KeyboardInterrupt):
        click.echo()
    if last:
        click.secho("\nTo end with, an open question (q leaves it out):", bold=True)
    report = InterviewReport(tuple(interview.results), _designed(last) if last else None)
    click.echo(f"\n{report}")
    for trouble in dict.fromkeys(result.trouble for result in interview.results if result.trouble):
        click.echo(trouble, err=True)
    return report


def _one(interview: Interview, turn: InterviewTurn) -> bool:
    """One question and its answer; False where one wants to stop."""
    source = turn.source
    click.secho(
        f"\n{turn.number}. {source.topic}, level {source.level}, {source.seconds} s{interview.time_left}", bold=True
    )
    click.echo(_filled(turn.text))
    return _aloud(interview, turn, turn.talk) if turn.talk else _typed(interview, turn)


def _typed(interview: Interview, turn: InterviewTurn) -> bool:
    question = turn.question
    for option in question.lettered if question else ():
        click.echo(_filled(option, "  "))
    while True:
        typed = _prompt()
        if typed.lower() in STOP:
            return False
        if typed.lower() in SKIP and question is not None:
            interview.skip()
            click.echo(_filled(f"It is {question.expected}. {question.why}"))
            return True
        try:
            reply = interview.answer(typed)
        except UnreadableError as error:
            click.echo(_filled(f"{error}."))
            continue
        click.secho(_filled(str(reply)), fg="green" if reply.right else "red")
        if not reply.right:
            click.echo(f"   {interview.results[-1].read}")
        return True


def _aloud(interview: Interview, turn: InterviewTurn, talk: Conversation) -> bool:
    """A spoken question, turn by turn; False where one wants to stop."""
    click.echo("Type what you would say, in one go; Enter ends it (? if you do not know, q to stop).")
    if not _talked(interview, talk):
        return False
    click.echo("A strong answer says:")
    for line in summary(talk):
        click.secho(_filled(line, "  "), fg={"✓": "green", "○": "yellow"}.get(line[0], "red"))
    if number := talk.source.example(turn.seed):
        click.echo(_filled(f"A number that belongs to it: {number}", "  "))
    if not talk.turns:
        interview.skip()
    else:
        if not _overruled(interview, talk):
            return False
        click.secho(verdict(talk), fg="green" if talk.good else "red")
        interview.settle()
    for step in talk.source.ladder[len(talk.follow_ups) :]:
        click.echo(_filled(f"Then comes: {step.question}", "  "))
        click.echo(_filled(step.strong, "      "))
    return True


def _talked(interview: Interview, talk: Conversation) -> bool:
    """Ask on until all was asked; False where one wants to stop."""
    while talk.part is not Part.OVER:
        if talk.turns:
            click.echo(_filled(f"{lead(talk)}{talk.asks}"))
        said = _prompt()
        if said.lower() in STOP:
            return False
        if said.lower() in SKIP:
            if not talk.turns:
                return True
            said = ""
        spoke = interview.say(said)
        if spoke.quotes:
            click.echo(_filled(marked(said, spoke.quotes, _mark)))
        click.echo(_filled(remark(talk, spoke)))
    return True


def _overruled(interview: Interview, talk: Conversation) -> bool:
    """Let the candidate claim what was not heard, after which a follow-up may come, or give back what was not said;
    False where one wants to stop."""
    while talk.claimable or talk.credited:
        click.echo(_filled(HOLD))
        typed = _prompt()
        if typed.lower() in STOP:
            return False
        if not typed:
            break
        try:
            interview.overrule(typed)
        except UnreadableError as error:
            click.echo(f"{error}.")
            continue
        click.echo(KEPT)
        if not _talked(interview, talk):
            return False
    return True


def _mark(words: str) -> str:
    """Words that counted: underlined, or where that is not seen in brackets."""
    return click.style(words, underline=True, fg="green") if sys.stdout.isatty() else f"[{words}]"


def _prompt() -> str:
    return str(click.prompt(">", prompt_suffix=" ", default="", show_default=False)).strip()


def _filled(text: str, lead: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))
