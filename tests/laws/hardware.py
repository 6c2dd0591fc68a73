"""Laws of what a model is trained on: links, GPUs, and the fitted numbers of how both fall short of their peaks."""

from __future__ import annotations

import dataclasses
from typing import Any

from fsdp_sim.cost import fitted
from fsdp_sim.spec import Cluster, Gpu
from tests.laws.draws import alone, by, fitted_to, in_a_node, linked, of_several, over_nodes
from tests.laws.law import Change, Request, after, as_drawn, cluster, laws, plan, times
from tests.laws.outcomes import (
    ALL,
    BETWEEN,
    COMM,
    COMPUTE,
    COPYING,
    EXPOSED,
    FLOPS,
    GATHERING,
    ISSUING,
    KEPT,
    LIMIT,
    MFU,
    OPTIMIZER,
    PEAK,
    PROGRAM,
    REDUCING,
    REPLAY,
    SENT,
    STEP,
    THROUGHPUT,
)

AT_ONCE = 1e40  # bytes or operations per second: no time
NO_LATENCY = {"base_s": 0.0, "hop_s": 0.0, "fill_s": 0.0}
SLOWER_START = {"base_s": times(4), "hop_s": times(4), "fill_s": times(4)}


def part(**fields: Any) -> Change:
    """The GPU is another one; a value that is a function makes it of the old one, where there is one."""

    def change(request: Request) -> Request:
        gpu: Gpu = request.cluster.gpu
        values = {n: v(getattr(gpu, n)) if callable(v) else v for n, v in fields.items() if getattr(gpu, n) is not None}
        return request._replace(cluster=dataclasses.replace(request.cluster, gpu=dataclasses.replace(gpu, **values)))

    return change


def numbers(**fields: Any) -> Change:
    """Other fitted numbers."""

    def change(request: Request) -> Request:
        old = request.calibration or fitted(request.plan.stack)
        values = {name: v(getattr(old, name)) if callable(v) else v for name, v in fields.items()}
        return request._replace(calibration=dataclasses.replace(old, **values))

    return change


def on_cpu(request: Request) -> Request:
    """Four processes that compute, and messages of no latency."""
    return fitted_to(request, Cluster("cpu", gpus=4, bandwidth_gbps=8, latency_us=0))


FLOPS_OF = (
    "bf16_flops", "fp16_flops", "tf32_flops", "fp32_flops", "fp8_flops", "sustained_matmul_flops", "attention_flops",
)  # fmt: skip
twice_the_flops = part(**dict.fromkeys(FLOPS_OF, times(2)))
no_contention = numbers(contention=0.0)

