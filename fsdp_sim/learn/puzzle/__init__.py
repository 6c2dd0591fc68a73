"""The schedule puzzle: move a step's collectives, and the engine replays it at once. Levels are in ``levels.toml``."""

from fsdp_sim.learn.puzzle.level import Level, levels, load
from fsdp_sim.learn.puzzle.puzzle import Puzzle, puzzle
from fsdp_sim.learn.puzzle.replayed import Replayed, replay

__all__ = ["Level", "Puzzle", "Replayed", "levels", "load", "puzzle", "replay"]
