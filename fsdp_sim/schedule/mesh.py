"""`Mesh`: the ranks among which the parameters of a unit lie. Experts have one of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_sim.schedule.unit import Param, Unit, padded_numel
from fsdp_sim.spec import DTYPE_BYTES, Plan

OF_EXPERTS = " of experts"  # what the names of their communicators end with


@dataclass(frozen=True)
class Mesh:
    """The ranks among which the parameters of a unit lie, as ``fully_shard`` is given them.

    Attributes:
        shards, replicas: ranks that share one copy of the parameters, and copies.
        post_forward_shards: ranks that share one copy between forward and backward (``reshard_after_forward=n``).
        stride: from one of the ranks that share a copy to the next.
        expert_parallel: ranks that share out the experts; each of them has its parameters from the others apart.
        of: what the names of its communicators end with, where it is not that of most units.
    """

    shards: int
    replicas: int
    post_forward_shards: int
    stride: int = 1
    expert_parallel: int = 1
    of: str = ""

    def of_experts(self, expert_parallel: int) -> Mesh:
        """That of the experts, where so many neighbouring ranks share them out."""
        if expert_parallel == 1:
            return self
        shards = self.shards // expert_parallel
        return Mesh(shards, self.replicas, shards, expert_parallel, expert_parallel, OF_EXPERTS)

    def padded_numel(self, param: Param) -> int:
        """Elements of a parameter in all shards of a copy, the last ones padded; of experts, those of one rank."""
        if self.expert_parallel == 1:
            return padded_numel(param.shape, self.shards)
        rows = param.shape[0] // self.expert_parallel
        return padded_numel((rows, *param.shape[1:]), 1 if self.by_columns(param) else self.shards)

    def padded_bytes(self, param: Param) -> int:
        """Bytes of all ranks' shards of a copy, of experts those of all who share them out."""
        return self.padded_numel(param) * self.expert_parallel * DTYPE_BYTES[param.dtype]

    def by_columns(self, param: Param) -> bool:
        """Whether FSDP shards it along dimension 1: experts of which each rank has fewer than there are ranks, as
        torchtitan's ``shard_placement_fn`` says.
        """
        return self.expert_parallel > 1 and self.shards > param.shape[0] // self.expert_parallel

    def cuts(self, param: Param) -> bool:
        """Whether FSDP can: it pads dimension 0, and no other."""
        return not self.by_columns(param) or (len(param.shape) > 1 and param.shape[1] % self.shards == 0)


def mesh_of(plan: Plan, world_size: int) -> Mesh:
    """The groups that a plan makes of so many ranks, for all but experts.

    Raises:
        ValueError: ``reshard_after_forward`` or ``expert_parallel`` does not divide the ranks of a shard group.
    """
    shards = plan.shard_size or world_size
    keep = plan.reshard_after_forward
    post_forward_shards = shards
    if type(keep) is int and keep != 1:
        if shards % keep:
            factors = ", ".join(str(n) for n in range(1, shards + 1) if shards % n == 0)
            if shards == 1:
                raise ValueError(f"Plan.reshard_after_forward is {keep}, and a shard group has one rank; leave it None")
            raise ValueError(
                f"Plan.reshard_after_forward is {keep}, which does not divide the {shards} ranks of a shard group; as "
                f"a number it must be one of {factors}"
            )
        post_forward_shards = keep
    if shards == 1 < plan.expert_parallel:
        raise ValueError(f"Plan.expert_parallel is {plan.expert_parallel}, and a shard group has one rank; leave it 1")
    if shards % plan.expert_parallel:
        raise ValueError(
            f"Plan.expert_parallel is {plan.expert_parallel}, which does not divide the {shards} ranks of a shard "
            f"group; take a divisor of both that and the number of experts"
        )
    return Mesh(shards, world_size // shards, post_forward_shards)


def mesh_of_unit(unit: Unit, mesh: Mesh, plan: Plan) -> Mesh:
    """Where the parameters of a unit lie.

    Args:
        mesh: of all but experts.

    Raises:
        ValueError: the ranks cannot share out its experts, or what each has.
    """
    if unit.exchange is None or plan.expert_parallel == 1:
        return mesh
    experts = mesh.of_experts(plan.expert_parallel)
    for p in unit.params:
        if p.shape[0] % plan.expert_parallel:
            raise ValueError(
                f"Plan.expert_parallel is {plan.expert_parallel}, which does not divide the {p.shape[0]} experts of "
                f"{p.name!r} in unit {unit.name}; take a divisor"
            )
        if not experts.cuts(p):
            own = p.shape[0] // plan.expert_parallel
            of = f"parameter {p.name!r} of unit {unit.name}"
            raise ValueError(
                f"{of} has {own} expert{'s' * (own > 1)} on each rank, so that FSDP "
                f"cuts it along dimension 1 among {experts.shards} ranks; that must divide it, and its shape is "
                f"{p.shape}: {_remedy(p, mesh, plan)}"
            )
    return experts


def _remedy(param: Param, mesh: Mesh, plan: Plan) -> str:
    """What else the ranks of a shard group can do with a parameter of experts that they cannot cut."""
    groups = [n for n in range(1, mesh.shards + 1) if mesh.shards % n == 0]
    more = [n for n in groups if param.shape[0] % n == 0 and n > plan.expert_parallel]
    if ranks := next((n for n in more if mesh.of_experts(n).cuts(param)), None):
        return f"take a larger expert_parallel, such as {ranks}"
    fewer = [n for n in groups if n % plan.expert_parallel == 0]  # at worst one rank for each part of the experts
    shards = max(n for n in fewer if replace(mesh, shards=n).of_experts(plan.expert_parallel).cuts(param))
    return f"take a smaller shard_size, such as {shards}"
