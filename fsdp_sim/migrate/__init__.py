"""From FSDP1, DDP and DeepSpeed to FSDP2: the changed lines of a script or of a configuration, and what differs.

A script is read by libcst, and never run; a configuration by `fsdp_sim.configurations`, which reads the new text too:
it gives the plan that was promised. What cannot be changed with certainty is left, and named with its line.
"""

from fsdp_sim.migrate.as_torch import torch_script
from fsdp_sim.migrate.configuration import jobs_of_configuration, migration_of_configuration
from fsdp_sim.migrate.formats import calls_a_trainer
from fsdp_sim.migrate.numbers import Numbers, both_jobs, is_enough, numbers_of, order_of
from fsdp_sim.migrate.result import LookAt, Migration
from fsdp_sim.packages import need

__all__ = [
    "LookAt", "Migration", "Numbers", "both_jobs", "calls_a_trainer", "is_enough", "jobs_of_configuration",
    "migration_of_configuration", "migration_of_script", "numbers_of", "order_of", "torch_script",
]  # fmt: skip


def migration_of_script(text: str, where: str, blocks: tuple[str, ...] = ()) -> tuple[Migration, dict[str, object]]:
    """A script's migration, and what the script says of a `Plan`, its API included.

    Args:
        where: its path, beside which files that it imports are looked for.
        blocks: names of the classes of modules that become units; none finds them out.

    Raises:
        ValueError: it is no Python.
        ModuleNotFoundError: libcst is not installed; says how to get it.
    """
    need("migrating a script", "libcst")
    from fsdp_sim.migrate.script import migration_of_script as of_script

    return of_script(text, where, blocks)
