"""``spoken(name)``: a question to be answered in words, in a notebook: it listens, and asks for what is missing."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from fsdp_sim.learn.drill import record
from fsdp_sim.learn.drill.ask import question_html
from fsdp_sim.learn.drill.heard import lead, marked, remark, summary, summary_html, verdict
from fsdp_sim.learn.drill.listening.follow import Conversation, Part, Spoke
from fsdp_sim.learn.drill.question import UnreadableError, with_letters
from fsdp_sim.learn.drill.spoken import SpokenQuestion
from fsdp_sim.learn.drill.spoken import spoken as known
from fsdp_sim.words import nearest

if TYPE_CHECKING:
    import ipywidgets

HOW = "Type it as you would say it."
CLAIM = "Heard wrongly? Choose what you did say, or with a minus what you did not; say why, and press Enter."


class SpokenReply:
    """What was heard in one turn, and what is asked next; shown as text and as HTML."""

    def __init__(self, talk: Conversation, spoke: Spoke) -> None:
        self.talk, self.spoke = talk, spoke
        self.asks = f"{lead(talk)}{talk.asks}"
        self.over = [verdict(talk), *summary(talk)] if talk.part is Part.OVER else []

    def __repr__(self) -> str:
        heard = marked(self.spoke.said, self.spoke.quotes, lambda words: f"_{words}_")
        return "\n".join(filter(None, [heard, remark(self.talk, self.spoke), self.asks, *self.over]))

    def _repr_html_(self) -> str:
        heard = marked(self.spoke.said, self.spoke.quotes, lambda words: f"<u><b>{escape(words)}</b></u>", escape)
        asks = f"<p><b>{escape(self.asks)}</b></p>" if self.asks else ""
        over = f"<p>{self.over[0]}{summary_html(self.talk)}</p>" if self.over else ""
        return f'<div role="status"><p>{heard}</p><p>{escape(remark(self.talk, self.spoke))}</p>{asks}{over}</div>'


class SpokenAnswer:
    """A spoken question: a box to type in where widgets are drawn, else `answer`; what a strong answer says is folded.

    Attributes:
        talk: what was said so far.
    """

    def __init__(self, source: SpokenQuestion, seed: int = 0) -> None:
        self.source, self.seed = source, seed
        self.talk = Conversation(source)

    def answer(self, said: str) -> SpokenReply:
        """Say it, as you would speak; called again, it answers what was asked next. After the last it begins anew."""
        if self.talk.part is Part.OVER:
            self.talk = Conversation(self.source)
        reply = SpokenReply(self.talk, self.talk.say(said))
        if self.talk.part is Part.OVER:
            self._note()
        return reply

    def overrule(self, which: str, reason: str) -> SpokenReply:
        """Claim what was not heard, by the letter of a point or the number of a follow-up, or give back what was heard
        wrongly, as "-c", and say why; it is kept with the record. After a claimed follow-up the next one is asked.

        Raises:
            UnreadableError: there is no such point or follow-up, or no reason.
        """
        self.talk.correct(f"{which} {reason}")
        self._note()
        return SpokenReply(self.talk, self.talk.turns[-1] if self.talk.turns else Spoke("", "", {}, {}))

    def _note(self) -> None:
        given_s = self.source.seconds
        record.note(
            self.source.name, right=self.talk.good, took_s=given_s, given_s=given_s, overruled=self.talk.corrections
        )

    @property
    def _parts(self) -> list[tuple[str, list[str]]]:
        number = self.source.example(self.seed)
        return [
            ("What a strong answer says", with_letters(self.source.points)),
            *([("The number it comes with", [number])] if number else []),
            *((f"Then: {step.question}", [step.strong]) for step in self.source.ladder),
        ]

    def __repr__(self) -> str:
        lines = [f"{self.source.question} ({self.source.seconds} s) {HOW}"]
        for heading, points in self._parts:
            lines += ["", heading, *(f"  {line}" for line in points)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        folded = ""
        for heading, points in self._parts:
            lines = "<br>".join(map(escape, points))
            folded += f"<details><summary>{escape(heading)}</summary><p>{lines}</p></details>"
        return f"{question_html(self.source.question, [], f'{self.source.seconds} seconds. {HOW}')}{folded}"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        fallback = {"text/plain": repr(self), "text/html": self._repr_html_()}
        return {**self._widget()._repr_mimebundle_(**kwargs), **fallback}

    def _widget(self) -> ipywidgets.Widget:
        import ipywidgets

        shown, replied = ipywidgets.HTML(self._repr_html_()), ipywidgets.HTML()
        box = ipywidgets.Text(placeholder="what you would say, then Enter", layout={"width": "95%"})
        box.add_class("fsdp-sim-answer")
        which = ipywidgets.Dropdown(layout={"width": "5em"})
        why = ipywidgets.Text(placeholder="why: I said that ...", layout={"width": "80%"})
        claim = ipywidgets.VBox([ipywidgets.Label(CLAIM), ipywidgets.HBox([which, why])], layout={"display": "none"})

        def entered(_: object) -> None:
            said(self.answer(box.value)._repr_html_())
            box.value = ""

        def claimed(_: object) -> None:
            try:
                said(self.overrule(which.value, why.value)._repr_html_())
                why.value = ""
            except UnreadableError as error:
                said(f"<p>{escape(str(error))}.</p>")

        def said(reply: str) -> None:
            replied.value = reply
            talk, over = self.talk, self.talk.part is Part.OVER
            which.options = [*talk.claimable, *(f"-{each}" for each in talk.credited)] if over else []
            claim.layout.display = "" if which.options else "none"

        box.on_submit(entered)
        why.on_submit(claimed)
        return ipywidgets.VBox([shown, box, replied, claim])


def spoken(name: str) -> SpokenAnswer:
    """A question to be answered in words.

    Raises:
        ValueError: there is no such question; the message names the nearest.
    """
    if name not in known():
        near = nearest(name, known()) or list(known())[:1]
        raise ValueError(f"there is no spoken question {name!r}; did you mean {near[0]!r}?")
    return SpokenAnswer(known()[name])
