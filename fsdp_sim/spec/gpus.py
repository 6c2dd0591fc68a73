"""`Gpu`: what one rank computes on, from the catalogue or measured. A CPU core is one too."""

from __future__ import annotations

import functools
import re
import statistics
from dataclasses import replace
from typing import Any

from fsdp_sim.spec.catalogue import find, tables
from fsdp_sim.spec.elsewhere import instead_of
from fsdp_sim.spec.fields import Allowed, field, number, one_of, spec, text, whole
from fsdp_sim.words import in_brief

DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8")
MATMUL_FRACTION = 0.7  # of the peak, for an architecture with no two measured GPUs: about the median of those measured
# What keeps long matmuls below the peak is mostly power. An A100, with 400 W for 312 TFLOP/s the best supplied of those
# that were measured, sustains 85%; one with as much for its peak (GeForce, H20) is taken to as well (unverified).
POWERED_W_PER_FLOPS, POWERED_FRACTION = 400 / 312e12, 0.85
COPY_FRACTION = 0.85  # of the datasheet's bandwidth, for a GPU with no measured copy: about that of those measured

_RATE = number(above=True)
_RATE_OR_NONE = one_of(None).explained("it does not have it, or it was not measured") | _RATE
SOURCES = Allowed(
    "a tuple of strings", lambda value: isinstance(value, tuple) and all(isinstance(item, str) for item in value)
)

# Keys of a TOML table with units for people, the fields they become, and how many SI units one of them is.
UNITS = {f"{dtype}_tflops": (f"{dtype}_flops", 1e12) for dtype in DTYPES} | {
    "matmul_tflops": ("sustained_matmul_flops", 1e12),
    "attention_tflops": ("attention_flops", 1e12),
    "launch_us": ("launch_s", 1e-6),
    "backward_launch_us": ("backward_launch_s", 1e-6),
    "collective_us": ("collective_s", 1e-6),
    "mem_gib": ("mem_bytes", 2**30),
    "mem_gbytes_per_s": ("mem_bytes_per_s", 1e9),
    "stream_gbytes_per_s": ("stream_bytes_per_s", 1e9),
    "host_mem_gbytes_per_s": ("host_mem_bytes_per_s", 1e9),
    "l2_mbytes": ("l2_bytes", 1e6),
}


