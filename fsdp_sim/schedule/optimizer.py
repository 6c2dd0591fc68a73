"""What is issued between backward and the next forward: clipping, the optimizer, the scales of weights in fp8.

Gradients and parameters of FSDP2 are DTensors, so what an operator asks of all ranks is asked by DTensor: a collective
on the stream of its process group, for which compute waits at once.

[Note: Muon]  `torch.optim.Muon` orthogonalises each matrix (R, C) by five steps of Newton and Schulz in bf16. A shard
has rows, and the products want all of them. As torch 2.13 redistributes them: of a matrix with R <= C it gathers the
matrix, the product of it with itself (R, R), and the matrix again; of a taller one, whose transpose is cut along the
inner dimension, it reduces the product (C, C) twice. The norm before is one number more to reduce.

[Note: offload]  Where shards are offloaded, gradients are clipped and parameters updated by the thread that issues. At
the end of backward it has waited for the copy of every gradient (``grad_offload_event.synchronize()``, in FSDP1 for the
compute stream); until ``optimizer.step()`` returns it issues nothing. So nothing of a step overlaps with its optimizer,
and the next forward's first shard is copied to the device after the last parameter has been updated.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.schedule.comm import EXPERTS, SHARD
from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.schedule.mesh import OF_EXPERTS
from fsdp_sim.schedule.unit import Param, Unit, root_of
from fsdp_sim.spec import Plan, shards_of
from fsdp_sim.timeline import Lane, Memory, Op

SCALAR_BYTES = 4  # of an fp32 norm or scale
NEWTON_SCHULZ_STEPS = 5
BF16_BYTES = 2


def optimizer_step(cpu: Cpu, units: Sequence[Unit], plan: Plan, world_size: int) -> None:
    """Issue the step of the optimizer, and what a plan puts before and after it."""
    shards = shards_of(plan, world_size)
    lane = Lane.CPU if plan.cpu_offload else Lane.COMPUTE
    once = list({unit.name: unit for unit in units}.values())
    if plan.clip_grad_norm:
        apart = [unit for unit in once if unit.exchange and plan.expert_parallel > 1]
        _clip(cpu, [unit for unit in once if unit not in apart], apart, plan, shards, lane)
    if plan.optimizer == "muon":
        for unit, param in matrices(once):
            _orthogonalise(cpu, f"{unit.name}.{param.name}", param, shards)
    _step(cpu, Op.OPTIM, lane)
    if plan.fp8_precompute_scale:
        _scale(cpu, once, shards)


def _step(cpu: Cpu, op: Op, lane: Lane, n_bytes: int = 0) -> None:
    if lane is Lane.CPU:
        cpu.compute(op, "", n_bytes)
    else:
        cpu.op(op, "", lane, n_bytes)


def matrices(units: Sequence[Unit]) -> list[tuple[Unit, Param]]:
    """The parameters that are Muon's: the trained matrices of the blocks. All others are AdamW's."""
    root = root_of(units)
    in_blocks = tuple(f"{block}." for block in root.blocks)
    return [
        (unit, p)
        for unit in units
        for p in unit.params
        if p.requires_grad
        and len(p.shape) == 2
        and ((unit is not root and unit.is_block) or p.name.startswith(in_blocks))
    ]


def _clip(cpu: Cpu, units: Sequence[Unit], experts: Sequence[Unit], plan: Plan, shards: int, lane: Lane) -> None:
    """``clip_grad_norm_``: FSDP2 reduces the norms of all parameters at once, FSDP1 the norm of what a rank has.

    Those of experts that ranks share out are reduced apart, on both dimensions of their mesh (torchtitan 0.2.2,
    ``_clip_grad_norm_with_ep``).
    """
    trained = [p for unit in units for p in unit.params if p.requires_grad]
    of_experts = [p for unit in experts for p in unit.params if p.requires_grad]
    whole = plan.api in ("ddp", "zero1") or shards == 1
    by_param = plan.api == "fsdp2"
    n_bytes = sum(
        p.padded_bytes(shards) // shards if by_param else -(-p.bytes // (1 if whole else shards)) for p in trained
    )
    n_bytes += sum(p.bytes // shards for p in of_experts)
    _step(cpu, Op.NORM, lane, n_bytes)
    if of_experts:
        ranks, norms = plan.expert_parallel, SCALAR_BYTES * len(of_experts)
        for n, of, stride in ((shards // ranks, SHARD + OF_EXPERTS, ranks), (ranks, EXPERTS, 1)):
            cpu.blocking_collective(Op.ALL_REDUCE, "", norms, "fp32", "SUM", n, of, stride, lane)
    if not whole:
        n_norms = len(trained) if by_param else 1
        cpu.blocking_collective(Op.ALL_REDUCE, "", SCALAR_BYTES * n_norms, "fp32", "SUM", shards, SHARD, lane=lane)
    _step(cpu, Op.CLIP, lane, n_bytes)


def _scale(cpu: Cpu, units: Sequence[Unit], shards: int) -> None:
    """torchao's ``precompute_float8_dynamic_scale_for_fsdp``: the largest of every shard, then of all ranks'."""
    weights = [p for unit in units for p in unit.params if p.gather_dtype]
    if weights:
        cpu.op(Op.NORM, "", Lane.COMPUTE, sum(p.padded_bytes(shards) // shards for p in weights))
        cpu.blocking_collective(Op.ALL_REDUCE, "", SCALAR_BYTES * len(weights), "fp32", "MAX", shards, SHARD)


def _orthogonalise(cpu: Cpu, name: str, param: Param, shards: int) -> None:
    """Muon's update of one matrix."""
    rows, columns = param.shape
    gram = BF16_BYTES * min(rows, columns) ** 2
    whole = BF16_BYTES * param.padded_bytes(shards) * rows * columns // param.bytes
    of_step = [(Op.ALL_GATHER, whole), (Op.ALL_GATHER, gram), (Op.ALL_GATHER, whole)]
    if rows > columns:
        of_step = [(Op.ALL_REDUCE, gram)] * 2
    needed = sum(n_bytes for _, n_bytes in of_step) if shards > 1 else gram
    cpu.alloc(Memory.TEMPORARY, name, needed, "bf16")
    cpu.blocking_collective(Op.ALL_REDUCE, name, BF16_BYTES, "bf16", "SUM", shards, SHARD)
    for _ in range(NEWTON_SCHULZ_STEPS):
        for op, n_bytes in of_step:
            cpu.blocking_collective(op, name, n_bytes, "bf16", "SUM" if op is Op.ALL_REDUCE else "", shards, SHARD)
    cpu.op(Op.OPTIM, name, Lane.COMPUTE, param.bytes // shards, param.dtype, f"{rows}x{columns}")
    cpu.free(Memory.TEMPORARY, name, needed, "bf16")