LAWS = [
    laws(
        "twice the bandwidth between nodes",
        over_nodes,
        linked(inter={"bytes_per_s": times(2)}),
        stays=[PROGRAM, COMPUTE, COPYING, OPTIMIZER, ISSUING, PEAK],
        never_grows=[STEP, EXPOSED, COMM, GATHERING, REDUCING],
    ),
    laws(
        "a tenth of the bandwidth between nodes",
        over_nodes,
        linked(inter={"bytes_per_s": times(0.1)}),
        stays=[PROGRAM, COMPUTE, PEAK],
        never_falls=[STEP, COMM, GATHERING, REDUCING],
    ),
    laws(
        "four times the latency between nodes",
        over_nodes,
        linked(inter=SLOWER_START),
        stays=[PROGRAM, COMPUTE, COPYING, OPTIMIZER, ISSUING, PEAK],
        never_falls=[STEP, COMM, GATHERING, REDUCING],
    ),
    laws(
        "no latency",
        of_several,
        linked(intra=NO_LATENCY, inter=NO_LATENCY, host=NO_LATENCY),
        stays=[PROGRAM, COMPUTE, PEAK],
        never_grows=[STEP, COMM, EXPOSED],
    ),
    laws(
        "a network that takes no time",
        after(of_several, plan(cpu_offload=False)),
        linked(**dict.fromkeys(("intra", "inter", "host"), NO_LATENCY | {"bytes_per_s": AT_ONCE})),
        stays=[PROGRAM, COMPUTE, COPYING, OPTIMIZER, PEAK, SENT],
        never_grows=[STEP],
        vanishes=[COMM, EXPOSED],
    ),
    laws(
        "twice the bandwidth inside a node",
        in_a_node,
        linked(intra={"bytes_per_s": times(2)}),
        stays=[PROGRAM, COMPUTE, OPTIMIZER, PEAK],
        never_grows=[STEP, COMM],
    ),
    laws("another network between nodes where there is one node", in_a_node, cluster(inter="IB HDR x1"), stays=ALL),
    laws(
        "other links on one GPU",
        alone,
        linked(intra={"bytes_per_s": times(9)}, inter={"bytes_per_s": times(9)}),
        stays=ALL,
    ),
    laws(
        "twice the bandwidth to the host under offload",
        after(by("fsdp2", cpu_offload=True), linked(intra={"reach": None}), cluster(host_memory_gb_per_s=1e9)),
        linked(host={"bytes_per_s": times(2)}),
        stays=[PROGRAM, COMPUTE, COMM, OPTIMIZER, PEAK],
        falls=[COPYING],
        never_grows=[STEP],
    ),
    laws(
        "twice the bandwidth of the CPUs' memory under offload",
        after(by("fsdp2", cpu_offload=True), cluster(host_memory_gb_per_s=100.0)),
        cluster(host_memory_gb_per_s=times(2)),
        stays=[PROGRAM, COMPUTE, COMM, PEAK],
        halves=[OPTIMIZER],
        never_grows=[STEP, COPYING],
    ),
    laws(
        "another bandwidth of the CPUs' memory without offload",
        by("fsdp2", cpu_offload=False, activation_offload=None),
        cluster(host_memory_gb_per_s=1.0),
        stays=ALL,
    ),
    laws(
        "another link to the host without offload",
        after(by("fsdp2", cpu_offload=False, activation_offload=None), linked(intra={"reach": None})),
        cluster(host="PCIe6"),
        stays=ALL,
    ),
    laws(
        "twice the bandwidth where messages have no latency",
        on_cpu,
        cluster(bandwidth_gbps=times(2)),
        halves=[COMM],
        stays=[PROGRAM, COMPUTE, PEAK],
        never_grows=[STEP],
    ),
    laws(
        "a tenth of a second of latency",
        after(of_several, on_cpu),
        cluster(latency_us=1e5),
        grows=[COMM, STEP],
        stays=[PROGRAM, COMPUTE, PEAK],
    ),
    laws(
        "twice the FLOPs per second",
        as_drawn,
        twice_the_flops,
        stays=[PROGRAM, COMM, COPYING, ISSUING, PEAK, FLOPS],
        never_grows=[STEP, COMPUTE, OPTIMIZER, MFU],
    ),
    laws(
        "twice the FLOPs per second without matmuls in the optimizer",
        plan(optimizer="adamw", optimizer_impl="fused"),
        twice_the_flops,
        stays=[OPTIMIZER],
    ),
    laws(
        "twice the memory bandwidth",
        as_drawn,
        part(mem_bytes_per_s=times(2), stream_bytes_per_s=times(2)),
        stays=[PROGRAM, COMM, ISSUING, PEAK],
        never_grows=[STEP, COMPUTE, COPYING, OPTIMIZER],
    ),
    laws(
        "twice the memory bandwidth without offload",
        by("fsdp2", cpu_offload=False, optimizer="adamw"),
        part(mem_bytes_per_s=times(2), stream_bytes_per_s=times(2)),
        halves=[COPYING, OPTIMIZER],
    ),
    laws("twice the memory", as_drawn, part(mem_bytes=times(2)), stays=ALL, grows=[LIMIT]),
    laws("another name of the GPU", as_drawn, part(name="another", form="another"), stays=ALL),
    laws(
        "nothing between two steps, where no checkpoint is saved",
        plan(save_every=None, async_save=False, storage_gb_per_s=None),
        numbers(step_s=0.0),
        vanishes=[BETWEEN],
        stays=[REPLAY, PROGRAM, PEAK],
        never_grows=[STEP],
    ),
    laws(
        "no gap between kernels",
        as_drawn,
        numbers(kernel_gap_s=0.0),
        stays=[PROGRAM, COMM, COPYING, PEAK],
        never_grows=[STEP, COMPUTE],
        never_falls=[THROUGHPUT],
    ),
    laws(
        "no contention",
        as_drawn,
        no_contention,
        stays=[PROGRAM, COMPUTE, COMM, COPYING, OPTIMIZER, PEAK],
        never_grows=[STEP],
    ),
    laws(
        "collectives at half their rate",
        of_several,
        numbers(link_fraction=times(0.5)),
        doubles=[COMM],
        stays=[COMPUTE, PROGRAM, PEAK],
        never_falls=[STEP],
    ),
    laws(
        "pointwise kernels that move twice the bytes",
        by("fsdp2", compile=False),
        numbers(eager_bytes=times(2)),
        grows=[COMPUTE],
        never_falls=[STEP],
        stays=[COMM, COPYING, OPTIMIZER, PROGRAM, KEPT],
    ),
]
