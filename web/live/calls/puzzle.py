"""The schedule puzzle in a page: a session as a notebook has it, whose stars the page keeps."""

from __future__ import annotations

from typing import Any

from fsdp_sim.learn.puzzle.level import levels
from fsdp_sim.learn.puzzle.session import PuzzleRecord, PuzzleSession, first_unwon

_session: list[PuzzleSession] = []  # the page's one


def open_puzzle(argument: dict[str, Any]) -> dict[str, Any]:
    """Begin, and say what to draw.

    Args:
        argument: ``won``: stars by level, as the page has kept them. ``in_torch``: by symbol its name and address.
            ``level`` and ``order``: where a link leads; without them to the first level that is not won.
    """
    won = {name: min(int(stars), 2) for name, stars in argument["won"].items() if name in levels()}

    def keep(name: str, stars: int) -> str:
        won[name] = max(stars, won.get(name, 0))
        return ""

    record = PuzzleRecord(lambda: won, keep, argument["in_torch"].get)
    session = PuzzleSession(argument.get("level") or first_unwon(record), record)
    if argument.get("order"):
        session.play(argument["order"])
    _session[:] = [session]
    return session.state


def take(argument: dict[str, Any]) -> dict[str, Any]:
    """Do what ``argument``, a message of ``puzzle.js``, says; the state to draw."""
    return _session[0].take(argument)
