"""The bytes that live through all steps: parameters, and the optimizer's states.

They follow from the units, the plan and the number of ranks. Gradients come and go with the program.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_sim.schedule import Program, Unit
from fsdp_sim.spec import OPTIMIZER_STATES, Plan, shards_of
from fsdp_sim.timeline import Memory


def state_bytes(units: Iterable[Unit], plan: Plan, world_size: int) -> dict[tuple[Memory, str], int]:
    """Bytes of parameters and of optimizer states on rank 0, by category and unit.

    fsdp2 cuts each parameter along dimension 0 into chunks of ceil(rows / ranks) rows, fsdp1 the flat parameter of the
    whole unit, zero1 and zero2 nothing but what the optimizer keeps; ddp cuts nothing. Rank 0 has as much as any. With
    ``cpu_offload`` both are in the CPU's memory.
    """
    if plan.cpu_offload:
        return {}
    shards = shards_of(plan, world_size)
    states = OPTIMIZER_STATES[plan.optimizer]
    found: dict[tuple[Memory, str], int] = {}
    by_param = plan.api == "fsdp2"
    whole = plan.api in ("ddp", "zero1", "zero2")
    for unit in units:
        kept = trained = 0
        for p in unit.params:
            n_bytes = p.padded_bytes(shards) if by_param else p.bytes
            kept += n_bytes
            if p.requires_grad:
                trained += n_bytes
        sizes = {
            Memory.SHARDED: kept if whole else -(-kept // shards),
            Memory.OPTIMIZER: states * -(-trained // shards),
        }
        found |= {(category, unit.name): n_bytes for category, n_bytes in sizes.items() if n_bytes}
    return found


def program_state_bytes(program: Program) -> dict[tuple[Memory, str], int]:
    """`state_bytes` of what a program trains."""
    return state_bytes(program.units, program.plan, program.world_size)


def model_state_bytes(
    params: float,
    shards: int,
    api: str = "fsdp2",
    *,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes of parameters, gradients and optimizer states on each rank, by the arithmetic of the ZeRO paper.

    Args:
        params: how many parameters.
        shards: ranks they are shared by.
        api: what is shared: by ``zero1`` the optimizer's states, by ``zero2`` the gradients too, by ``fsdp1`` and
            ``fsdp2`` all; by ``ddp`` nothing.
        param_bytes, grad_bytes, optimizer_bytes: of one parameter. The defaults are the paper's: half precision, and an
            optimizer that keeps an fp32 copy and two fp32 moments. torch's FSDP keeps fp32 parameters, which are that
            copy: 4, 4 and 8, the same sum.

    Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    2020 (arXiv 1910.02054), section 3.

    Raises:
        ValueError: a number is negative, ``shards`` is below 1, or ``api`` is unknown.

    Example:
        >>> [model_state_bytes(7.5e9, 64, api) / 1e9 for api in ("ddp", "zero1", "zero2", "fsdp2")]
        [120.0, 31.40625, 16.640625, 1.875]
    """
    shared = {"ddp": "", "zero1": "o", "zero2": "og", "fsdp1": "ogp", "fsdp2": "ogp"}
    if api not in shared:
        raise ValueError(f"api is {api!r}; it must be one of {', '.join(shared)}")
    if type(shards) is not int or shards < 1:
        raise ValueError(f"shards is {shards!r}; it must be a whole number >= 1")
    sizes = {"p": param_bytes, "g": grad_bytes, "o": optimizer_bytes}
    for name, value in {"params": params, **sizes}.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value!r}; it must be >= 0")
    return sum(params * n_bytes / (shards if part in shared[api] else 1) for part, n_bytes in sizes.items())
