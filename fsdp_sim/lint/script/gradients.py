"""Traps in gradients, precision and what is made of an optimizer's parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fsdp_sim.lint.script.ask import (
    Found,
    certainly_fsdp1,
    certainly_fsdp2,
    dtype_of,
    in_doubt,
    model_of_parameters,
    optimizers,
    same_model,
    wrapped,
)
from fsdp_sim.lint.script.record import Script, Thing, alternatives, every, inside, whole

METHODS = {
    "clip_grad_norm_": "use torch.nn.utils.clip_grad_norm_(model.parameters(), ...)",
    "no_sync": "use model.set_requires_gradient_sync(False)",
    "summon_full_params": "use parameter.full_tensor()",
    "flat_param": "FSDP2 keeps the parameters", "check_is_root": "there is none",
}  # fmt: skip
"""Methods of FSDP1 that `FSDPModule` lacks, and what to do."""
LOW = ("bfloat16", "float16", "half")


def clip_per_rank(script: Script) -> Iterator[Found]:
    for call in script.torch("clip_grad_norm_", "clip_grad_norm"):
        for model in model_of_parameters(call):
            if certainly_fsdp1(model, script, call):
                yield Found(call.node, "each rank takes the norm of its own shard of the FSDP model")
                break


def fsdp1_method(script: Script) -> Iterator[Found]:
    for call in script.methods(*METHODS):
        if certainly_fsdp2(call.on, script, call) and not any(one.name == call.name for one in _own_methods(script)):
            yield Found(call.node, f"a model that fully_shard has taken has no {call.name}: {METHODS[call.name]}")
    for call in script.calls:
        if call.name == "<read>" and call.full == "module" and certainly_fsdp2(call.on, script, call):
            around = [] if call.on is None else [thing.kind for thing in inside(call.on, call.path)]
            if {"ddp", "compiled", "checkpointed"}.isdisjoint(around):
                yield Found(call.node, "fully_shard puts no module around the model: there is no .module")


def _own_methods(script: Script) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(script.tree) if isinstance(node, ast.FunctionDef)]


def gradient_sync_left_off(script: Script) -> Iterator[Found]:
    calls = script.methods("set_requires_gradient_sync")
    if not calls or not (script.methods("step") or script.methods("backward")):
        return
    values = [call.args[0] if call.args else call.words.get("requires_gradient_sync") for call in calls]
    constants = [
        value is not None and isinstance(value.node, ast.Constant) and value.node.value is False for value in values
    ]
    if all(constants) and script.sharded:
        yield Found(calls[0].node, "this is never set to True again")


def plain_grad_scaler(script: Script) -> Iterator[Found]:
    if not wrapped(script) or script.torch("fully_shard"):
        return
    for call in script.torch("GradScaler"):
        enabled = call.words.get("enabled")
        if enabled is not None and isinstance(enabled.node, ast.Constant) and enabled.node.value is False:
            continue
        if "sharded_grad_scaler" in call.full or in_doubt(script, call):
            continue
        other = [one for one in script.torch("ShardedGradScaler")]
        if not other:
            yield Found(call.node, "the model is FSDP1's, and this scaler is not ShardedGradScaler")


def reduce_dtype_unsaid(script: Script) -> Iterator[Found]:
    for call in script.torch("MixedPrecisionPolicy"):
        low = dtype_of(call.given("param_dtype", 0)) in LOW
        said = call.given("reduce_dtype", 1)
        unsaid = said is None or (isinstance(said.node, ast.Constant) and said.node.value is None)
        if low and unsaid and "**" not in call.words:
            yield Found(
                call.node, f"param_dtype is {dtype_of(call.given('param_dtype', 0))}, and no reduce_dtype is given"
            )


def low_precision_parameters(script: Script) -> Iterator[Found]:
    if script.methods("requires_grad_") or any("lora" in name.lower() or "peft" in name for name in script.imports):
        return  # frozen weights may well be in bf16
    for call in script.methods("to", "bfloat16", "half"):
        low = [dtype for one in (*call.args, *call.words.values()) if (dtype := dtype_of(one)) in LOW]
        if call.on is None or (call.name == "to" and not low) or in_doubt(script, call):
            continue
        for one in alternatives(call.on, call.path):
            trains = [
                made for made in optimizers(script)
                if made.full.startswith("torch.optim.") and made.order > call.order
                and any(same_model(one, model) for model in model_of_parameters(made))
            ]  # fmt: skip
            if whole(one) is one and trains and _is_sharded(one, script):
                dtype = low[0] if call.name == "to" else call.name
                message = (
                    f"the parameters become {dtype}, and {trains[0].name} of line {trains[0].line} adds to them in it"
                )
                yield Found(call.node, message)
                break
    for made in optimizers(script):
        for model in model_of_parameters(made):
            loads = whole(model).call
            if made.full.startswith("torch.optim.") and loads is not None and loads.name == "from_pretrained":
                dtype = dtype_of(loads.words.get("dtype", loads.words.get("torch_dtype")))
                if dtype in LOW and _is_sharded(model, script) and not script.methods("float"):
                    adds = f"{made.name} of line {made.line} adds to them in it"
                    yield Found(loads.node, f"the parameters are loaded in {dtype}, and {adds}")


def _is_sharded(model: Thing, script: Script) -> bool:
    return any(
        same_model(one, model)
        for call in [*script.torch("fully_shard"), *wrapped(script)]
        for one in every(call.given("module", 0), call.path)
    )


def decay_by_dim(script: Script) -> Iterator[Found]:
    tests = [*script.methods("dim", "ndimension"), *(c for c in script.calls if (c.name, c.full) == ("<read>", "ndim"))]
    for call in tests:
        of = [one.of for one in alternatives(call.on, call.path) if one.kind == "parameters"]
        if any(certainly_fsdp1(model, script, call) for model in of) and optimizers(script):
            yield Found(call.node, "an FSDP1 parameter has one dimension, whatever it had")


def count_of_a_shard(script: Script) -> Iterator[Found]:
    for call in script.methods("numel", "nelement"):
        for one in alternatives(call.on, call.path):
            if (
                one.kind == "parameters"
                and call.loops
                and certainly_fsdp1(one.of, script, call)
                and not _reduced(script)
            ):
                yield Found(call.node, "numel() is that of this rank's shard")


def _reduced(script: Script) -> bool:
    return bool(script.torch("all_reduce", "summon_full_params")) or "summon_full_params" in script.text
