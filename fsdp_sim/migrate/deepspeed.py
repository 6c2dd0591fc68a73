"""DeepSpeed's engine becomes a sharded model, an optimizer and an ordinary loop."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from fsdp_sim.migrate.source import Script


def initialized(
    script: Script, statement: cst.SimpleStatementLine, call: cst.Call
) -> Sequence[cst.BaseStatement] | None:
    return None
