"""How well the listener hears: point recall and precision on answers that somebody marked.

Run ``python -m fsdp_sim.learn.drill.listening.measured FILE`` with a file of marked answers: of each question a list of
[kind, letters of the points that were made, what was said]. Of a follow-up, such as "zero_stages 2", its number stands
in place of letters where it was answered.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

from fsdp_sim.learn.drill.listening.listen import listen, listen_on

Answers = dict[str, list[tuple[str, str, str]]]


@dataclass(frozen=True)
class Score:
    """Points that were made and heard, heard and not made, made and not heard."""

    heard: int = 0
    wrongly: int = 0
    missed: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.heard + other.heard, self.wrongly + other.wrongly, self.missed + other.missed)

    @property
    def recall(self) -> float:
        return self.heard / ((self.heard + self.missed) or 1)

    @property
    def precision(self) -> float:
        return self.heard / ((self.heard + self.wrongly) or 1)


def letters_heard(name: str, said: str) -> set[str]:
    """The letters of the points that were heard; of a follow-up its number."""
    name, _, number = name.partition(" ")
    if number:
        return {number} if listen_on(name, int(number) - 1, said).made else set()
    return {ascii_lowercase[place] for place in listen(name, said).made}


def measure(answers: Answers) -> dict[str, Score]:
    """The score of each question."""
    scores = {}
    for name, marked in answers.items():
        scores[name] = Score()
        for _, made, said in marked:
            heard = letters_heard(name, said)
            scores[name] += Score(len(heard & set(made)), len(heard - set(made)), len(set(made) - heard))
    return scores


def main(path: str, show: str = "") -> None:
    """Print the scores of a file, and with ``show`` what was heard wrongly or missed."""
    answers: Answers = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    for name, score in measure(answers).items():
        print(f"{name:32} recall {score.recall:.2f}  precision {score.precision:.2f}  of {score.heard + score.missed}")
        for kind, made, said in answers[name] if show else ():
            heard = letters_heard(name, said)
            if heard != set(made):
                wrongly, missed = "".join(sorted(heard - set(made))), "".join(sorted(set(made) - heard))
                print(f"    {kind}: wrongly {wrongly or '-'}, missed {missed or '-'}: {said}")
    whole = sum(measure(answers).values(), Score())
    print(f"{'all':32} recall {whole.recall:.2f}  precision {whole.precision:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
