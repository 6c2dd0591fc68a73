"""What each argument of a wrapper says to fully_shard: one function for each of FSDP1's, a table for DDP's."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from fsdp_sim.migrate.sharding import FSDP, KEEPS, Sharding, of_policy
from fsdp_sim.migrate.source import Script, arguments_of

OF_FSDP1 = (
    "module", "process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy", "backward_prefetch",
    "mixed_precision", "ignored_modules", "param_init_fn", "device_id", "sync_module_states", "forward_prefetch",
    "limit_all_gathers", "use_orig_params", "ignored_states", "device_mesh",
)  # fmt: skip
OF_DDP = (
    "module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync", "process_group", "bucket_cap_mb",
    "find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph",
    "delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh",
)  # fmt: skip
"""In the order of torch 2.13's signatures."""
DDP_SAYS = {
    "find_unused_parameters": "find_unused_parameters has no equivalent: a parameter without a gradient is left out of "
    "its unit's reduce-scatter. Ranks that leave out different ones wait for each other for ever: let every rank use "
    "the same parameters, or add 0 * parameter.sum() to the loss.",
    "mixed_precision": "DDP's mixed_precision is left out: give fully_shard an mp_policy=MixedPrecisionPolicy(...).",
    "delay_all_reduce_named_params": "delay_all_reduce_named_params has no equivalent; it is left out.",
    "param_to_hook_all_reduce": "param_to_hook_all_reduce has no equivalent; it is left out.",
}
"""Arguments of DDP that change more than speed, and what to do; others are dropped without loss."""
Reader = Callable[[Script, Sharding, cst.BaseExpression], None]


def of_ddp(script: Script, call: cst.Call) -> Sharding:
    """What a ``DistributedDataParallel(...)`` becomes."""
    found = Sharding(broadcast="before")
    given = arguments_of(call, OF_DDP)
    for name, node in given.items():
        text = script.code(node)
        if name in DDP_SAYS and text not in ("False", "None"):
            script.look(node, DDP_SAYS[name])
        elif name == "init_sync" and text == "False":
            found.broadcast = ""
        elif name in ("process_group", "device_mesh") and text != "None":
            READERS[name](script, found, node)
        elif name in ("*", "**"):
            unread(script, found, node)
    if "device_ids" in given:
        _device(script, given["device_ids"])
    return found


def of_fsdp1(script: Script, call: cst.Call) -> Sharding:
    """What a ``FullyShardedDataParallel(...)`` becomes."""
    found = Sharding()
    given = arguments_of(call, OF_FSDP1)
    for name, node in given.items():
        if name in READERS and script.code(node) != "None":
            READERS[name](script, found, node)
        elif name not in OF_FSDP1:
            unread(script, found, node)
    if found.broadcast and "device_id" in given:
        found.broadcast = "after"  # the model may be on the CPU, from where NCCL sends nothing
    if "HYBRID" in str(script.plan.get("sharding_strategy")) and "mesh" not in found.arguments:
        found.arguments["mesh"] = hybrid_mesh(script)
    return found


