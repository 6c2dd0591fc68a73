"""A model, a cluster and a plan in the forms that people use: a line of words, Python, a torch script,
torchtitan's TOML, Accelerate's YAML."""

from fsdp_sim.forms.accelerate import accelerate_yaml
from fsdp_sim.forms.python_code import FORMS, python_code, state_code, torchrun_command
from fsdp_sim.forms.state import WORDS, FormState, plan_texts, state_of
from fsdp_sim.forms.torch_code import torch_code
from fsdp_sim.forms.torchtitan import torchtitan_toml

__all__ = [
    "FORMS",
    "WORDS",
    "FormState",
    "accelerate_yaml",
    "plan_texts",
    "python_code",
    "state_code",
    "state_of",
    "torch_code",
    "torchrun_command",
    "torchtitan_toml",
]
