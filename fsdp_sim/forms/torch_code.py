"""A state as a torch training script, ``train.py`` under ``torchrun``: every setting as the call that makes it."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_sim.forms.state import FormState
from fsdp_sim.forms.torch_model import torch_model
from fsdp_sim.spec import TORCH_DTYPES, Cluster, Model, Plan, aten_names

OPTIMIZERS = {
    "adamw": "torch.optim.AdamW({}, lr=3e-4)",
    "sgd_momentum": "torch.optim.SGD({}, lr=0.1, momentum=0.9)",
    "sgd": "torch.optim.SGD({}, lr=0.1)",
    "adamw_8bit": "torch.optim.AdamW({}, lr=3e-4)",
    "adamw_master_weights": "torch.optim.AdamW({}, lr=3e-4)",
    "muon": "torch.optim.AdamW({}, lr=3e-4)",
}
TODO_OPTIMIZERS = {
    "adamw_8bit": "torchao.optim.AdamW8bit",
    "adamw_master_weights": "AdamW with an fp32 copy of the parameters",
    "muon": "torch.optim.Muon for the matrices of the blocks",
}


class Script:
    """Lines of ``train.py``, and the imports they need."""

    def __init__(self) -> None:
        self.imports: set[str] = {
            "import os", "from functools import partial", "import torch", "import torch.distributed as dist",
            "import torch.nn.functional as F", "from torch import nn",
        }  # fmt: skip
        self.shard: list[str] = []  # the body of main() from the model to the optimizer
        self.optimizer = ""
        self.before_micro_batch: list[str] = []
        self.sync = ""  # a context manager around a micro-batch
        self.saving = ""  # one around its forward
        self.after_step: list[str] = []

    def use(self, module: str, *names: str) -> None:
        self.imports |= {f"from {module} import {name}" for name in names}


def torch_code(state: FormState) -> str:
    """A script that trains the state's model as its plan says, on random tokens.

    The model is a plain transformer of the same dimensions; put your own in its place.
    """
    model, cluster, plan = state.model, state.cluster, state.plan
    script = Script()
    script.shard += [
        f"# TODO {name} = {getattr(plan, name)!r} is not written here: {how}"
        for name, how in LEFT_OUT.items()
        if getattr(plan, name) != getattr(Plan, name)
    ]
    if plan.optimizer in TODO_OPTIMIZERS:
        script.shard.append(f"# TODO the optimizer is to be {TODO_OPTIMIZERS[plan.optimizer]}")
    if plan.activation_offload == "save_on_cpu":
        script.saving = f"torch.autograd.graph.save_on_cpu(pin_memory={cluster.kind == 'gpu'})"
    elif plan.activation_offload:
        script.shard.append(
            f"# TODO activation_offload = {plan.activation_offload!r} is not written here: "
            "torchtune.training.OffloadActivations() around the forward, its NoOpManager() around the head"
        )
    _checkpoint_and_compile(script, plan)
    WRITERS[plan.api](script, plan, cluster, model)
    return _assembled(script, state)


LEFT_OUT = {  # fields of a plan that this script, which has no other packages than torch, leaves to the reader
    "freeze": "requires_grad_(False) on the parameters",
    "lora_rank": "peft.get_peft_model",
    "expert_parallel": "torchtitan's ExpertParallel, and fully_shard on the experts with the ranks that have the same",
    "base_quantization": "transformers.BitsAndBytesConfig",
    "kbit_training": "peft.prepare_model_for_kbit_training",
    "held_logits": "a loop that keeps the model's outputs until backward is over",
    "fp8": "torchao.float8.convert_to_float8_training",
    "fp8_all_gather": "its enable_fsdp_float8_all_gather",
    "loss_chunks": "a loss that takes the head and a chunk of the sequence at a time",
    "float32_matmul_precision": "torch.set_float32_matmul_precision",
    "save_every": "torch.distributed.checkpoint",
    "optimizer_impl": "foreach=True where the optimizer is made",
    "fp8_precompute_scale": "torchao.float8.precompute_float8_dynamic_scale_for_fsdp after optimizer.step()",
}


def _dtype(name: str | None) -> str:
    return TORCH_DTYPES[name] if name else "None"


def _mesh(script: Script, cluster: Cluster, shards: int | None) -> None:
    script.use("torch.distributed.device_mesh", "init_device_mesh")
    if shards is None:
        script.shard.append("mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=('shard',))")
    else:
        script.shard.append(
            f"mesh = init_device_mesh(device.type, (world_size // {shards}, {shards}), "
            "mesh_dim_names=('replicate', 'shard'))"
        )


def _checkpoint_and_compile(script: Script, plan: Plan) -> None:
    every = plan.activation_checkpointing
    if every is not None:
        script.use(
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "checkpoint_wrapper", "CheckpointImpl"
        )
        how = f"checkpoint_impl=CheckpointImpl.{'' if plan.use_reentrant else 'NO_'}REENTRANT"
        if every == "selective":
            script.use("torch.utils.checkpoint", "CheckpointPolicy", "create_selective_checkpoint_contexts")
            script.shard += SELECTIVE
            how += ", context_fn=partial(create_selective_checkpoint_contexts, keep_every_other_matmul())"
        if isinstance(every, tuple):
            script.use("torch.utils.checkpoint", "create_selective_checkpoint_contexts")
            names = [f"torch.ops.aten.{name}.default" for operator in every for name in aten_names(operator)]
            script.shard += ["kept = [", *(f"    {name}," for name in names), "]"]
            how += ", context_fn=partial(create_selective_checkpoint_contexts, kept)"
        test = f" if (i + 1) % {every} == 0" if isinstance(every, int) else ""
        script.shard.append("for i, layer in enumerate(model.layers):")
        if test:
            script.shard.append(f"   {test}:")
            script.shard.append(f"        model.layers[i] = checkpoint_wrapper(layer, {how})")
        else:
            script.shard.append(f"    model.layers[i] = checkpoint_wrapper(layer, {how})")
    if plan.compile:
        script.shard += ["for layer in model.layers:", "    layer.compile()"]


SELECTIVE = '''
def keep_every_other_matmul():  # torchtitan's policy: attention and every second matmul are kept
    count = {True: 0, False: 0}

    def policy(ctx, op, *args, **kwargs):
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            count[ctx.is_recompute] += 1
            keep = count[ctx.is_recompute] % 2 == 1
        else:
            keep = "scaled_dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy

'''.strip("\n").split("\n")  # fmt: skip


def _wrapped(plan: Plan, model: Model) -> str:
    """The modules that are units of their own, as an expression."""
    if _has_ends(plan, model):
        return "[model.embed, *model.layers, model.head]"
    if plan.wrap in ("block", "embed_block_head"):
        return "list(model.layers)"
    if plan.wrap == "root":
        return "[]"
    if isinstance(plan.wrap, int):
        return f"[m for m in model.layers if sum(p.numel() for p in m.parameters()) >= {plan.wrap}]"
    numbers = [int(name.rsplit(".", 1)[-1]) for name in plan.wrap]
    return f"[model.layers[i] for i in {numbers}]"


def _has_ends(plan: Plan, model: Model) -> bool:
    return plan.wrap == "embed_block_head" and not model.tied_embeddings


def _fsdp2(script: Script, plan: Plan, cluster: Cluster, model: Model) -> None:
    script.use("torch.distributed.fsdp", "fully_shard")
    _mesh(script, cluster, plan.shard_size)
    given = ["mesh=mesh"]
    if plan.param_dtype or plan.reduce_dtype:
        script.use("torch.distributed.fsdp", "MixedPrecisionPolicy")
        given.append(
            f"mp_policy=MixedPrecisionPolicy(param_dtype={_dtype(plan.param_dtype)}, "
            f"reduce_dtype={_dtype(plan.reduce_dtype)})"
        )
    if plan.cpu_offload:
        script.use("torch.distributed.fsdp", "CPUOffloadPolicy")
        given.append(f"offload_policy=CPUOffloadPolicy(pin_memory={cluster.kind == 'gpu'})")
    if plan.reshard_after_forward is not None:
        given.append(f"reshard_after_forward={plan.reshard_after_forward}")
    lines = [
        f"fsdp = dict({', '.join(given)})" if len(", ".join(given)) < 90 else "fsdp = dict(",
        *([] if len(", ".join(given)) < 90 else [*(f"    {one}," for one in given), ")"]),
        f"units = {_wrapped(plan, model)}",
        f"for unit in units{'[:-1]' if _has_ends(plan, model) else ''}:",
        "    fully_shard(unit, **fsdp)",
    ]
    if _has_ends(plan, model):
        kept = " | dict(reshard_after_forward=False)" if plan.reshard_after_forward is None else ""
        lines.append(f"fully_shard([model.norm, model.head], **fsdp{kept})")
    lines.append("fully_shard(model, **fsdp)")
    for direction, depth, ahead in (
        ("forward", plan.forward_prefetch, "units[i + 1 : i + 1 + {depth}]"),
        ("backward", plan.backward_prefetch, "units[max(i - {depth}, 0) : i][::-1]"),
    ):
        if depth is not None:
            lines += [
                "for i, unit in enumerate(units):",
                f"    unit.set_modules_to_{direction}_prefetch({ahead.format(depth=depth)})",
            ]
    if plan.reduce_scatter_max_input_buffers != 1:
        lines.append(f"model.set_reduce_scatter_max_input_buffers({plan.reduce_scatter_max_input_buffers})")
    if plan.separate_reduce_scatter_group:
        lines.append("model.set_separate_reduce_scatter_group(True)")
    if plan.unshard_async_op:
        lines.append("model._set_unshard_async_op(True)")
    if plan.gradient_divide_factor is not None:
        lines += [
            "for module in [*units, model]:",
            f"    module.set_gradient_divide_factor({plan.gradient_divide_factor!r})",
        ]
        if cluster.kind == "cpu":
            lines.append("    module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor")
    script.shard += lines
    for name in ("requires_gradient_sync", "requires_all_reduce", "reshard_after_backward", "is_last_backward"):
        value = getattr(plan, name)
        if value is not True:
            script.before_micro_batch.append(f"model.set_{name}({'last' if value == 'last' else value})")
    if plan.post_optim_event:
        script.after_step.append(
            "model.set_post_optim_event(torch.get_device_module(device).current_stream().record_event())"
        )
    script.optimizer = OPTIMIZERS[plan.optimizer].format("model.parameters()")


def _fsdp1(script: Script, plan: Plan, cluster: Cluster, model: Model) -> None:
    module = "torch.distributed.fsdp"
    script.use(module, "FullyShardedDataParallel", "ShardingStrategy", "BackwardPrefetch")
    hybrid = "HYBRID" in plan.sharding_strategy
    given = [f"sharding_strategy=ShardingStrategy.{plan.sharding_strategy}"]
    if hybrid:
        _mesh(script, cluster, plan.shard_size or min(cluster.node_size, cluster.gpus))
        given.append("device_mesh=mesh")
    script.shard.append(f"units = {_wrapped(plan, model)}")
    given.append("auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in units")
    if plan.param_dtype or plan.reduce_dtype:
        script.use(module, "MixedPrecision")
        given.append(
            f"mixed_precision=MixedPrecision(param_dtype={_dtype(plan.param_dtype)}, "
            f"reduce_dtype={_dtype(plan.reduce_dtype)})"
        )
    if plan.cpu_offload:
        script.use(module, "CPUOffload")
        given.append("cpu_offload=CPUOffload(offload_params=True)")
    prefetch = {None: "BackwardPrefetch.BACKWARD_PRE", "none": "None"}.get(
        plan.backward_prefetch, f"BackwardPrefetch.{plan.backward_prefetch}"
    )
    given += [
        f"backward_prefetch={prefetch}", f"forward_prefetch={bool(plan.forward_prefetch)}",
        f"limit_all_gathers={plan.limit_all_gathers}", "device_id=device",
        "use_orig_params=True",
    ]  # fmt: skip
    script.shard += ["model = FullyShardedDataParallel(", "    model,", *(f"    {one}," for one in given), ")"]
    _no_sync(script, plan)
    script.optimizer = OPTIMIZERS[plan.optimizer].format("model.parameters()")


def _no_sync(script: Script, plan: Plan) -> None:
    script.use("contextlib", "nullcontext")
    if plan.requires_gradient_sync is False:
        script.sync = "model.no_sync()"
    elif plan.requires_gradient_sync == "last" and plan.grad_accum > 1:
        script.sync = "nullcontext() if last else model.no_sync()"


def _ddp(script: Script, plan: Plan, cluster: Cluster, model: Model) -> None:
    script.use("torch.nn.parallel", "DistributedDataParallel")
    given = ["device_ids=[device] if device.type == 'cuda' else None", "gradient_as_bucket_view=True"]
    if plan.bucket_cap_mb is not None:
        given.append(f"bucket_cap_mb={plan.bucket_cap_mb!r}")
    if plan.param_dtype or plan.reduce_dtype:
        script.use("torch.nn.parallel.distributed", "_MixedPrecision")
        given.append(
            f"mixed_precision=_MixedPrecision(param_dtype={_dtype(plan.param_dtype)}, "
            f"reduce_dtype={_dtype(plan.reduce_dtype or plan.param_dtype)})"
        )
    script.shard += ["model = DistributedDataParallel(", "    model,", *(f"    {one}," for one in given), ")"]
    _no_sync(script, plan)
    script.optimizer = OPTIMIZERS[plan.optimizer].format("model.parameters()")


def _zero1(script: Script, plan: Plan, cluster: Cluster, model: Model) -> None:
    _ddp(script, plan, cluster, model)
    script.use("torch.distributed.optim", "ZeroRedundancyOptimizer")
    name, _, options = OPTIMIZERS[plan.optimizer].partition("({}, ")
    script.optimizer = f"ZeroRedundancyOptimizer(model.parameters(), optimizer_class={name}, {options}"


def _zero2(script: Script, plan: Plan, cluster: Cluster, model: Model) -> None:
    # torch has ZeRO-1 and ZeRO-3; that of this project reads like it.
    script.use("fsdp_sim.mini.siblings", "ZeroOptimizer")
    script.shard.append("# torch has no ZeRO-2 (its FSDP is stage 3); this one is fsdp_sim's own")
    name, _, options = OPTIMIZERS[plan.optimizer].partition("({}, ")
    bucket = f"bucket_cap_mb={plan.bucket_cap_mb!r}, " if plan.bucket_cap_mb is not None else ""
    script.optimizer = f"ZeroOptimizer(model.parameters(), {name}, stage=2, {bucket}{options}"


WRITERS: dict[str, Callable[[Script, Plan, Cluster, Model], None]] = {
    "fsdp2": _fsdp2, "fsdp1": _fsdp1, "ddp": _ddp, "zero1": _zero1, "zero2": _zero2,
}  # fmt: skip


def _assembled(script: Script, state: FormState) -> str:
    model, cluster, plan = state.model, state.cluster, state.plan
    kind = "cuda" if cluster.kind == "gpu" else "cpu"
    backend = "nccl" if kind == "cuda" else "gloo"
    needs_last = bool(script.before_micro_batch or script.sync)
    fsdp1 = plan.api == "fsdp1"
    clip = "model.clip_grad_norm_(1.0)" if fsdp1 else "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    loop = [f"for micro_batch in range({plan.grad_accum}):"]
    if needs_last:
        loop.append(f"    last = micro_batch == {plan.grad_accum - 1}")
    loop += [f"    {line}" for line in script.before_micro_batch]
    forward = [
        "logits = model(tokens[:, :-1])",
        "loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())",
    ]
    if script.saving:
        forward = [f"with {script.saving}:", *(f"    {line}" for line in forward)]
    body = [
        f"tokens = torch.randint(VOCAB, ({plan.micro_batch}, {plan.seq_len} + 1), device=device)",
        *forward,
        f"(loss / {plan.grad_accum}).backward()" if plan.grad_accum > 1 else "loss.backward()",
    ]
    if script.sync:
        loop += [f"    with {script.sync}:", *(f"        {line}" for line in body)]
    else:
        loop += [f"    {line}" for line in body]
    plain = sorted(one for one in script.imports if one.startswith("import ") or "from functools" in one)
    source = sorted(script.imports - set(plain))
    main = [
        "device = torch.device(DEVICE, int(os.environ['LOCAL_RANK'])) if DEVICE == 'cuda' else torch.device(DEVICE)",
        "if DEVICE == 'cuda':",
        "    torch.cuda.set_device(device)",
        f"dist.init_process_group({backend!r})",
        "world_size = dist.get_world_size()",
        "torch.manual_seed(0)",
        "model = GPT().to(device)",
        *script.shard,
        f"optimizer = {script.optimizer}",
        "for step in range(STEPS):",
        *(f"    {line}" for line in loop),
        *([f"    {clip}"] if plan.clip_grad_norm else []),
        "    optimizer.step()",
        *(f"    {line}" for line in script.after_step),
        "    optimizer.zero_grad()",
        "    if dist.get_rank() == 0:",
        "        print(f'step {step}: loss {loss.item():.3f}')",
        "dist.destroy_process_group()",
    ]
    indented = "\n".join(f"    {line}" if line else "" for line in main)
    return (
        f'"""Train {model.name} on {cluster.gpus} x {cluster.gpu.name}, as the explorer has it:\n\n'
        f'{state.line}\n"""\n\n'
        + "\n".join(plain) + "\n\n" + "\n".join(source)
        + f"\n\nDEVICE, STEPS = {kind!r}, 3\n"
        + torch_model(model, plan.seq_len)
        + f"\n\ndef main():\n{indented}\n\n\nif __name__ == '__main__':\n    main()\n"
    )  # fmt: skip
