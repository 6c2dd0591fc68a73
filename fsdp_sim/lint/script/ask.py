"""What rules ask of a script: what is sharded, and how; what a call is given; what is not certain."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from fsdp_sim.lint.script.record import Call, Path, Script, Thing, compatible, every, inside, whole
from fsdp_sim.lint.script.values import PLAIN

OF_KIND = re.compile(
    r"fsdp|isinstance|hasattr|ddp|distributed|world|version|strategy|parallel|shard|offload", re.IGNORECASE
)
"""Words of a test that may say which API is in use: what stands behind it may be right."""


class Found(NamedTuple):
    """A place of a script where a rule finds its trap, and what it has to say of it."""

    node: ast.AST
    message: str


def wrapped(script: Script) -> list[Call]:
    """Each call of torch's `FullyShardedDataParallel`."""
    return script.torch("FullyShardedDataParallel")


def is_fsdp1(thing: Thing | None, path: Path = ()) -> bool:
    return thing is not None and any(one.kind == "fsdp1" for one in inside(thing, path))


def is_fsdp2(thing: Thing | None, script: Script, at: Call) -> bool:
    """Whether the thing itself has been given to `fully_shard` before a call, where that is reached."""
    if thing is None:
        return False
    these = inside(thing, at.path)
    return any(one.kind == "fsdp2" for one in these) or any(
        one in these and call.order < at.order and compatible(call.path, at.path) for call, one in script.sharded
    )


def certainly_fsdp1(thing: Thing | None, script: Script, at: Call) -> bool:
    """FSDP1, and nothing says that it could be something else where the call is reached."""
    return is_fsdp1(thing, at.path) and not is_fsdp2(thing, script, at) and not in_doubt(script, at)


def certainly_fsdp2(thing: Thing | None, script: Script, at: Call) -> bool:
    return is_fsdp2(thing, script, at) and not is_fsdp1(thing, at.path) and not in_doubt(script, at)


def in_doubt(script: Script, at: Call) -> bool:
    """Whether the call stands behind a test of which API is in use, that the sharding does not stand behind."""
    known = {(c.text, c.holds) for call in [*wrapped(script), *script.torch("fully_shard")] for c in call.path}
    return any((c.text, c.holds) not in known and OF_KIND.search(c.text) for c in at.path)


def same_model(one: Thing | None, other: Thing | None) -> bool:
    """Whether two things belong to one model."""
    return one is not None and other is not None and whole(one) is whole(other)


def model_of_parameters(call: Call) -> list[Thing]:
    """The modules whose parameters a call is given."""
    given = [*call.args, *call.words.values()]
    return [one.of for thing in given for one in every(thing, call.path) if one.kind == "parameters" and one.of]


def optimizers(script: Script) -> list[Call]:
    """Each optimizer of torch (and those of other packages by torch's names) that is made."""
    return [
        call
        for call in script.calls
        if call.on is None and call.name[:1].isupper() and (call.full.startswith("torch.optim.") or "Adam" in call.name)
        and ".lr_scheduler" not in call.full and "SWA" not in call.name
    ]  # fmt: skip


def forwards(script: Script) -> list[Call]:
    """Each call of a thing, as ``model(x)``."""
    return [call for call in script.calls if call.name == "<call>" and call.on is not None]


def trains(script: Script) -> bool:
    return bool(script.methods("backward") or script.torch("backward"))


def escapes(thing: Thing, script: Script, before: Call | None = None) -> list[Call]:
    """Calls of functions that are not torch's nor the script's, which may do anything to the model."""
    return [
        call
        for call in script.calls
        if call.on is None
        and not call.full.startswith("torch.")
        and call.name not in PLAIN
        and call.name != ""
        and "<" not in call.name
        and call.name not in script.own
        and (before is None or call.order < before.order)
        and any(same_model(one, thing) for given in (*call.args, *call.words.values()) for one in every(given))
    ]


def dtype_of(thing: Thing | None) -> str:
    """bfloat16 for ``torch.bfloat16``; empty for what is none of torch's."""
    name = thing.name if thing is not None and thing.kind == "name" else ""
    return name.removeprefix("torch.") if name.startswith("torch.") else ""


def shown(node: ast.AST, most: int = 60) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."
