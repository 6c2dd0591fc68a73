"""`Link`: what joins GPUs within a node, nodes to each other, or a GPU to its CPU's memory."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from typing import Any

from fsdp_sim.spec.catalogue import find, tables
from fsdp_sim.spec.fields import field, number, one_of, spec, text, whole
from fsdp_sim.spec.gpus import SOURCES

_MEASURED = one_of(None).explained("its family's") | number()


@spec
class Link:
    """A link, by what it carries per GPU and direction.

    Attributes:
        name: for messages.
        bytes_per_s: peak per GPU and direction.
        family: whose measured behaviour applies (the tables of ``fsdp_sim/cost/collectives.toml``).
        kind: ``intra`` joins the GPUs of a node, ``inter`` the nodes, ``host`` a GPU and its CPU's memory.
        reach: how many GPUs it joins, if fewer than a node may hold (a bridge joins 2); more of them pass PCIe.
        mesh: each pair of GPUs of a node has its own share, so that a ring of few GPUs uses few shares.
        fraction, base_s, hop_s, fill_s: what was measured on this very link, in place of its family's: fraction of
            ``bytes_per_s`` reached, seconds of a collective of no bytes, seconds more per step from rank to rank,
            and seconds more per step once messages are large.
        reduce_scatter_fraction, all_reduce_fraction: of the rate of an all-gather, that the bytes of these pass at. 1
            in a ring; gloo's reduce-scatter is an all-reduce of a copy, cut afterwards.
        sources, notes: where the numbers come from.
        unverified: which of them have no source that could be read.

    Example:
        >>> link("NDR").name, link("NDR").bytes_per_s
        ('IB NDR x8', 50000000000.0)
    """

    name: str = field(text())
    bytes_per_s: float = field(number(above=True).explained("bytes per second, GPU and direction"))
    family: str = field(text())
    kind: str = field(one_of("intra", "inter", "host"), default="inter")
    reach: int | None = field(one_of(None) | whole(2), default=None)
    mesh: bool = field(one_of(True, False), default=False)
    fraction: float | None = field(one_of(None).explained("its family's") | number(above=True), default=None)
    base_s: float | None = field(_MEASURED, default=None)
    hop_s: float | None = field(_MEASURED, default=None)
    fill_s: float | None = field(_MEASURED, default=None)
    reduce_scatter_fraction: float = field(number(above=True), default=1.0)
    all_reduce_fraction: float = field(number(above=True), default=1.0)
    sources: tuple[str, ...] = field(SOURCES, default=())
    notes: str = ""
    unverified: str = ""

    @classmethod
    def from_table(cls, name: str, table: dict[str, Any]) -> Link:
        """From a table with the catalogue's keys (``gbytes_per_s``, microseconds).

        Raises:
            TypeError, ValueError: a key it does not know or lacks, a value that is not allowed.
        """
        values: dict[str, Any] = {"name": name}
        for key, value in table.items():
            if key in _UNITS:
                to, unit = _UNITS[key]
                values[to] = value * unit
            elif key != "aliases":
                values[key] = tuple(value) if key == "sources" else value
        return cls(**values)

    def to_table(self) -> dict[str, Any]:
        """The table `from_table` reads."""
        units = {to: (key, unit) for key, (to, unit) in _UNITS.items()}
        table: dict[str, Any] = {}
        for key, default in _DEFAULTS.items():
            value = getattr(self, key)
            if value is None or value == default:
                continue
            to, unit = units.get(key, (key, None))
            table[to] = list(value) if key == "sources" else float(f"{value / unit:.10g}") if unit else value
        return table


_UNITS = {
    "gbytes_per_s": ("bytes_per_s", 1e9),
    "base_us": ("base_s", 1e-6),
    "hop_us": ("hop_s", 1e-6),
    "fill_us": ("fill_s", 1e-6),
}
_DEFAULTS = {name: f.default for name, f in Link.__dataclass_fields__.items()}


@functools.cache
def link(name: str, kind: str | None = None) -> Link:
    """Look up a link by its name or an alias, in any case.

    Args:
        kind: what it is to join; of a rate in place of a name then those of that kind are said.

    Raises:
        ValueError: there is none; gives the nearest names.
    """
    if kind is not None and (said := rate_alone(name, kind)):
        raise ValueError(f"no link is called {name!r}: {said}")
    found = find("links.toml", "link", name)
    return Link.from_table(found, tables("links.toml")[found])


def link_names() -> tuple[str, ...]:
    """Every link in the catalogue, without aliases."""
    return tuple(tables("links.toml"))


_RATE = re.compile(
    r"(?:(?P<count>\d+)\s*[x×]\s*)?(?P<rate>\d+(?:\.\d+)?)\s*(?:(?P<unit>[GT])(?P<bits>b|bit|B|byte)s?(?:/s|ps)|(?P<gbe>GbE))"
)
_FAMILIES = {  # what may stand beside a rate, and whose behaviour it means
    "ib": "infiniband", "infiniband": "infiniband", "rdma": "infiniband", "roce": "roce", "efa": "efa", "efav1": "efa1",
    "efav2": "efa", "efav3": "efa", "efav4": "efa", "tcpx": "tcpx", "tcpxo": "tcpx", "ethernet": "ethernet",
}  # fmt: skip
_ADAPTER = (
    re.compile(  # a rate that does not say whose it is, as people name networks: 10GbE, RoCE 400, 400G InfiniBand
        r"(?P<gbe>\d+)\s*GbE|(?P<kind>RoCE|IB|InfiniBand|Ethernet|[EHNX]DR)[\s-]*(?P<rate>\d+)G?|"
        r"(?P<rate2>\d+)G\s+(?P<kind2>RoCE|IB|InfiniBand|Ethernet)",
        re.IGNORECASE,
    )
)
_ALONE = re.compile(r"(?P<rate>\d+(?:\.\d+)?)\s*(?P<unit>(?:[GT](?:b|bit|B|byte)?s?(?:/s|ps)?)?)")
_FORM = "'1600 Gb/s per node', '400 Gb/s RoCE per GPU' or '8x400Gb/s'"


def rate_alone(words: object, kind: str) -> str:
    """What is missing where a link is a number, maybe with a unit: the unit, and whose rate it is; empty for others.

    Example:
        >>> rate_alone("NDR", "inter"), rate_alone(400, "inter").partition(";")[0]
        ('', "400 says neither its unit nor whose it is: '400 Gb/s per GPU', '400 Gb/s per node' or '50 GB/s per GPU'")
    """
    found = _ALONE.fullmatch(str(words).strip()) if isinstance(words, str | int | float) else None
    if found is None or (kind == "inter" and len(found["unit"]) > 1):  # a unit without a sharer has its own sentence
        return ""
    rate, unit = float(found["rate"]), found["unit"]
    gbytes = rate * (1000 if unit.startswith("T") else 1) / (1 if "B" in unit or (kind != "inter" and not unit) else 8)
    some = [link(name) for name, table in tables("links.toml").items() if table["kind"] == kind and name != "gloo"]
    near = sorted(some, key=lambda one: abs(math.log(one.bytes_per_s / max(gbytes * 1e9, 1.0))))[:4]
    if kind == "inter":
        have = ", ".join(f"{one.name} ({one.bytes_per_s * 8e-9:g})" for one in near)
        return (
            f"{words} says neither its unit nor whose it is: '{rate:g} Gb/s per GPU', '{rate:g} Gb/s per node' or "
            f"'{rate / 8:g} GB/s per GPU'; links near {gbytes * 8:g} Gb/s per GPU are {have}"
        )
    have = ", ".join(f"{one.name} ({one.bytes_per_s / 1e9:g})" for one in near)
    return (
        f"within a node a link is named, and its rate counts one direction, half of what NVIDIA says of NVLink; those "
        f"near {gbytes:g} GB/s are {have}; for another rate give a Link, or a cluster file with a table [{kind}]"
    )


def link_of_text(words: str, gpus_per_node: int) -> Link:
    """A link between nodes from its name in the catalogue, or from a rate in words.

    Args:
        words: a name, or a rate per node or per GPU: ``1600 Gb/s RoCE per node``, ``400 Gb/s RDMA per GPU``,
            ``8x400Gb/s`` (adapters of a node), ``100GbE per node``; a remark in parentheses may end it. ``RoCE 400``
            and ``IB 400`` are one adapter per GPU, ``10GbE`` is one per node; the link's name says so.
        gpus_per_node: who share a node's rate.

    Raises:
        ValueError: neither; gives the nearest names and the form of a rate, or the part that is not understood.

    Example:
        >>> link_of_text("1600 Gb/s RoCE per node", 8).bytes_per_s
        25000000000.0
        >>> link_of_text("1,600 Gb/s per node", 8)
        Traceback (most recent call last):
        ValueError: the link '1,600 Gb/s per node' is not understood at '1,'; write its rate as '1600 Gb/s per node', \
