"""Bug hunts: a training with a fault drawn from a catalogue, and what it leaves behind when it is really run.

``hunt(1)`` shows both, ``predict("hunt_1")`` asks for the cause, ``hand_in(1, training)`` judges what was mended by
running it beside the sound one, on ranks of their own.
"""

from fsdp_sim.learn.hunts.hunting import drawn, hand_in, hunt
from fsdp_sim.learn.hunts.training import Fault, Training
from fsdp_sim.learn.hunts.trainings import TRAININGS

__all__ = ["TRAININGS", "Fault", "Training", "drawn", "hand_in", "hunt"]
