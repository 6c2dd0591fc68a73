"""How the tests of the commands call them, and the examples that their help gives."""

import re
import shlex

from click.testing import CliRunner, Result

from fsdp_sim.cli.main import main

EIGHT_B = ("--model", "llama3-8b", "--gpu", "H100-SXM-80GB", "--gpus", "64", "--seq-len", "8192")
SMALL = ("--model", "gpt2-124m", "--gpu", "A100", "--gpus", "8")


def call(*arguments: str, input: bytes | None = None) -> Result:
    """Call a command in this process; an exception other than its exit fails the test."""
    done = CliRunner().invoke(main, list(arguments), input=input)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def examples(command: str) -> list[list[str]]:
    """The calls that ``--help`` shows, as arguments."""
    text = call(command, "--help").output
    text = text[text.index("Examples:") :].replace("\\\n", " ")
    return [shlex.split(line.strip())[1:] for line in text.splitlines() if re.match(r" *fsdp-sim ", line)]
