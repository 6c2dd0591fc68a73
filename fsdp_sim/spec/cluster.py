"""`Cluster`: what the model is trained on."""

from __future__ import annotations

from typing import Literal

from fsdp_sim.spec.fields import field, number, one_of, spec, whole


@spec
class Cluster:
    """Ranks joined by one link.

    Attributes:
        kind: ``gpu`` (the CPU issues work and runs ahead of it) or ``cpu`` (the thread that issues also computes).
        gpus: the world size: GPUs, or processes on a cluster of kind ``cpu``.
        bandwidth_gbps: what a rank sends over the link, in gigabits (1e9 bits) per second.
        latency_us: microseconds a message of no bytes takes.

    Example:
        >>> laptop = Cluster("cpu", gpus=4, bandwidth_gbps=4, latency_us=200)
        >>> laptop.bandwidth_bytes_per_s, round(laptop.latency_s, 9)
        (500000000.0, 0.0002)
        >>> Cluster("cpu", gpus=0, bandwidth_gbps=1)
        Traceback (most recent call last):
        ValueError: Cluster.gpus is 0; it must be a whole number >= 1 (the world size)
    """

    kind: Literal["gpu", "cpu"] = field(one_of("gpu", "cpu"))
    gpus: int = field(whole(1).explained("the world size"))
    bandwidth_gbps: float = field(number(above=True).explained("gigabits per second"))
    latency_us: float = field(number().explained("microseconds"), default=0.0)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return self.bandwidth_gbps * 1e9 / 8

    @property
    def latency_s(self) -> float:
        return self.latency_us * 1e-6