def unread(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    script.look(
        node, f"{script.code(node)[:60]} may hold any arguments, which only running the script would tell: write them "
        "out, then migrate.", must=True,
    )  # fmt: skip
    found.refused = True


def _strategy(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    said = _kept(script, node)
    if said is None:
        name = script.code(script.value_of(node) or node)
        if name.endswith("NO_SHARD"):
            why = "NO_SHARD is DDP, which FSDP2 is not: use DistributedDataParallel, or shard."
            script.look(node, why, must=True, rule="no-shard")
        else:
            script.look(
                node, f"{name[:60]} is no strategy that can be read here: write ShardingStrategy.FULL_SHARD or another "
                "one, then migrate.", must=True,
            )  # fmt: skip
        found.refused = True
    elif said:
        found.arguments["reshard_after_forward"] = said


def _kept(script: Script, node: cst.BaseExpression) -> str | None:
    """``reshard_after_forward`` of a strategy, empty for the default; None for what is not understood."""
    value = script.value_of(node)
    if isinstance(value, cst.IfExp):
        yes, no = _kept(script, value.body), _kept(script, value.orelse)
        if yes is None or no is None:
            return None
        return yes if yes == no else f"{yes or None} if {script.code(value.test)} else {no or None}"
    name = script.name_of(value).rpartition(".")[2] if value is not None else ""
    if name not in KEEPS:
        return None
    script.plan["sharding_strategy"] = name
    return KEEPS[name]


def hybrid_mesh(script: Script) -> str:
    """Replicas between nodes, shards within: FSDP1's groups, which it makes of ``torch.cuda.device_count()``."""
    script.need("torch.distributed.device_mesh", "init_device_mesh")
    script.need("torch", "distributed as dist")
    script.use("hybrid")
    local = "torch.cuda.device_count()"
    return (
        f'init_device_mesh("cuda", (dist.get_world_size() // {local}, {local}), mesh_dim_names=("replicate", "shard"))'
    )


def _policy(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    units = "" if script.blocks_given else of_policy(script, node)
    if units is None:
        script.look(
            node, f"It is not told here by which classes {script.code(node)[:60]} wraps, and FSDP2 has no policies: "
            "name the classes of the blocks with --block, then migrate.", must=True,
        )  # fmt: skip
        found.refused = True
    else:
        found.units = units


def _mixed(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    _with_default(script, found, node, "mp_policy", "MixedPrecisionPolicy")


def _offload(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        return
    _with_default(script, found, node, "offload_policy", "OffloadPolicy")


def _with_default(script: Script, found: Sharding, node: cst.BaseExpression, name: str, default: str) -> None:
    """An argument that was a policy or None. `Policies` has made it FSDP2's policy where it is made."""
    value = script.value_of(node)
    made = value is not None and script.is_a(value, "MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy")
    if isinstance(value, cst.Name) and value.value == "None":
        return
    if made and value is not None and script.code(value) == "OffloadPolicy()":
        return
    code = script.code(node)
    if not made:
        if script.name_of(node) != code and "." in script.name_of(node):
            script.look(node, f"{code} comes from another file: migrate that one too, for it must be a {default} now.")
        script.need(FSDP, default)
        if isinstance(node, cst.IfExp) and script.code(node.orelse) == "None":
            code = script.code(node.with_changes(orelse=cst.parse_expression(f"{default}()")))
        else:
            code = f"({code}) or {default}()" if isinstance(node, cst.IfExp) else f"{code} or {default}()"
    found.arguments[name] = code


def _prefetch(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    if not script.is_a(node, "BACKWARD_PRE"):
        script.look(
            node, f"backward_prefetch={script.code(node)}: FSDP2 always gathers one unit ahead in backward, as "
            "BACKWARD_PRE does, and so holds one more whole unit.", rule="backward-prefetch-off",
        )  # fmt: skip


def _ahead(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    if script.code(node) != "False":
        script.look(
            node, "forward_prefetch is gone. FSDP2 gathers ahead by itself as far as the CPU is ahead; where the "
            "CPU is "
            "late, each block's set_modules_to_forward_prefetch([next block]) does what it did.",
        )  # fmt: skip


def _limit(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    if script.code(node) == "False":
        script.look(
            node, "limit_all_gathers=False is gone: FSDP2 needs no limit, for it frees what it gathered in stream "
            "order.", rule="limit-all-gathers-off",
        )  # fmt: skip


def _sync(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    if script.code(node) != "False":
        found.broadcast = "before"
        script.use("sync-module-states")


def _ignored(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    code = script.code(node)
    found.arguments["ignored_params"] = f"{{p for module in {code} for p in module.parameters()}}"
    script.use("ignored-parameters")


def _ignored_states(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    script.look(
        node, f"ignored_states={script.code(node)[:60]} is taken to hold parameters; where it holds modules, give "
        "ignored_params their parameters.", rule="ignored-parameters",
    )  # fmt: skip
    found.arguments["ignored_params"] = f"set({script.code(node)})"
    script.use("ignored-parameters")


def _init_fn(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    script.look(
        node, "param_init_fn is gone: FSDP2 shards a model on the meta device as it is. Make it on meta on every rank, "
        'then fully_shard, then model.to_empty(device="cuda"), tie weights again, and init_weights or '
        "set_model_state_dict.", must=True, rule="meta-never-filled",
    )  # fmt: skip
    found.refused = True


def _group(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    script.need("torch.distributed.device_mesh", "DeviceMesh")
    device = "cuda" if "cuda" in script.module.code else "cpu"
    found.arguments["mesh"] = f'DeviceMesh.from_group({script.code(node)}, "{device}")'


def _mesh(script: Script, found: Sharding, node: cst.BaseExpression) -> None:
    found.arguments["mesh"] = script.code(node)


def _device(script: Script, node: cst.BaseExpression) -> None:
    text = script.code(node)
    known = text == "None" or "cpu" in text or "current_device" in text
    if not known and "cuda" in script.module.code and "set_device" not in script.module.code:
        script.look(
            node, f"{text[:40]} said which GPU is this rank's. fully_shard takes the current one: call "
            "torch.cuda.set_device(local_rank) before it.", must=True,
        )  # fmt: skip


READERS: dict[str, Reader] = {
    "sharding_strategy": _strategy, "auto_wrap_policy": _policy, "mixed_precision": _mixed, "cpu_offload": _offload,
    "backward_prefetch": _prefetch, "forward_prefetch": _ahead, "limit_all_gathers": _limit,
    "sync_module_states": _sync, "ignored_modules": _ignored, "ignored_states": _ignored_states,
    "param_init_fn": _init_fn, "process_group": _group, "device_mesh": _mesh,
    "device_id": lambda script, found, node: _device(script, node),
}  # fmt: skip
