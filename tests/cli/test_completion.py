"""`fsdp-sim completion`: scripts for shells, and the names that they complete."""

import pytest
from click.shell_completion import ShellComplete

from fsdp_sim.cli.main import main
from tests.cli.commands import call


def completed(*words: str) -> list[str]:
    """What the shell offers for the last word."""
    found = ShellComplete(main, {}, "fsdp-sim", "_FSDP_SIM_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(shell):
    done = call("completion", shell)

    assert done.exit_code == 0
    assert f"_FSDP_SIM_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["simu"], ["simulate"]),
        (["simulate", "--model", "llama3-"], ["llama3-8b", "llama3-70b", "llama3-405b"]),
        (["simulate", "--gpu", "h200"], ["H200-SXM-141GB", "H200-NVL-141GB"]),
        (["simulate", "--plan", "forward_"], ["forward_prefetch="]),
        (["program", "--plan", "api=fsdp"], ["api=fsdp2", "api=fsdp1"]),
        (["sweep", "--vary", "gpu=H200"], ["gpu=H200-SXM-141GB", "gpu=H200-NVL-141GB"]),
        (["fit", "--largest", "s"], ["seq-len"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_names_are_completed(words, offered):
    assert completed(*words) == offered
