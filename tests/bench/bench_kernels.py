"""What matmuls and fused attention reach alone, on GPUs that were measured: ``python -m tests.bench.bench_kernels``.

``matmuls.csv`` (x (m, k) times a weight (n, k), bf16, as torch.nn.functional.linear has them) and ``attention.csv``
(causal FlashAttention-2, bf16, forward) are from NVIDIA's aiconfigurator-core 0.12.0 (Apache-2.0), which measured them
for serving by three libraries: of its 100,000 rows those of a training's sizes. What is printed is ``matmul_tflops`` of
``fsdp_sim/spec/gpus.toml``: of each library the median over sizes, of the libraries the middle one, with the ramp of
`Calibration.matmul_ramp_k` taken out; and what attention reaches of it, which `attention_fraction_ada` and
``_blackwell`` are. These are short runs: in a training, with power to share, matmuls reach less
(`matmul_fraction_hopper`), and so do the largest ones here, which run longest.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import median

from fsdp_sim.cost import fitted
from fsdp_sim.spec import gpu

HERE = Path(__file__).parent
LONG = 4096  # tokens from which on attention's rate hardly grows
Row = dict[str, str]


def groups(rows: list[Row], *keys: str) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Rows with the same cells, in the order of the file."""

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
    found = {}
    print(
        f"{'matmuls, TFLOP/s':<18}{'catalogue':>10}{'measured':>10}{'of peak':>9}   by library, sizes; k 1024 to 16384"
    )
    for (name,), of_gpu in groups(matmuls, "gpu"):
        rates = {library: (middle(rows, matmul_tflops), len(rows)) for (library,), rows in groups(of_gpu, "library")}
        part, found[name] = gpu(name), median(rate for rate, _ in rates.values())
        by = ", ".join(f"{library} {rate:.0f} ({n})" for library, (rate, n) in rates.items())
        by_k = " ".join(f"{middle(rows, matmul_tflops):.0f}" for _, rows in sorted(groups(of_gpu, "k"), key=by_number))
        peak = found[name] / (part.bf16_flops or 1) * 1e12
        print(f"{name:<18}{(part.best_matmul_flops or 0) / 1e12:>10.0f}{found[name]:>10.0f}{peak:>9.1%}   {by}; {by_k}")
    print(f"\n{'attention':<18}{'measured':>10}{'of matmul':>10}   heads of, tokens")
    for (name, head_dim), rows in groups(attention, "gpu", "head_dim"):
        rate = middle([row for row in rows if int(row["seq_len"]) >= LONG], attention_tflops)
        by_length = {int(n): f"{middle(of, attention_tflops):.0f}" for (n,), of in groups(rows, "seq_len")}
        by = ", ".join(f"{n}: {by_length[n]}" for n in sorted(by_length))
        print(f"{name:<18}{rate:>10.0f}{rate / found[name]:>10.2f}   {head_dim}; {by}")


def by_number(group: tuple[tuple[str, ...], list[Row]]) -> int:
    return int(group[0][0])


if __name__ == "__main__":
    main()
