"""`Cluster`: what the model is trained on: GPUs, how many of them share a node, and the links between them."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_sim.spec.catalogue import toml_or_json
from fsdp_sim.spec.fields import Allowed, field, number, one_of, spec, whole
from fsdp_sim.spec.gpus import Gpu, gpu
from fsdp_sim.spec.links import Link, link, link_of_text, rate_alone
from fsdp_sim.timeline import read_text, written

_RANKS = 2**20
_GPU = Allowed(
    "the name of a GPU, 'cpu' or a Gpu", lambda value: isinstance(value, (str, Gpu)) and value != "", are_names=True
)


def _link_field(kind: str) -> Any:
    named = Allowed(
        "a Link or the name of one", lambda value: isinstance(value, (str, Link)) and value != "", are_names=True,
        instead=lambda value: rate_alone(value, kind),
    )  # fmt: skip
    return field(one_of(None).explained("what its servers ship with") | named, default=None)


class GroupSpan(NamedTuple):
    """How a group of ranks is spread: over how many nodes, and how many of its ranks are on the one with the fewest,
    whose cards carry all that its rings send on."""

    nodes: int
    ranks_per_node: int


@spec
class Cluster:
    """GPUs in nodes, or processes on one machine.

    Attributes:
        gpu: name of the GPU (see `fsdp_sim.spec.gpu_names`), ``cpu`` for processes that compute on CPU cores, or a
            `Gpu`; always a `Gpu` once built.
        gpus: the world size: GPUs, or processes of a cluster of kind ``cpu``.
        gpus_per_node: GPUs of one server; None is what the GPU's servers hold. The last node may not be part full.
        intra: the link between the GPUs of a node.
        inter: the link between nodes: a `Link`, a name (``IB NDR x8``), or its rate in words (``1600 Gb/s per node``,
            ``400 Gb/s RoCE per GPU``).
        host: the link between a GPU and its CPU's memory.
        host_memory_gb_per_s: peak of the memory of a node's CPUs, in 1e9 bytes a second. Its GPUs share it: for copies
            to and from it, and for what the CPU computes (``cpu_offload``). None is what the GPU's servers have.
        bandwidth_gbps: gigabits (1e9 bits) per second that a rank can send over the link between nodes, or, on a
            cluster of kind ``cpu``, between processes. It replaces the link's own; on one node of GPUs nothing uses it.
        latency_us: microseconds that a message of no bytes takes over that link, in place of the link's own.

    Example:
        >>> cluster = Cluster("H100", gpus=64)
        >>> cluster.nodes, cluster.gpu.name, cluster.inter_link.name
        (8, 'H100-SXM-80GB', 'IB NDR x8')
        >>> laptop = Cluster("cpu", gpus=4, bandwidth_gbps=4, latency_us=200)
        >>> laptop.bandwidth_bytes_per_s, round(laptop.latency_s, 9)
        (500000000.0, 0.0002)
        >>> Cluster("H100", gpus=12)
        Traceback (most recent call last):
        ValueError: Cluster.gpus is 12, which does not fill nodes of 8 GPUs; take 8 or 16, or gpus_per_node=6
    """

    gpu: Any = field(_GPU)
    gpus: int = field(whole(1, _RANKS).explained("the world size"))
    gpus_per_node: int | None = field(one_of(None) | whole(1, _RANKS), default=None)
    intra: str | Link | None = _link_field("intra")
    inter: str | Link | None = _link_field("inter")
    host: str | Link | None = _link_field("host")
    host_memory_gb_per_s: float | None = field(
        one_of(None).explained("what its servers have") | number(above=True), default=None
    )
    bandwidth_gbps: float | None = field(
        one_of(None) | number(above=True).explained("gigabits per second"), default=None
    )
    latency_us: float | None = field(one_of(None) | number().explained("microseconds"), default=None)

    def __post_init__(self) -> None:
        if isinstance(self.gpu, str):
            object.__setattr__(self, "gpu", gpu(self.gpu))
        size = self.node_size
        if self.gpus > size and self.gpus % size:
            divisors = [n for n in range(2, size) if self.gpus % n == 0]
            or_smaller = f", or gpus_per_node={divisors[-1]}" if divisors else ""
            raise ValueError(
                f"Cluster.gpus is {self.gpus}, which does not fill nodes of {size} GPUs; take "
                f"{self.gpus // size * size} or {(self.gpus // size + 1) * size}{or_smaller}"
            )
        for name in ("intra_link", "inter_link", "host_link"):
            getattr(self, name)  # a name that does not exist is an error now

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:] if getattr(self, f.name) is not None]
        return f"Cluster({self.gpu.name!r}, {', '.join(given)})"

    @property
    def kind(self) -> str:
        """``gpu``: the CPU issues work and runs ahead of it; ``cpu``: the thread that issues also computes."""
        return "cpu" if self.gpu.arch == "CPU" else "gpu"

    @functools.cached_property
    def node_size(self) -> int:
        """GPUs that one node holds; `gpus` may be fewer."""
        return self.gpus_per_node or self.gpu.gpus_per_node

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.node_size)

    @functools.cached_property
    def intra_link(self) -> Link:
        """Between the GPUs of a node; between the processes of a cluster of kind ``cpu``."""
        found = self.intra if isinstance(self.intra, Link) else link(self.intra or self.gpu.intra, "intra")
        return self._overridden(found) if self.kind == "cpu" else found

    @functools.cached_property
    def inter_link(self) -> Link:
        """Between nodes, per GPU."""
        if isinstance(self.inter, Link):
            return self._overridden(self.inter)
        return self._overridden(link_of_text(self.inter or self.gpu.inter, self.node_size))

    @functools.cached_property
    def host_link(self) -> Link:
        """Between a GPU and the memory of its CPU."""
        return self.host if isinstance(self.host, Link) else link(self.host or self.gpu.host, "host")

    @property
    def host_mem_bytes_per_s(self) -> float:
        """Each GPU's share of the peak of its node's CPU memory; without bound where that is not known."""
        whole = (self.host_memory_gb_per_s or 0.0) * 1e9 or self.gpu.host_mem_bytes_per_s or math.inf
        return whole / min(self.gpus, self.node_size)

    def _overridden(self, found: Link) -> Link:
        if self.bandwidth_gbps is not None:
            found = replace(found, bytes_per_s=self.bandwidth_gbps * 1e9 / 8)
        return found if self.latency_us is None else replace(found, base_s=self.latency_us * 1e-6)

    @property
    def slowest_link(self) -> Link:
        """The link that bounds a collective of all ranks."""
        return self.inter_link if self.nodes > 1 else self.intra_link

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Peak of the link that bounds a collective of all ranks, per rank and direction."""
        return self.slowest_link.bytes_per_s

    @property
    def latency_s(self) -> float:
        """What a message of no bytes takes on that link, where it was given or measured; else 0."""
        return self.slowest_link.base_s or 0.0

    @property
    def notes(self) -> list[str]:
        """What is not certain about its figures, in sentences."""
        parts: list[Gpu | Link] = [self.gpu, self.intra_link, *([self.inter_link] if self.nodes > 1 else [])]
        return [*(f"Of {p.name} this is unverified: {p.unverified}." for p in parts if p.unverified), *self._elsewhere]

    @property
    def _elsewhere(self) -> list[str]:
        """That a link of the catalogue is put where its hardware does not join anything, in sentences."""
        places = {"intra": "the GPUs of a node", "inter": "nodes", "host": "a GPU and its CPU's memory"}
        return [
            f"Cluster.{name}={getattr(self, name)!r} joins {places[of.kind]}; here it is taken to join {places[name]}, "
            f"at the same {of.bytes_per_s / 1e9:g} GB/s per GPU."
            for name, of in (("intra", self.intra_link), ("inter", self.inter_link), ("host", self.host_link))
            if isinstance(getattr(self, name), str)
            and of.kind != name
            and not of.name.startswith("PCIe")  # which joins GPUs to each other and to the CPU
            and (name != "inter" or self.nodes > 1)
        ]

    def spans(self, group_size: int, stride: int = 1) -> GroupSpan:
        """How groups of ``group_size`` ranks, ``stride`` apart, are spread over nodes; if they differ, the widest,
        and of these the one with the fewest ranks on a node.

        A shard group is consecutive ranks (stride 1); a replicate group of HSDP takes one rank of each shard group
        (its stride is the shard size).

        Raises:
            ValueError: the groups do not fill the cluster.

        Example:
            >>> cluster = Cluster("H100", gpus=64)
            >>> cluster.spans(16), cluster.spans(8, stride=8)
            (GroupSpan(nodes=2, ranks_per_node=8), GroupSpan(nodes=8, ranks_per_node=1))
        """
        if group_size < 1 or stride < 1 or self.gpus % (group_size * stride):
            raise ValueError(
                f"groups of {group_size} ranks, {stride} apart, do not fill {self.gpus} ranks; group_size times stride "
                f"must divide them"
            )
        return _span(self.gpus, self.node_size, group_size, stride)

    def to_file(self, path: str | Path) -> None:
        """Write a TOML file for `from_file`: all that the catalogue does not say, in the catalogue's units."""
        top: dict[str, Any] = {"gpus": self.gpus}
        parts: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Gpu) and _is_catalogued(value):
                top[f.name] = value.name
            elif isinstance(value, (Gpu, Link)):
                parts[f.name] = value.to_table()
            elif value is not None:
                top[f.name] = value
        tables = {"cluster": top} | parts
        with written(path) as new:
            new.write_text(_TITLE + "\n".join(_toml(name, table) for name, table in tables.items()))

    @classmethod
    def from_file(cls, path: str | Path) -> Cluster:
        """The cluster that a file describes, such as ``fsdp-sim calibrate`` writes.

        Raises:
            ValueError: no such file, not TOML, or a value that is not allowed; names the file.
        """
        try:
            tables = toml_or_json(read_text(path))
            tables.pop("calibration", None)  # of the stack: `fsdp_sim.cost.numbers_of_file`
            values: dict[str, Any] = dict(tables.pop("cluster"))
            for name, table in tables.items():
                made: type[Gpu | Link] = Gpu if name == "gpu" else Link
                values[name] = made.from_table(table.pop("name", name), table)
            return cls(**values)
        except FileNotFoundError:
            named = ", and a GPU's name goes to gpu (--gpu)" if _is_gpu(str(path)) else ""
            raise ValueError(f"there is no cluster file {path}; fsdp-sim calibrate writes one{named}") from None
        except KeyError as error:
            raise ValueError(f"{path} has no table {error.args[0]!r}; fsdp-sim calibrate writes such files") from None
        except (TypeError, AttributeError, ValueError, OSError) as error:
            raise ValueError(f"{path} is not a cluster file: {error}") from None