'400 Gb/s RoCE per GPU' or '8x400Gb/s'
    """
    if said := rate_alone(words, "inter"):
        raise ValueError(f"the link {words!r} is not understood: {said}")
    if adapter := _ADAPTER.fullmatch(words.strip()):
        kind = (adapter["kind"] or adapter["kind2"] or "Ethernet").lower()
        gbits = next(filter(None, adapter.group("gbe", "rate", "rate2")))
        whose = "node" if kind == "ethernet" else "GPU"
        family = "InfiniBand" if kind.endswith("dr") else kind
        found_link = link_of_text(f"{gbits} Gb/s {family} per {whose}", gpus_per_node)
        return replace(found_link, name=f"{words.strip()} ({gbits} Gb/s per {whose})")
    apart = re.sub(r"(?<=[^\W\d]),(?=\s)", " ", words)  # between words; after a digit it may be one of a number
    found = _RATE.search(apart)
    if found is None:
        try:
            return link(words)
        except ValueError as error:
            if words.strip().lower() in _FAMILIES:
                raise ValueError(f"the link {words!r} says no rate; write it as {_FORM}") from None
            raise ValueError(f"{error}; or write its rate as {_FORM}") from None
    rest = re.sub(r"\([^()]*\)\s*$", "", apart[: found.start()] + " | " + apart[found.end() :])
    shares = re.findall(r"\bper (gpu|node)\b", rest, re.IGNORECASE)
    named = re.sub(r"\bper (gpu|node)\b", "", rest, flags=re.IGNORECASE).replace("|", " ").split()
    if odd := next((word for word in named if word.lower() not in _FAMILIES), None):
        raise ValueError(f"the link {words!r} is not understood at {odd!r}; write its rate as {_FORM}")
    if len({share.lower() for share in shares}) > 1:
        raise ValueError(f"the link {words!r} says both per node and per GPU; say whose rate that is")
    if found["count"] is None and not shares:
        raise ValueError(f"the link {words!r} does not say whose rate that is; add 'per node' or 'per GPU'")
    shared = 1 if shares and shares[0].lower() == "gpu" else gpus_per_node
    per_s = float(found["rate"]) * int(found["count"] or 1) * (1e12 if found["unit"] == "T" else 1e9)
    bytes_per_s = per_s / (1 if found["bits"] in ("B", "byte") else 8) / shared
    families = {_FAMILIES[word.lower()] for word in named} | ({"ethernet"} if found["gbe"] else set())
    if len(families) > 1:
        raise ValueError(f"the link {words!r} is said to be {' and '.join(sorted(families))}; name one of them")
    return Link(name=words, bytes_per_s=bytes_per_s, family=families.pop() if families else "infiniband")
