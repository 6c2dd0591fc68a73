"""The tree of units: which unit runs inside which, and the order of torch's lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_sim.schedule.unit import Unit, root_of


@dataclass
class UnitNode:
    """A unit and the units that run where it has ``...``."""

    unit: Unit
    children: list[UnitNode] = field(default_factory=list)

    def __iter__(self) -> Iterator[UnitNode]:
        """This unit and all inside it, outer before inner: the order of ``named_modules``."""
        yield self
        for child in self.children:
            yield from child


def tree_of(units: Sequence[Unit]) -> UnitNode:
    """The root. Units keep their order; one that runs several times has a node for each."""
    root = UnitNode(root_of(units))
    nodes = [root if unit is root.unit else UnitNode(unit) for unit in units]
    parents = {node.unit.name: node for node in nodes if node.unit.is_root and node is not root}
    for node in nodes:
        if node is not root:
            around = [name for name in parents if node.unit.name.startswith(f"{name}.")]
            (parents[max(around, key=len)] if around else root).children.append(node)
    return root


def walk_of(units: Sequence[Unit]) -> list[tuple[Unit, str]]:
    """Unit and segment of each piece of compute, in forward order."""

    def walk(node: UnitNode) -> Iterable[tuple[Unit, str]]:
        yield from ((node.unit, segment) for segment in node.unit.before_children())
        for child in node.children:
            yield from walk(child)
        yield from ((node.unit, segment) for segment in node.unit.after_children())

    return list(walk(tree_of(units)))


def in_order_of_modules(nodes: Sequence[UnitNode]) -> list[UnitNode]:
    """The order of ``named_modules``: units of one container stay together, where its first one is.

    It differs from the order of execution only if that goes back and forth between containers.
    """
    if len({node.unit.name.rpartition(".")[0] for node in nodes}) == 1:
        return list(nodes)
    first: dict[str, int] = {}

    def key(number: int, node: UnitNode) -> tuple[int, ...]:
        parts = node.unit.name.split(".")
        return tuple(first.setdefault(".".join(parts[: n + 1]), number) for n in range(len(parts)))

    keys = [key(number, node) for number, node in enumerate(nodes)]
    return [nodes[number] for number in sorted(range(len(nodes)), key=lambda number: keys[number])]