def _is_gpu(name: str) -> bool:
    try:
        return bool(gpu(name))
    except ValueError:
        return False


def _is_catalogued(value: Gpu) -> bool:
    try:
        return gpu(value.name) == value
    except ValueError:
        return False


@functools.cache
def _span(gpus: int, node_size: int, group_size: int, stride: int) -> GroupSpan:
    reach = (group_size - 1) * stride
    starts = {  # groups that start at the same place of a node lie alike
        first % node_size
        for block in range(0, gpus, group_size * stride)
        for first in range(block, block + min(stride, node_size))
    }
    if reach < node_size and all(start + reach < node_size for start in starts):
        return GroupSpan(1, group_size)
    found = []
    for start in starts:
        in_node = Counter(rank // node_size for rank in range(start, start + reach + 1, stride))
        found.append(GroupSpan(len(in_node), min(in_node.values())))
    return max(found, key=lambda span: (span.nodes, -span.ranks_per_node))


_TITLE = """# A cluster, for `fsdp-sim simulate --cluster FILE` and `Cluster.from_file`.
# Rates are per GPU (or process) and direction; *_gbytes_per_s are 1e9 bytes per second.

"""


def _toml(name: str, table: dict[str, Any]) -> str:
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items()]
    return "\n".join([f"[{name}]", *lines, ""])
