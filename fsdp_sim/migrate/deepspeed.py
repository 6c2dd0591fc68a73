"""DeepSpeed's engine is not rewritten: what to do is said, line by line."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from fsdp_sim.migrate.source import Script


def initialized(
    script: Script, statement: cst.SimpleStatementLine, call: cst.Call
) -> Sequence[cst.BaseStatement] | None:
    script.found.append("deepspeed")
    script.look(
        call,
        "DeepSpeed's engine accumulates, clips, scales and steps by its configuration, which is not rewritten here: "
        "shard the model with fully_shard, make the optimizer that the configuration names, and write the loop. "
        "fsdp-sim migrate CONFIG.json --as torch writes such a script of its JSON.",
        must=True,
    )
    return None
