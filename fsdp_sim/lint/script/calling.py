"""Traps in how torch's functions are called: arguments and names that there are not, checkpointing, compile."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from fsdp_sim.lint.script.ask import (
    Found,
    is_fsdp1,
    is_fsdp2,
    model_of_parameters,
    optimizers,
    same_model,
    wrapped,
)
from fsdp_sim.lint.script.record import WRAPPERS, Script, alternatives, compatible, every, inside, whole
from fsdp_sim.words import did_you_mean


@functools.cache
def known() -> dict[str, Any]:
    """torch's names and arguments, from names.toml."""
    return tomllib.loads(files("fsdp_sim.lint.script").joinpath("names.toml").read_text("utf-8"))


def policy_not_bound(script: Script) -> Iterator[Found]:
    for call in wrapped(script):
        policy = call.words.get("auto_wrap_policy")
        for one in alternatives(policy, call.path):
            if (
                one.kind == "name"
                and one.name.startswith("torch.")
                and one.name.endswith(("transformer_auto_wrap_policy", "lambda_auto_wrap_policy"))
            ):
                yield Found(
                    policy.node if policy and policy.node else call.node,
                    f"{one.name.rpartition('.')[2]} is given as it is",
                )


def strategy_as_text(script: Script) -> Iterator[Found]:
    for call in wrapped(script):
        for name in ("sharding_strategy", "backward_prefetch", "mixed_precision", "cpu_offload"):
            value = call.literal(name)
            if isinstance(value, str):
                yield Found(call.words[name].node or call.node, f"{name} is the text {value!r}")


def unknown_argument(script: Script) -> Iterator[Found]:
    for call in script.calls:
        of = known()["arguments"].get(call.name)
        if of is None or not call.full.startswith("torch.") or not isinstance(call.node, ast.Call):
            continue
        for name, thing in call.words.items():
            if name == "**" or name in of["takes"] or not any(word.arg == name for word in call.node.keywords):
                continue
            instead = of.get("instead", {}).get(name) or did_you_mean(name, of["takes"], "it has")
            yield Found(thing.node or call.node, f"{call.name} has no {name}; {instead}")


def moved_name(script: Script) -> Iterator[Found]:
    moved = known()["moved"]
    seen = set()
    for full, node, is_guarded in script.imported:
        for name, instead in moved.items():
            if not is_guarded and (full == name or full.startswith(f"{name}.")) and (node, name) not in seen:
                seen.add((node, name))
                yield Found(node, f"{name}: {instead}")
    for call in script.calls:
        last = call.full.startswith("torch.") and next((name for name in moved if call.full == name), None)
        if (
            last
            and last not in {full for full, *_ in script.imported}
            and not any(c.text == "an exception" for c in call.path)
        ):
            yield Found(call.node, f"{last}: {moved[last]}")


def checkpoint_whole_model(script: Script) -> Iterator[Found]:
    for call in script.torch("checkpoint_wrapper"):
        for one in alternatives(call.given("module", 0), call.path):
            if whole(one) is not one or one.kind not in ("call", "instance") or call.loops:
                continue
            if any(same_model(one, model) for made in optimizers(script) for model in model_of_parameters(made)):
                yield Found(call.node, "checkpoint_wrapper takes the whole model")


def checkpoint_after_sharding(script: Script) -> Iterator[Found]:
    for call in script.torch("checkpoint_wrapper", "apply_activation_checkpointing"):
        given = call.given("module", 0) or call.words.get("model")
        for one in every(given, call.path):
            if is_fsdp1(one, call.path):  # FSDP1's own order: torch's tutorial checkpoints after wrapping
                continue
            if call.name == "checkpoint_wrapper" and is_fsdp2(one, script, call):
                yield Found(call.node, "this block was given to fully_shard before")
            elif call.name != "checkpoint_wrapper" and any(
                same_model(part, one) and shard.order < call.order for shard, part in script.sharded
            ):
                yield Found(call.node, "its blocks were given to fully_shard before")


def compile_before_checkpointing(script: Script) -> Iterator[Found]:
    for call in script.torch("checkpoint_wrapper", "apply_activation_checkpointing"):
        given = call.given("module", 0) or call.words.get("model")
        whole_model = call.name != "checkpoint_wrapper"
        for one in alternatives(given, call.path):
            layers = inside(one, call.path)
            if sum(thing.kind not in WRAPPERS for thing in layers) > 1:
                continue  # it may be one of several
            made = any(thing.kind == "compiled" for thing in layers)
            before = [
                other for other in script.calls
                if other.order < call.order and other.function == call.function and compatible(other.path, call.path)
            ]  # fmt: skip
            in_place = [
                other for other in before
                if other.name == "compile" and other.on is not None
                and (other.on in layers or (whole_model and same_model(other.on, one)))
            ]  # fmt: skip
            stored = whole_model and any(
                (other.name, other.full) == ("<assign>", "[]") and other.args and other.args[0].kind == "compiled"
                and same_model(other.args[0], one) for other in before
            )  # fmt: skip
            if made or in_place or stored:
                yield Found(call.node, "what is checkpointed here was compiled before")


def compile_flat_parameters(script: Script) -> Iterator[Found]:
    compiled = [(c, c.given("model", 0)) for c in script.torch("compile")] + [
        (c, c.on) for c in script.methods("compile")
    ]
    for call, thing in compiled:
        for wrap in wrapped(script):
            made = [
                one for one in (inside(thing, call.path) if thing else []) if one.call is wrap and one.kind == "fsdp1"
            ]
            if made and "**" not in wrap.words and wrap.literal("use_orig_params") in (False, ...):
                if "use_orig_params" in wrap.words and wrap.literal("use_orig_params") is ...:
                    continue
                yield Found(call.node, f"the FSDP of line {wrap.line} has use_orig_params=False"
                            + ("" if "use_orig_params" in wrap.words else ", its default"))  # fmt: skip


def compiled_state_dict(script: Script) -> Iterator[Found]:
    for call in script.methods("state_dict"):
        kinds = [[thing.kind for thing in inside(one, call.path)] for one in alternatives(call.on, call.path)]
        if kinds and all("compiled" in of for of in kinds) and not any(name in script.text for name in ("_orig_mod",)):
            yield Found(call.node, "torch.compile returned what this is the state dict of")


def limit_all_gathers_off(script: Script) -> Iterator[Found]:
    for call in wrapped(script):
        if call.literal("limit_all_gathers") is False:
            yield Found(call.words["limit_all_gathers"].node or call.node, "the CPU may gather far ahead")


def no_shard(script: Script) -> Iterator[Found]:
    for call in wrapped(script):
        thing = call.given("sharding_strategy", 2)
        if thing is not None and thing.kind == "name" and thing.name.endswith("ShardingStrategy.NO_SHARD"):
            yield Found(thing.node or call.node, "ShardingStrategy.NO_SHARD")
