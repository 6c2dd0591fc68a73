"""Who waits in which collective, and who never came: said from the dumps of torch's flight recorder in a folder.

    python -m labs.cluster.flight_recorder FOLDER            what the dumps in it say
    TORCH_FR_DUMP_TEMP_FILE=/shared/fr_ torchrun ...     where NCCL's watchdog writes them when a collective times out

Exit status: 0 nobody waits; 1 somebody does; 2 the dumps cannot be read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from labs.cluster.flight_recorder import diagnose, read


def main(folder: Annotated[Path, tyro.conf.Positional]) -> int:
    """Say what the flight recorder's dumps in a folder say.

    Args:
        folder: with a file for each rank, whose name ends with the rank.
    """
    try:
        dumps = read(folder)
    except (OSError, ValueError) as error:
        print(f"labs.cluster.flight_recorder: {error}", file=sys.stderr)
        return 2
    findings = diagnose(dumps)
    for finding in findings:
        print(f"group {finding.group}: {finding}")
    if not findings:
        print(f"{len(dumps)} ranks, and in every group all have issued the same collectives")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m labs.cluster.flight_recorder", description=__doc__))