@spec
class Gpu:
    """One device. Rates are dense.

    Attributes:
        name: of the part.
        arch: architecture, which decides how near to its peaks kernels come.
        mem_bytes: device memory; the driver and the context keep about one per cent of it.
        mem_bytes_per_s: of its memory, datasheet.
        form: SXM, PCIe, OAM, ...
        bf16_flops, fp16_flops, tf32_flops, fp8_flops: peak of the matrix units; None where it has none.
        fp32_flops: peak of the vector units.
        sustained_matmul_flops: what bf16 matmuls alone reach for as long as one likes, measured.
        stream_bytes_per_s: memory bandwidth that a copy reached.
        sms: streaming multiprocessors (compute units on AMD).
        l2_bytes: its last-level cache.
        tdp_w: power limit.
        attention_flops: what fused attention, forward, reached, where measured.
        launch_s: what the CPU takes to issue one small operation from eager torch, where measured.
        backward_launch_s: the same in backward, which autograd issues without Python; by default as in forward.
        collective_s: what a collective costs a rank beside its time on the wire, where measured: the hooks around it,
            being woken after it, ranks that come late.
        matmul_ramp: a matmul's start and end cost as much as so many elements of each of its dimensions more, on CPU
            cores, where measured.
        intra, inter, host: names of the links it ships with: to its neighbours, between nodes, to the CPU's memory.
        gpus_per_node: how many its server holds.
        host_mem_bytes_per_s: peak of the memory of that server's CPUs, which its GPUs share.
        sources, notes: where the numbers come from.
        unverified: which of them have no source that could be read; `Cluster.notes` says so to users.

    Example:
        >>> gpu("h100").name, gpu("h100").peak_flops("bf16")
        ('H100-SXM-80GB', 989400000000000.0)
        >>> gpu("V100").peak_flops("bf16")
        Traceback (most recent call last):
        ValueError: V100-SXM2-32GB has no bf16; it has fp16, fp32; take fp16 in its place
    """

    name: str = field(text())
    arch: str = field(text())
    mem_bytes: float = field(_RATE)
    mem_bytes_per_s: float = field(_RATE)
    form: str = field(text(), default="PCIe")
    bf16_flops: float | None = field(_RATE_OR_NONE, default=None)
    fp16_flops: float | None = field(_RATE_OR_NONE, default=None)
    tf32_flops: float | None = field(_RATE_OR_NONE, default=None)
    fp32_flops: float | None = field(_RATE_OR_NONE, default=None)
    fp8_flops: float | None = field(_RATE_OR_NONE, default=None)
    sustained_matmul_flops: float | None = field(_RATE_OR_NONE, default=None)
    stream_bytes_per_s: float | None = field(_RATE_OR_NONE, default=None)
    mem_type: str = field(text(), default="HBM")
    sms: int = field(whole(1), default=1)
    l2_bytes: float = field(number(), default=0.0)
    tdp_w: float | None = field(_RATE_OR_NONE, default=None)
    attention_flops: float | None = field(_RATE_OR_NONE, default=None)
    launch_s: float | None = field(one_of(None) | number(), default=None)
    backward_launch_s: float | None = field(one_of(None) | number(), default=None)
    collective_s: float | None = field(one_of(None) | number(), default=None)
    matmul_ramp: float | None = field(one_of(None) | number(), default=None)
    intra: str = field(text(), default="PCIe4")
    inter: str = field(text(), default="Ethernet 100Gb per node")
    host: str = field(text(), default="PCIe4")
    gpus_per_node: int = field(whole(1), default=8)
    host_mem_bytes_per_s: float | None = field(_RATE_OR_NONE, default=None)
    sources: tuple[str, ...] = field(SOURCES, default=())
    notes: str = ""
    unverified: str = ""

    def __post_init__(self) -> None:
        if not self.dtypes:
            peaks = ", ".join(f"{dtype}_flops" for dtype in DTYPES)
            raise ValueError(f"Gpu {self.name} has no peak; give at least one of {peaks}")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes it has a peak for."""
        return tuple(dtype for dtype in DTYPES if getattr(self, f"{dtype}_flops") is not None)

    @property
    def supports_bf16(self) -> bool:
        return self.bf16_flops is not None

    def peak_flops(self, dtype: str) -> float:
        """Dense peak in FLOP/s.

        Raises:
            ValueError: it has no such dtype; says which it has.
        """
        found = getattr(self, f"{dtype}_flops", None) if dtype in DTYPES else None
        if found is None:
            instead = "; take fp16 in its place" if dtype == "bf16" and "fp16" in self.dtypes else ""
            if dtype == "fp64":
                raise ValueError(f"how fast {self.name} computes in fp64 is not known here; take fp32")
            raise ValueError(f"{self.name} has no {dtype}; it has {', '.join(self.dtypes)}{instead}")
        return float(found)

    def matmul_flops(self, dtype: str) -> float:
        """What matmuls alone sustain in FLOP/s: measured, or the fraction of its architecture's GPUs."""
        return self.peak_flops(dtype) * self.matmul_fraction

    @property
    def matmul_fraction(self) -> float:
        """What matmuls sustain over the peak, both in bf16 where it was measured."""
        peak = self.bf16_flops or self.fp16_flops or self.fp32_flops or 1.0
        if self.sustained_matmul_flops is not None:
            return self.sustained_matmul_flops / peak
        if self.tdp_w is not None and self.tdp_w / peak >= POWERED_W_PER_FLOPS and self.arch != "CPU":
            return POWERED_FRACTION
        return _fraction_of(self.arch)

    @property
    def copy_bytes_per_s(self) -> float:
        """What a kernel that is bound by memory reaches alone: a copy, as measured, or as others reach.

        Of CPU cores ``mem_bytes_per_s`` is what kernels reach in training already.
        """
        if self.arch == "CPU":
            return self.mem_bytes_per_s
        return self.stream_bytes_per_s or self.mem_bytes_per_s * COPY_FRACTION

    @classmethod
    def from_table(cls, name: str, table: dict[str, Any]) -> Gpu:
        """From a table with the catalogue's keys and units.

        Raises:
            TypeError, ValueError: a key it does not know, a value that is not allowed.
        """
        values: dict[str, Any] = {}
        for key, value in table.items():
            if key in UNITS:
                to, unit = UNITS[key]
                values[to] = value * unit
            elif key != "aliases":
                values[key] = tuple(value) if key == "sources" else value
        return cls(**{"name": name} | values)

    def to_table(self) -> dict[str, Any]:
        """The table `from_table` reads."""
        units = {to: (key, unit) for key, (to, unit) in UNITS.items()}
        table: dict[str, Any] = {}
        for key, default in _DEFAULTS.items():
            value = getattr(self, key)
            if value is None or (value == default and key not in ("name", "arch")):
                continue
            to, unit = units.get(key, (key, None))
            table[to] = list(value) if key == "sources" else float(f"{value / unit:.10g}") if unit else value
        return table


