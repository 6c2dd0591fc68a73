"""The schedule puzzle: move a step's collectives, and the engine replays it at once. Levels are in ``levels.toml``."""

from fsdp_sim.learn.puzzle.level import Level, levels, load
from fsdp_sim.learn.puzzle.puzzle import Puzzle, puzzle

__all__ = ["Level", "Puzzle", "levels", "load", "puzzle"]
