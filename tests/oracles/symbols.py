"""What the buffers of an FSDP2 program hold: shards of parameters, and micro-batches' gradients.

[Note: symbols]  A buffer of parameters holds `Parts`: which of how many shards, of which version (the optimizer's steps
so far). A gradient is (step, micro-batch, segment) until the optimizer has it; a buffer of gradients holds `Sum`: a set
of those, and what has been done to it. Operations move symbols as they move bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_sim.schedule.checkpointing import checkpoints
from fsdp_sim.schedule.comm import SHARD
from fsdp_sim.schedule.layout import layout_of
from fsdp_sim.schedule.mesh import Mesh
from fsdp_sim.schedule.program import Program
from fsdp_sim.schedule.tree import UnitNode, tree_of
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.timeline import Op

Gradient = tuple[int, int, str]  # step, micro-batch, segment


class Parts(NamedTuple):
    """Shards of a unit's parameters: ``have`` of ``of``, cut for ``communicator``; how many tensors were written."""

    have: int
    of: int
    version: int
    communicator: str = SHARD
    written: int = 0


@dataclass(frozen=True)
class Sum:
    """Gradients added up.

    Attributes:
        scattered, replicated: reduced over the shard group, and between replicas.
        divided: by what, beyond the collectives' own mean.
        consumed: they are in another buffer now.
        on_cpu: tensors copied to the CPU's memory.
        on_device: the device's memory is not freed.
    """

    of: frozenset[Gradient]
    scattered: bool = False
    replicated: bool = False
    divided: float = 1.0
    consumed: bool = False
    on_cpu: int = 0
    on_device: bool = True


@dataclass
class Whole:
    """Whole gradients of a unit: fresh from autograd, kept in the reduce dtype, and how many tensors may go."""

    fresh: frozenset[Gradient] = frozenset()
    kept: frozenset[Gradient] = frozenset()
    moved: int = 0
    done: int = 0


@dataclass
class UnitFacts:
    """A unit and what it should do."""

    unit: Unit
    n_params: int
    n_cast: tuple[int, ...]  # parameters cast, among the first k
    n_trained: int
    gather_bytes: int
    divide: float
    loads: Counter[Op] = field(default_factory=Counter)  # since its last copy-in or copy-out


class Facts:
    """What a program should do, from its units and its plan.

    Attributes:
        shards, replicas, post_forward_shards: ranks of the groups.
        checkpoints: of each segment that runs again, those that run again with it.
        units: by name.
        owner: by segment.
        sequence: segments in the order in which they run forward.
        trains: segments that compute gradients of parameters.
        version: optimizer steps so far.
    """

    def __init__(self, program: Program) -> None:
        plan = self.plan = program.plan
        self.shards = plan.shard_size or program.world_size
        self.replicas = program.world_size // self.shards
        keep = plan.reshard_after_forward
        self.post_forward_shards = keep if type(keep) is int and keep > 1 else self.shards
        self.checkpoints = checkpoints(program.units, plan)
        self.units = {u.name: self._unit(u) for u in program.units}
        self.owner = {segment: self.units[u.name] for u in program.units for segment in u.names_of_segments}
        self.sequence = _segments_in_order(tree_of(program.runs or program.units))
        self.trains = {s for u in program.units for s in u.names_of_segments if u.trains(s)}
        self.version = 0

    def _unit(self, unit: Unit) -> UnitFacts:
        if not unit.params:
            return UnitFacts(unit, 0, (0,), 0, 0, 1.0)
        layout = layout_of(unit, self.plan, Mesh(self.shards, self.replicas, self.shards))
        n_cast = tuple(sum(layout.cast[:k]) for k in range(len(layout.cast) + 1))
        division = layout.division
        divide = (division.before or 1) * (division.after or 1)
        if self.shards == 1:  # no reduce-scatter divides
            divide *= self.plan.gradient_divide_factor or 1
        return UnitFacts(unit, len(unit.params), n_cast, len(layout.trained), layout.gather_bytes, divide)


def _segments_in_order(node: UnitNode) -> list[str]:
    inside = [segment for child in node.children for segment in _segments_in_order(child)]
    return [*node.unit.before_children(), *inside, *node.unit.after_children()]
