"""The plan as others run it: a torch script, read for traps before a GPU is paid for; a command of the trainer."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fsdp_sim import Plan
from fsdp_sim.forms import state_of, torch_code
from fsdp_sim.lint import lint
from fsdp_sim.spec import text_of
from fsdp_sim.viz import Table
from labs.config import TrainConfig
from labs.experiments.capstone.choice import Choice
from labs.experiments.capstone.here import SAME

KEYS = ("model", "seq_len", "global_batch", "micro_batch", *SAME)


def script(choice: Choice, plan: Plan) -> str:
    """A training script for the choice's model and cluster, with torch's own calls.

    Raises:
        ValueError: the model or the cluster has no name that a script could say.
    """
    return torch_code(state_of(choice.model, choice.cluster, plan))


def traps(code: str) -> Table:
    """What lint finds in a script, which is read and never run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(code, encoding="utf-8")
        (report,) = lint(str(path))
    rows = [(str(one.line), one.rule, one.message) for one in report.findings] or [("-", "none", "no trap was found")]
    return Table(f"lint of {len(code.splitlines())} lines", ("line", "rule", "what happens"), tuple(rows))


def command(config: TrainConfig, ranks: int = 2) -> str:
    """The command that trains with this configuration: the keys in which it differs from the trainer's defaults."""
    usual, keys = TrainConfig(), []
    for key in KEYS:
        of, default = ((one if hasattr(one, key) else one.plan) for one in (config, usual))
        if getattr(of, key) != getattr(default, key):
            keys.append(f"--{key}={text_of(getattr(of, key))}")
    return " ".join([f"torchrun --standalone --nproc_per_node={ranks} -m labs.train", *keys])
