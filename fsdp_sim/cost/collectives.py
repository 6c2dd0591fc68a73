"""`collective_s`: how long a collective takes, by alpha and beta over the links it crosses.

A collective moves chunks from rank to rank in steps. Each step costs a latency; the slowest link on the way bounds the
rate. NCCL chooses between algorithms, and so does this: it takes the fastest of those the collective has.

    ring    n-1 steps, each rank sends (n-1)/n of the message (all-reduce: twice both); of the first and the last a part
            overlaps with no other (`idle_steps`), so that two ranks are further from the link's rate than eight
    tree    all-reduce between nodes: up and down a double binary tree of nodes, in 2 log2(nodes) steps; every node
            sends the message twice (once if there are two), and a chain of its GPUs carries it inside
    pairs   all-to-all: each rank sends 1/n of its message to every rank, to all at once; what stays in the node and
            what leaves it, by the card of the GPU, travel beside each other. No measurement of one is here: links reach
            what they reach in rings (unverified)
    nvls    the same with the reduction inside the switch of NVLink 4 and later: each GPU sends 1 + 1/ranks of it

The latency of a step grows from `hop` to `hop + fill` as the piece a rank sends grows past `half_bytes`: small
messages take a protocol without buffering (NCCL's LL), large ones fill a pipeline of buffers first (Simple).

More ranks never take less time, with two exceptions that are measured: in a mesh, few GPUs use few of its shares (two
of eight MI300X reach 48 GB/s, all of them 313); and in the switch, all-reduces of large messages get a little faster,
as 1 + 1/ranks says (8 GiB in 35.5 ms on 4 H200 and 31.8 on 8, in 19.1 and 17.9 ms on B200).
"""

from __future__ import annotations

import functools
import math
import tomllib
from importlib.resources import files
from typing import NamedTuple

from fsdp_sim.spec import Cluster, Link
from fsdp_sim.timeline import RING_PASSES, ring_share

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


class LinkFamily(NamedTuple):
    """How a link behaves. One per family in ``collectives.toml``.

    Attributes:
        fraction: of the link's peak that rings reach.
        base_s: seconds of a collective that moves nothing: launch and rendezvous.
        hop_s: seconds of each further step of a small message.
        fill_s: seconds more per step of a large one.
        nvls_fraction: of the link's peak with reduction in the switch; 0 where it cannot.
        nvls_fill_s: seconds more, once, of a large message reduced in the switch.
        idle_steps: what each turn of a ring takes beside its steps, as a share of one.
        host_fraction: of the link's peak that copies between a GPU and pinned memory of its CPU reach.
        channels: in which a collective runs over the link, each a block of threads that keeps a multiprocessor, also
            while it waits.
    """

    fraction: float
    base_s: float
    hop_s: float
    fill_s: float
    nvls_fraction: float = 0.0
    nvls_fill_s: float = 0.0
    idle_steps: float = 0.0
    host_fraction: float = 0.0
    channels: float = 2


class Algorithm(NamedTuple):
    """One algorithm of one collective: ``base_s + fill_s * b / (b + half_bytes) + b * s_per_byte`` for b bytes."""

    algorithm: str
    base_s: float
    fill_s: float
    half_bytes: float
    s_per_byte: float

    def seconds(self, n_bytes: float) -> float:
        """Seconds of a message of that many bytes."""
        return self.base_s + self.fill_s * n_bytes / (n_bytes + self.half_bytes) + n_bytes * self.s_per_byte


class FittedLinks(NamedTuple):
    """All fitted numbers: a set for each family of links, and two that all share."""

    families: dict[str, LinkFamily]
    half_bytes: float
    max_rails: int


@functools.cache
def fitted_links() -> FittedLinks:
    """The numbers of ``collectives.toml``."""
    table = tomllib.loads(files("fsdp_sim.cost").joinpath("collectives.toml").read_text())
    half, rails = table.pop("half_bytes"), table.pop("max_rails")
    return FittedLinks({family: _family(values) for family, values in table.items()}, half, rails)


def _family(values: dict[str, float]) -> LinkFamily:
    return LinkFamily(**{_SI.get(key, key): value * (1e-6 if key in _SI else 1.0) for key, value in values.items()})


_SI = {f"{name}_us": f"{name}_s" for name in ("base", "hop", "fill", "nvls_fill")}


def collective_s(op: str, n_bytes: float, group_size: int, cluster: Cluster, *, stride: int = 1) -> float:
    """Seconds of one collective that runs alone.

    Args:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``broadcast``.
        n_bytes: the whole message: an all-gather's output, a reduce-scatter's input, an all-reduce's buffer, all that
            a rank has for the ranks of an all-to-all.
        group_size: ranks that take part.
        stride: from one rank of the group to the next: 1 for a shard group, the shard size for a replicate group.

    Raises:
        ValueError: an op that does not exist, a negative size, groups that do not fill the cluster.

    Example:
        >>> cluster = Cluster("cpu", gpus=4, bandwidth_gbps=8, latency_us=100)
        >>> round(collective_s("all_gather", 4_000_000, 4, cluster), 9)
        0.0031
    """
    if n_bytes < 0:
        raise ValueError(f"{op} of {n_bytes} bytes: a message has 0 bytes or more")
    slowest = 0.0
    for found in _levels(op, group_size, cluster, stride):
        best = math.inf
        for _, base_s, fill_s, half, s_per_byte in found:
            seconds = base_s + fill_s * n_bytes / (n_bytes + half) + n_bytes * s_per_byte
            if seconds < best:
                best = seconds
        if best > slowest:
            slowest = best
    return slowest


