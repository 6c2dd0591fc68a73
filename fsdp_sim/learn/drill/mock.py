"""``mock()``: a mock interview in a notebook: a box to type in, Enter to answer, no mouse needed."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from fsdp_sim.learn.drill.ask import question_html
from fsdp_sim.learn.drill.interview import SKIP, STOP, Interview, InterviewTurn
from fsdp_sim.learn.drill.question import UnreadableError, with_letters
from fsdp_sim.learn.drill.report import InterviewReport
from fsdp_sim.learn.drill.spoken import VERDICTS, SpokenQuestion

if TYPE_CHECKING:
    import ipywidgets

KEYS = "Enter answers; ? if you do not know; q ends it."


class Mock:
    """An interview as a widget. Where widgets are not drawn, its text says how to hold it in a terminal.

    Attributes:
        interview: what was asked and answered so far.
    """

    def __init__(self, interview: Interview) -> None:
        self.interview = interview
        self._answered_aloud = False  # a spoken answer was given, and its points are shown
        self._ended = False

    @property
    def report(self) -> InterviewReport:
        """What it showed so far."""
        return InterviewReport(tuple(self.interview.results))

    def __repr__(self) -> str:
        return f"A mock interview; in a terminal: fsdp-sim drill mock. {self.report.headline}"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        from fsdp_sim.viz.bundle import widget_bundle

        return {**widget_bundle(self._widget()), "text/plain": repr(self)}

    def typed(self, text: str) -> str:
        """What was typed is dealt with; the reply, as HTML."""
        interview, turn, word = self.interview, self.interview.ask(), text.strip().lower()
        if turn is None or self._ended or word in STOP:
            self._ended = True
            return ""
        if isinstance(turn.source, SpokenQuestion):
            return self._aloud(turn.source, turn, text)
        try:
            if word in SKIP:
                assert turn.question is not None
                interview.skip()
                return f"<p>It is {escape(turn.question.expected)}. {escape(turn.question.why)}</p>"
            reply = interview.answer(text)
        except UnreadableError as error:
            return f"<p>{escape(str(error))}.</p>"
        read = "" if reply.right else f"<p>{escape(interview.results[-1].read)}</p>"
        return f"{reply._repr_html_()}{read}"

    def _aloud(self, source: SpokenQuestion, turn: InterviewTurn, text: str) -> str:
        """A spoken answer takes two turns of the box: one when it was said, one for the points that were in it."""
        if not self._answered_aloud:
            self._answered_aloud = True
            number = source.example(turn.seed)
            points = "".join(f"<br>{escape(point)}" for point in with_letters(source.points))
            with_number = f"<p>The number: {escape(number)}</p>" if number else ""
            return f"<p>A strong answer says:{points}</p>{with_number}<p>Type the letters of what you said.</p>"
        try:
            good = self.interview.made("" if text.strip() in SKIP else text)
        except UnreadableError as error:
            return f"<p>{escape(str(error))}.</p>"
        self._answered_aloud = False
        steps = "".join(f"<li>{escape(s.question)}<br>{escape(s.strong)}</li>" for s in source.ladder)
        return f"<p>{VERDICTS[good]} What comes next in an interview:</p><ol>{steps}</ol>"

    def asked(self) -> str:
        """The question that waits, or the report, as HTML."""
        turn = None if self._ended else self.interview.ask()
        if turn is None:
            return self.report._repr_html_()
        aloud = isinstance(turn.source, SpokenQuestion)
        how = "say it aloud, then press Enter" if aloud else f"{turn.question.how}" if turn.question else ""
        given = f"{turn.source.topic}, {turn.source.seconds} s{self.interview.time_left}"
        below = f"{turn.number}: {given}. Answer: {how}. {KEYS}"
        return question_html(turn.text, turn.question.lettered if turn.question else [], below)

    def _widget(self) -> ipywidgets.Widget:
        import ipywidgets

        asked, replied = ipywidgets.HTML(self.asked()), ipywidgets.HTML()
        box = ipywidgets.Text(placeholder="your answer, then Enter", layout={"width": "24em"})
        box.add_class("fsdp-sim-answer")

        def entered(_: object) -> None:
            replied.value = self.typed(box.value)
            asked.value, box.value = self.asked(), ""

        box.on_submit(entered)
        return ipywidgets.VBox([asked, box, replied])


def mock(minutes: float = 30, *, seed: int | None = None) -> Mock:
    """Hold a mock interview: all topics, harder when you are right, some questions to be answered aloud.

    Args:
        minutes: after which no further question is asked.
        seed: the same questions with the same numbers.
    """
    return Mock(Interview(limit_s=60 * minutes, seed=seed))
