"""A ladder whose right rungs are climbed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from labs.experiments import ladder
from labs.experiments.ladder.faults import Fault
from labs.experiments.ladder.on_ranks import LadderConfig
from labs.experiments.ladder.rungs import RUNGS, Rung


@pytest.fixture(scope="module")
def right_rungs_once() -> Iterator[None]:
    """In this module what the ranks of a right rung found serves every climb with the same setting."""
    found: dict[tuple[Any, ...], Any] = {}
    run = ladder._run

    def once(
        train: Callable[..., Any], ranks: int, setting: LadderConfig, rung: Rung, fault: Fault | None, *more: Any,
        **how: Any,
    ) -> Any:  # fmt: skip
        if fault is not None or rung.name not in RUNGS:
            return run(train, ranks, setting, rung, fault, *more, **how)
        key = (ranks, setting, rung.name, *more)
        if key not in found:
            found[key] = run(train, ranks, setting, rung, fault, *more, **how)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "_run", once)
        yield
