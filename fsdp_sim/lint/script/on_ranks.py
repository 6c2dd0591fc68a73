"""Traps in what every rank must do together, and one does alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from fsdp_sim.lint.script.ask import (
    Found,
    certainly_fsdp1,
    certainly_fsdp2,
    is_fsdp1,
    is_fsdp2,
    shown,
)
from fsdp_sim.lint.script.record import Call, Script, Thing, alternatives, every, inside, whole

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "broadcast", "broadcast_object_list", "barrier",
    "all_to_all", "all_to_all_single", "gather", "gather_object", "scatter", "scatter_object_list", "monitored_barrier",
)  # fmt: skip
GATHERS_STATE = ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "set_model_state_dict",
                 "set_optimizer_state_dict", "set_state_dict")  # fmt: skip
OF_FSDP1 = (
    "summon_full_params",
    "state_dict_type",
    "full_optim_state_dict",
    "optim_state_dict",
    "scatter_full_optim_state_dict",
)
OTHER_MESH = re.compile(r"tp|pp|cp|ep|stage|group|node", re.IGNORECASE)


def alone(call: Call) -> str:
    """The test by which only some ranks come to a call; empty where all do, or it is not certain."""
    tests = [condition for condition in call.path if condition.by_rank]
    return "" if not tests else f"{'' if tests[-1].holds else 'not '}{shown(tests[-1].test)}"


def _met_elsewhere(call: Call, script: Script) -> bool:
    """Whether the other ranks call the same elsewhere: ``if rank != 0: barrier()`` and, later, rank 0's."""
    mine = {(c.text, c.holds) for c in call.path if c.by_rank}
    for other in script.calls:
        if other is not call and other.name == call.name:
            its = {(c.text, c.holds) for c in other.path}
            if (other.by_rank and not mine <= its) or any((text, not holds) in its for text, holds in mine):
                return True
    return False


def collective_on_one_rank(script: Script) -> Iterator[Found]:
    names = set(COLLECTIVES)
    for call in script.calls:
        if not (call.full.startswith("torch.distributed.") and call.name in names and call.full.count(".") <= 3):
            continue
        if call.by_rank and "group" not in call.words and not _met_elsewhere(call, script):
            yield Found(call.node, f"dist.{call.name} only where {alone(call)}")


def forward_on_one_rank(script: Script) -> Iterator[Found]:
    for call in script.calls:
        if (
            call.name not in ("<call>", "generate")
            or call.on is None
            or not call.by_rank
            or _met_elsewhere(call, script)
        ):
            continue
        if certain(call.on, script, call) and not _summoned(call):
            yield Found(call.node, f"the sharded model runs only where {alone(call)}")


def certain(thing: Thing, script: Script, call: Call) -> bool:
    """Whether it is FSDP's, in either version, on every way that leads here."""
    return all(is_fsdp1(one, call.path) or is_fsdp2(one, script, call) for one in alternatives(thing, call.path)) and (
        is_fsdp1(thing, call.path) or is_fsdp2(thing, script, call)
    )


def _summoned(call: Call) -> bool:
    return any(around.name == "summon_full_params" for around in call.within)


def state_dict_on_one_rank(script: Script) -> Iterator[Found]:
    for call in script.calls:
        if not call.by_rank or _met_elsewhere(call, script):
            continue
        where = f"only where {alone(call)}"
        if call.name == "state_dict" and call.on is not None and certainly_fsdp1(call.on, script, call):
            yield Found(call.node, f"FSDP1's state_dict gathers from all ranks, and is called {where}")
        elif call.is_torch(*GATHERS_STATE) and any(is_fsdp1(o) or is_fsdp2(o, script, call) for o in call.args[:1]):
            yield Found(call.node, f"{call.name} gathers from all ranks, and is called {where}")
        elif call.name in OF_FSDP1 and call.full.startswith("torch.distributed.fsdp"):
            yield Found(call.node, f"{call.name} is called {where}")
        elif call.name == "full_tensor" and call.on is not None and _is_parameter(call.on, script, call):
            yield Found(call.node, f"full_tensor() gathers from all ranks, and is called {where}")
        elif (
            call.name == "save_pretrained" and "state_dict" not in call.words and certainly_fsdp2(call.on, script, call)
        ):
            yield Found(call.node, f"save_pretrained gathers each tensor from all ranks, and is called {where}")
        elif call.full in ("torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save",
                           "torch.distributed.checkpoint.load") and call.literal("no_dist") is not True:  # fmt: skip
            yield Found(call.node, f"torch.distributed.checkpoint.{call.name} is called {where}")


