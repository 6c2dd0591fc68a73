"""``mock()``: a mock interview in a notebook: a box to type in, Enter to answer, no mouse needed."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from fsdp_sim.learn.drill.ask import question_html
from fsdp_sim.learn.drill.design import Design
from fsdp_sim.learn.drill.design_answer import HOW
from fsdp_sim.learn.drill.design_answer import design as open_design
from fsdp_sim.learn.drill.heard import HOLD, KEPT, lead, marked, remark, summary_html, verdict
from fsdp_sim.learn.drill.interview import SKIP, STOP, Interview, InterviewTurn
from fsdp_sim.learn.drill.listening.endpoint import endpoint as listener_at
from fsdp_sim.learn.drill.listening.follow import Conversation, Part
from fsdp_sim.learn.drill.question import UnreadableError
from fsdp_sim.learn.drill.report import InterviewReport

if TYPE_CHECKING:
    import ipywidgets

KEYS = "Enter answers; ? if you do not know; q ends it."


class Mock:
    """An interview as a widget. Where widgets are not drawn, its text says how to hold it in a terminal.

    Attributes:
        interview: what was asked and answered so far.
        design: the open question at its end.
    """

    def __init__(self, interview: Interview, design: Design | None = None) -> None:
        self.interview, self.design = interview, design
        self._ended = False

    @property
    def report(self) -> InterviewReport:
        """What it showed so far."""
        return InterviewReport(
            tuple(self.interview.results), self.design if self.design and self.design.texts else None
        )

    def __repr__(self) -> str:
        return f"A mock interview; in a terminal: fsdp-sim drill mock. {self.report.headline}"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        from fsdp_sim.viz.bundle import widget_bundle

        return {**widget_bundle(self._widget()), "text/plain": repr(self)}

    def typed(self, text: str) -> str:
        """What was typed is dealt with; the reply, as HTML."""
        interview, turn, word = self.interview, self.interview.ask(), text.strip().lower()
        if self._open:
            return self._designed(self._open, text)
        if turn is None or self._ended or word in STOP:
            self._ended = True
            return ""
        if turn.talk:
            return self._aloud(turn.talk, turn, text)
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

    @property
    def _open(self) -> Design | None:
        """The open question, while it waits for an answer."""
        over = self._ended or self.interview.ask() is None
        return self.design if over and self.design and self.design.asks else None

    def _designed(self, design: Design, text: str) -> str:
        """A turn of the open question; at its end what a reviewer writes."""
        if text.strip().lower() in STOP:
            self.design = None
        elif text.strip() or design.texts:
            design.say("" if text.strip() in SKIP else text)
        return "" if design.asks else "".join(f"<p>{escape(line)}</p>" for line in design.review())

    def _aloud(self, talk: Conversation, turn: InterviewTurn, text: str) -> str:
        """One turn of a conversation; when all was asked, what was not heard may be claimed."""
        unknown = text.strip().lower() in SKIP
        if talk.part is Part.OVER:
            return self._claimed(talk, text)
        if unknown and not talk.turns:
            self.interview.skip()
            return f"<p>A strong answer says:{summary_html(talk)}</p>"
        spoke = self.interview.say("" if unknown else text)
        heard = marked(spoke.said, spoke.quotes, lambda words: f"<u><b>{escape(words)}</b></u>", escape)
        reply = f"<p>{heard}</p><p>{escape(remark(talk, spoke))}</p>"
        if talk.part is not Part.OVER:
            return reply
        number = talk.source.example(turn.seed)
        with_number = f"<p>A number that belongs to it: {escape(number)}</p>" if number else ""
        reply += f"<p>A strong answer says:{summary_html(talk)}</p>{with_number}"
        if talk.claimable or talk.credited:
            return f"{reply}<p>{escape(HOLD)}</p>"
        return reply + self._settled(talk)

    def _claimed(self, talk: Conversation, text: str) -> str:
        if text.strip():
            try:
                self.interview.overrule(text)
            except UnreadableError as error:
                return f"<p>{escape(str(error))}.</p>"
            if talk.part is not Part.OVER:
                return f"<p>{KEPT}</p>"
            return f"<p>{KEPT} {escape(HOLD)}</p>"
        return self._settled(talk)

    def _settled(self, talk: Conversation) -> str:
        self.interview.settle()
        return f"<p>{verdict(talk)}</p>"

    def asked(self) -> str:
        """The question that waits, or the report, as HTML."""
        turn = None if self._ended else self.interview.ask()
        if self._open:
            return question_html(self._open.asks, [], HOW)
        if turn is None:
            return self.report._repr_html_()
        talk = turn.talk
        how = "what you would say, in one go" if talk else f"{turn.question.how}" if turn.question else ""
        given = f"{turn.source.topic}, {turn.source.seconds} s{self.interview.time_left}"
        sent = f" {self.interview.endpoint.notice}" if self.interview.endpoint and talk else ""
        below = f"{turn.number}: {given}. Answer: {how}. {KEYS}{sent}"
        text = f"{lead(talk)}{talk.asks or turn.text}" if talk else turn.text
        return question_html(text, turn.question.lettered if turn.question else [], below)

    def _widget(self) -> ipywidgets.Widget:
        import ipywidgets

        asked, replied = ipywidgets.HTML(self.asked()), ipywidgets.HTML()
        box = ipywidgets.Text(placeholder="your answer, then Enter", layout={"width": "95%"})
        box.add_class("fsdp-sim-answer")

        def entered(_: object) -> None:
            replied.value = self.typed(box.value)
            asked.value, box.value = self.asked(), ""

        box.on_submit(entered)
        return ipywidgets.VBox([asked, box, replied])


def mock(minutes: float = 30, *, seed: int | None = None, endpoint: str = "", design: str = "") -> Mock:
    """Hold a mock interview: all topics, harder when you are right, to some questions you talk, and it listens.

    Args:
        minutes: after which no further question is asked.
        seed: the same questions with the same numbers.
        endpoint: URL of a model of your own that listens too (see `fsdp_sim.learn.drill.listening.endpoint`); without
            it, and without the variable FSDP_SIM_LISTENER_URL, nothing is sent anywhere.
        design: an open design question to end with, such as ``dense_70b``; the simulator judges its numbers.

    Raises:
        ValueError: the endpoint is no URL, or there is no such design question.
    """
    last = open_design(design).design if design else None
    return Mock(Interview(limit_s=60 * minutes, seed=seed, endpoint=listener_at(endpoint)), last)
