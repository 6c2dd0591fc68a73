"""Traps in how a model is made and sharded. Each function is the detector of the rule of its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from fsdp_sim.lint.script.ask import (
    Found,
    escapes,
    forwards,
    is_fsdp2,
    model_of_parameters,
    optimizers,
    same_model,
    shown,
    wrapped,
)
from fsdp_sim.lint.script.record import Call, Script, Thing, alternatives, compatible, every, inside, whole

FILLS = re.compile(
    r"init|reset|load|fill|copy|materialize|broadcast|apply|from_pretrained|restore|resume", re.IGNORECASE
)
"""Names of what may give values to a model."""
FILLS_NOT = re.compile(
    r"data_?loader|load_data|reset_(peak|max|accum)|^_*init_*$|init_(process|device|dist|log)|apply_(act|ac$|fsdp|comp)",
    re.IGNORECASE,
)
"""Names like these that give none: DataLoader, wandb.init, apply_activation_checkpointing, super().__init__."""


def optimizer_before_sharding(script: Script) -> Iterator[Found]:
    for made in optimizers(script):
        models = model_of_parameters(made)
        for call in [*script.torch("fully_shard"), *wrapped(script)]:
            if call.order < made.order or not compatible(call.path, made.path):
                continue
            if (
                call.name != "fully_shard"
                and call.literal("use_orig_params") is not False
                and "use_orig_params" in call.words
            ):
                continue  # FSDP1 keeps the parameters' identity with use_orig_params=True
            given = list(every(call.given("module", 0), call.path))
            if any(same_model(model, one) for model in models for one in given):
                if not any(_again(other, made, call, script) for other in optimizers(script)):
                    yield Found(
                        made.node,
                        f"{made.name} takes the parameters here, and {call.name} replaces them in line {call.line}",
                    )
                break


def fabric_joint_setup(script: Script) -> Iterator[Found]:
    for call in script.methods("setup"):
        fabrics = [one.call for one in alternatives(call.on, call.path) if one.call is not None]
        if len(call.args) > 1 and any(_is_of_fsdp2(one) for one in fabrics):
            yield Found(call.node, "the model is sharded here, after the optimizer took its parameters")


def _is_of_fsdp2(made: Call) -> bool:
    """Whether it makes a Fabric of Lightning with its strategy for FSDP2."""
    given = list(alternatives(made.given("strategy", 1), made.path))
    strategies = [one.call.name for one in given if one.call is not None]
    return made.name == "Fabric" and made.full.startswith("lightning") and "ModelParallelStrategy" in strategies


def _again(other: Call, made: Call, shards: Call, script: Script) -> bool:
    """Whether another optimizer is made of the model after it was sharded."""
    return other.order > shards.order and any(
        same_model(one, two) for one in model_of_parameters(other) for two in model_of_parameters(made)
    )


def forward_before_optimizer(script: Script) -> Iterator[Found]:
    for made in optimizers(script):
        for model in model_of_parameters(made):
            roots = [
                call for call, one in script.sharded if one in inside(model, made.path) and call.order < made.order
            ]
            if not roots or roots[-1].literal("reshard_after_forward") is True:
                continue
            between = [
                call for call in script.calls
                if roots[-1].order < call.order < made.order and call.on is not None
                and compatible(call.path, made.path)
                and any(one in inside(model, made.path) for one in inside(call.on, call.path))
            ]  # fmt: skip
            ran = [call for call in between if call.name == "<call>"]
            freed = [
                call for call in script.calls
                if ran and ran[-1].order < call.order < made.order and (call.name == "backward" or call in between)
                and call.name in ("reshard", "backward")
            ]  # fmt: skip
            if ran and not freed:
                yield Found(made.node, f"the model ran in line {ran[-1].line}, so the root is unsharded here")
                break


def _roots(script: Script) -> list[tuple[Call, Thing]]:
    """Each sharding of a part, with the model that it is a part of."""
    return [(call, whole(one)) for call, one in script.sharded if whole(one) is not one]


def root_not_sharded(script: Script) -> Iterator[Found]:
    seen: list[Thing] = []
    for call, model in _roots(script):
        if model in seen:
            continue
        seen.append(model)
        tops = [one for _, one in script.sharded]
        if any(one in inside(model) or (whole(one) is one and one is model) for one in tops) or model.kind == "several":
            continue
        if wrapped(script) or _unknown(model, script) or not _is_used(model, script):
            continue
        yield Found(call.node, "the parts are sharded here, and no fully_shard takes the model they belong to")


def _unknown(model: Thing, script: Script) -> bool:
    """Whether something that cannot be read may do to the model what seems to be missing."""
    return bool(escapes(model, script)) or (model.kind == "argument" and not _is_used(model, script))


def _is_used(model: Thing, script: Script) -> bool:
    """Whether the script trains the model itself: one that is handed on may be finished elsewhere."""
    return any(same_model(one, model) for made in optimizers(script) for one in model_of_parameters(made)) and any(
        call.on is not None and model in inside(call.on) for call in forwards(script)
    )


def root_before_blocks(script: Script) -> Iterator[Found]:
    for call, one in script.sharded:
        if whole(one) is not one:
            continue
        later = [
            other for other, part in script.sharded
            if other.order > call.order and part is not one and whole(part) is one and compatible(other.path, call.path)
            and not any(t is part and c.order < call.order for c, t in script.sharded)
        ]  # fmt: skip
        if later and not _lists_first(call, one):
            yield Found(call.node, f"the model is sharded here, its parts only in line {later[0].line}")


def _lists_first(call: Call, one: Thing) -> bool:
    return one.kind == "several"


BLOCKS = re.compile(r"(^|\.)(ModuleList|from_pretrained|from_config|\w+For\w+)$")
"""Names of what makes a model of which we know that it has blocks."""


def one_unit(script: Script) -> Iterator[Found]:
    for call in [*wrapped(script), *script.torch("fully_shard")]:
        is_fsdp1, model = call.name != "fully_shard", call.given("module", 0)
        if (
            model is None
            or call.loops
            or (is_fsdp1 and ({"auto_wrap_policy", "**"} & set(call.words) or len(call.args) > 1))
        ):
            continue
        made = whole(model)
        others = [other for other in [*wrapped(script), *script.torch("fully_shard")] if other is not call]
        if any(
            one is not model for other in others for one in every(other.given("module", 0)) if same_model(one, made)
        ):
            continue
        if escapes(made, script, call) or script.torch("enable_wrap", "auto_wrap", "wrap"):
            continue
        if any(other.loops for other in others) or model.kind == "part" or not _has_blocks(made, script):
            continue
        yield Found(
            call.node,
            f"{call.name} takes the model, and {'no auto_wrap_policy' if is_fsdp1 else 'none of its blocks before'}",
        )


def _has_blocks(model: Thing, script: Script) -> bool:
    """Whether the model is seen to be made of blocks."""
    if model.kind == "instance" and isinstance(model.node, ast.ClassDef):
        return "ModuleList" in ast.unparse(model.node)
    return model.kind == "call" and bool(BLOCKS.search(model.name))


def unit_per_linear(script: Script) -> Iterator[Found]:
    for call in [*script.torch("fully_shard"), *wrapped(script)]:
        for condition in call.path:
            test = condition.test
            if condition.holds and _is_linear_test(test, script):
                yield Found(call.node, f"a unit for each module for which {shown(test)}")
    for call in script.torch("ModuleWrapPolicy", "transformer_auto_wrap_policy", "partial") + [
        call for call in script.calls if call.full == "functools.partial"
    ]:
        given = call.args[:1] if call.name == "ModuleWrapPolicy" else [call.words.get("transformer_layer_cls")]
        names = {one.name for thing in given for one in every(thing) if one.kind == "name"}
        if names & {"torch.nn.Linear", "torch.nn.modules.linear.Linear"}:
            yield Found(call.node, "the policy makes a unit of each nn.Linear")


def _is_linear_test(test: ast.expr, script: Script) -> bool:
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance"):
        return False
    classes = test.args[1].elts if isinstance(test.args[1], ast.Tuple) else [test.args[1]]
    names = {_dotted(one, script) for one in classes}
    return "torch.nn.Linear" in names


def _dotted(node: ast.expr, script: Script) -> str:
    text = ast.unparse(node)
    first, _, rest = text.partition(".")
    return ".".join(filter(None, (script.imports.get(first, first), rest)))


def tied_across_units(script: Script) -> Iterator[Found]:
    for tie, one, other in ties(script):
        units = [(call, unit) for call, unit in script.sharded] + [
            (call, unit) for call in wrapped(script) for unit in alternatives(call.given("module", 0), call.path)
        ]
        mine = [call for call, unit in units if unit is one]
        its = [call for call, unit in units if unit is other]
        if not (mine or its) or any(call in its for call in mine):
            continue  # both are left to the root, or given in one list
        yield Found(tie, "the weight is tied, and its two modules are given to different units "
                         f"(line {(mine or its)[0].line})")  # fmt: skip


def ties(script: Script) -> Iterator[tuple[ast.AST, Thing, Thing]]:
    """Each place where a weight of one module becomes that of another, with the two modules."""
    for call in script.calls:
        if call.name != "<assign>" or call.full != "weight" or call.on is None or not call.args:
            continue
        for value in alternatives(call.args[0], call.path):
            if value.kind == "part" and value.name == "weight" and value.owner is not None:
                for one in alternatives(call.on, call.path):
                    yield call.node, one, value.owner


def to_empty_unties(script: Script) -> Iterator[Found]:
    all_ties = list(ties(script))
    for call in script.methods("to_empty"):
        tied = [tie for tie in all_ties if same_model(tie[1], call.on)]
        names = ("tie_weights", "tie_embeddings", "tie")
        if tied and not any(other.name in names and other.order > call.order for other in script.calls):
            last = max(getattr(node, "lineno", 0) for node, _, _ in tied)
            orders = [other.order for other in script.calls for node, _, _ in tied if other.node is node]
            if max(orders) < call.order:
                yield Found(call.node, f"the weights tied in line {last} are two here, and nothing ties them again")


def meta_never_filled(script: Script) -> Iterator[Found]:
    for call in script.methods("to_empty"):
        if call.on is None:
            continue
        model = whole(call.on)
        after = [
            other for other in script.calls
            if other.order > call.order and FILLS.search(other.name) and not FILLS_NOT.search(other.name)
        ]  # fmt: skip
        if after or escapes(model, script) or not _is_used(model, script) or (call.path and call.path[-1].by_rank):
            continue
        yield Found(call.node, "to_empty leaves the weights unset, and nothing after it sets them")


def seed_per_rank(script: Script) -> Iterator[Found]:
    seeds = [
        call for call in script.torch("manual_seed", "manual_seed_all", "seed")
        if call.args and any(one.kind == "rank" for one in _operands(call.args[0]))
    ]  # fmt: skip
    for call in script.torch("fully_shard"):
        for one in every(call.given("module", 0), call.path):
            model = whole(one)
            made = model.node
            if (
                one is not model
                or not isinstance(made, ast.Call | ast.ClassDef)
                or model.kind not in ("call", "instance")
            ):
                continue
            at = next(
                (
                    c.order
                    for c in script.calls
                    if c.node is made or (c.name == model.name and model.kind == "instance")
                ),
                None,
            )
            before = [seed for seed in seeds if at is not None and seed.order < at]
            between = script.torch("manual_seed")
            if not before or [s for s in between if before[-1].order < s.order < (at or 0) and s not in seeds]:
                continue
            if _gets_values(script, call, model) or "from_pretrained" in model.name:
                continue
            yield Found(
                before[-1].node, f"each rank makes another model after this, and line {call.line} shards it as it is"
            )
            return


def _operands(thing: Thing) -> Iterator[Thing]:
    yield thing
    for item in thing.items:
        yield from _operands(item)


def _gets_values(script: Script, call: Call, model: Thing) -> bool:
    names = re.compile(r"load|broadcast|set_model_state_dict|set_state_dict|sync", re.IGNORECASE)
    return any(names.search(other.name) for other in script.calls) or bool(escapes(model, script))


def weights_on_one_rank(script: Script) -> Iterator[Found]:
    for load in script.methods("load_state_dict"):
        if not load.by_rank or load.on is None:
            continue
        later = [
            call for call in [*script.torch("fully_shard"), *wrapped(script)]
            if call.order > load.order and any(same_model(one, load.on) for one in every(call.given("module", 0)))
        ]  # fmt: skip
        if not later or any(call.literal("sync_module_states") is True or "**" in call.words for call in later):
            continue
        sends = re.compile("broadcast|set_model_state_dict|set_state_dict|sync", re.IGNORECASE)
        if any(sends.search(call.name) for call in script.calls) or escapes(whole(load.on), script):
            continue
        opposite = [o for o in script.methods("load_state_dict") if o is not load and same_model(o.on, load.on)]
        if not opposite:
            yield Found(load.node, f"only some ranks load, and line {later[0].line} shards what each has")


def sync_states_on_cpu(script: Script) -> Iterator[Found]:
    for call in wrapped(script):
        if call.literal("sync_module_states") is not True or "device_id" in call.words or "**" in call.words:
            continue
        model = call.given("module", 0)
        moved = [other for other in script.methods("to", "cuda", "xpu") if same_model(other.on, model)]
        on_device = [other for other in script.torch("set_default_device", "device") if other.order < call.order]
        if model is None or moved or on_device or escapes(model, script, call):
            continue
        if any(one.kind in ("call", "instance") for one in alternatives(model, call.path)):
            yield Found(call.node, "the model is on the CPU here, and no device_id says where it is to go")


def ignored_parameters(script: Script) -> Iterator[Found]:
    for call in [*script.torch("fully_shard"), *wrapped(script)]:
        for name in ("ignored_params", "ignored_states", "ignored_modules"):
            given = call.words.get(name)
            if given is None or given.kind == "constant" or not optimizers(script):
                continue
            freezes = [
                other for other in script.calls
                if other.name in ("requires_grad_", "all_reduce", "DistributedDataParallel", "replicate", "<assign>")
                and (other.name != "<assign>" or other.full == "requires_grad")
            ]  # fmt: skip
            tests = any("requires_grad" in c.text for other in script.calls for c in other.path if other.loops)
            if not freezes and not tests:
                yield Found(given.node or call.node, f"{name} keeps these out, and nothing freezes or reduces them")


def deepcopy_of_shards(script: Script) -> Iterator[Found]:
    for call in script.calls:
        if call.full in ("copy.deepcopy", "torch.optim.swa_utils.AveragedModel") and call.args:
            thing = call.args[0]
            if is_fsdp2(thing, script, call):
                yield Found(call.node, f"{call.name} of a model that fully_shard has taken")