def channels(group_size: int, cluster: Cluster, *, stride: int = 1) -> float:
    """How many multiprocessors a collective keeps while it runs; for the arguments see `collective_s`.

    Its rings pass through the nodes, so the links inside decide; where a group has one GPU of each node, its card does.
    """
    _, local = cluster.spans(group_size, stride)
    return family_of(_inside(cluster, local) if local > 1 else cluster.inter_link).channels


def offload_s(n_bytes: float, cluster: Cluster) -> float:
    """Seconds of a copy between a GPU and pinned memory of its CPU, either way; 0 on a cluster of kind ``cpu``.

    All GPUs of a node are taken to copy at one time, so that each has its share of the CPU's memory.
    """
    if n_bytes <= 0 or cluster.kind == "cpu":
        return 0.0
    found = cluster.host_link
    family = family_of(found)
    link_bytes_per_s = found.bytes_per_s * (found.fraction or family.host_fraction or family.fraction)
    return family.base_s + n_bytes / min(link_bytes_per_s, cluster.host_mem_bytes_per_s)


def family_of(found: Link, numbers: FittedLinks | None = None) -> LinkFamily:
    """How a link behaves: its family's numbers, or its own where it was measured."""
    families = (numbers or fitted_links()).families
    if found.family not in families:
        raise ValueError(f"the link {found.name} is of family {found.family!r}; known are {', '.join(families)}")
    own = {name: getattr(found, name) for name in ("fraction", "base_s", "hop_s", "fill_s")}
    own["idle_steps"] = None if found.fraction is None else 0.0  # what was measured has them in it
    return families[found.family]._replace(**{name: value for name, value in own.items() if value is not None})


@functools.cache
def _levels(op: str, n: int, cluster: Cluster, stride: int) -> tuple[tuple[Algorithm, ...], ...]:
    """The algorithms; of an all-reduce between nodes also those of half as many nodes, of a quarter, ..., whose time is
    the least it takes.

    Fitted to 2 to 32 nodes, the tree alone would get faster with ever more of them: the pieces grow smaller than its
    steps grow more.
    """
    found = [algorithms(op, n, cluster, stride, fitted_links())]
    if op == "all_reduce":
        nodes, local = cluster.spans(n, stride)
        while nodes > 1:
            nodes = -(-nodes // 2)
            found.append(_algorithms(op, nodes, local, nodes * local, cluster, fitted_links()))
    return tuple(found)


def algorithms(op: str, n: int, cluster: Cluster, stride: int, numbers: FittedLinks) -> tuple[Algorithm, ...]:
    """The algorithms a collective can take."""
    if op not in OPS:
        raise ValueError(f"there is no collective {op!r}; there are {', '.join(OPS)}")
    if n == 1:
        return (Algorithm("none", 0.0, 0.0, 1.0, 0.0),)
    return _algorithms(op, *cluster.spans(n, stride), n, cluster, numbers)


def _algorithms(
    op: str, nodes: int, local: int, n: int, cluster: Cluster, numbers: FittedLinks
) -> tuple[Algorithm, ...]:
    inside = _inside(cluster, local)
    near, far = family_of(inside, numbers), family_of(cluster.inter_link, numbers)
    peers = (local - 1) / (cluster.node_size - 1) if inside.mesh and local > 1 else 1.0
    near_peak = inside.bytes_per_s * peers
    far_rate = cluster.inter_link.bytes_per_s * min(local, numbers.max_rails) * far.fraction
    base_s = far.base_s if nodes > 1 else near.base_s

    def path(
        algorithm: str,
        near_hops: float,
        far_hops: float,
        near_s: float,
        far_s: float,
        near_fill_s: float | None = None,
        pieces: int = n,
    ) -> Algorithm:
        hop_s = near_hops * near.hop_s + far_hops * far.hop_s
        fill_s = (near_hops * near.fill_s if near_fill_s is None else near_fill_s) + far_hops * far.fill_s
        return Algorithm(algorithm, base_s + hop_s, fill_s, numbers.half_bytes * pieces, max(near_s, far_s))

    turns, share = RING_PASSES.get(op, 1), ring_share(op, n)
    many, several = local > 1, nodes > 1
    near_rate = near_peak * near.fraction * getattr(inside, f"{op}_fraction", 1.0)
    if op == "all_to_all":
        base_s = max(base_s, near.base_s if many else 0.0)  # some ranks are in the node, others are not
        a_card = far_rate / local  # where few cards leave a node, its GPUs share them
        near_s, far_s = (local - 1) / n / near_rate if many else 0.0, (n - local) / n / a_card if several else 0.0
        return (path("pairs", many, several, near_s, far_s, pieces=1),)
    idle = (turns - share) * near.idle_steps  # of a message in n pieces 1/n of each turn
    ring_s, far_ring_s = (share + idle) / near_rate if many else 0.0, share / far_rate if several else 0.0
    found = [path("ring", turns * (n - nodes), turns * (nodes - 1), ring_s, far_ring_s)]
    if op == "all_reduce":
        levels, far_tree_s = 2 * math.log2(nodes), min(2, nodes - 1) / far_rate
        if several:
            found.append(path("tree", 2 * (local - 1), levels, 2 / near_rate if many else 0.0, far_tree_s))
        if near.nvls_fraction and many:
            nvls_s = (1 + 1 / local) / (near_peak * near.nvls_fraction)
            pieces = max(n, cluster.node_size)  # the switch cuts a message as finely for few GPUs as for all of them
            found.append(path("nvls", 2, levels, nvls_s, far_tree_s, near.nvls_fill_s, pieces))
    return tuple(found)


def _inside(cluster: Cluster, local: int) -> Link:
    """The link that limits a ring of ``local`` ranks in a node: PCIe where a bridge does not reach them all."""
    found = cluster.intra_link
    return cluster.host_link if found.reach is not None and local > found.reach else found