def _is_parameter(thing: Thing, script: Script, call: Call) -> bool:
    model = whole(thing)
    return any(model in inside(one) or model is whole(one) for _, one in script.sharded)


def sharded_save_on_one_rank(script: Script) -> Iterator[Found]:
    for call in script.torch("save"):
        if not call.by_rank or call.full != "torch.save":
            continue
        for one in every(call.given("obj", 0), call.path):
            state = one.call
            if state is not None and state.name == "state_dict" and certainly_fsdp2(state.on, script, state):
                yield Found(
                    call.node, f"the state dict holds this rank's shards, and is written only where {alone(call)}"
                )
                break


def step_skipped_on_one_rank(script: Script) -> Iterator[Found]:
    backward = script.methods("backward")
    for skip in script.calls:
        if skip.name != "<skip>" or not skip.loops or not skip.path:
            continue
        test = skip.path[-1]
        text = test.text
        if not (re.search(r"\b(isnan|isfinite|isinf)\b", text) and test.holds):
            continue
        later = [call for call in backward if call.order > skip.order and skip.loops[-1] in call.loops]
        agreed = [
            call for call in script.calls
            if call.order < skip.order and skip.loops[-1] in call.loops
            and ("reduce" in call.name or "gather" in call.name)
        ]  # fmt: skip
        if later and not agreed and (script.sharded or script.torch("FullyShardedDataParallel")):
            names = {node.id for node in ast.walk(test.test) if isinstance(node, ast.Name)}
            if not names & {"norm", "grad_norm", "total_norm"}:
                yield Found(skip.node, f"a rank for which {shown(test.test)} leaves before backward")


def forward_called_directly(script: Script) -> Iterator[Found]:
    for call in script.methods("forward"):
        if (
            call.on is not None
            and certain(call.on, script, call)
            and not _registered(script, "forward")
            and not _summoned(call)
        ):
            yield Found(call.node, "FSDP's hooks run when the module is called, not its forward")


def _registered(script: Script, method: str) -> bool:
    return any(
        isinstance(given.node, ast.Constant) and given.node.value == method
        for call in script.torch("register_fsdp_forward_method")
        for given in (*call.args[1:], *call.words.values())
    )


def generate_without_hooks(script: Script) -> Iterator[Found]:
    for call in script.methods("generate"):
        if call.on is None or call.by_rank or _registered(script, "generate") or script.methods("unshard"):
            continue
        if certain(call.on, script, call) and not _summoned(call):
            yield Found(call.node, "generate runs the model without the root's hooks")


def inference_mode(script: Script) -> Iterator[Found]:
    for call in script.calls:
        if call.name != "<call>" or call.on is None or not any(one.is_torch("inference_mode") for one in call.within):
            continue
        mode = next(one for one in call.within if one.is_torch("inference_mode"))
        if mode.args and isinstance(mode.args[0].node, ast.Constant) and mode.args[0].node.value is False:
            continue
        trains = [
            other for other in script.methods("backward")
            if other.order > call.order or set(other.loops) & set(call.loops)
        ]  # fmt: skip
        if trains and certain(call.on, script, call):
            yield Found(call.node, "what is gathered here cannot be trained afterwards")
