"""A model, a cluster and a plan in the forms that people use: a line of words, Python, a torch script."""

from fsdp_sim.forms.python_code import FORMS, python_code, state_code, torchrun_command
from fsdp_sim.forms.state import WORDS, State, state_of
from fsdp_sim.forms.torch_code import torch_code

__all__ = [
    "FORMS",
    "WORDS",
    "State",
    "python_code",
    "state_code",
    "state_of",
    "torch_code",
    "torchrun_command",
]
