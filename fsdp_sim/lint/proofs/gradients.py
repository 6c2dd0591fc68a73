"""Proofs of the traps in gradients and precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_sim.lint.proofs._toy import Collectives, Shown, Toy, fsdp1, fsdp2, of_all, own_tokens
from fsdp_sim.lint.script.gradients import METHODS
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Plan


def clip_per_rank() -> Shown:
    model = fsdp1(Toy())
    model(own_tokens()).square().mean().backward()
    trap = of_all(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
    fix = of_all(model.clip_grad_norm_(1e9).item())
    return Shown(abs(trap[0] - trap[1]) > 1e-4 and abs(fix[0] - fix[1]) < 1e-6, f"norms {trap}", f"{fix}")


def fsdp1_method() -> Shown:
    model, old = fsdp2(Toy()), fsdp1(Toy())
    trap = [name for name in (*METHODS, "module") if not hasattr(model, name)]
    fix = [name for name in (*METHODS, "module") if hasattr(old, name) or name == "flat_param"]
    return Shown(len(trap) == len(METHODS) + 1, f"FSDP2 lacks {trap}", f"FSDP1 has {fix}")


def gradient_sync_left_off() -> Shown:
    def has_gradient(last: bool) -> bool:
        model = fsdp2(Toy())
        for sync in (False, last):
            model.set_requires_gradient_sync(sync)
            model(own_tokens()).sum().backward()
        return model.head.weight.grad is not None

    trap, fix = has_gradient(False), has_gradient(True)
    return Shown(not trap and fix, f"the shards have gradients: {trap}", f"{fix}")


def gradients_kept_whole() -> Shown:
    """After a micro-batch that is not the last one: how much of a gradient a rank keeps."""

    def kept(each: bool) -> tuple[int, int]:
        model = fsdp2(Toy())
        model.set_requires_gradient_sync(each)
        model(own_tokens()).sum().backward()
        params = model._get_fsdp_state()._fsdp_param_group.fsdp_params
        whole = [p.unsharded_param.grad.numel() for p in params if p.unsharded_param.grad is not None]
        shards = [p.grad.to_local().numel() for p in model.parameters() if p.grad is not None]
        return sum(whole), sum(shards)

    trap, fix = kept(False), kept(True)
    return Shown(
        trap[0] > 0 and trap[1] == 0 and fix[0] == 0 and fix[1] > 0,
        f"{trap[0]} elements of whole gradients, {trap[1]} of shards", f"{fix[0]} and {fix[1]}",
    )  # fmt: skip


def plain_grad_scaler() -> Shown:
    def scales(sharded: bool) -> list[float]:
        model = fsdp1(Toy())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = ShardedGradScaler(device="cpu") if sharded else torch.amp.GradScaler("cpu")
        scaler.scale(model(own_tokens()).square().mean()).backward()
        if dist.get_rank() == 1:
            next(p for p in model.parameters() if p.grad is not None).grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        return of_all(scaler.get_scale())

    trap, fix = scales(False), scales(True)
    return Shown(trap[0] != trap[1] and fix[0] == fix[1], f"scales {trap}", f"{fix}")


def reduce_dtype_unsaid() -> Shown:
    def dtypes(**said: Any) -> set[torch.dtype]:
        model = fsdp2(Toy(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, **said))
        with Collectives() as collectives:
            model(own_tokens()).sum().backward()
        return {dtype for name, _, dtype in collectives.seen if "reduce" in name}

    unsaid, said = dtypes(), dtypes(reduce_dtype=torch.float32)
    new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    expected = {torch.float32 if new else torch.bfloat16}
    return Shown(
        unsaid == expected and said == {torch.float32}, f"torch {torch.__version__} reduces in {unsaid}", f"{said}"
    )


def low_precision_parameters() -> Shown:
    def moved(dtype: torch.dtype) -> bool:
        weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return bool((weight != 1).any())

    trap, fix = moved(torch.bfloat16), moved(torch.float32)
    return Shown(not trap and fix, f"a weight of 1 moves by 0.001: {trap}", f"{fix}")


def decay_by_dim() -> Shown:
    def decayed(model: torch.nn.Module) -> int:
        return sum(p.dim() >= 2 for p in model.parameters())

    trap, fix = decayed(fsdp1(Toy(), use_orig_params=True)), decayed(fsdp2(Toy()))
    return Shown(trap == 0 and fix > 0, f"{trap} parameters have two dimensions", f"{fix}")


def count_of_a_shard() -> Shown:
    trap = sum(p.numel() for p in fsdp1(Toy()).parameters())
    fix = sum(p.numel() for p in Toy().parameters())
    return Shown(trap < 0.6 * fix, f"{trap} parameters", f"{fix}")


def limit_all_gathers_off() -> Shown:
    """Of the program that torch issues: how often the CPU waits before it asks for another unit."""

    def waits(limited: bool) -> int:
        plan = Plan(api="fsdp1", limit_all_gathers=limited)
        step = simulate("gpt2-124m", Cluster("A100", gpus=8), plan)
        return sum("CPU_BLOCK" in line for line in step.program.lines())

    trap, fix = waits(False), waits(True)
    return Shown(trap == 0 and fix > 0, f"the CPU waits {trap} times", f"{fix} times")
