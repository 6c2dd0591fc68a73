"""The calls of fully_shard that take a wrapper's place: what its arguments become, unit by unit, root last."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from fsdp_sim.migrate.source import Script, arguments_of, calls_in, walk

FSDP = "torch.distributed.fsdp"
WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
STATE = "torch.distributed.checkpoint.state_dict"
KEEPS = {"FULL_SHARD": "", "HYBRID_SHARD": "", "SHARD_GRAD_OP": "False", "_HYBRID_SHARD_ZERO2": "False"}
"""Of a sharding strategy: ``reshard_after_forward``, empty for the default."""


@dataclass
class Sharding:
    """What becomes of one wrapper.

    Attributes:
        arguments: of fully_shard, as code. units: a condition on ``module``; empty where the root is the one unit.
        compiled: arguments of the blocks' ``compile``, None where they are not compiled.
        broadcast: ``before`` sharding from tensors on their device, ``after`` it from rank 0's state, or not.
        refused: it cannot be written without a person.
    """

    arguments: dict[str, str] = field(default_factory=dict)
    units: str = ""
    broadcast: str = ""
    refused: bool = False

    def lines(self, script: Script, model: str) -> str:
        """The statements, for a model by that name."""
        script.need(FSDP, "fully_shard")
        said, code = "", []
        if self.broadcast:
            script.need("torch", "distributed as dist")
        if self.broadcast == "before":
            code += [
                f"for tensor in (*{model}.parameters(), *{model}.buffers()):  # fully_shard sends nothing",
                "    dist.broadcast(tensor.detach(), src=0)",
            ]
        if self.broadcast == "after":
            code.append(f"whole = {model}.state_dict() if dist.get_rank() == 0 else {{}}")
        given = [f"{name}={value}" for name, value in self.arguments.items()]
        if given and self.units:
            parts = [f'"{name}": {value}' for name, value in self.arguments.items()]
            short = f"fsdp_kwargs = {{{', '.join(parts)}}}"
            code += [short] if len(short) < 90 else ["fsdp_kwargs = {", *(f"    {part}," for part in parts), "}"]
            said = ", **fsdp_kwargs"
        elif given:
            said = ", " + ", ".join(given)
        if self.units:
            code += [
                f"for module in reversed(list({model}.modules())):  # blocks first, the root last",
                f"    if {self.units.replace('{model}', model)}:",
                f"        fully_shard(module{said})",
            ]
        code.append(f"fully_shard({model}{said})")
        if self.broadcast == "after":
            script.need(STATE, "set_model_state_dict")
            script.need(STATE, "StateDictOptions")
            code.append(
                f"set_model_state_dict(\n    {model}, whole, options=StateDictOptions(full_state_dict=True, "
                "broadcast_from_rank0=True)\n)"
            )
        return "\n".join(code) + "\n"


def units_of(script: Script, classes: tuple[str, ...]) -> str:
    """The condition by which a module is a unit."""
    if script.by_name and not classes:
        return "type(module).__name__ in ({model}._no_split_modules or ())"
    if not classes:
        return ""
    block = classes[0] if len(classes) == 1 else f"({', '.join(classes)})"
    how = _checkpointed(script)
    if how is None:
        return f"isinstance(module, {block})"
    script.need(WRAPPER, "CheckpointWrapper")
    return f"isinstance(module, {f'CheckpointWrapper if {how} else {block}' if how else 'CheckpointWrapper'})"


def choose_units(script: Script, found: Sharding, at: cst.CSTNode, *, by_class: bool) -> None:
    """Settle which modules are units: those of the script's blocks where nothing else said it, or where they are given.

    Args:
        at: the wrapper, for what is said where the whole model is one unit.
        by_class: the old API had no policy that said it.
    """
    if by_class or script.blocks_given:
        found.units = units_of(script, script.blocks)
    if not found.units:
        script.look(
            at, "No class of blocks was found, so the whole model is one unit, gathered at once. Name the class with "
            "--block.", rule="one-unit",
        )  # fmt: skip
    script.plan["wrap"] = "block" if found.units else "root"


def _checkpointed(script: Script) -> str | None:
    """Whether the blocks lie in checkpoint wrappers: None for no, else the condition under which, empty for always."""
    for node in walk(script.module):
        if isinstance(node, cst.If) and node.orelse is None and _applies(script, node.body):
            return script.code(node.test)
    return "" if _applies(script, script.module) else None


def _applies(script: Script, node: cst.CSTNode) -> bool:
    return any(script.is_a(one, "apply_activation_checkpointing") for one in calls_in(node))


def of_policy(script: Script, node: cst.BaseExpression) -> str | None:
    """The condition on a module that a wrap policy of FSDP1 puts; None for one that is not understood."""
    value = script.value_of(node)
    if isinstance(value, cst.Lambda):
        return None
    if not isinstance(value, cst.Call):
        return None
    given = arguments_of(value)
    if script.is_a(value, "ModuleWrapPolicy"):
        classes = given.get("#0", given.get("module_classes"))
    elif script.is_a(value, "partial") and script.is_a(given.get("#0", value), "transformer_auto_wrap_policy"):
        classes = given.get("transformer_layer_cls")
    elif script.is_a(value, "partial") and script.is_a(given.get("#0", value), "lambda_auto_wrap_policy"):
        return f"{script.code(given['lambda_fn'])}(module)" if isinstance(given.get("lambda_fn"), cst.Name) else None
    else:
        return None
    if isinstance(classes, cst.Name):
        classes = script.value_of(classes) or classes
    if isinstance(classes, cst.Set | cst.Tuple | cst.List):
        return units_of(script, tuple(script.code(one.value) for one in classes.elements))
    return f"isinstance(module, tuple({script.code(classes)}))" if classes is not None else None


def policy_of_dtype(script: Script, call: cst.Call) -> str:
    """FSDP1's ``MixedPrecision(...)`` as a ``MixedPrecisionPolicy``."""
    given = arguments_of(
        call, ("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads", "cast_forward_inputs",
               "cast_root_forward_inputs"),
    )  # fmt: skip
    script.need(FSDP, "MixedPrecisionPolicy")
    code: dict[str, str] = {name: script.code(given[name]) for name in ("param_dtype", "reduce_dtype") if name in given}
    if "param_dtype" in code and code.get("reduce_dtype", "None") == "None":
        code["reduce_dtype"] = code["param_dtype"]  # FSDP1 reduces in it; torch 2.15 would in that of the shards
        script.use("reduce-dtype-unsaid")
    script.plan |= {name: text for name, value in code.items() if (text := _dtype(value))}
    if "buffer_dtype" in given and script.code(given["buffer_dtype"]) != "None":
        script.look(
            call,
            f"buffer_dtype={script.code(given['buffer_dtype'])}: FSDP2 leaves buffers as they are. A model that has "
            "buffers in floating point must cast them itself, before fully_shard.",
        )
    if script.code(given.get("keep_low_precision_grads", cst.Name("False"))) != "False":
        script.look(call, "keep_low_precision_grads: FSDP2 keeps gradients in the dtype of the shards.")
    inputs = [script.code(given[name]) for name in ("cast_forward_inputs", "cast_root_forward_inputs") if name in given]
    if inputs == ["False", "False"]:
        code["cast_forward_inputs"] = "False"
    script.use("mixed-precision")
    return f"MixedPrecisionPolicy({', '.join(f'{name}={value}' for name, value in code.items())})"


def policy_of_offload(script: Script, call: cst.Call) -> str:
    """FSDP1's ``CPUOffload(...)`` as an offload policy."""
    given = arguments_of(call, ("offload_params",))
    text = script.code(given["offload_params"]) if "offload_params" in given else "False"
    pinned = "" if "cuda" in script.module.code else "pin_memory=False"  # pinning takes a GPU
    if text != "False":
        script.need(FSDP, "CPUOffloadPolicy")
        script.plan["cpu_offload"] = True
        script.use("offload")
    if text != "True":
        script.need(FSDP, "OffloadPolicy")
    yes = f"CPUOffloadPolicy({pinned})"
    return {"True": yes, "False": "OffloadPolicy()"}.get(text, f"{yes} if {text} else OffloadPolicy()")


def _dtype(code: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}.get(code.rpartition(".")[2], "")
