"""`DesignQuestion`: a model, a cluster, a time; the risks and measurements that a strong answer names."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files

import msgspec

from fsdp_sim.learn.drill.listening.pattern import Pattern, pattern
from fsdp_sim.spec import Cluster


class DesignQuestion(msgspec.Struct, frozen=True):
    """An open question.

    Attributes:
        inter: the link between nodes; empty for one machine.
        days: to train; 0 where the question gives none.
        seq_len: tokens of a sequence, where the question fixes them; else 0.
        read: sections of the course.
        risks, first: what to name, each with the patterns by which it is heard.
    """

    name: str
    question: str
    model: str
    gpu: str
    gpus: int
    inter: str
    days: float
    read: tuple[str, ...]
    risks: dict[str, tuple[str, ...]]
    first: dict[str, tuple[str, ...]]
    seq_len: int = 0

    @property
    def cluster(self) -> Cluster:
        """What the question gives."""
        return Cluster(self.gpu, self.gpus, inter=self.inter or None)

    def patterns(self) -> dict[str, tuple[Pattern, ...]]:
        """The patterns of each risk and each measurement."""
        return {said: tuple(map(pattern, lines)) for said, lines in {**self.risks, **self.first}.items()}


@functools.cache
def designs() -> dict[str, DesignQuestion]:
    """All of them, by name."""
    text = (files("fsdp_sim.learn.drill.design") / "designs.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return {name: msgspec.convert({"name": name, **entry}, DesignQuestion) for name, entry in table.items()}
