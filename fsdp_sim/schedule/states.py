"""The bytes that live through all steps: parameters, and the optimizer's states.

They follow from the units, the plan and the number of ranks. Gradients come and go with the program.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.schedule.mesh import mesh_of, mesh_of_unit
from fsdp_sim.schedule.optimizer import matrices
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import DTYPE_BYTES, OPTIMIZERS, Optimizer, Plan, shards_of
from fsdp_sim.timeline import Memory


def state_bytes(units: Sequence[Unit], plan: Plan, world_size: int) -> dict[tuple[Memory, str], int]:
    """Bytes of parameters (with the buffers beside them) and of optimizer states on rank 0, by category and unit.

    fsdp2 cuts each parameter along dimension 0 into chunks of ceil(rows / ranks) rows, fsdp1 the flat parameter of the
    whole unit, zero1 and zero2 nothing but what the optimizer keeps; ddp cuts nothing. Rank 0 has as much as any. With
    ``cpu_offload`` parameters and states are in the CPU's memory.
    """
    if plan.cpu_offload:
        return {(Memory.SHARDED, unit.name): unit.buffer_bytes for unit in units if unit.buffer_bytes}
    shards = shards_of(plan, world_size)
    mesh = mesh_of(plan, world_size)
    found: dict[tuple[Memory, str], int] = {}
    by_param = plan.api == "fsdp2"
    whole = plan.api in ("ddp", "zero1", "zero2")
    of_muon = {id(p) for _, p in matrices(units)} if plan.optimizer == "muon" else set()
    known: dict[tuple[int, bool], tuple[int, int]] = {}  # layers often share their parameters' descriptions
    for unit in units:
        alike = id(unit.params), unit.exchange is None
        if alike not in known:
            kept = states = 0
            own = mesh_of_unit(unit, mesh, plan)
            for p in unit.params:
                n_bytes = p.bytes
                if by_param:
                    n_bytes = own.padded_numel(p) * own.expert_parallel * DTYPE_BYTES[p.dtype]
                kept += n_bytes
                if p.requires_grad:
                    of = "adamw" if plan.optimizer == "muon" and id(p) not in of_muon else plan.optimizer
                    states += _beside(OPTIMIZERS[of], n_bytes, DTYPE_BYTES[p.dtype], shards)
            known[alike] = kept, states
        kept, states = known[alike]
        sizes = {
            Memory.SHARDED: (kept if whole else -(-kept // shards)) + unit.buffer_bytes,
            Memory.OPTIMIZER: -(-states // shards),
        }
        found |= {(category, unit.name): n_bytes for category, n_bytes in sizes.items() if n_bytes}
    return found


def _beside(optimizer: Optimizer, n_bytes: int, dtype_bytes: int, shards: int) -> int:
    """Bytes of states of all ranks beside a parameter of so many."""
    elements = n_bytes // dtype_bytes
    if optimizer.state_bytes is not None and elements // shards >= optimizer.least:
        return round(optimizer.states * elements * optimizer.state_bytes)
    return optimizer.states * n_bytes
