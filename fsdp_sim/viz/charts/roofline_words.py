"""What the rooflines show, in sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import Op, Phase
from fsdp_sim.viz.chart import short
from fsdp_sim.viz.charts.intensity import KernelPoint, UnitPoint, alike, compute_flops_per_s, peak_of
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import human_bytes, human_ms

MAX_ROWS = 20


def headline(talking: Sequence[UnitPoint], rate: float) -> str:
    if not talking or not rate:
        return "Nothing is communicated: what a kernel does with each byte of memory is all that counts."
    short_of = [u for u in talking if not u.hidden]
    if not short_of:
        return "Every unit can hide what it communicates behind its own compute."
    if len(short_of) == len(talking):
        return "No unit can hide what it communicates behind its own compute."
    return f"In {len(short_of)} of {len(talking)} passes a unit has too little work to hide what it communicates."


def finding(sim: Simulation, kernels: Sequence[KernelPoint], units: Sequence[UnitPoint], rate: float) -> str:
    gpu = sim.cluster.gpu
    peak, dtype = peak_of(sim, kernels)
    ridge, all_s = peak / gpu.mem_bytes_per_s, sum(k.seconds for k in kernels) or 1.0
    bound = sum(k.seconds for k in kernels if k.intensity >= ridge)
    moving = sum(k.seconds for k in kernels if not k.kernel.flops)
    name = gpu.name if sim.cluster.kind == "gpu" else "a CPU core"
    sentences = [
        f"To be bound by compute on {name}, a kernel needs {ridge:,.0f} FLOP per byte of memory: kernels with "
        f"{bound / all_s:.0%} of the compute time have that, and {moving / all_s:.0%} of it goes to kernels that only "
        f"move bytes."
    ]
    if matmuls := [k for k in kernels if k.kernel.kind == "matmul"]:
        best = max(matmuls, key=lambda k: k.flops_per_s)
        share = f"{best.flops_per_s / peak:.0%} of the peak in {dtype}"
        sentences.append(f"The best matmul reaches {short(best.flops_per_s)}FLOP/s, {share}.")
    talking = [u for u in units if u.bytes and u.flops]
    if not talking or not rate:
        return " ".join(sentences) + f"\n\nNothing communicates on {gpus(sim)}."
    reached = compute_flops_per_s(units)
    least = min(talking, key=lambda u: u.compute_s / u.comm_s if u.comm_s else float("inf"))
    short_of = [u for u in talking if not u.hidden]
    sentences.append(
        f"\n\nA large message passes at {short(rate)}B/s and the step computes at {short(reached)}FLOP/s, so a unit "
        f"needs {reached / rate:,.0f} FLOP for each byte it communicates. {headline(talking, rate)}"
    )
    which = f"{least.phase} of {least.unit}"
    if short_of:
        factor = least.comm_s / least.compute_s if least.compute_s else float("inf")
        sentences.append(
            f"The worst is {which} with {least.intensity:,.0f}: it communicates {human_ms(least.comm_s)} and computes "
            f"{human_ms(least.compute_s)}; some {factor:.1f} times the tokens per rank would do."
        )
    else:
        sentences.append(
            f"The nearest to the edge is {which} with {least.intensity:,.0f}: it communicates {human_ms(least.comm_s)} "
            f"and computes {human_ms(least.compute_s)}."
        )
    if any(i.op is Op.ALL_GATHER and i.phase is Phase.FORWARD for i in sim.program.ops):
        sentences.append("The first all-gather of a step has no compute before it to hide behind, whatever its size.")
    return " ".join(sentences).replace(" \n\n", "\n\n")


def tables(kernels: Sequence[KernelPoint], units: Sequence[UnitPoint], rate: float) -> tuple[Table, ...]:
    rows = [
        (
            f"{k.kernel.kind} {' × '.join(map(str, k.kernel.shape))}".strip(),
            "backward" if k.backward else "forward",
            str(k.calls),
            human_ms(k.seconds),
            f"{k.intensity:,.1f}",
            f"{short(k.flops_per_s)}FLOP/s" if k.kernel.flops else "moves bytes only",
        )
        for k in kernels[:MAX_ROWS]
    ]
    passes = [
        (
            named([u.unit for u in group]),
            str(group[0].phase),
            f"{short(group[0].flops)}FLOP",
            human_bytes(group[0].bytes),
            f"{group[0].intensity:,.0f}" if group[0].bytes else "none communicated",
            human_ms(group[0].compute_s),
            human_ms(group[0].comm_s),
            "yes" if group[0].hidden else "no",
        )
        for phase in Phase
        for group in alike([u for u in units if u.phase is phase])
    ]
    head = ("unit", "phase", "work", "communicated", "FLOP per byte", "computes", "communicates", "can be hidden")
    return (
        Table(
            "Kernels, those that take longest first",
            ("kernel", "in", "calls", "time", "FLOP per byte of memory", "reaches"),
            tuple(rows),
        ),
        Table("Units", head, tuple(passes)),
    )


def named(units: Sequence[str]) -> str:
    return safe(units[0]) if len(units) == 1 else f"{safe(units[0])} to {safe(units[-1])} ({len(units)})"


def gpus(sim: Simulation) -> str:
    what = "CPU process" if sim.cluster.kind == "cpu" else "GPU"
    plural = "es" if what.endswith("s") else "s"
    return f"{sim.cluster.gpus:,} {what}" + (plural if sim.cluster.gpus > 1 else "")
