"""How well `collective_s` predicts published nccl-tests, and the fit of its numbers to them.

    python tests/bench/bench_collectives.py             errors by source, GPU, collective and size
    python tests/bench/bench_collectives.py --hold-out  each source predicted by numbers fitted to the others
    python tests/bench/bench_collectives.py --refit     fit again, and write fsdp_sim/cost/collectives.toml

The measurements are ``fsdp_sim/cost/data/nccl_collectives.csv``, a row each, with its source. Errors are of the time,
relative; those of messages under 1 MiB are counted half in the fit, since FSDP's are larger and since their latencies
differ by a factor of three between machines with the same parts.

Where it is wrong: messages under 1 MiB (p5's 17 us against 50 us elsewhere on the same parts); GCP's fabrics, whose two
TCPX sources differ by half and whose A4 rows jump between sizes; EFA v4 under 256 KiB; rings of 1,000 ranks, whose
time per step falls with size in the one source; all-gathers on 256 H100 (one row, 22% too fast); GB200 over 20 domains.
All-gathers and reduce-scatters over several nodes are few, and none is over EFA or A100 with 200 Gb/s adapters.
Four L40S of the one machine that was measured are 4 times slower than two, and eight 15 times: its GPUs reach each
other through two CPUs, it seems. PCIe is fitted to the other machine, whose eight RTX PRO 6000 are as fast as four.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import timeit
from collections.abc import Sequence
from pathlib import Path as File
from typing import NamedTuple

import numpy as np

from fsdp_sim.cost import collectives
from fsdp_sim.cost.collectives import FittedLinks, algorithms, collective_s, fitted_links
from fsdp_sim.spec import Cluster

ROOM = File(collectives.__file__).parent
GPUS = {"GPU not stated (4 nodes)": "A100"}  # beyond those whose name begins with that of a GPU
INTER = {  # a part of how a row describes its fabric, and the link that it is taken to be
    "EFA v1": "AWS EFA v1", "EFA v2": "AWS EFA v2", "EFA v4": "AWS EFA v4", "TCPX": "GCP A3 High TCPX",
    "gIB": "GCP A4 RoCE", "RoCE (NIC": "400 Gb/s RoCE per node", "400Gb/s": "IB NDR x8", "not stated": "IB EDR x8",
}  # fmt: skip
SIZES = {"under 1 MiB": 2**20, "1 to 64 MiB": 2**26, "over 64 MiB": float("inf")}
RING = ("fraction", "base_s", "hop_s", "fill_s", "idle_steps")
NVLS = ("nvls_fraction", "nvls_fill_s")
FITTED = {  # the numbers that the measurements determine; the others are assumed, and say so in the file
    "nvlink3": RING,
    "nvlink4": (*RING, *NVLS),
    "nvlink5": (*RING, *NVLS),
    "nvl72": (*RING, *NVLS),
    "pcie": RING,
    "infiniband": ("fraction", "base_s", "hop_s", "fill_s"),
    "roce": ("fraction", "fill_s"),
    "efa1": ("fraction", "base_s", "fill_s"),
    "efa": ("base_s", "hop_s", "fill_s"),
    "tcpx": ("fraction", "base_s", "fill_s"),
    "gib": ("fraction", "base_s", "fill_s"),
}
NEUTRAL = {  # where every fit starts, whatever the family
    "nvlink": {
        "fraction": 0.8, "base_s": 30e-6, "hop_s": 1e-6, "fill_s": 4e-6, "idle_steps": 0.3, "nvls_fraction": 0.65,
        "nvls_fill_s": 75e-6,
    },
    "pcie": {"fraction": 0.4, "base_s": 20e-6, "hop_s": 5e-6, "fill_s": 20e-6, "idle_steps": 0.3},
    "network": {"fraction": 0.85, "base_s": 60e-6, "hop_s": 10e-6, "fill_s": 80e-6},
}  # fmt: skip
NOT_FITTED = "L40S"  # see above
MOST_S = 2e-3  # of any latency: far above all that are determined
PRIOR = 0.1  # weight of staying at the start: settles what the measurements leave open


class Row(NamedTuple):
    """One measurement."""

    source: str
    gpu: str
    op: str
    cluster: Cluster
    n_bytes: int
    seconds: float
    ring: bool  # the source says NCCL was held to rings, or it predates reduction in the switch


def measurements() -> list[Row]:
    with (ROOM / "data" / "nccl_collectives.csv").open(newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: dict[str, str]) -> Row:
    name = GPUS.get(line["gpu_type"]) or re.split(r"[ (]", line["gpu_type"])[0]
    inter = next((link for words, link in INTER.items() if words in line["interconnect"]), None)
    ring = line["nccl_algo"].startswith("Ring") or line["source"].startswith("MIT ORCD")
    cluster = Cluster(name, gpus=int(line["n_gpus"]), inter=inter)
    return Row(
        line["source"], name, line["collective"], cluster, int(line["size_bytes"]), float(line["time_us"]) * 1e-6, ring
    )


def predict(rows: Sequence[Row], numbers: FittedLinks) -> np.ndarray:
    """Seconds of each row."""
    known: dict[tuple[str, Cluster, bool], list[collectives.Path]] = {}
    out = []
    for row in rows:
        key = (row.op, row.cluster, row.ring)
        if key not in known:
            found = algorithms(row.op, row.cluster.gpus, row.cluster, 1, numbers)
            known[key] = [path for path in found if not row.ring or path.algorithm == "ring"]
        out.append(min(path.seconds(row.n_bytes) for path in known[key]))
    return np.array(out)


def neutral(numbers: FittedLinks) -> FittedLinks:
    """The same with all that is fitted forgotten."""
    families = dict(numbers.families)
    for family, free in FITTED.items():
        start = NEUTRAL.get("nvlink" if family.startswith("nv") else family, NEUTRAL["network"])
        families[family] = families[family]._replace(**{name: start[name] for name in free})
    return numbers._replace(families=families, half_bytes=2e6)


def fit(rows: Sequence[Row], start: FittedLinks) -> FittedLinks:
    """The numbers nearest to the measurements, by robust least squares of the logarithm of the time."""
    from scipy.optimize import least_squares  # needed for the fit alone

    rows = [row for row in rows if row.gpu != NOT_FITTED]
    names = [(family, name) for family, free in FITTED.items() for name in free]
    log_start = np.log([*(getattr(start.families[f], name) for f, name in names), start.half_bytes])
    log_measured = np.log([row.seconds for row in rows])
    weight = np.array([0.5 if row.n_bytes < 2**20 else 1.0 for row in rows])
    top = [np.log(MOST_S if name.endswith("_s") else 1.0) for _, name in names] + [np.log(1e9)]

    def at(x: np.ndarray) -> FittedLinks:
        families = dict(start.families)
        for (family, name), value in zip(names, np.exp(x[:-1]), strict=True):
            families[family] = families[family]._replace(**{name: float(value)})
        return start._replace(families=families, half_bytes=float(np.exp(x[-1])))

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.concatenate([weight * (np.log(predict(rows, at(x))) - log_measured), PRIOR * (x - log_start)])

    return at(least_squares(residuals, log_start, loss="soft_l1", f_scale=0.1, bounds=(-np.inf, top)).x)


def table(rows: Sequence[Row], errors: np.ndarray) -> None:
    """Errors of every part of the measurements."""
    parts: dict[str, list[tuple[str, np.ndarray]]] = {}
    for title, of in {
        "source": lambda r: r.source, "GPU": lambda r: r.gpu, "collective": lambda r: r.op,
        "size": lambda r: next(name for name, end in SIZES.items() if r.n_bytes < end),
        "nodes": lambda r: "one node" if r.cluster.nodes == 1 else "several nodes",
    }.items():  # fmt: skip
        keys = [of(row) for row in rows]
        parts[title] = [(key, np.array([k == key for k in keys])) for key in dict.fromkeys(keys)]
    print(f"{'':<72}{'rows':>6}{'median':>8}{'mean':>8}{'bias':>8}")
    for title, groups in {**parts, "all": [("all", np.ones(len(rows), bool))]}.items():
        for key, chosen in groups:
            e = errors[chosen]
            print(f"{title:<12}{key:<60}{len(e):>6}{np.median(abs(e)):>8.1%}{np.mean(abs(e)):>8.1%}{np.mean(e):>+8.1%}")


def write(numbers: FittedLinks) -> None:
    """Put fitted numbers into the file, leaving its comments and its order."""
    path = ROOM / "collectives.toml"
    text = re.sub(r"(?m)^half_bytes = \S+", f"half_bytes = {numbers.half_bytes:.3g}", path.read_text())
    for family, free in FITTED.items():
        for name in free:
            key, value = name, getattr(numbers.families[family], name)
            if name.endswith("_s"):
                key, value = f"{name[:-2]}_us", value * 1e6
            text, found = re.subn(rf"(\[{family}\][^\[]*?\n{key} = )\S+", rf"\g<1>{value:.3g}", text)
            assert found == 1, (family, key)
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refit", action="store_true")
    parser.add_argument("--hold-out", action="store_true")
    chosen = parser.parse_args()
    rows = measurements()
    seconds = np.array([row.seconds for row in rows])
    numbers = fitted_links()
    if chosen.refit:
        numbers = fit(rows, neutral(numbers))
        write(numbers)
        print(numbers.half_bytes, *(f"{f}: {w}" for f, w in numbers.families.items()), sep="\n")
    predicted = predict(rows, numbers)
    if chosen.hold_out:
        for source in dict.fromkeys(row.source for row in rows):
            out = [row for row in rows if row.source == source]
            there = np.array([row.source == source for row in rows])
            predicted[there] = predict(out, fit([row for row in rows if row.source != source], neutral(numbers)))
    table(rows, predicted / seconds - 1)
    cluster = Cluster("H100", gpus=64)
    for op in ("all_gather", "all_reduce"):
        calls = 20_000
        best = min(timeit.repeat(lambda op=op: collective_s(op, 1e8, 64, cluster), number=calls, repeat=5)) / calls
        print(f"one call of collective_s({op}): {best * 1e6:.2f} us")


if __name__ == "__main__":
    sys.exit(main())
