"""Traps of FSDP, found before a GPU is paid for: in a configuration, a script that is read and never run, a model."""

from fsdp_sim.lint.cost import Costs
from fsdp_sim.lint.door import lint
from fsdp_sim.lint.explained import Example, examples, examples_of, proof_of
from fsdp_sim.lint.report import FileReport, Finding
from fsdp_sim.lint.rules import LEVELS, PLACES, Rule, chosen, rules
from fsdp_sim.lint.sarif import plain, sarif

__all__ = [
    "LEVELS",
    "PLACES",
    "Costs",
    "Example",
    "FileReport",
    "Finding",
    "Rule",
    "chosen",
    "examples",
    "examples_of",
    "lint",
    "plain",
    "proof_of",
    "rules",
    "sarif",
]
