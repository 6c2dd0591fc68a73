"""Lab 11, the capstone: your model, your cluster. Predict, tune, run what can be run here, compare, defend.

Reading order: `choice` (the model, the cluster and the budget, in words), `guess` (what the learner commits to, beside
the simulator's interval), `written` (the plan as a script that is read for traps, and as a command), `here` (the same
plan on gloo ranks of this machine), `scores` (all that was predicted and measured, kept), `defence` (three questions,
and a plan in words), `page` (the report).
"""

from labs.experiments.capstone.choice import Choice, bill, chosen, front, worth
from labs.experiments.capstone.defence import defence, in_words
from labs.experiments.capstone.guess import compared
from labs.experiments.capstone.here import run_here, scaled
from labs.experiments.capstone.page import report
from labs.experiments.capstone.scores import keep, scoreboard
from labs.experiments.capstone.written import command, script, traps

__all__ = [
    "Choice",
    "bill",
    "chosen",
    "command",
    "compared",
    "defence",
    "front",
    "in_words",
    "keep",
    "report",
    "run_here",
    "scaled",
    "scoreboard",
    "script",
    "traps",
    "worth",
]
