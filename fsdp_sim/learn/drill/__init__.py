"""Interview questions with numbers drawn anew, judged by machine: in a notebook, and as ``fsdp-sim drill``."""

from fsdp_sim.learn.drill.ask import OpenQuestion, ask
from fsdp_sim.learn.drill.design_answer import DesignAnswer, design
from fsdp_sim.learn.drill.mock import Mock, mock
from fsdp_sim.learn.drill.sheet import Sheet, sheet
from fsdp_sim.learn.drill.spoken_answer import SpokenAnswer, spoken
from fsdp_sim.learn.drill.whiteboard import Whiteboard, whiteboard

__all__ = [
    "DesignAnswer",
    "Mock",
    "OpenQuestion",
    "Sheet",
    "SpokenAnswer",
    "Whiteboard",
    "ask",
    "design",
    "mock",
    "sheet",
    "spoken",
    "whiteboard",
]