_DEFAULTS = {name: f.default for name, f in Gpu.__dataclass_fields__.items()}


@functools.cache
def gpu(name: str) -> Gpu:
    """Look up a GPU by its name or an alias, in any case; the name that its driver reports works too.

    A plain ``H100`` or ``A100`` is the 80 GB SXM part, a plain ``V100`` the 32 GB one. ``A100 MIG 3g.40gb`` is a slice.

    Raises:
        ValueError: there is none; gives the nearest names.

    Example:
        >>> gpu("4090").name, gpu("NVIDIA A100-SXM4-40GB").name
        ('RTX-4090', 'A100-SXM-40GB')
        >>> gpu("H1000")
        Traceback (most recent call last):
        ValueError: no GPU is called 'H1000'; the nearest names are H100-SXM-80GB, V100-SXM2-32GB
    """
    plain = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct)\b", "", name, flags=re.IGNORECASE)
    plain, *mig = re.split(r"[\s-]MIG[\s-]", plain, maxsplit=1, flags=re.IGNORECASE)
    try:
        found = find("gpus.toml", "GPU", "-".join(re.split(r"[\s_-]+", plain.strip(" -_"))))
    except ValueError:
        if said := instead_of("gpu", name):
            raise ValueError(f"no GPU is called {in_brief(name)}: {said}") from None
        raise
    part = Gpu.from_table(found, tables("gpus.toml")[found])
    return _slice(part, mig[0].strip()) if mig else part


MIG_ARCHS = ("Ampere", "Hopper", "Blackwell")
_COMPUTE_SLICES, _MEMORY_SLICES = (1, 2, 3, 4, 7), 8  # NVIDIA, Multi-Instance GPU user guide: 7 of compute, 8 of memory


def _slice(part: Gpu, profile: str) -> Gpu:
    """A MIG instance, such as ``3g.40gb``: three sevenths of the multiprocessors, four eighths of the memory.

    Instances of one GPU reach each other through the CPU's memory alone, and share the GPU's way there.
    """
    found = re.fullmatch(r"(\d)g\.(\d+)gb", profile.lower())
    if part.arch not in MIG_ARCHS or "RTX" in part.name or not part.mem_type.startswith("HBM"):
        raise ValueError(f"{part.name} MIG {profile}: {part.name} cannot be cut into MIG instances; leave MIG away")
    eighth_gib = part.mem_bytes / 2**30 / _MEMORY_SLICES
    memory = round(int(found[2]) / eighth_gib) if found else 0
    if found is None or int(found[1]) not in _COMPUTE_SLICES or memory not in (1, 2, 4, 8):
        sizes = ", ".join(f"{g}g.{eighth_gib * m:.0f}gb" for g, m in ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4), (7, 8)))
        raise ValueError(f"{part.name} MIG {profile}: there is no such instance; there are {sizes}")
    compute, of_memory = int(found[1]) / _COMPUTE_SLICES[-1], memory / _MEMORY_SLICES
    shares = dict.fromkeys(["tdp_w", *(to for key, (to, _) in UNITS.items() if key.endswith("tflops"))], compute)
    shares |= dict.fromkeys(("mem_bytes", "mem_bytes_per_s", "stream_bytes_per_s", "l2_bytes"), of_memory)
    cut = {name: getattr(part, name) * share for name, share in shares.items() if getattr(part, name) is not None}
    instances = min(_COMPUTE_SLICES[-1] // int(found[1]), _MEMORY_SLICES // memory)
    return replace(
        part, **cut, name=f"{part.name} MIG {profile.lower()}", sms=max(1, int(part.sms * compute)),
        intra=part.host if part.host.startswith("PCIe") else "PCIe5",
        gpus_per_node=part.gpus_per_node * instances, unverified="what instances of one GPU do to each other's rates",
    )  # fmt: skip


def gpu_names() -> tuple[str, ...]:
    """Every GPU in the catalogue, without aliases and without the CPU."""
    return tuple(name for name in tables("gpus.toml") if name != "cpu")


@functools.cache
def _fraction_of(arch: str) -> float:
    """The median measured matmul fraction of an architecture.

    One GPU does not speak for its kind: an L40S stays at 54% for want of power, which a GeForce with half its rate does
    not lack.
    """
    measured = [
        g.matmul_fraction for g in map(gpu, gpu_names()) if g.arch == arch and g.sustained_matmul_flops is not None
    ]
    return statistics.median(measured) if len(measured) > 1 else MATMUL_FRACTION
