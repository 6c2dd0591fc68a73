"""The command of the lab."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import tyro
from rich.console import Console

from labs.experiments import nodes
from labs.experiments.nodes.namespaces import NoNamespacesError


@dataclass(frozen=True)
class NodesOptions:
    """What to do; by default FSDP against HSDP."""

    lose: bool = False
    """Kill one node in the middle of a training, and bring it back."""
    hang: bool = False
    """Stop one rank before the forward of one unit, and read the flight recorder."""
    mbit: float = 100.0
    """What each node may send over the slow link, Mbit/s."""
    steps: int = 4
    """Steps counted on each link."""
    loopback: bool = False
    """Both nodes on loopback, also where network namespaces would work."""


def main(options: NodesOptions) -> int:
    """Exit status: 0 done; 1 it failed, and says how; 2 asked wrongly; 130 Ctrl-C."""
    apart = False if options.loopback else None
    console = Console()
    say = partial(console.print, sep="\n  ", markup=False, highlight=False, soft_wrap=True)
    try:
        if options.hang:
            found = nodes.hang()
            say("The flight recorder's dumps say:", *map(str, found.findings))
            say("The watchdog of fsdp_sim.ranks saw what the missing rank did meanwhile:", found.why)
            return 0
        result = (
            nodes.lose_a_node(apart=apart)
            if options.lose
            else nodes.run(mbit=options.mbit, steps=options.steps, apart=apart)
        )
    except ValueError as error:
        print(f"labs.experiments.nodes: {error}", file=sys.stderr)
        return 2
    except (NoNamespacesError, RuntimeError) as error:
        print(f"labs.experiments.nodes: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(result.table())
    console.print(*result.notes, sep="\n", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(NodesOptions, prog="python -m labs.experiments.nodes", description=nodes.__doc__)))
