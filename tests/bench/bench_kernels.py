"""What matmuls and fused attention reach alone, on GPUs that were measured: ``python -m tests.bench.bench_kernels``.

``matmuls.csv`` (x (m, k) times a weight (n, k), bf16, as torch.nn.functional.linear has them) and ``attention.csv``
(causal FlashAttention-2, bf16, forward) are from NVIDIA's aiconfigurator-core 0.12.0 (Apache-2.0), which measured them
for serving: of its 100,000 rows those of a training's sizes.

A matmul of ten milliseconds and more runs at the clock that a GPU's power sustains, shorter ones above it. Sustained is
``matmul_tflops`` of ``fsdp_sim/spec/gpus.toml``: of each library the median, with the ramp of
`Calibration.matmul_ramp_k` taken out, of libraries the mean. vLLM's is left out: it multiplied numbers that draw less
power, so that long matmuls are as fast as short ones. H100 and H200 are one chip with one limit of power, and have the
mean of both. What attention reaches of it are `attention_fraction_ada` and ``_blackwell``.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import mean, median

from fsdp_sim.cost import fitted
from fsdp_sim.spec import gpu

HERE = Path(__file__).parent
SUSTAINED_US = 1e4
LITTLE_POWER = "vllm"
LONG = 4096  # tokens from which on attention's rate hardly grows
Row = dict[str, str]


def groups(rows: list[Row], *keys: str) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Rows with the same cells."""

    def of(row: Row) -> tuple[str, ...]:
        return tuple(row[key] for key in keys)

    for key, found in groupby(sorted(rows, key=of), of):
        yield key, list(found)


def matmul_tflops(row: Row) -> float:
    """The rate that a matmul of endless k would have."""
    m, n, k = (int(row[name]) for name in ("m", "n", "k"))
    return 2 * m * n * k / float(row["us"]) / 1e6 * (1 + fitted().matmul_ramp_k / k)


def attention_tflops(row: Row) -> float:
    batch, heads, tokens, head_dim = (int(row[name]) for name in ("batch", "heads", "seq_len", "head_dim"))
    return 2.0 * batch * heads * tokens**2 * head_dim / float(row["us"]) / 1e6


def middle(rows: list[Row], rate: Callable[[Row], float]) -> float:
    return median(map(rate, rows))


def main() -> None:
    matmuls, attention = (list(csv.DictReader((HERE / f"{name}.csv").open())) for name in ("matmuls", "attention"))
    sustained = {}
    print(
        f"{'matmuls, TFLOP/s':<18}{'catalogue':>10}{'sustained':>10}{'of peak':>9}{'short':>7}   libraries: short, long"
    )
    for (name,), of_gpu in groups(matmuls, "gpu"):
        rates = {}
        for (library,), rows in groups(of_gpu, "library"):
            long = [row for row in rows if float(row["us"]) > SUSTAINED_US]
            short = [row for row in rows if float(row["us"]) <= SUSTAINED_US]
            rates[library] = middle(short, matmul_tflops), middle(long, matmul_tflops)
        found = sustained[name] = mean(long for of, (_, long) in rates.items() if LITTLE_POWER not in of)
        part, typical = gpu(name), median(short for short, _ in rates.values())
        by = ", ".join(f"{library} {short:.0f} {long:.0f}" for library, (short, long) in rates.items())
        known, share = (part.sustained_matmul_flops or 0) / 1e12, found / (part.bf16_flops or 1) * 1e12
        print(f"{name:<18}{known:>10.0f}{found:>10.0f}{share:>9.1%}{typical:>7.0f}   {by}")
    print(f"\n{'attention':<18}{'measured':>10}{'of matmul':>10}   heads of, by tokens")
    for (name, head_dim), rows in groups(attention, "gpu", "head_dim"):
        rate = middle([row for row in rows if int(row["seq_len"]) >= LONG], attention_tflops)
        by_length = {int(n): f"{middle(of, attention_tflops):.0f}" for (n,), of in groups(rows, "seq_len")}
        by = ", ".join(f"{n}: {by_length[n]}" for n in sorted(by_length))
        print(f"{name:<18}{rate:>10.0f}{rate / sustained[name]:>10.2f}   {head_dim}; {by}")


if __name__ == "__main__":
    main()
